"""`Runtime.log_to`: writes what a runtime knows about its own work to TensorBoard, MLflow, or another writer.

`RuntimeFigures` has the measurements as scalars by tag; docs/guides/tracking.md explains the tags.
"""

import time
import warnings
from collections.abc import Callable
from typing import Any, Protocol
from weakref import proxy

import numpy as np
import numpy.typing as npt
import torch

from hostdev.core.errors import in_words
from hostdev.core.timeline import STAGES
from hostdev.device.table import DeviceTable

MOST_ROWS = 100_000  # maximum number of rows per table in a histogram
_PART_BYTES = 1 << 24  # of rows that are read at a time
_METHODS = ("add_scalar", "add_histogram")


class RuntimeFigures:
    """Speed, waits, op times, caches and exchange of a runtime.

    Means are over the steps since the last call of `scalars` or `restart`; totals are since the runtime was created.

    Args:
        runtime: A `Runtime`, untyped because its module imports this one.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._stalls: dict[str, int] = {}
        self._busy: dict[str, int] = {}
        self._ops: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Begin a new period for the means of `scalars`."""
        timeline = self._runtime.pipeline.timeline
        self._stalls, self._busy = dict(timeline.stall_ns), dict(timeline.busy_ns)
        self._ops = self._runtime.log.totals()

    def scalars(self, steps: int, samples: int, seconds: float) -> dict[str, float]:
        """Return the means since the previous call, and the totals, by tag; begin a new period for the means.

        Args:
            steps: The number of steps since the previous call.
            samples: The number of samples in these steps.
            seconds: The duration of these steps.
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
    """Return at most `most` evenly spaced row numbers; for a table by key, in the order of its keys."""
    count = table.rows
    at = np.arange(count) if count <= most else np.linspace(0, count - 1, most).astype(np.int64)
    found: npt.NDArray[Any] = table.rows_at(at)
    return found.astype(np.int32) if count < 1 << 31 else found  # int32 as in training, to use its compiled kernels


def _read(table: Any, ids: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return the weights of rows after the last step, float32 [n, D]."""
    if isinstance(table, DeviceTable):
        with torch.no_grad():
            return np.asarray(table.lookup_now(torch.from_numpy(ids).to(table.device)).cpu())
    out = np.empty((len(ids), table.dim), np.float32)
    table.lookup_now(ids, out)
    return out


class Writer(Protocol):
    """A destination of values: torch.utils.tensorboard.SummaryWriter, `hostdev.tracking.MLflowWriter`, or another."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write a value of this step."""

    def add_histogram(self, tag: str, values: Any, global_step: int) -> Any:
        """Write the distribution of values, float32 [N]."""


class RuntimeLog:
    """Writes the figures of a runtime at intervals of steps.

    Args:
        writer: The destination.
        figures: Computes the figures.
        every: Steps between two records.
        histograms_every: Steps between two records with histograms; 0 for none.
    """

    def __init__(self, writer: Writer, figures: RuntimeFigures, every: int, histograms_every: int) -> None:
        self._writer, self._figures, self._every, self._histograms_every = writer, figures, every, histograms_every
        self._step = self._steps = self._samples = 0
        self._start = 0.0

    def begin(self, step: int) -> None:
        """Begin a loop; `step` is the number of steps that the tables have."""
        self._step = step
        self._restart()

    def _restart(self) -> None:
        self._steps, self._samples, self._start = 0, 0, time.perf_counter()
        self._figures.restart()

    def step(self, runtime: Any, samples: int) -> bool:
        """Count a step, and write if it is due; if the writer fails, warn and return False."""
        self._step, self._steps, self._samples = self._step + 1, self._steps + 1, self._samples + samples
        try:
            if self._step % self._every == 0:
                seconds = time.perf_counter() - self._start
                for tag, value in self._figures.scalars(self._steps, self._samples, seconds).items():
                    self._writer.add_scalar(tag, value, self._step)
                self._restart()
            if self._histograms_every and self._step % self._histograms_every == 0:
                start = time.perf_counter()
                runtime.pipeline.write_back()
                for tag, values in self._figures.histograms().items():
                    self._writer.add_histogram(tag, values, self._step)
                self._start += time.perf_counter() - start
        except Exception as error:
            text = f"Runtime.log_to writes nothing after step {self._step:,}: {type(error).__name__}: {in_words(error)}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            return False
        return True


class Logged:
    """The method `log_to` of a `Runtime`."""

    def log_to(self, writer: Writer, every: int = 100, *, histograms_every: int | None = None) -> None:
        """Write speed, waits, op times, caches and the norms of rows to a writer, in every loop over `train`.

        docs/guides/tracking.md has the tags, which are those of `hostdev train --log-to`. The program logs its losses
        itself. The results do not depend on this method. With other ranks, each rank that calls it writes its own
        figures. If the writer raises an exception, a warning says so, and nothing more is written to it.

        Args:
            writer: An object with the methods add_scalar(tag, value, global_step) and add_histogram, such as torch's
                SummaryWriter, or a `hostdev.tracking.MLflowWriter`. The program closes it.
            every: Number of steps between two records; a step is a batch of the loop or, with
                `accumulate` or `micro_batches`, several batches.
            histograms_every: Number of steps between two histograms of the norms of each table's rows; 0 for none. None
                means 10 * `every`. Before a histogram, all updates are finished, and cached rows are written back.

        Raises:
            TypeError: The writer lacks a method.
            ValueError: A number of steps is too small, or the runtime is closed.
        """
        missing = [name for name in _METHODS if not callable(getattr(writer, name, None))]
        if missing:
            modules = str(getattr(writer, "__name__", "")) + type(writer).__module__
            more = "; for MLflow, give hostdev.tracking.MLflowWriter()" if "mlflow" in modules else ""
            raise TypeError(
                f"log_to needs a writer with the methods {' and '.join(_METHODS)}, such as SummaryWriter of "
                f"torch.utils.tensorboard; {writer!r} lacks {' and '.join(missing)}{more}"
            )
        histograms_every = 10 * every if histograms_every is None else histograms_every
        if every < 1 or histograms_every < 0:
            raise ValueError(
                f"every must be at least 1, and histograms_every at least 0, not {every} and {histograms_every}"
            )
        self._add_log(lambda: RuntimeLog(writer, RuntimeFigures(proxy(self)), every, histograms_every))

    def _add_log(self, make: Callable[[], RuntimeLog]) -> None:
        raise NotImplementedError
