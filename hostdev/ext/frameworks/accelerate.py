"""Support for data loaders prepared by Hugging Face accelerate, in loops that read ahead.

accelerate's `GradientState` tells a loop's body whether a batch is the loader's last one (`Accelerator.accumulate`
then takes a step), and how many samples of the batch are padding. A prepared loader sets this state whenever a batch is
read, but a hostdev loop reads several batches before the body sees them. So the loop records each batch's state when it
reads the batch, and shows the state to accelerate when the body gets the batch.
"""

import functools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class _State(NamedTuple):
    """accelerate's gradient state for one batch."""

    end_of_dataloader: bool
    remainder: int


class _Shown:
    """The dataloader that a loop shows to accelerate as the active one, with the state of the body's batch."""

    end_of_dataloader = False
    remainder = -1


class _Reports:
    """A substitute for a prepared loader's `GradientState` while a loop reads the loader."""

    def __init__(self) -> None:
        self._active: list[Any] = []

    def _add_dataloader(self, loader: Any) -> None:
        if _reading.reports is None:  # the hostdev loop is over; the program itself reads the loader
            loader.gradient_state = _gradient_state()
            loader.gradient_state._add_dataloader(loader)
            return
        self._active.append(loader)

    def _remove_dataloader(self, loader: Any) -> None:
        self._active = [one for one in self._active if one is not loader]

    def state(self) -> _State | None:
        """Return the state of the innermost loader that is being read, or None if no loader is being read."""
        if not self._active:
            return None
        return _State(bool(self._active[-1].end_of_dataloader), int(self._active[-1].remainder))


class _Reading(threading.local):
    """The current thread's recorder of prepared loaders' states; None unless it reads batches for a hostdev loop."""

    reports: _Reports | None = None


_reading = _Reading()
_lock = threading.Lock()
_readers: list[_Reports] = []  # one recorder for each thread that is reading a batch
_original: Callable[[Any], None]  # accelerate's own `begin`, while a replacement is installed


class States:
    """The states of accelerate's loaders; implements `runtime.reading.LoaderStates`.

    One thread at a time reads batches; the loop's thread yields them in the same order.
    """

    def __init__(self) -> None:
        self._reports = _Reports()
        self._noted: deque[_State | None] = deque()
        self._shown: _Shown | None = None

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches; record each batch's state, unless an earlier loop over the loader has done so."""
        known = len(self._noted)  # left over from an earlier loop
        while True:
            try:
                with _reporting_to(self._reports):
                    held = [next(batches)]
            except StopIteration:
                return
            if known:
                known -= 1
            else:
                self._noted.append(self._reports.state())
            yield held.pop()  # keep no reference: only the caller may hold the batch

    def show(self) -> None:
        """Show accelerate the state of the batch that is about to be yielded."""
        state = self._noted.popleft()
        if state is None:
            self.hide()
            return
        if self._shown is None:
            self._shown = _Shown()
            _gradient_state()._add_dataloader(self._shown)
        self._shown.end_of_dataloader, self._shown.remainder = state

    def hide(self) -> None:
        """Hide this loop's loader from accelerate at the loop's end."""
        if self._shown is not None:
            _gradient_state()._remove_dataloader(self._shown)
            self._shown = None


def _gradient_state() -> Any:
    return sys.modules["accelerate.state"].GradientState()


@contextmanager
def _reporting_to(reports: _Reports) -> Iterator[None]:
    """In a `with` block, send the state of each prepared loader that this thread begins to read to `reports`."""
    global _original
    mixin = sys.modules["accelerate.data_loader"].DataLoaderStateMixin
    with _lock:
        if not _readers:
            _original = mixin.begin
            mixin.begin = _replace(_original)
        _readers.append(reports)
    before, _reading.reports = _reading.reports, reports
    try:
        yield
    finally:
        _reading.reports = before
        with _lock:
            _readers.remove(reports)
            if not _readers:
                mixin.begin = _original


def _replace(begin: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(begin)
    def begin_reporting(loader: Any) -> None:
        if _reading.reports is not None:
            loader.gradient_state = _reading.reports
        begin(loader)

    return begin_reporting
