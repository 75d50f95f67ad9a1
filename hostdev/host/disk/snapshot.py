"""A snapshot of a table on disk: the places of its rows' records, which do not change.

A location is 1 + (number of the segment << 32 | number of the record in it), or 0 for a row with its initial values.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.host.disk.segments import SegmentFile
from hostdev.host.disk.tier import Tier
from hostdev.host.snapshot import AT_ONCE_BYTES

Ids = npt.NDArray[Any]
Values = tuple[Any, ...]

LOCATION_BITS = 32  # of the number of a record in its segment


def make_locations(segments: Ids, records: Ids) -> npt.NDArray[np.int64]:
    """Return the locations [N] of records by the numbers of their segments and their own ones."""
    found: npt.NDArray[np.int64] = (segments << LOCATION_BITS | records) + 1
    return found


def split_locations(locations: Ids) -> tuple[Ids, Ids]:
    """Return the numbers of segments and records at locations [N], none of which is 0."""
    return (locations - 1) >> LOCATION_BITS, (locations - 1) & ((1 << LOCATION_BITS) - 1)


class LocationCopies:
    """Implements `host.snapshot.Copies`; the output is one array of locations, int64 [N].

    Changed rows are written to segments when they are located. From construction to `end`, no segment is removed.
    """

    def __init__(self, tier: Tier) -> None:
        self._tier = tier
        self.row_bytes = 16  # a row's number and its location
        self.at_once = max(1, AT_ONCE_BYTES // tier.planes.row_bytes)
        self._numbers = np.full(len(tier.store.live), -1, np.int64)  # of the segments of the table
        self._segments: list[int] = []
        self._read: int | None = tier.begin_read()

    def held(self, rows: Ids) -> Iterator[Ids]:
        """See `Copies`."""
        yield rows

    def prepare(self, rows: Ids) -> None:
        """See `Copies`; writes rows, which may wait for the disk."""
        self._tier.write_back(rows)

    def aside(self, rows: Ids) -> Values:
        """See `Copies`."""
        return (self._locate(rows),)

    def select(self, copied: Values, places: Ids) -> Values:
        """See `Copies`."""
        return tuple(values[places] for values in copied)

    def read(self, rows: Ids, start: int, out: Values, left: Ids | None, first: int | None) -> None:
        """See `Copies`."""
        del first
        to = out[0][start : start + len(rows)]
        if left is None:
            to[:] = self._locate(rows)
        else:
            to[left] = self._locate(rows[left])

    def place(self, copied: Values, at: Ids, positions: Ids, start: int, out: Values) -> None:
        """See `Copies`."""
        places = np.minimum(np.searchsorted(positions, at), len(positions) - 1)
        here = positions[places] == at
        out[0][start + places[here]] = copied[0][here]

    def _locate(self, rows: Ids) -> npt.NDArray[np.int64]:
        found = self._tier.locate(rows)
        there = np.flatnonzero(found)
        segments, numbers = np.divmod(found[there] - 1, self._tier.store.format.per_segment)
        for segment in np.unique(segments[self._numbers[segments] < 0]).tolist():
            self._numbers[segment] = len(self._segments)
            self._segments.append(segment)
        found[there] = make_locations(self._numbers[segments], numbers)
        return found

    def finish(self, hold: Callable[[SegmentFile], str]) -> list[tuple[str, SegmentFile]]:
        """Make `hold` hold each segment that was named, in the order of their numbers; return what it returns.

        Raises:
            UserError: A write of the disk has failed.
            OSError: As `hold` raises it.
        """
        return [(hold(file), file) for file in self._tier.store.finish(self._segments)]

    def end(self) -> None:
        """See `Copies`."""
        if self._read is not None:
            number, self._read = self._read, None
            self._tier.end_read(number)
