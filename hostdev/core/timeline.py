"""Busy and stalled time of each stage of a run, and a trace of the stages' work in Chrome's format, for Perfetto."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import torch
from torch.profiler import record_function

from hostdev.core.errors import naming

HOST_STAGES = ("read", "unique", "plan", "lookup", "lookup forwarded", "send", "update first", "lookup late", "update")
STAGES = (*HOST_STAGES[:6], "step", *HOST_STAGES[6:])
EXCHANGES = ("exchange ids", "exchange rows", "exchange late rows", "exchange gradients")  # only with other ranks
STEP_PARTS = ("forward", "backward", "optimizer")  # within the step; on an accelerator, the time to queue their work
PHASES = ("epoch", "evaluation", "checkpoint")  # around all stages, or between them
_ON_HOST, _IN_TRACE_ONLY = frozenset(HOST_STAGES), frozenset((*STEP_PARTS, *PHASES))
_AFTER_STEP = 1 + STAGES.index("step")
TRACKS = (*PHASES, *STAGES[:_AFTER_STEP], *STEP_PARTS, *STAGES[_AFTER_STEP:], *EXCHANGES)
_NUMBERS = {stage: number for number, stage in enumerate(TRACKS, 1)}
_NAMES = {"optimizer": "dense update"}  # shown instead, to tell it from the tracks of row updates


class Timeline:
    """A collector of the time spans in which a run's stages work; any thread may add spans."""

    def __init__(self) -> None:
        self.busy_ns = dict.fromkeys(STAGES, 0)
        self.stall_ns = dict.fromkeys(STAGES, 0)
        self.host_busy_ns = 0  # time during which at least one host stage works
        self.device_busy_ns = 0
        self.wall_ns = 0
        self._lock = threading.Lock()
        self._at_work = 0
        self._since = 0
        self._file: IO[str] | None = None
        self._pid = 1
        self._zero = time.perf_counter_ns()

    def write_to(self, file: IO[str], *, rank: int | None = None) -> None:
        """Write a trace to a text file from now on; `close` completes it. `rank` is None for a single process."""
        self._pid, name = (1, "hostdev") if rank is None else (1 + rank, f"hostdev rank {rank}")
        events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": self._pid, "args": {"name": name}}]
        for stage, track in _NUMBERS.items():
            if rank is None and stage in EXCHANGES:
                continue
            where = {"pid": self._pid, "tid": track}
            events.append({"name": "thread_name", "ph": "M", **where, "args": {"name": _NAMES.get(stage, stage)}})
            events.append({"name": "thread_sort_index", "ph": "M", **where, "args": {"sort_index": track}})
        with naming(file.name):
            file.write("[\n" + ",\n".join(map(json.dumps, events)))
        self._file = file

    @contextmanager
    def run(self) -> Iterator[None]:
        """Add the block's duration to the wall time."""
        start = time.perf_counter_ns()
        try:
            yield
        finally:
            self.wall_ns += time.perf_counter_ns() - start

    def span(self, stage: str, batch: int, *, flow: str = "t", **args: int) -> "Span":
        """Return a context that times a stage's work on a batch.

        It yields the dict of the trace event's arguments, to which more may be added. Parts of a step and phases of an
        epoch appear in the trace only.

        Args:
            stage: One of STAGES, EXCHANGES, STEP_PARTS or PHASES.
            batch: The batch's number, from 1; for a phase, the number of the epoch or, for a checkpoint, the step.
            flow: "s" for a batch's first span, "f" for its last, "t" in between.
        """
        return Span(self, stage, batch, flow, args)

    def stall(self, stage: str) -> "Stall":
        """Return a context that times how long a stage waits for other stages."""
        return Stall(self.stall_ns, stage)

    def summary(self) -> dict[str, Any]:
        """Return all times in microseconds, and the overlap efficiency.

        The overlap efficiency is the busy time of the host or of the device, whichever is longer, divided by the wall
        time. It is None if the wall time is 0.
        """
        most = max(self.host_busy_ns, self.device_busy_ns)
        return {
            "stall_us": {stage: ns // 1000 for stage, ns in self.stall_ns.items()},
            "busy_us": {stage: ns // 1000 for stage, ns in self.busy_ns.items()},
            "host_busy_us": self.host_busy_ns // 1000,
            "device_busy_us": self.device_busy_ns // 1000,
            "wall_us": self.wall_ns // 1000,
            "overlap_efficiency": round(min(1.0, most / self.wall_ns), 4) if self.wall_ns else None,
        }

    def close(self) -> None:
        """Complete the trace, if there is one, and close its file."""
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            with naming(file.name), file:
                file.write("\n]\n")

    def count_work(self, now: int, by: int) -> None:
        """Add `by` to the number of host stages at work; count the time since the last call as busy if any was."""
        with self._lock:
            if self._at_work:
                self.host_busy_ns += now - self._since
            self._since = now
            self._at_work += by

    def add(self, stage: str, batch: int, flow: str, start: int, end: int, args: dict[str, int]) -> None:
        """Record that a stage was at work on a batch."""
        if stage not in _IN_TRACE_ONLY:
            if stage in EXCHANGES:
                self.busy_ns.setdefault(stage, 0)
            self.busy_ns[stage] += end - start  # a stage's spans do not overlap
        if self._file is not None:
            self._write(stage, batch, flow, start, end, args)

    def _write(self, stage: str, batch: int, flow: str, start: int, end: int, args: dict[str, int]) -> None:
        where = {"pid": self._pid, "tid": _NUMBERS[stage]}
        at, length = (start - self._zero) / 1e3, (end - start) / 1e3
        number = {{"checkpoint": "step"}.get(stage, "epoch" if stage in PHASES else "batch"): batch}
        events: list[dict[str, Any]] = [
            {
                "name": _NAMES.get(stage, stage),
                "cat": "stage",
                "ph": "X",
                "ts": at,
                "dur": length,
                **where,
                "args": {**number, **args},
            }
        ]
        if stage in STAGES:
            arrow = {"name": "batch", "cat": "batch", "ph": flow, "id": batch, "ts": at, "bp": "e", **where}
            events.append(arrow)
        with self._lock:
            if self._file is None:
                return
            with naming(self._file.name):
                self._file.write(",\n" + ",\n".join(map(json.dumps, events)))


class Stall:
    """A context that adds its duration to a stage's stalled time."""

    __slots__ = ("_stage", "_stall_ns", "_start")

    def __init__(self, stall_ns: dict[str, int], stage: str) -> None:
        self._stall_ns, self._stage = stall_ns, stage

    def __enter__(self) -> None:
        self._start = time.perf_counter_ns()

    def __exit__(self, *error: Any) -> None:
        self._stall_ns[self._stage] += time.perf_counter_ns() - self._start


class Span:
    """A context that times a stage's work on a batch; as a class, it is three times as fast as a generator."""

    __slots__ = ("_args", "_batch", "_flow", "_range", "_stage", "_start", "_timeline")

    def __init__(self, timeline: Timeline, stage: str, batch: int, flow: str, args: dict[str, int]) -> None:
        self._timeline, self._stage, self._batch, self._flow, self._args = timeline, stage, batch, flow, args

    def __enter__(self) -> dict[str, int]:
        self._start = now = time.perf_counter_ns()
        if self._stage in _ON_HOST:
            self._timeline.count_work(now, 1)
        # If torch.profiler is off, a profiler range would still cost up to 0.1 ms with cold caches.
        is_profiling = getattr(torch.autograd.profiler, "_is_profiler_enabled", True)
        self._range = _profiler_range(self._stage) if is_profiling else None
        if self._range is not None:
            self._range.__enter__()
        return self._args

    def __exit__(self, *error: Any) -> None:
        if self._range is not None:
            self._range.__exit__(*error)
        now = time.perf_counter_ns()
        if self._stage in _ON_HOST:
            self._timeline.count_work(now, -1)
        self._timeline.add(self._stage, self._batch, self._flow, self._start, now, self._args)


_profiler_range: Any = record_function  # torch's function has no types
