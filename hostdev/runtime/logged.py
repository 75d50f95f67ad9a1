"""`Runtime.log_to`: writes what a runtime knows about its own work to TensorBoard, MLflow, or another writer."""

import time
import warnings
from typing import Any, Protocol
from weakref import proxy

from hostdev.core.errors import in_words
from hostdev.runtime.figures import RuntimeFigures

_METHODS = ("add_scalar", "add_histogram")


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
        """Count a step, and write if it is due; return False if the writer has failed, with a warning."""
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

        docs/guides/tracking.md has the tags, which are those of `hostdev train --log-to`. Losses are the program's own.
        The results do not depend on it. With other ranks, each rank that calls this writes its own figures. If the
        writer raises an exception, a warning says so, and nothing more is written to it.

        Args:
            writer: An object with the methods add_scalar(tag, value, global_step) and add_histogram, such as torch's
                SummaryWriter, or a `hostdev.tracking.MLflowWriter`. The program closes it.
            every: Number of steps between two records; a step is a batch of the loop or, with
                `accumulate` or `micro_batches`, as many.
            histograms_every: Number of steps between two histograms of the norms of each table's rows, for which all
                updates are waited for, and cached rows are written back; 0 for none. None means 10 * `every`.

        Raises:
            TypeError: The writer lacks a method.
            ValueError: A number of steps is too small, or the runtime is closed.
        """
        missing = [name for name in _METHODS if not callable(getattr(writer, name, None))]
        if missing:
            more = "; for MLflow, give hostdev.tracking.MLflowWriter()" if "mlflow" in _module_of(writer) else ""
            raise TypeError(
                f"log_to needs a writer with the methods {' and '.join(_METHODS)}, such as SummaryWriter of "
                f"torch.utils.tensorboard; {writer!r} lacks {' and '.join(missing)}{more}"
            )
        self.require_open()
        histograms_every = 10 * every if histograms_every is None else histograms_every
        if every < 1 or histograms_every < 0:
            raise ValueError(
                f"every must be at least 1, and histograms_every at least 0, not {every} and {histograms_every}"
            )
        self._add_log(RuntimeLog(writer, RuntimeFigures(proxy(self)), every, histograms_every))

    def require_open(self) -> None:
        """See `Runtime`."""
        raise NotImplementedError

    def _add_log(self, log: RuntimeLog) -> None:
        raise NotImplementedError


def _module_of(writer: object) -> str:
    return str(getattr(writer, "__name__", "")) + type(writer).__module__
