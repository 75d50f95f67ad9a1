"""Timed ops with a name and a target; their times go to ops.log and the summary's table of ops.

Memory for the times is bounded: up to 65,536 calls of an op are kept exactly, earlier ones in a histogram.
"""

import contextlib
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import IO, Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from hostdev.core.run_files import RotatedFile
from hostdev.core.workers import Worker
from hostdev.kernels.pool import Task, timed

EXACT = 1 << 16  # number of durations that are kept exactly, 8 bytes each
_BITS = 7  # log2 of the number of buckets per power of two
_BUCKETS = (63 - _BITS + 1) << _BITS
TARGETS = ("CPU", "DEVICE")
Report = Callable[[int], None]
_MOST_WAITING = 1 << 16  # maximum number of lines queued for the writer thread
_EVERY_SECONDS = 1.0


class Durations:
    """Durations of calls in nanoseconds: up to 65,536 are kept exactly, older ones in a histogram of 57 KiB.

    Count and sum are exact. Percentiles are exact for up to 65,536 calls, and within 0.4% for more. Not thread-safe.
    """

    def __init__(self) -> None:
        self.latest = array("q")  # nanoseconds, not yet in the histogram
        self._earlier: npt.NDArray[np.int64] | None = None
        self._count = self._total = 0  # number and sum of the durations in the histogram

    def add(self, nanoseconds: int) -> None:
        """Add a call's duration."""
        if len(self.latest) == EXACT:
            values = np.array(self.latest, np.int64)
            self._earlier = _histogram(values) if self._earlier is None else self._earlier + _histogram(values)
            self._count, self._total = self._count + len(values), self._total + int(values.sum())
            self.latest = array("q")
        self.latest.append(nanoseconds)

    def copy(self) -> "Durations":
        """Return an independent copy."""
        made = Durations()
        made.latest = self.latest[:]
        made._earlier, made._count, made._total = self._earlier, self._count, self._total
        return made

    def __len__(self) -> int:
        return self._count + len(self.latest)


def statistics(each: Sequence[Durations]) -> dict[str, Any]:
    """Return the count, total, mean, median and 99th percentile of all durations, in microseconds."""
    latest = [np.array(one.latest, np.int64) for one in each]
    earlier = [one._earlier for one in each if one._earlier is not None]
    us = np.concatenate(latest) / 1e3
    count, total = sum(map(len, each)), float(us.sum()) + sum(one._total for one in each) / 1e3
    if earlier:
        p50, p99 = _percentiles(np.sum([*earlier, *map(_histogram, latest)], axis=0), [50, 99])
    else:
        p50, p99 = np.percentile(us, [50, 99]).tolist()
    return {
        "count": count,
        "total_us": round(total, 1),
        "mean_us": round(total / count, 1),
        "p50_us": round(p50, 1),
        "p99_us": round(p99, 1),
    }


def _histogram(nanoseconds: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Count values by their highest eight bits; each value below 256 has its own bucket."""
    values = np.maximum(nanoseconds, 0)
    shift = np.maximum(np.frexp(values.astype(np.float64))[1] - (_BITS + 1), 0)
    buckets = (shift << _BITS) + (values >> shift)
    return np.bincount(np.minimum(buckets, _BUCKETS - 1), minlength=_BUCKETS)


def _percentiles(histogram: npt.NDArray[np.int64], of: list[int]) -> list[float]:
    """Return the percentiles `of` in microseconds, as np.percentile does, with the buckets' midpoints as values."""
    until = np.cumsum(histogram)
    found = []
    for each in of:
        rank = (int(until[-1]) - 1) * each / 100
        low, high = (_middle(int(np.searchsorted(until, at, "right"))) for at in (int(rank), -int(-rank // 1)))
        found.append((low + (high - low) * (rank % 1)) / 1e3)
    return found


def _middle(bucket: int) -> float:
    shift = max(0, (bucket >> _BITS) - 1)
    return float((bucket - (shift << _BITS)) << shift) + ((1 << shift) - 1) / 2


class OpClock(Protocol):
    """A clock for ops whose calls may return before their work is done; `begin` and `end` are called around a call."""

    def begin(self) -> Any:
        """Return a mark for `end`, such as the current time."""

    def end(self, mark: Any, report: Report) -> None:
        """Pass the nanoseconds since the mark to `report`, now or later."""


class OpTimes:
    """The durations of one op's calls, and the bytes that it moved."""

    def __init__(self, log: "OpLog", line: str, scope: str, name: str) -> None:
        self._log = log
        self._line = line
        self.scope = scope
        self.name = name
        self.bytes = 0
        self.total = 0  # nanoseconds
        self._durations = Durations()
        self._adding = threading.Lock()

    def add(self, nanoseconds: int, nbytes: int) -> None:
        """Add one call's duration, and the bytes that it moved."""
        with self._adding:
            self._durations.add(nanoseconds)
            self.total += nanoseconds
            self.bytes += nbytes
        if self._log.is_writing:
            self._log.append(self._line, nanoseconds)

    def durations(self) -> Durations:
        """Return the durations so far."""
        with self._adding:
            return self._durations.copy()


class OpLog:
    """A collector of the durations of all ops, with a thread that writes ops.log.

    Lines are written once a second, so that the file can be followed. No line is dropped: if a slow disk leaves 65,536
    lines queued, ops wait.

    Args:
        clocks: The clocks of targets whose calls may return before their work is done.

    Attributes:
        is_writing: Whether lines are written to a file.
    """

    def __init__(self, clocks: Mapping[str, OpClock | None] | None = None) -> None:
        self.is_writing = False
        self._file: IO[str] | RotatedFile | None = None
        self._clocks = clocks or {}
        self._ops: list[OpTimes] = []
        self._buffer: deque[tuple[float, str, int]] = deque()
        self._registering = threading.Lock()
        self._writing = threading.Lock()
        self._writer = Worker("hostdev-ops-log", self._write, seconds=_EVERY_SECONDS)
        self._failed: Exception | None = None

    def write_to(self, file: IO[str] | RotatedFile) -> None:
        """Write a line per call to `file` from now on, until `close`."""
        self._file, self.is_writing, self._failed = file, True, None
        self._writer.start()

    def clock(self, target: str) -> OpClock | None:
        """Return the clock for ops of this target; None if their calls return when their work is done."""
        return self._clocks.get(target)

    def register(self, target: str, scope: str, name: str) -> OpTimes:
        """Add an op, and return the object that collects its durations; ops.log numbers the ops from 1."""
        where = "cpu" if target == "CPU" else "device"
        full = "/".join(part for part in ("Default", scope, name) if part)
        with self._registering:
            op = OpTimes(self, f"{where} kernel: {full}-op{len(self._ops) + 1} costs", scope, name)
            self._ops.append(op)
        return op

    def append(self, line: str, nanoseconds: int) -> None:
        """Queue a line for the writer thread; wait while the queue is full."""
        self._buffer.append((time.time(), line, nanoseconds))
        if len(self._buffer) >= _MOST_WAITING:
            self._writer.ask()
            self._writer.wait_for(lambda: len(self._buffer) < _MOST_WAITING or not self.is_writing)

    def _write(self) -> None:
        with contextlib.suppress(Exception):  # `flush` stores the error for `check`
            self.flush()

    def check(self) -> None:
        """Raise the error, such as an OSError, that stopped writing, if any."""
        if self._failed is not None:
            raise self._failed

    def flush(self) -> None:
        """Write the queued lines in the caller's thread; raise the error of this or an earlier write."""
        with self._writing:
            self.check()
            if self._file is None:
                return
            lines, second, stamp = [], None, ""
            for _ in range(len(self._buffer)):  # other threads may be appending
                at, line, ns = self._buffer.popleft()
                if second != int(at):
                    second, stamp = int(at), time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
                lines.append(f"{stamp}.{int(at % 1 * 1e3):03d} INFO {line} {ns // 1000} us.\n")
            try:
                self._file.writelines(lines)
                self._file.flush()
            except Exception as error:
                self._failed, self.is_writing = error, False
                raise
            finally:
                with self._writer.changed:
                    self._writer.changed.notify_all()

    def close(self) -> None:
        """Write the remaining lines and stop writing, but still collect durations; raise errors as `flush` does."""
        try:
            self.flush()
        finally:
            with self._writing:
                self._file, self.is_writing = None, False
            self._writer.stop()

    def totals(self) -> dict[str, int]:
        """Return the total duration of each op name in nanoseconds."""
        found: dict[str, int] = {}
        for op in list(self._ops):
            found[op.name] = found.get(op.name, 0) + op.total
        return found

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return the bytes and duration statistics (in microseconds) of each op name, and of its scopes if several."""
        by_name: dict[str, dict[str, list[OpTimes]]] = {}
        for op in self._ops:
            if len(op.durations()):
                by_name.setdefault(op.name, {}).setdefault(op.scope, []).append(op)
        result = {}
        for name, scopes in by_name.items():
            result[name] = _statistics([op for ops in scopes.values() for op in ops])
            if len(scopes) > 1:
                result[name]["by_scope"] = {scope: _statistics(ops) for scope, ops in scopes.items()}
        return result


def _statistics(ops: list[OpTimes]) -> dict[str, Any]:
    return {**statistics([op.durations() for op in ops]), "bytes": sum(op.bytes for op in ops)}


class Primitive:
    """An op with a name, attributes and timing; pass `run`, or define it in a subclass.

    The attribute "primitive_target" is "CPU" (the host) or "DEVICE", the default.

    Args:
        name: The op's name, such as "EmbeddingLookup".
        run: The implementation.
        nbytes: Called with the op's arguments; returns the bytes that the op reads and writes. By default, the class's
            method `nbytes` is called.
        scope: The part of the model that the op belongs to, such as "deep".
        log: Collects the durations; the default is a new log.
    """

    name: ClassVar[str] = "Primitive"

    def __init__(
        self,
        name: str | None = None,
        run: Callable[..., Any] | None = None,  # Any: each op has its own arguments
        *,
        nbytes: Callable[..., int] | None = None,
        scope: str = "",
        log: OpLog | None = None,
    ) -> None:
        self.attrs: dict[str, Any] = {"primitive_target": "DEVICE"}
        self._name = name or type(self).name
        self._scope = scope
        self._log = log or OpLog()
        self._times: OpTimes | None = None
        self._clock: OpClock | None = None
        self._registering = threading.Lock()
        if run is not None:
            self.run = run  # type: ignore[method-assign]
        if nbytes is not None:
            self.nbytes = nbytes  # type: ignore[method-assign]

    def add_prim_attr(self, key: str, value: object) -> "Primitive":
        """Set an attribute and return self; raise ValueError for an invalid "primitive_target"."""
        if key == "primitive_target" and value not in TARGETS:
            raise ValueError(f"primitive_target must be one of {TARGETS}, not {value!r}")
        self.attrs[key] = value
        self._times = None  # registered again under the new target
        return self

    @property
    def primitive_target(self) -> str:
        """Where the op runs: "CPU" or "DEVICE"."""
        return str(self.attrs["primitive_target"])

    @property
    def times(self) -> OpTimes:
        """The durations of the op's calls."""
        with self._registering:
            if self._times is None:
                self._clock = self._log.clock(self.primitive_target)
                self._times = self._log.register(self.primitive_target, self._scope, self._name)
            return self._times

    # Any, below: each op has its own arguments and results.

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Do the work of one call."""
        raise NotImplementedError(f"{self._name} has no implementation")

    def tasks(self, *args: Any) -> list[Task]:
        """Return the tasks that do the work of one call, if the op can be split."""
        raise NotImplementedError(f"{self._name} cannot be split into tasks")

    def nbytes(self, *args: Any, **kwargs: Any) -> int:
        """Return the bytes that a call with these arguments reads and writes; 0 if they are not counted."""
        return 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run and time the op."""
        times = self._times or self.times
        clock = self._clock
        mark = time.perf_counter_ns() if clock is None else clock.begin()
        result = self.run(*args, **kwargs)
        if clock is None:
            times.add(time.perf_counter_ns() - mark, self.nbytes(*args, **kwargs))
        else:
            clock.end(mark, partial(times.add, nbytes=self.nbytes(*args, **kwargs)))
        return result


class PartialCall:
    """One call of an op on the host that runs in parts, possibly in different threads, and is timed as one call."""

    def __init__(self, op: Primitive) -> None:
        self._op = op
        self._parts: list[int] = []  # nanoseconds of each part
        self._spans: list[list[tuple[int, int]]] = []  # per part, the start and end of each task
        self._nbytes = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a part."""
        start = time.perf_counter_ns()
        result = self._op.run(*args, **kwargs)
        self._parts.append(time.perf_counter_ns() - start)
        self._nbytes += self._op.nbytes(*args, **kwargs)
        return result

    def tasks(self, *args: Any) -> list[Task]:
        """Return a part's tasks for `kernels.pool.run_tasks`.

        The part's time is measured from the start of its first task to the end of its last task.
        """
        span: list[tuple[int, int]] = []
        self._spans.append(span)
        self._nbytes += self._op.nbytes(*args)
        return timed(self._op.tasks(*args), span)

    def end(self) -> None:
        """Report the time and the bytes of all parts."""
        nanoseconds = sum(self._parts)
        for span in self._spans:
            if len(span) == 1:
                begin, end = span[0]
                nanoseconds += end - begin
            elif span:
                begins, ends = zip(*span, strict=True)
                nanoseconds += max(ends) - min(begins)
        times = self._op._times or self._op.times
        times.add(nanoseconds, self._nbytes)
