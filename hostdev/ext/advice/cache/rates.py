"""The host's time per row for lookups, updates and swaps, measured with the training kernels on similar tables."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.cache.prices import Costs
from hostdev.core.initializers import Constant
from hostdev.core.memory import TableShape, available_bytes, row_bytes
from hostdev.core.optimizers import SparseOptimizer
from hostdev.host.table import HostTable
from hostdev.kernels.pool import Task, run_tasks
from hostdev.kernels.unique import unique

_MOST_BYTES = 1 << 29  # maximum bytes of the tables; many times a processor's cache
_ROUNDS = 7


def host_costs(
    rows: int, tables: Sequence[tuple[int, SparseOptimizer] | TableShape], batches: Sequence[npt.NDArray[Any]]
) -> Costs:
    """Measure the nanoseconds that the host needs for a row that bypasses a cache, is admitted, or is evicted.

    Each time covers one row in every table. A bypassing row is looked up and updated. An admitted row is read
    with its optimizer state, and an evicted row is written with its state.

    Args:
        rows: V, the number of rows. Tables above 512 MiB or a quarter of the free memory are measured with fewer rows.
        tables: Dimension, optimizer and dtypes of each table.
        batches: Unique ids [U] of some batches.
    """
    most = min(_MOST_BYTES, available_bytes() // 4)
    held = max(1, min(rows, most // row_bytes(tables)[1]))
    mine = [
        HostTable(held, dim, optimizer, name=f"measured {number}", init=Constant(), dtype=dtype, slots=slots)
        for number, (dim, optimizer, dtype, slots) in enumerate(TableShape(*table) for table in tables)
    ]
    ids = [unique(batch % held)[0] for batch in batches if len(batch)]
    if not ids:
        return Costs(0, 0, 0)
    longest = max(map(len, ids))
    weights = [np.zeros((longest, table.dim), np.float32) for table in mine]
    whole = [
        (
            np.zeros((longest, 1 + len(table.optimizer.slots), table.dim), np.float32),
            np.zeros((longest, table.row_slots.shape[1]), np.float32),
        )
        for table in mine
    ]

    def bypass(some: npt.NDArray[Any]) -> list[list[Task]]:
        pairs = list(zip(mine, weights, strict=True))
        looked_up = [task for table, rows in pairs for task in table.lookup_tasks(some, rows[: len(some)])]
        return [looked_up, [task for table, rows in pairs for task in table.update_tasks(some, rows[: len(some)])]]

    def admit(some: npt.NDArray[Any]) -> list[list[Task]]:
        n, pairs = len(some), zip(mine, whole, strict=True)
        return [[task for table, (block, own) in pairs for task in table.read_rows_tasks(some, block[:n], own[:n])]]

    def evict(some: npt.NDArray[Any]) -> list[list[Task]]:
        n, pairs = len(some), zip(mine, whole, strict=True)
        return [[task for table, (block, own) in pairs for task in table.write_rows_tasks(some, block[:n], own[:n])]]

    return Costs(*(_measure_row(make_tasks, ids) for make_tasks in (bypass, admit, evict)))


def _measure_row(
    make_tasks: Callable[[npt.NDArray[Any]], list[list[Task]]], batches: Sequence[npt.NDArray[Any]]
) -> float:
    """Return the median nanoseconds per row over batches, after two rounds that only load kernels and memory pages."""
    times = []
    for number in range(_ROUNDS + 2):
        ids = batches[number % len(batches)]
        start = time.perf_counter_ns()
        for tasks in make_tasks(ids):
            run_tasks(tasks)
        times.append((time.perf_counter_ns() - start) / len(ids))
    return statistics.median(times[2:])
