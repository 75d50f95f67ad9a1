"""Predict the time of a step of several ranks by a formula, with constants that the benchmark `ranks` measured.

    step = max(dense, host) if a rank has spare cores for both; dense + host if it has one core

    dense = t_sample B / W + 4 P (k + 1) t_copy + moved(dense bytes) + calls t_call
    host  = a + t_id n + t_row(D) o + t_asked(D) u + t_copy copies + moved(bytes of ids, rows, gradients) + calls t_call

A batch has B samples. Each of W ranks has n ids, u of them unique, and owns o unique rows that all ranks request. D is
the number of columns of all tables, P of dense parameters, and k of summation tree nodes that a rank's micro-batches
fill. Ranks that share hosts exchange in one level or in two. docs/scaling.md explains the formula.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bench.record import make_parser

ROW_CALLS, DENSE_CALLS = 6, 2  # successive collectives of a step: for rows; for the dense side, plus two per bucket
BUCKET_BYTES = 4 << 20


class Machine(NamedTuple):
    """The constants of a rank's share of a machine, in seconds."""

    per_step: float  # host time that does not depend on the batch
    per_id: float
    per_row: float  # per unique row: find it
    per_value: float  # per unique row and column: look it up and update it
    per_asked: float  # per requested unique row: find its owner, and find it among the requests of other ranks
    per_asked_value: float  # per requested row and column: move it from the owner to the requesting rank
    per_copied_byte: float
    per_sent_byte: float  # per byte that a host sends
    per_call: float  # per empty collective


class Work(NamedTuple):
    """A rank's work in a step."""

    ids: float  # n
    asked: float  # u
    owned: float  # o
    columns: int  # D
    ranks: int  # W
    nodes: int = 1  # k
    parameters: int = 0  # P
    each: int = 1  # L, ranks of a host
    levels: int = 1  # of the exchange

    @property
    def away(self) -> float:
        """The share of the ranks that are on other hosts."""
        return (self.ranks - self.each) / self.ranks


def fitted(points: Sequence[tuple[Work, float, float]], copied: float, sent: float, call: float) -> Machine:
    """Return the constants, fitted to steps of one rank without a dense side.

    Args:
        points: The work of each step, its seconds, and its seconds with an exchange of the rank with itself.
        copied: Seconds per copied byte.
        sent: Seconds per sent byte.
        call: Seconds of an empty collective.
    """
    rows = np.array([[1.0, work.ids, work.owned, work.owned * work.columns] for work, _, _ in points])
    more = np.array([[work.asked, work.asked * work.columns] for work, _, _ in points])
    alone, with_itself = (np.array(each) for each in list(zip(*points, strict=True))[1:])
    found = _non_negative(rows / alone[:, None], np.ones(len(points)))
    extra = np.maximum(with_itself - alone - ROW_CALLS * call, 0)
    asked = _non_negative(more / with_itself[:, None], extra / with_itself)
    return Machine(*found, *asked, copied, sent, call)


def _non_negative(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Return the least-squares solution; terms that would be negative are 0."""
    used = list(range(a.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(a[:, used], b, rcond=None)
        if (found >= 0).all():
            whole = np.zeros(a.shape[1])
            whole[used] = found
            return [float(value) for value in whole]
        used.pop(int(found.argmin()))


def host_seconds(work: Work, machine: Machine) -> float:
    """Return the seconds of a rank's host work in a step, with the exchange of rows."""
    m, w = machine, work
    taken = m.per_step + m.per_id * w.ids + (m.per_row + m.per_value * w.columns) * w.owned
    if w.ranks == 1:
        return taken
    others = (w.ranks - 1) / w.ranks
    row = 4 * w.columns
    each = w.asked * (4 + row + w.nodes * row)
    # Rows and gradients that go to another rank pass two more buffers.
    copied = w.asked * others * row * (2 + 2 * w.nodes)
    taken += (m.per_asked + m.per_asked_value * w.columns) * w.asked
    # The ranks of a host share its link. Bytes that pass through its memory are written and read.
    within = others if w.levels == 2 else others - w.away
    copied += 2 * each * within
    return taken + m.per_copied_byte * copied + m.per_sent_byte * w.each * each * w.away + m.per_call * ROW_CALLS


def dense_seconds(work: Work, machine: Machine, alone: float) -> float:
    """Return the seconds of a rank's dense side in a step, with its exchange; `alone` are those without."""
    if work.ranks == 1:
        return alone
    size = 4 * work.parameters
    copied = size * (work.nodes + 1)  # into a buffer, and added up
    moved, L = size * (work.nodes + 1), work.each
    calls = DENSE_CALLS + 2 * -(-size // BUCKET_BYTES)
    if work.levels == 2:
        # Each rank writes its nodes for the others and reads theirs, writes its sum once and reads theirs; then it
        # exchanges its slice of the host's node, which is one if L is a power of two.
        copied += (2 * work.nodes + 1) * size * (L - 1) / L + size / L + 4 * size / L * work.away
        sent = 2 * size * work.away  # by all ranks of a host
    else:
        copied += 2 * moved * ((work.ranks - 1) / work.ranks - work.away)
        sent = L * moved * work.away
    return alone + machine.per_copied_byte * copied + machine.per_sent_byte * sent + machine.per_call * calls


# Assumptions of the printed table, which could not be measured: 8 ranks per host, kernels on 8 cores per rank, 80 GB/s
# from each host, 20 us per other rank or host in a collective, an accelerator that takes 25 ms for 16,000 samples of
# Wide & Deep. A collective takes PER_HOST more in two levels: measured for 8 ranks on 2 cores.
EACH, CORES, SENT_BYTES_PER_S, PER_PEER, PER_HOST = 8, 8, 80e9, 20e-6, 500e-6
DENSE_SECONDS, DENSE_SAMPLES = 25e-3, 16_000
ROWS, FIELDS, DIM, PARAMETERS, EXPONENT = 5_000_000, 39, 80, 3_885_057, 1.1


def expect_unique(ids: float) -> float:
    """Return the expected number of unique ids among `ids` Zipf draws of `workload.draw_ids`."""
    chance = np.arange(1, ROWS + 1, dtype=np.float64) ** -EXPONENT
    chance /= chance.sum()
    return float(-np.expm1(ids * np.log1p(-chance)).sum())


def scaled(machine: Machine, ranks: int, levels: int, rate: float) -> Machine:
    """Return the constants of the assumed hosts, derived from those of one core."""
    cores = 1 / CORES
    return machine._replace(
        per_id=machine.per_id * cores,
        per_row=machine.per_row * cores,
        per_value=machine.per_value * cores,
        per_asked=machine.per_asked * cores,
        per_asked_value=machine.per_asked_value * cores,
        per_copied_byte=machine.per_copied_byte * cores,
        per_sent_byte=1 / rate,
        per_call=PER_PEER * (ranks - 1) if levels == 1 else PER_PEER * (ranks // EACH - 1) + PER_HOST,
    )


def predict(machine: Machine, ranks: int, batch: int, levels: int, rate: float) -> tuple[float, float]:
    """Return the seconds of the host's and of the dense part of a step; `rate` is in bytes per second of a host."""
    ids = FIELDS * batch / ranks
    shape = {"ids": ids, "asked": expect_unique(ids), "owned": expect_unique(ids * ranks) / ranks, "columns": DIM + 1}
    work = Work(**shape, ranks=ranks, parameters=PARAMETERS, each=min(EACH, ranks), levels=levels)
    constants = scaled(machine, ranks, levels, rate)
    alone = DENSE_SECONDS * batch / ranks / DENSE_SAMPLES
    return host_seconds(work, constants), dense_seconds(work, constants, alone)


def main() -> None:
    """Print the formula's predictions for up to 512 ranks."""
    parser = make_parser(__doc__, out=False)
    parser.add_argument("result", type=Path, help="result of the benchmark `ranks`, with the constants of one core")
    parser.add_argument("--rate", type=float, default=SENT_BYTES_PER_S, help="bytes per second that a host sends")
    arguments = parser.parse_args()
    machine = Machine(**json.loads(arguments.result.read_text())["formula"]["machine"])
    print(
        f"{'ranks':>5}{'hosts':>7}{'samples a batch':>17}{'levels':>8}{'host ms':>9}{'dense ms':>10}{'step ms':>9}"
        f"{'samples/s':>13}{'of linear':>11}"
    )
    for fixed in (False, True):
        first = 0.0
        for ranks in (1, 2, 8, 64, 512):
            batch = (1 << 16) if fixed else DENSE_SAMPLES * ranks
            for levels in (1, 2) if ranks > EACH else (1,):
                host, dense = predict(machine, ranks, batch, levels, arguments.rate)
                step = max(host, dense)
                first = first or batch / step
                print(
                    f"{ranks:>5}{-(-ranks // EACH):>7}{batch:>17,}{levels:>8}{host * 1e3:>9.1f}{dense * 1e3:>10.1f}"
                    f"{step * 1e3:>9.1f}{batch / step:>13,.0f}{batch / step / first / ranks:>11.0%}"
                )
        print()
