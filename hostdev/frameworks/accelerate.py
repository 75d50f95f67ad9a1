"""Hugging Face accelerate's prepared loaders under a loop that reads ahead.

accelerate tells the body of a loop, through its `GradientState`, whether this batch is the last one of the loader
(`Accelerator.accumulate` steps there) and how many samples of it are padding. A prepared loader sets this when it is
read, and a hostdev loop reads several batches before the body sees them. So a prepared loader that is read by a loop
reports to the loop, which notes the state of each batch and shows it to accelerate with that batch.
"""

import functools
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

_MARK = "_seen_by_hostdev"


class _State(NamedTuple):
    """What accelerate tells of a batch."""

    end_of_dataloader: bool
    remainder: int


class _Shown:
    """The dataloader that accelerate sees as the active one: it has the state of the batch in the body."""

    end_of_dataloader = False
    remainder = -1


class _Reports:
    """Stands in for the `GradientState` of a prepared loader while a loop reads it."""

    def __init__(self) -> None:
        self._active: list[Any] = []

    def _add_dataloader(self, loader: Any) -> None:
        self._active.append(loader)

    def _remove_dataloader(self, loader: Any) -> None:
        self._active = [one for one in self._active if one is not loader]

    def state(self) -> _State | None:
        """Return the state of the innermost loader that is being read; None where there is none."""
        if not self._active:
            return None
        return _State(bool(self._active[-1].end_of_dataloader), int(self._active[-1].remainder))


class _Reading(threading.local):
    """Where prepared loaders report to, while a thread reads for a loop."""

    reports: _Reports | None = None


_reading = _Reading()


def is_imported() -> bool:
    """Tell whether the program uses accelerate."""
    return "accelerate.data_loader" in sys.modules


class States:
    """The state of accelerate with each batch that was read and not yet given out.

    Batches are read in one thread at a time, and given out in the same order, in the thread of the loop.
    """

    def __init__(self) -> None:
        self._reports = _Reports()
        self._noted: deque[_State | None] = deque()
        self._shown: _Shown | None = None

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield the batches, and note the state with each; those that were noted before come first."""
        _install()
        known = len(self._noted)  # read for a loop before this one, and kept for it
        while True:
            before, _reading.reports = _reading.reports, self._reports
            try:
                held = [next(batches)]
            except StopIteration:
                return
            finally:
                _reading.reports = before
            if known:
                known -= 1
            else:
                self._noted.append(self._reports.state())
            yield held.pop()  # not kept here: a batch lives no longer than the caller has it

    def show(self) -> None:
        """Show accelerate the state of the batch that is given out now."""
        state = self._noted.popleft()
        if state is None:
            self.hide()
            return
        if self._shown is None:
            self._shown = _Shown()
            _gradient_state()._add_dataloader(self._shown)
        self._shown.end_of_dataloader, self._shown.remainder = state

    def hide(self) -> None:
        """Let accelerate see no loader of this loop: it is over."""
        if self._shown is not None:
            _gradient_state()._remove_dataloader(self._shown)
            self._shown = None


def _gradient_state() -> Any:
    return sys.modules["accelerate.state"].GradientState()


def _install() -> None:
    """Let prepared loaders report to the loop that reads them, once in a process."""
    mixin = sys.modules["accelerate.data_loader"].DataLoaderStateMixin
    if getattr(mixin, _MARK, False):
        return
    setattr(mixin, _MARK, True)
    begin = mixin.begin

    @functools.wraps(begin)
    def begin_reporting(loader: Any) -> None:
        if _reading.reports is not None:
            loader.gradient_state = _reading.reports
        elif isinstance(loader.gradient_state, _Reports):  # a loop read it before
            loader.gradient_state = _gradient_state()
        begin(loader)

    mixin.begin = begin_reporting
