"""Durations of work that the device does after the call has returned."""

from typing import Any

import torch

from hostdev.device.backend import is_accelerator
from hostdev.primitive import Clock, HostClock, Report


class EventClock:
    """Puts events into the device's stream; reports a duration once both have passed, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: list[tuple[Any, Any, Report]] = []

    def begin(self) -> Any:
        """Mark the stream."""
        return self._mark()

    def end(self, mark: Any, report: Report) -> None:
        """Mark the stream again, and report what has finished by now."""
        self._pending.append((mark, self._mark(), report))
        if len(self._pending) >= 64:
            self.drain()

    def drain(self, *, wait: bool = False) -> None:
        """Report the durations of finished work, in order; with `wait`, of all work."""
        if wait:
            torch.accelerator.synchronize(self._device)
        done = 0
        for begin, end, report in self._pending:
            if not end.query():
                break
            report(int(begin.elapsed_time(end) * 1e6))
            done += 1
        del self._pending[:done]

    def _mark(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def clock_for(device: torch.device) -> Clock:
    """Return the clock for ops on this device."""
    return EventClock(device) if is_accelerator(device) else HostClock()
