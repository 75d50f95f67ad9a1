"""The norms of a table's rows, for histograms; reading them changes nothing."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.device.table import DeviceTable

MOST_ROWS = 100_000  # per table
_PART_BYTES = 1 << 24  # of rows that are read at a time


def row_norms(table: Any, most: int = MOST_ROWS) -> npt.NDArray[np.float32]:
    """Return the Euclidean norms of at most `most` evenly spaced rows of this process's part of a table, float32 [n].

    Updates of earlier steps must be in the table, and cached rows written back; nothing else may write to it meanwhile.

    Args:
        table: A `HostTable`, in memory or on disk, by row or by key (then only keys that have a row), or a
            `DeviceTable`.
    """
    ids = _choose(table, most)
    norms = np.empty(len(ids), np.float32)
    step = max(1, _PART_BYTES // (4 * table.dim))
    for start in range(0, len(ids), step):
        some = ids[start : start + step]
        norms[start : start + len(some)] = np.linalg.norm(_read(table, some), axis=1)
    return norms


def _choose(table: Any, most: int) -> npt.NDArray[Any]:
    """Return row numbers, in order; those of a table by key in the order of its keys."""
    count = table.rows
    at = np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)
    found: npt.NDArray[Any] = table.rows_at(at)
    return found.astype(np.int32) if count < 1 << 31 else found  # int32 as in training, whose kernels are compiled


def _read(table: Any, ids: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return the weights of rows after the last step, float32 [n, D]."""
    if isinstance(table, DeviceTable):
        with torch.no_grad():
            return np.asarray(table.lookup_now(torch.from_numpy(ids).to(table.device)).cpu())
    out = np.empty((len(ids), table.dim), np.float32)
    table.lookup_now(ids, out)
    return out
