"""Which rows of a checkpoint's files a process holds, and their numbers there."""

from typing import Any

import numpy as np

from hostdev.checkpoint.manifest import RangeFile, Table
from hostdev.checkpoint.ranges import SPREAD
from hostdev.kernels.shards import get_positions, ids_of


def has_local_rows(about: Table, file: RangeFile, table: Any) -> bool:
    """Return whether a file may have rows that this process holds."""
    if table.part is None or about.order != SPREAD or about.rows != table.total_rows:
        return True
    return bool(file.start < table.start + table.rows and table.start < file.stop)


def map_rows(about: Table, numbers: Any, table: Any) -> tuple[Any, Any]:
    """Return the local rows to load, and the indices of their values among the file's rows (None for all).

    Args:
        about: The table's entry in the manifest.
        numbers: The file's rows: ascending ids, or ascending positions if the rows were divided among processes.
        table: The table to load into.
    """
    part = table.part
    if about.order == SPREAD and (part is None or about.rows != table.total_rows):
        numbers = ids_of(numbers, about.rows)  # positions depend on the table's number of rows
    if part is None:
        return numbers, None
    same = about.order == SPREAD and about.rows == table.total_rows
    positions = numbers if same else get_positions(numbers, table.total_rows)
    chosen = np.flatnonzero((table.start <= positions) & (positions < table.start + table.rows))
    return positions[chosen] - table.start, chosen
