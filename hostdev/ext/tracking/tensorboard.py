"""Writes a run to TensorBoard's event files, in the run directory's folder tensorboard."""

import threading
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.printable import printable
from hostdev.core.run_files import TENSORBOARD
from hostdev.ext.tracking.tracker import EndInfo, Norms, RunInfo, StepInfo, Tracker, clean, final_figures, flatten

_FLUSH_SECONDS = 10
_QUEUE = 1000  # the most events that wait to be written


class TensorBoardTracker(Tracker):
    """Writes a run's scalars, histograms and configuration, and its final figures as hparams."""

    name = "tensorboard"

    def __init__(self) -> None:
        self._writer: Any = None  # untyped
        self._config: Mapping[str, Any] = {}
        self._again: StepInfo | None = None
        self._hook: Callable[[Any], Any] | None = None

    @classmethod
    def require(cls) -> None:
        """See `Tracker`."""
        if find_spec("tensorboard") is None:
            raise UserError("--log-to tensorboard needs a package; run pip install tensorboard")

    def take_again(self, step: StepInfo | None) -> None:
        """See `Tracker`."""
        self._again = step

    def on_start(self, run: RunInfo) -> None:
        """Open the event file; if the run resumes, hide earlier events of the steps that it repeats."""
        from torch.utils.tensorboard import SummaryWriter  # its import takes seconds

        first = run.first_step
        purge = None if not first else first if self._again is not None else first + 1
        self._hook, threading.excepthook = threading.excepthook, _without_traceback(threading.excepthook)
        folder = str(run.run_dir / TENSORBOARD)
        self._writer = SummaryWriter(folder, purge_step=purge, max_queue=_QUEUE, flush_secs=_FLUSH_SECONDS)
        self._config = run.config
        if self._again is not None:
            self.on_step(self._again)
        self._writer.add_text("configuration", _as_table(flatten(run.config)), first)
        self._writer.flush()

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        """See `Tracker`."""
        self._writer.add_scalar(clean(tag), value, global_step)

    def add_histogram(self, tag: str, values: Norms, global_step: int) -> None:
        """See `Tracker`."""
        self._writer.add_histogram(clean(tag), values, global_step)

    def abandon(self, status: str) -> None:
        """See `Tracker`."""
        self._writer.flush()

    def on_end(self, end: EndInfo) -> None:
        """Write the options and the final figures as hparams."""
        self._writer.flush()
        options = {clean(name): _as_hparam(value) for name, value in flatten(self._config).items()}
        options["status"] = end.status
        figures = {f"summary/{name}": value for name, value in final_figures(end).items()}
        self._writer.add_hparams(options, figures, run_name=".", global_step=end.steps)

    def close(self) -> None:
        """See `Tracker`."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._hook is not None:
                threading.excepthook = self._hook


def _as_table(values: Mapping[str, Any]) -> str:
    """Return values by name as a table in Markdown."""
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join(["| option | value |", "|---|---|", *rows])


def _cell(value: Any) -> str:
    return clean(printable(str(value))).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _as_hparam(value: Any) -> bool | int | float | str:
    return value if isinstance(value, bool | int | float) else clean(printable(str(value)))


def _without_traceback(usual: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a hook that hides errors of the threads that write event files: the writer's next call raises them."""

    def hook(args: Any) -> None:
        if not type(args.thread).__module__.startswith("tensorboard."):
            usual(args)

    return hook
