"""Durations of asynchronous work on the device, and the bandwidth between host and device."""

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hostdev.core.primitive import Report
from hostdev.device.backend import is_accelerator


class EventClock:
    """Records begin and end events in the device's stream; reports durations once the device has passed the events."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pending: deque[tuple[Any, Any, Report]] = deque()
        self._draining = threading.Lock()  # several threads may call `drain`

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


def make_clock(device: torch.device) -> EventClock | None:
    """Return the clock for ops on this device; None if their calls return when their work is done."""
    return EventClock(device) if is_accelerator(device) else None


class Bus(NamedTuple):
    """Bandwidths between host and device, in bytes per second."""

    down: float  # from the host to the device
    up: float  # from the device to the host


def measure(device: torch.device, nbytes: int = 1 << 26, rounds: int = 5) -> Bus:
    """Measure the median bandwidths of copies of `nbytes` between pinned memory and the device.

    On the CPU, measure copies within host memory.
    """
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=is_accelerator(device))
    there = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    down = _measure_seconds(lambda: there.copy_(host, non_blocking=True), device, rounds)
    up = _measure_seconds(lambda: host.copy_(there, non_blocking=True), device, rounds)
    return Bus(nbytes / down, nbytes / up)


def _measure_seconds(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Return the median seconds that the device takes for the work of a call."""
    module: Any = torch.get_device_module(device) if is_accelerator(device) else None
    times = []
    for _ in range(rounds + 2):
        if module is None:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
            continue
        begin, end = (module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return max(statistics.median(times[2:]), 1e-9)
