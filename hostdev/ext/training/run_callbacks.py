"""Calls the callbacks and trackers of a run, and keeps their errors and their random draws away from the training."""

import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from hostdev.core.errors import in_words
from hostdev.core.progress import note
from hostdev.core.run_events import CallbackError, CheckpointInfo, EndInfo, EpochInfo, RunInfo, RunObserver, StepInfo
from hostdev.distributed.monitor import run_within
from hostdev.ext.tracking.options import TrackingOptions, make_callbacks, make_trackers
from hostdev.ext.tracking.tracker import Tracker
from hostdev.runtime.generators import get_generators
from hostdev.runtime.logged import RuntimeFigures
from hostdev.runtime.runtime import Runtime
from hostdev.train.interrupt import GracefulStop

EVERY = 20  # steps between two records of speed, waits and op times
_ABANDON_SECONDS = 2.0


class RunCallbacks(RunObserver):
    """The callbacks and trackers of a run.

    The first error of a callback ends the run like a signal: `error` is set, and after the current event, only `on_end`
    of the other callbacks is called. A tracker that fails is removed, with a warning.

    Args:
        users: Name and object of each class in --callback.
        trackers: The trackers of --log-to.
        stop: Ends the run when its `requested` is set.
    """

    def __init__(self, users: Iterable[tuple[str, Any]], trackers: Iterable[Tracker], stop: GracefulStop) -> None:
        self._users, self._trackers, self._stop = list(users), list(trackers), stop
        self.listens = bool(self._users or self._trackers)  # as of the start; a tracker that fails is removed later
        self._failed: list[str] = []  # warnings about failed trackers, for the end of the run
        self.error: CallbackError | None = None
        self._raised: Any = None  # the callback that raised `error`
        self._step = self._samples = self._since = 0  # _samples, _since: samples and steps since the last record
        self._at = 0.0
        self._figures: RuntimeFigures | None = None
        self._generators: list[Any] = []
        self._is_started = self._has_ended = False

    def start(self, run: RunInfo, runtime: Runtime, again: StepInfo | None) -> None:
        """Call `take_again` of the trackers, then `on_start` of all; raise CallbackError if a callback fails."""
        if not self.listens:
            return
        self._generators, self._step = get_generators(runtime.device), run.first_step
        self._is_started = True
        if self._trackers:
            self._figures = RuntimeFigures(runtime)
        with self._same_generators():
            self._track("take_again", again)
            self._call("on_start", run)
        if self.error is not None:
            raise self.error
        self._at = time.perf_counter()

    def step(self, info: StepInfo) -> None:
        """Call `on_step`; every `EVERY` steps, also write the runtime's figures."""
        self._step, self._samples, self._since = info.step, self._samples + info.samples, self._since + 1
        with self._same_generators():
            self._track("check")
            self._call("on_step", info)
            if self._since == EVERY:
                self._write()

    def _write(self) -> None:
        """Write the figures of the steps since the last record."""
        if self._figures is not None and self._trackers and self._since:
            now = time.perf_counter()
            figures = self._figures.scalars(self._since, self._samples, now - self._at)
            self._track("write", figures, {}, self._step)
        self.restart()

    def restart(self) -> None:
        """Begin the next record here, after a pause of training."""
        self._since, self._samples, self._at = 0, 0, time.perf_counter()
        if self._figures is not None:
            self._figures.restart()

    def end_training(self) -> None:
        """Write the figures of the last steps before an evaluation, whose time does not count."""
        if self.listens:
            self._write()

    def epoch(self, info: EpochInfo) -> None:
        """Call `on_epoch`, and write the runtime's totals and histograms; no loop over the tables may be open."""
        with self._same_generators():
            self._call("on_epoch", info)
        if self._figures is not None and self._trackers:
            self._track("write", self._figures.totals(), self._figures.histograms(), info.step)
        self.restart()

    def checkpoint(self, step: int, path: Path, seconds: float) -> None:
        """Call `on_checkpoint`."""
        if self.listens:
            with self._same_generators():
                self._call("on_checkpoint", CheckpointInfo(step=step, path=path, seconds=seconds))

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """Call `on_end`, close the trackers, and print which of them failed. A second call does nothing."""
        if self._has_ended or not self._is_started:
            return
        self._has_ended = True
        before = self.error
        self._call("on_end", EndInfo(status=status, steps=self._step, summary=summary), anyway=True)
        self._track("close")
        for line in self._failed:
            note(line)
        if before is None and self.error is not None and status in ("interrupted", "failed"):
            note(f"warning: {self.error}")  # the run ends for another reason

    def abandon(self, status: str) -> None:
        """Let trackers write what they can within two seconds, in a thread, before the process ends."""
        trackers = list(self._trackers) if self._is_started and not self._has_ended else []
        if trackers:
            run_within(_ABANDON_SECONDS, lambda: _abandon(trackers, status))

    def _call(self, method: str, info: Any, *, anyway: bool = False) -> None:
        """Call a method of all trackers and, if no callback has failed yet or if `anyway`, of all callbacks."""
        failed = self.error
        for name, user in self._users:
            if failed is None or anyway:
                self._call_user(name, user, method, info)
        self._track(method, info)

    def _call_user(self, name: str, user: Any, method: str, info: Any) -> None:
        if user is self._raised:
            return
        try:
            call = getattr(user, method, None)
            if call is not None:
                call(info)
        except Exception as error:
            if self.error is None:
                self._raised = user
                self.error = CallbackError(
                    f"callback {name!r}: {method} raised {type(error).__name__}: {in_words(error)}"
                )
                self.error.__cause__ = error
                self._stop.requested = self._stop.requested or signal.SIGTERM

    @contextmanager
    def _same_generators(self) -> Iterator[None]:
        """Restore the global random number generators at the end of the block."""
        states = [generator.state() for generator in self._generators]
        try:
            yield
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.restore(state)

    def _track(self, method: str, *arguments: Any) -> None:
        """Call a method of all trackers; a tracker that fails is closed and removed."""
        for tracker in list(self._trackers):
            try:
                getattr(tracker, method)(*arguments)
            except Exception as error:
                self._trackers.remove(tracker)
                why = in_words(error)
                if method != "close":
                    self._close(tracker)
                if method in ("on_end", "close"):
                    note(f"warning: --log-to {tracker.name}: the end of the run is not complete there: {why}")
                    continue
                note(f"warning: --log-to {tracker.name} is off from now on: {why}; training continues")
                self._failed.append(f"warning: --log-to {tracker.name}: nothing after step {self._step:,}: {why}")

    @staticmethod
    def _close(tracker: Tracker) -> None:
        try:
            tracker.close()
        except Exception:  # `_track` has reported the tracker's first error
            return


def _abandon(trackers: Iterable[Tracker], status: str) -> None:
    for tracker in trackers:
        with suppress(Exception):  # the other trackers must still write
            tracker.abandon(status)


def make_run_callbacks(settings: TrackingOptions, stop: GracefulStop, *, first: bool) -> RunCallbacks:
    """Return the callbacks and trackers of the options; none unless this is the first rank.

    Raises:
        UserError: A class cannot be used.
    """
    return RunCallbacks(make_callbacks(settings) if first else (), make_trackers(settings) if first else (), stop)
