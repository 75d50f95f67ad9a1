"""Measurement of the bandwidth between host and device."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from hostdev.device.backend import is_accelerator


class Bus(NamedTuple):
    """Bandwidths between host and device, in bytes per second."""

    down: float  # to the device
    up: float  # to the host


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
