"""Durations of asynchronous work on the device."""

import threading
from collections import deque
from typing import Any

import torch

from hostdev.core.primitive import HostClock, OpClock, Report
from hostdev.device.backend import is_accelerator


class EventClock:
    """Records begin and end events in the device's stream; reports durations once the device has passed the events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[Any, Any, Report]] = deque()
        self._draining = threading.Lock()  # any thread may report

    def begin(self) -> Any:
        """Record the begin event, and return it for `end`."""
        return self._record_event()

    def end(self, mark: Any, report: Report) -> None:
        """Record the end event; `report` is called later, when the duration is known."""
        self._pending.append((mark, self._record_event(), report))
        if len(self._pending) >= 64:
            self.drain()

    def drain(self, *, wait: bool = False) -> None:
        """Report the durations of finished work, in order; with `wait`, first wait until all work is finished."""
        if wait:
            torch.accelerator.synchronize(self._device)
        with self._draining:
            while self._pending and self._pending[0][1].query():
                begin, end, report = self._pending.popleft()
                report(int(begin.elapsed_time(end) * 1e6))

    def _record_event(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def make_clock(device: torch.device) -> OpClock:
    """Return the clock for ops on this device."""
    return EventClock(device) if is_accelerator(device) else HostClock()
