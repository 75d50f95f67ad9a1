"""What a row's ways cost the host, measured by the kernels of a training on a table like its own."""

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

_MOST_BYTES = 1 << 29  # of the tables, which are many times what a processor caches
_ROUNDS = 7


def host_costs(
    rows: int, tables: Sequence[tuple[int, SparseOptimizer] | TableShape], batches: Sequence[npt.NDArray[Any]]
) -> Costs:
    """Return the nanoseconds of a row of all tables: looked up and updated, read with its slots, overwritten with them.

    rows     V; of larger tables than 512 MiB, or a quarter of the free memory, there are fewer rows here
    tables   columns and optimizer of each, and its weights' dtype
    batches  unique ids [U] of some batches
    """
    most = min(_MOST_BYTES, available_bytes() // 4)
    held = max(1, min(rows, most // row_bytes(tables)[1]))
    mine = [
        HostTable(held, dim, optimizer, name=f"measured {number}", init=Constant(), dtype=dtype)
        for number, (dim, optimizer, dtype) in enumerate(TableShape(*table) for table in tables)
    ]
    ids = [unique(batch % held)[0] for batch in batches if len(batch)]
    if not ids:
        return Costs(0, 0, 0)
    longest = max(map(len, ids))
    weights = [np.zeros((longest, table.dim), np.float32) for table in mine]
    whole = [(np.zeros((longest, 1 + len(table.optimizer.slots), table.dim), np.float32),
              np.zeros((longest, table.row_slots.shape[1]), np.float32)) for table in mine]  # fmt: skip

    def passing(some: npt.NDArray[Any]) -> list[list[Task]]:
        pairs = list(zip(mine, weights, strict=True))
        looked_up = [task for table, rows in pairs for task in table.lookup_tasks(some, rows[: len(some)])]
        return [looked_up, [task for table, rows in pairs for task in table.update_tasks(some, rows[: len(some)])]]

    def admitting(some: npt.NDArray[Any]) -> list[list[Task]]:
        return [[task for table, (block, row_slots) in zip(mine, whole, strict=True)
                 for task in table.read_rows_tasks(some, block[: len(some)], row_slots[: len(some)])]]  # fmt: skip

    def evicting(some: npt.NDArray[Any]) -> list[list[Task]]:
        return [[task for table, (block, row_slots) in zip(mine, whole, strict=True)
                 for task in table.write_rows_tasks(some, block[: len(some)], row_slots[: len(some)])]]  # fmt: skip

    return Costs(*(_per_row(tasks_of, ids) for tasks_of in (passing, admitting, evicting)))


def _per_row(tasks_of: Callable[[npt.NDArray[Any]], list[list[Task]]], batches: Sequence[npt.NDArray[Any]]) -> float:
    """Return the median over batches in turn; the first ones bring kernels and pages."""
    times = []
    for number in range(_ROUNDS + 2):
        ids = batches[number % len(batches)]
        start = time.perf_counter_ns()
        for tasks in tasks_of(ids):
            run_tasks(tasks)
        times.append((time.perf_counter_ns() - start) / len(ids))
    return statistics.median(times[2:])
