"""The measurements of a runtime as scalars by tag; `TAGS` of docs/guides/tracking.md explains them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hostdev.core.timeline import STAGES
from hostdev.device.table import DeviceTable

MOST_ROWS = 100_000  # per table, in a histogram
_PART_BYTES = 1 << 24  # of rows that are read at a time


class RuntimeFigures:
    """Speed, waits, op times, caches and exchange of a runtime.

    Means are over the steps since the previous call of `scalars`; totals are since the runtime was created.

    Args:
        runtime: A `Runtime`, whose module is above this one.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._stalls: dict[str, int] = {}
        self._busy: dict[str, int] = {}
        self._ops: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Begin the next means here."""
        timeline = self._runtime.pipeline.timeline
        self._stalls, self._busy = dict(timeline.stall_ns), dict(timeline.busy_ns)
        self._ops = self._runtime.log.totals()

    def scalars(self, steps: int, samples: int, seconds: float) -> dict[str, float]:
        """Return the scalars by tag.

        Args:
            steps: The number of steps since the previous call.
            samples: Their samples.
            seconds: Their time.
        """
        runtime, timeline = self._runtime, self._runtime.pipeline.timeline
        per_step = 1e6 * max(1, steps)
        found = {} if seconds <= 0 else {"speed/samples_per_second": samples / seconds}
        found["pipeline/step_waits_ms"] = (timeline.stall_ns["step"] - self._stalls["step"]) / per_step
        for stage in STAGES:
            if busy := timeline.busy_ns[stage] - self._busy.get(stage, 0):
                found[f"pipeline/{stage.replace(' ', '_')}_ms"] = busy / per_step
        for name, total in runtime.log.totals().items():
            if spent := total - self._ops.get(name, 0):
                found[f"ops/{name}_ms"] = spent / per_step
        self.restart()
        return found | self.totals()

    def totals(self) -> dict[str, float]:
        """Return the totals by tag: of caches, and of the exchange between ranks."""
        runtime, found = self._runtime, {}
        for cache in runtime.caches:
            name, about = "+".join(table.name for table in cache.tables), cache.summary(optimum=False)
            for figure in ("hit_rate", "bytes_to_device", "bytes_to_host"):
                found[f"cache/{name}/{figure}"] = float(about[figure])
        return found | {f"exchange/{name}_bytes": float(sent) for name, sent in runtime.exchanged_bytes().items()}

    def histograms(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return the norms of rows of each table by tag; the tables must have the updates of all steps."""
        found = {}
        for name, table in sorted(self._runtime.tables.items()):
            norms = row_norms(table)
            norms = norms[np.isfinite(norms)]
            if len(norms):
                found[f"rows/{name}/norm"] = norms
        return found


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
