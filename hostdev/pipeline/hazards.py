"""Read-after-write hazards: finds a batch's conflicting rows, which an unfinished batch will write.

Conflicting rows form two subsets. Rows that the previous batch writes are forwarded on the device if possible.
Otherwise the previous batch's update begins with them, as soon as its gradients arrive. Rows that only older batches
write are ready even earlier.
"""

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from hostdev.kernels.claims import Claims, Late, claim, intersect, others
from hostdev.pipeline.batch_ids import ConcatenatedIds, RowSubset
from hostdev.pipeline.forwarding import find_forwarded
from hostdev.pipeline.scheduling.in_flight import Conflicts, InFlight, SharedRows, Unfinished


def find_conflicts(
    unfinished: Unfinished,
    reads: ConcatenatedIds,
    written: npt.NDArray[Any],
    last_writers: Claims,
    *,
    staleness: int = 0,
    ignored: Sequence[int] = (),
) -> Conflicts:
    """Find a batch's rows that an unfinished batch will write, and make the batch the last writer of its rows.

    Args:
        unfinished: The batch, and the unfinished batches for which it may have to wait.
        reads: The host rows that the batch reads.
        written: The rows whose last writer the batch becomes: first the rows that it reads, then others.
        last_writers: The last writer of each row; the batch is recorded here.
        staleness: Number of preceding batches whose writes the batch does not wait for.
        ignored: Groups whose hazards are ignored, to test that checks find the wrong results.
    """
    batch, before, pin = unfinished.batch, unfinished.before, unfinished.pin
    number = batch.number
    late = claim(written, last_writers, number, unfinished.updated + 1, number - 1 - staleness).first(len(reads))
    for group in ignored:
        kept = (late.rows < reads.starts[group]) | (late.rows >= reads.starts[group + 1])
        late = Late(late.rows[kept], late.owner[kept])
    is_of_before = late.owner == number - 1
    of_before, of_older = late.rows[is_of_before], late.rows[~is_of_before]
    subsets = []
    if len(of_before):
        subsets.append((RowSubset.select(reads.ids, of_before), number - 1))
    if len(of_older):
        subsets.append((RowSubset.select(reads.ids, of_older), int(late.owner[~is_of_before].max())))
    if before is None or not len(of_before):
        return Conflicts(late.rows, subsets, None, None)
    assert before.writes is not None
    conflicting = subsets[0][0]
    if pin is not None and pin():
        forwarded = find_forwarded(before.writes, conflicting, before.forwarded)
        return Conflicts(late.rows, subsets[1:], None, forwarded)
    if before.updating:
        return Conflicts(late.rows, subsets, None, None)
    theirs = before.writes.ids
    both = intersect(theirs, conflicting.ids, last_writers, number)
    rest = RowSubset.select(theirs, others(len(theirs), both))
    shared = SharedRows(RowSubset.select(theirs, both), rest, batch, conflicting)
    return Conflicts(late.rows, subsets, shared, None)


def record_writer(batch: InFlight, last_writers: Claims) -> None:
    """Make a batch, which was planned after all earlier updates and has no conflicts, the last writer of its rows."""
    assert batch.writes is not None
    claim(batch.writes.ids, last_writers, batch.number, batch.number, batch.number - 1)
    batch.claimed = True
