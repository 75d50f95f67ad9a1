"""The time of a step of several ranks as a formula (docs/scaling.md), and its constants from a machine's measurements.

    step = max(dense, host), where a rank has cores to spare for both; dense + host, where it has one core

    dense = t_sample B / W + 4 P (k + 1) (W - 1) / W / bandwidth + calls latency
    host  = t_id n + t_row(D) o + copies / t_copy + bytes (W - 1) / W / bandwidth + calls latency

B samples a batch, W ranks, n ids of a rank, u of them unique, o unique rows of a rank's part of the tables that all ask
for, D columns of all tables, P dense parameters, k nodes of the tree that a rank's micro-batches make up.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

ROW_CALLS, DENSE_CALLS = 6, 4  # collectives of a step: for rows; for the dense side, and two for each of its buckets
BUCKET_BYTES = 4 << 20


class Machine(NamedTuple):
    """What a rank's share of a machine can do, in seconds."""

    per_step: float  # of the host's work, whatever its size
    per_id: float
    per_row: float  # and unique row: finding it
    per_value: float  # and unique row and column: lookup and update
    per_copied_byte: float
    per_sent_byte: float
    per_call: float  # a collective of nothing


class Work(NamedTuple):
    """What a rank has to do in a step."""

    ids: float  # n
    asked: float  # u
    owned: float  # o
    columns: int  # D
    ranks: int  # W
    nodes: int = 1  # k
    parameters: int = 0  # P


def fitted(points: Sequence[tuple[Work, float]], copied: float, sent: float, call: float) -> Machine:
    """Return the constants of steps of one rank, without a dense side, and of what they took in seconds."""
    rows = np.array([[1.0, work.ids, work.owned, work.owned * work.columns] for work, _ in points])
    seconds = np.array([taken for _, taken in points])
    found = _non_negative(rows / seconds[:, None], np.ones(len(points)))
    return Machine(*found, copied, sent, call)


def _non_negative(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Return the least squares' solution; what would be below 0 is left out."""
    used = list(range(a.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(a[:, used], b, rcond=None)
        if (found >= 0).all():
            whole = np.zeros(a.shape[1])
            whole[used] = found
            return [float(value) for value in whole]
        used.pop(int(found.argmin()))


def host_seconds(work: Work, machine: Machine) -> float:
    """Return what a rank's host needs for a step, with its exchange."""
    m, w = machine, work
    taken = m.per_step + m.per_id * w.ids + (m.per_row + m.per_value * w.columns) * w.owned
    if w.ranks == 1:
        return taken
    away = (w.ranks - 1) / w.ranks
    row = 4 * w.columns
    sent = w.asked * away * (4 + row + w.nodes * row)
    # Rows are put into a buffer and taken out of one; gradients too, and are added up where they come.
    copied = w.asked * row * (2 * 2 + 2 * w.nodes + w.nodes + 1)
    taken += m.per_id * w.asked  # they are made unique once more at their owner
    return taken + m.per_copied_byte * copied + m.per_sent_byte * sent + m.per_call * ROW_CALLS


def dense_seconds(work: Work, machine: Machine, alone: float) -> float:
    """Return what a rank's dense side needs for a step, with its exchange; alone: without."""
    if work.ranks == 1:
        return alone
    size = 4 * work.parameters
    sent = size * (work.nodes + 1) * (work.ranks - 1) / work.ranks
    calls = DENSE_CALLS + 2 * -(-size // BUCKET_BYTES)
    return alone + machine.per_sent_byte * sent + machine.per_call * calls
