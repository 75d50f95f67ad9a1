"""Claim: the cost of handing a call to the threads does not grow with their number.

The benchmark calls an empty kernel over four ranges per thread, so that only the hand-over is measured: in native code,
as for kernels, and through Python, as for other tasks, one range at a time while holding the GIL. A result for more
threads than cores does not apply to a machine with that many cores: there, the threads wake during the call; here, most
of them find it finished.
"""

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import hostdev
from bench.record import make_parser, record
from hostdev.kernels.jit import kernel
from hostdev.kernels.pool import KernelTask, Task, ranges, run_tasks, set_host_threads

THREADS = (1, 2, 4, 16, 64, 128)
PER_THREAD = 4
LIMIT = 3.0  # the time with the most threads over the time with two


@kernel
def nothing(start: Any, stop: Any, out: Any) -> None:
    out[start] = stop


def through_python(start: int, stop: int, out: Any) -> None:
    nothing(start, stop, out)


def microseconds(call: Callable[[], object]) -> float:
    """Return the microseconds of a call."""
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


def measure(threads: int, rounds: int) -> dict[str, Any]:
    """Return the times through native code and through Python, measured in turn."""
    set_host_threads(threads)
    n = threads * PER_THREAD
    out = np.zeros(n, np.int64)
    pieces = ranges(n)
    ways: dict[str, list[Task]] = {
        "native": [KernelTask(nothing, n, 1, len(pieces), (out,))],
        "python": [(through_python, start, stop, (out,)) for start, stop in pieces],
    }
    times: dict[str, list[float]] = {way: [] for way in ways}
    for tasks in ways.values():
        run_tasks(tasks)
    for _ in range(rounds):
        for way, tasks in ways.items():
            times[way].append(microseconds(lambda tasks=tasks: run_tasks(tasks)))  # type: ignore[misc]
    found: dict[str, Any] = {"threads": threads, "ranges": len(pieces)}
    for way, some in times.items():
        found[way] = {"median_us": round(statistics.median(some), 1), "p90_us": round(np.percentile(some, 90), 1)}
    return found


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=1000)
    arguments = parser.parse_args()
    rounds = arguments.rounds
    results = []
    print(f"{len(os.sched_getaffinity(0))} cores; median and 90th percentile of {rounds} calls, us")
    print(f"{'threads':>7}{'ranges':>8}{'native code':>18}{'through Python':>18}")
    for threads in THREADS:
        found = measure(threads, rounds)
        results.append(found)
        native, python = (f"{found[way]['median_us']:,.0f} {found[way]['p90_us']:,.0f}" for way in ("native", "python"))
        print(f"{threads:>7}{found['ranges']:>8}{native:>18}{python:>18}")
    at = {found["threads"]: found["native"]["median_us"] for found in results}
    print(f"{THREADS[-1]} threads take {at[THREADS[-1]] / at[2]:.2f} times what two take (at most {LIMIT})")
    record("pool", {"version": hostdev.__version__, "rounds": rounds, "calls": results}, arguments.out)
