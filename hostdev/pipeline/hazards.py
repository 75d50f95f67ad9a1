"""Read-after-write hazards: which rows of a batch an unfinished one is going to write, and when they may be read.

Rows of the batch right before are one part: they are written first when its gradients arrive. Those of all older
batches, which are updated earlier, are the other.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy.typing as npt

from hostdev.kernels.claims import Claims, Late, claim, intersect, others
from hostdev.pipeline.flight import Flight, Shared
from hostdev.pipeline.groups import Part, Positions
from hostdev.pipeline.line import Line


class LateRows(NamedTuple):
    """The rows of a batch that come late."""

    rows: Positions  # among those that the batch reads
    parts: list[tuple[Part, int]]  # each with the batch after whose update it may be read
    shared: Shared | None  # with the batch before


def find_late(
    flight: Flight,
    before: Flight | None,
    claimed: npt.NDArray[Any],
    claims: Claims,
    oldest: int,
    newest: int,
    excused: Sequence[tuple[int, int]] = (),
) -> LateRows:
    """Claim a batch's rows, and find those that an unfinished batch is going to write.

    before   the batch right before, if it is unfinished
    claimed  the rows that the batch reads, and then others that it writes
    claims, oldest, newest  as in `claim`
    excused  ranges of what the batch reads whose hazards are not to be seen: for tests of those that look for them
    """
    reads = flight.reads.ids
    late = claim(claimed, claims, flight.number, oldest, newest).first(len(reads))
    for start, stop in excused:
        seen = (late.rows < start) | (late.rows >= stop)
        late = Late(late.rows[seen], late.owner[seen])
    of_before = late.owner == flight.number - 1
    parts = [
        (Part.of(reads, late.rows[group]), int(late.owner[group].max()))
        for group in (of_before, ~of_before)
        if group.any()
    ]
    shared = None
    if before is not None and not before.closed and of_before.any():
        theirs, part = before.writes.ids, parts[0][0]
        both = intersect(theirs, part.ids, claims, flight.number)
        shared = Shared(Part.of(theirs, both), Part.of(theirs, others(len(theirs), both)), flight, part)
    return LateRows(late.rows, parts, shared)


def ask_for(flight: Flight, late: LateRows, line: Line) -> list[Part]:
    """Ask the batches in flight for the late rows; return those whose batch has been updated by now."""
    ready = []
    with line.changed:
        for part, number in late.parts:
            if number <= line.updated:
                ready.append(part)
                continue
            owner = line.flights[number]
            flight.missing += 1
            if late.shared is not None and part is late.shared.late and not owner.closed:
                owner.shared = late.shared
            else:
                owner.after.append((flight, part))
    return ready
