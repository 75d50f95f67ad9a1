"""A copy-on-write snapshot of a table by key, for checkpoints that are written during training.

Its positions 0 .. P - 1 stand for the out-of-vocabulary rows, in the order of their names, and then for the rows of the
snapshot's keys, in the order of the keys' hashes.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from hostdev.core.keys import KeyColumns
from hostdev.host.committed_keys import CommittedKeys
from hostdev.host.snapshot import Budget, Copies, Snapshot
from hostdev.kernels.arrays import AnyIds, Keys
from hostdev.kernels.bits import Bits, empty_bits, mark
from hostdev.kernels.buffers import reserved
from hostdev.kernels.key_order import order_of, sorted_rows
from hostdev.kernels.key_use import split


class KeySnapshot(Snapshot):
    """The rows of a table by key when the snapshot is constructed.

    Args:
        copies: Copies rows.
        rows: Number of rows that the table can have.
        budget: As for `Snapshot`.
        unknown: The out-of-vocabulary rows by name, in the order of the names.
        found: The table's keys.
        changed: The rows that the snapshot has if their keys have a row, or None for all.
        gone: int64 [G], keys that have lost their rows since the last snapshot.
    """

    def __init__(
        self,
        copies: Copies,
        rows: int,
        budget: Budget,
        unknown: Mapping[str, int],
        found: CommittedKeys,
        changed: Bits | None,
        gone: Keys,
    ) -> None:
        self.found, self.gone, self.names = found, gone, list(unknown)
        self._own = np.array(list(unknown.values()), np.int32)
        live = found.live if changed is None else found.live & changed[: len(found.live)]
        self._live: Bits | None = live
        wanted = empty_bits(rows)
        wanted[: len(live)] = live
        mark(self._own, wanted)
        super().__init__(copies, rows, wanted, budget)
        self._rows = self.count
        self._bucket = -(-self.count // 32)

    @cached_property
    def _order(self) -> npt.NDArray[np.int32]:
        """The row of each position; sorted by the thread that writes, as that takes time."""
        live, self._live = self._live, None
        assert live is not None
        return sorted_rows(self.found.by_row, live, self._own)

    @cached_property
    def _positions(self) -> npt.NDArray[np.int32]:
        """The position of each row; undefined for other rows."""
        rows = self._order
        found: npt.NDArray[np.int32] = reserved((int(rows.max(initial=0)) + 1,), np.int32)
        found[rows] = np.arange(len(rows), dtype=np.int32)
        return found

    def key_columns(self, first: int, last: int) -> KeyColumns:
        """Return the keys at the positions [first, last)."""
        rows = self._order[first:last]
        used, uses = split(self.found.packed)
        return KeyColumns(self.found.by_row[rows], used[rows], uses[rows])

    def rows_between(self, first: int, last: int) -> AnyIds:
        """Return the positions [first, last), int64."""
        return np.arange(first, last)

    def _rows_at(self, positions: AnyIds) -> AnyIds:
        return self._order[positions]

    def _positions_of(self, rows: AnyIds) -> AnyIds:
        return self._positions[rows]

    def end(self) -> None:
        """See `Snapshot.end`."""
        super().end()
        self.found.forget_rows()


def gone_since(keys: Sequence[Keys]) -> Keys:
    """Return distinct keys of several arrays, in the order of their hashes."""
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *keys]))
    return found[order_of(found)]
