"""Prometheus metrics of one process, or of all worker processes of a server."""

import contextlib
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import prometheus_client.values
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from hostdev.core.outputs import replacing

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"  # if this is set, each process reports the sums over a server's processes
_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536)


class _Writer(NamedTuple):
    """The process id in the names of the metrics' files; if `openings` changes, metrics open their files again."""

    process: int
    openings: int

    def __str__(self) -> str:
        return str(self.process)


class Metrics:
    """The metrics of a server."""

    def __init__(self) -> None:
        self._openings = 0
        if FOLDER_VARIABLE in os.environ:
            prometheus_client.values.ValueClass = prometheus_client.values.MultiProcessValue(  # type: ignore[no-untyped-call]
                lambda: _Writer(os.getpid(), self._openings)
            )
        self._registry = mine = CollectorRegistry()
        counter, histogram = partial(Counter, registry=mine), partial(Histogram, registry=mine)
        gauge = partial(Gauge, registry=mine)
        self._requests = counter("hostdev_requests", "Answered requests by end and status.", ["end", "status"])
        taken = "Time from a request's head to its answer."
        self._seconds = histogram("hostdev_request_seconds", taken, ["end"], buckets=_SECONDS)
        self._rows = counter("hostdev_rows", "Rows with predictions, or with errors.")
        self._batch_rows = histogram("hostdev_batch_rows", "Rows of a batch.", buckets=_ROWS)
        self._batch_requests = histogram("hostdev_batch_requests", "Requests of a batch.", buckets=_ROWS)
        self._compute = histogram("hostdev_batch_seconds", "Time to encode and compute a batch.", buckets=_SECONDS)
        waiting = "Rows that wait for a batch."
        self._waiting = gauge("hostdev_queue_rows", waiting, multiprocess_mode="livesum")
        step = "Step of the checkpoint that is served; of several processes, the lowest."
        self._step = gauge("hostdev_model_step", step, multiprocess_mode="livemin")
        written = "When the served checkpoint was written, in seconds since 1970; of several processes, the earliest."
        self._written = gauge("hostdev_model_written_timestamp_seconds", written, multiprocess_mode="livemin")
        self._changes = counter("hostdev_model_changes", "Newer checkpoints that were taken, by all processes.")
        self._problems = counter("hostdev_model_problems", "Checkpoints that could not be used, by all processes.")

    def request(self, end: str, status: int, seconds: float) -> None:
        """Count an answered request of the endpoint `end`."""
        self._requests.labels(end, str(status)).inc()
        self._seconds.labels(end).observe(seconds)

    def batch(self, requests: int, rows: int, seconds: float) -> None:
        """Count a computed batch."""
        self._rows.inc(rows)
        self._batch_rows.observe(rows)
        self._batch_requests.observe(requests)
        self._compute.observe(seconds)

    def waiting(self, rows: int) -> None:
        """Set the number of rows that wait."""
        self._waiting.set(rows)

    def model(self, step: int, written: float) -> None:
        """Set the served checkpoint's step, and when it was written."""
        self._step.set(step)
        self._written.set(written)

    def change(self, step: int, written: float) -> None:
        """Count a newer checkpoint that is served now."""
        self._changes.inc()
        self.model(step, written)

    def problem(self) -> None:
        """Count a newer checkpoint that cannot be used."""
        self._problems.inc()

    def text(self) -> tuple[bytes, str]:
        """Return all metrics in Prometheus's text format, and its content type."""
        self.restore()
        shown = CollectorRegistry()
        shown.register(_WithAge(self._registry))
        return generate_latest(shown), CONTENT_TYPE_LATEST

    def restore(self) -> None:
        """Write this process's files again, with all that was counted, if a cleaner of temporary files removed them."""
        if FOLDER_VARIABLE not in os.environ:
            return
        values: list[Any] = [self._rows, self._waiting, self._step]  # one metric of each file
        files = [value._value._file for value in values] + [self._batch_rows._sum._file]
        missing = [file for file in files if not Path(file._fname).exists()]
        with contextlib.suppress(OSError):
            for file in missing:
                path = Path(file._fname)
                path.parent.mkdir(0o700, exist_ok=True)
                with replacing(path) as partial:
                    partial.write_bytes(file._m[:])
            self._openings += bool(missing)


class _WithAge:
    """The metrics of this process, or of all processes, and the model's age, which is computed at each request."""

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        for metric in self._collect():
            yield metric
            if metric.name == "hostdev_model_written_timestamp_seconds" and metric.samples:
                age = GaugeMetricFamily("hostdev_model_age_seconds", "Seconds since the served checkpoint was written.")
                age.add_metric([], max(0.0, time.time() - metric.samples[0].value))
                yield age

    def _collect(self) -> list[Metric]:
        folder = Path(os.environ.get(FOLDER_VARIABLE, ""))
        with contextlib.suppress(OSError, ValueError):  # the folder is gone
            if FOLDER_VARIABLE in os.environ and folder.stat().st_uid == os.getuid():
                return list(MultiProcessCollector(CollectorRegistry()).collect())  # type: ignore[no-untyped-call]
        return list(self._own.collect())
