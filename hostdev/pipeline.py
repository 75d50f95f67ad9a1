"""Batches through reading, unique, lookup, step and update: one after the other, or neighbours at once; the same bits.

The in-flight rule. A batch sees a row only after every earlier batch's update of it. When a batch is planned, the rows
that an unfinished batch will update are found: rows of the batch right before it are updated first when that one's
gradients arrive, and delivered late; rows of an older one are delivered after that one's update; all others are fetched
at once. Only the update stage writes the tables, in the order of the batches, so no row is locked.

Threads: a reader, a fetcher (unique, plan, lookup), the caller's (the model's step) and an updater. What they share is
under one condition; a batch carries its state, and an exception goes where its batch would have gone.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hostdev.batch import Batch
from hostdev.device.staging import Staging
from hostdev.embedding import BatchRows, Embedding, Part, Positions
from hostdev.kernels.claims import MOST_UNFINISHED, Late, claim, intersect, others
from hostdev.kernels.pool import urgent
from hostdev.timeline import Timeline

_LATEST_ERROR = 0.5  # seconds after which an exception is raised though earlier batches have not been stepped
_LONGEST_JOIN = 0.8  # seconds; a reader may be inside somebody's code
_MANY_LATE = 4  # of so many rows one; then those that come late are not looked up before
_MOST_DEPTH = MOST_UNFINISHED - 2
Hook = Callable[[str, int], None]


class Prepared(Protocol):
    """A batch as the model wants it."""

    @property
    def ids(self) -> Any:
        """Unique ids [U] where the tables are: numpy on the host, a tensor on the device."""


class Model(Protocol):
    """What a pipeline runs."""

    reads_whole_tables: bool  # in `step`, which must wait until every earlier batch has been updated

    def prepare(self, batch: Batch) -> Prepared:
        """Deduplicate the ids and send what the step needs to the device; runs in the fetcher's thread."""

    def await_prepared(self, prepared: Any) -> None:
        """Let the device wait for what `prepare` has sent."""

    def step(self, prepared: Any, rows: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return a result and, unless it only predicts, the gradient float32 [U, D] of each table's rows."""


class Result(NamedTuple):
    """A batch's step."""

    batch: Batch
    value: Any


class _Flight:
    """A batch on its way."""

    def __init__(self, number: int, batch: Batch) -> None:
        self.number = number
        self.batch = batch
        self.prepared: Any = None
        self.rows: list[BatchRows] = []
        self.missing = 0  # groups of rows that have not been fetched, late ones and the others
        self.shared_before: Positions | None = None  # the rows that it shares with the batch before, in that one
        self.shared: tuple[Part, _Flight, Part] | None = None  # what the next one waits for, here and there
        self.after: list[tuple[_Flight, Part]] = []  # what later batches wait for
        self.closed = False  # its update has begun: too late to ask for rows to be updated first
        self.held = True  # by the caller, to whom its result goes, or by the updater
        self.grads: list[Tensor] = []
        self.received: Any = None
        self.clocks: tuple[Any, Any] = (None, None)


def _part(ids: npt.NDArray[Any], positions: Positions) -> Part:
    return Part(ids[positions], positions)


class _End(NamedTuple):
    """Goes where the next batch would go."""

    error: BaseException | None


class _Stopped(Exception):  # noqa: N818  (not an error: a thread is asked to end)
    """Raised in a thread that waits, when the run is over."""


class _Line:
    """What the threads of one run share."""

    def __init__(self, depth: int, *, update: bool) -> None:
        self.update = update
        self.changed = threading.Condition()
        self.read: deque[_Flight | _End] = deque()
        self.fetched: deque[_Flight | _End] = deque()
        self.stepped: deque[_Flight | _End] = deque()
        self.flights: dict[int, _Flight] = {}  # batches alive
        self.most = depth + 2
        self.yielded = 0  # the batch whose result the caller has
        self.stopping = False
        self.error: BaseException | None = None  # the first exception of the stages before the step
        self.failed_at = 0.0  # its time
        self.update_error: BaseException | None = None

    def put(self, queue: "deque[_Flight | _End]", item: _Flight | _End) -> None:
        with self.changed:
            queue.append(item)
            if isinstance(item, _End) and item.error is not None and self.error is None:
                self.error, self.failed_at = item.error, time.monotonic()
            self.changed.notify_all()

    def take(self, queue: "deque[_Flight | _End]") -> _Flight | _End:
        self.wait(lambda: queue)
        return queue.popleft()

    def wait(self, ready: Callable[[], Any]) -> None:
        """Wait until `ready`; _Stopped if the run ends before."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or self.stopping)
            if not ready():
                raise _Stopped


class Pipeline:
    """Runs a model over batches.

    model         what to run
    embeddings    its tables, which share ids; all on the host or all on the device
    staging       the way to the device and back
    depth         how far reading and fetching run ahead: at most depth + 2 batches are alive, those being fetched, the
                  one in the step, and those being updated. 0: the stages run one after the other in the caller's
                  thread, which is the reference
    staleness     **not exact**: a lookup may miss the updates of up to so many batches before it
    timeline      where durations go
    before_stage  called with a stage's name and a batch's number before its work, in its thread: for tests
    after_update  called with a batch's number and what `prepare` returned when its rows have been updated and no later
                  batch has changed them
    """

    def __init__(
        self,
        model: Model,
        embeddings: Sequence[Embedding],
        staging: Staging,
        *,
        depth: int,
        staleness: int = 0,
        timeline: Timeline | None = None,
        before_stage: Hook | None = None,
        after_update: Callable[[int, Any], None] | None = None,
    ) -> None:
        if not 0 <= depth <= _MOST_DEPTH:
            raise ValueError(f"the depth must be in 0..{_MOST_DEPTH}, not {depth}")
        self.depth = depth
        self.timeline = timeline or Timeline()
        self._model = model
        self._embeddings = embeddings
        self._staging = staging
        self._staleness = staleness
        self._before_stage = before_stage or (lambda stage, number: None)
        self._after_update = after_update or (lambda number, prepared: None)
        self._on_host = embeddings[0].target == "CPU"
        self._claims = np.zeros(embeddings[0].table.rows if self._on_host and depth else 0, np.uint8)
        self._number = 0  # of the last batch
        self._updated = 0  # the last batch whose update is finished

    def train(self, batches: Iterable[Batch]) -> Generator[Result, None, None]:
        """Step over batches, yield each one's result, and update the tables, all of it before the iterator ends.

        Closing the iterator finishes what has been stepped. Raises what a stage raised; what came before is finished.
        """
        return self._run(batches, self._model.step, update=True)

    def predict(
        self, batches: Iterable[Batch], step: Callable[[Any, list[Tensor]], Any]
    ) -> Generator[Result, None, None]:
        """Yield the results of another step of the model, which updates nothing."""
        return self._run(batches, lambda prepared, rows: (step(prepared, rows), []), update=False)

    def _run(
        self, batches: Iterable[Batch], step: Callable[[Any, list[Tensor]], tuple[Any, list[Tensor]]], *, update: bool
    ) -> Generator[Result, None, None]:
        with self.timeline.run():
            self._updated = self._number  # an earlier run may have ended in the middle
            if self.depth:
                yield from self._run_overlapped(batches, step, update)
            else:
                yield from self._run_serially(batches, step, update)

    def _run_serially(self, batches: Iterable[Batch], step: Any, update: bool) -> Iterator[Result]:
        source = iter(batches)
        while (flight := self._read(source)) is not None:
            self._fetch(flight, None)
            value = self._step(flight, step, update)
            if update:
                self._update(flight, None)
            yield Result(flight.batch, value)

    def _run_overlapped(self, batches: Iterable[Batch], step: Any, update: bool) -> Iterator[Result]:
        line = _Line(self.depth, update=update)
        threads = [
            threading.Thread(target=self._serve, args=(line, stage, *arguments), name=f"hostdev-{name}", daemon=True)
            for name, stage, *arguments in (
                ("reader", self._reader, line.read, iter(batches)),
                ("fetcher", self._fetcher, line.fetched),
                ("updater", self._updater, None),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            yield from iter(partial(self._step_next, line, step, update), None)  # a loop's variable would keep a batch
            line.put(line.stepped, _End(None))
            with self.timeline.stall("step"):
                threads[-1].join()
            if line.update_error is not None:
                raise line.update_error
            if line.error is not None:
                raise line.error
        finally:
            line.put(line.stepped, _End(None))  # what has been stepped is updated
            with line.changed:
                line.stopping = True
                line.changed.notify_all()
            threads[-1].join()
            for thread in threads[:-1]:
                thread.join(_LONGEST_JOIN)

    def _step_next(self, line: _Line, step: Any, update: bool) -> Result | None:
        """Wait for a batch and all its rows, and step; None after the last one."""
        if line.yielded:  # the caller has come back, and is done with it
            self._let_go(line, line.flights[line.yielded])
        with self.timeline.stall("step"):
            line.wait(lambda: line.fetched or line.update_error)
            item = line.fetched.popleft() if line.update_error is None else _End(None)
            if isinstance(item, _Flight):
                line.wait(partial(self._may_step, line, item))
        if line.update_error is not None:
            raise line.update_error
        if isinstance(item, _End):
            return None
        if line.error is not None and time.monotonic() - line.failed_at > _LATEST_ERROR:
            raise line.error
        result = Result(item.batch, self._step(item, step, update))
        line.yielded = item.number
        if update:
            line.put(line.stepped, item)
        else:
            self._let_go(line, item)
        return result

    def _may_step(self, line: _Line, flight: _Flight) -> bool:
        whole = not (line.update and self._model.reads_whole_tables) or self._updated == flight.number - 1
        return (whole and not flight.missing) or line.update_error is not None

    def _serve(self, line: _Line, stage: Any, out: "deque[_Flight | _End] | None", *arguments: Any) -> None:
        """A thread: repeat its stage until the batches end; an exception goes on as the last item."""
        try:
            while stage(line, *arguments):
                pass
        except _Stopped:
            return
        except BaseException as error:
            if out is not None:
                line.put(out, _End(error))
                return
            with line.changed:
                line.update_error = error
                line.changed.notify_all()

    def _reader(self, line: _Line, source: Iterator[Batch]) -> bool:
        with self.timeline.stall("read"):
            line.wait(lambda: len(line.flights) < line.most)
        flight = self._read(source)
        if flight is None:
            line.put(line.read, _End(None))
            return False
        with line.changed:
            line.flights[flight.number] = flight
        line.put(line.read, flight)
        return True

    def _fetcher(self, line: _Line) -> bool:
        with self.timeline.stall("unique"):
            item = line.take(line.read)
        if isinstance(item, _Flight):
            self._fetch(item, line if line.update else None)
        line.put(line.fetched, item)
        return isinstance(item, _Flight)

    def _updater(self, line: _Line) -> bool:
        with self.timeline.stall("update"):
            item = line.take(line.stepped)
            if isinstance(item, _End):
                return False
            self._end_step(item)
        self._update(item, line)
        self._let_go(line, item)
        return True

    @staticmethod
    def _let_go(line: _Line, flight: _Flight) -> None:
        """The caller or the updater is done with a batch; after both, another may be read."""
        with line.changed:
            if flight.held:
                flight.held = False
            else:
                del line.flights[flight.number]
                line.changed.notify_all()

    def _read(self, source: Iterator[Batch]) -> _Flight | None:
        number = self._number + 1
        self._before_stage("read", number)
        with self.timeline.span("read", number, flow="s") as span:
            batch = next(source, None)
            span["rows"] = len(batch) if batch is not None else 0
        if batch is None:
            return None
        self._number = number
        return _Flight(number, batch)

    def _fetch(self, flight: _Flight, line: _Line | None) -> None:
        """Prepare a batch and look up the rows that need not wait; the others when they may."""
        self._before_stage("unique", flight.number)
        with self.timeline.span("unique", flight.number) as span:
            flight.prepared = self._model.prepare(flight.batch)
            span["rows"] = len(flight.prepared.ids)
        if not self._on_host:
            return
        late = self._plan(flight, line) if line is not None else None
        self._before_stage("lookup", flight.number)
        flight.missing = 1  # what is fetched here
        ids = flight.prepared.ids
        flight.rows = [BatchRows(embedding, len(ids), self._staging) for embedding in self._embeddings]
        with self.timeline.span("lookup", flight.number) as span:
            part = Part(ids, None)  # a few late rows may be looked up twice, many not
            if late is not None and len(late.rows) * _MANY_LATE > len(ids):
                part = _part(ids, others(len(ids), late.rows))
            for rows in flight.rows:
                rows.fetch(part)
            ready = self._ask_for(flight, late, line) if line is not None and late is not None else None
            if ready is not None:
                self._fetch_late(flight, ready)
            span["rows"] = len(part) + (0 if ready is None else len(ready))
            span["bytes"] = span["rows"] * self._row_bytes
        self._arrived(flight, line)

    def _plan(self, flight: _Flight, line: _Line) -> Late:
        """Claim a batch's rows, and find those that the batch before has too, in both."""
        self._before_stage("plan", flight.number)
        with self.timeline.span("plan", flight.number) as span:
            oldest, newest = self._updated + 1, flight.number - 1 - self._staleness
            late = claim(flight.prepared.ids, self._claims, flight.number, oldest, newest)
            before = line.flights.get(flight.number - 1)
            if before is not None and not before.closed:
                both = flight.prepared.ids[late.rows[late.owner == before.number]]
                if len(both):
                    flight.shared_before = intersect(before.prepared.ids, both, self._claims, flight.number)
            span["rows"], span["conflicts"] = len(flight.prepared.ids), len(late.rows)
        return late

    def _ask_for(self, flight: _Flight, late: Late, line: _Line) -> Part | None:
        """Ask the batches in flight for the late rows; return those whose batch has been updated by now.

        Rows of the batch right before are one group, those of all older ones, which are updated earlier, the other.
        """
        ready = []
        of_before = late.owner == flight.number - 1
        with line.changed:
            for group in (of_before, ~of_before):
                if not group.any():
                    continue
                part, number = _part(flight.prepared.ids, late.rows[group]), int(late.owner[group].max())
                if number <= self._updated:
                    ready.append(part.positions)
                    continue
                owner, mine = line.flights[number], flight.shared_before
                flight.missing += 1
                if group is of_before and mine is not None and not owner.closed:
                    owner.shared = (_part(owner.prepared.ids, mine), flight, part)
                else:
                    owner.after.append((flight, part))
        return _part(flight.prepared.ids, np.concatenate(ready)) if ready else None

    def _fetch_late(self, flight: _Flight, part: Part) -> None:
        self._before_stage("lookup late", flight.number)
        for rows in flight.rows:
            rows.fetch_late(part)

    def _deliver(self, flight: _Flight, part: Part, line: _Line) -> None:
        """Look up late rows of a batch, in the updater's thread."""
        with self.timeline.span("lookup late", flight.number) as span:
            span["rows"], span["bytes"] = len(part), len(part) * self._row_bytes
            self._fetch_late(flight, part)
        self._arrived(flight, line)

    @staticmethod
    def _arrived(flight: _Flight, line: _Line | None) -> None:
        """Count a group of a batch's rows as fetched."""
        with line.changed if line is not None else nullcontext():
            flight.missing -= 1
            if not flight.missing:
                for rows in flight.rows:
                    rows.fetched()
                if line is not None:
                    line.changed.notify_all()

    def _step(self, flight: _Flight, step: Any, update: bool) -> Any:
        self._before_stage("step", flight.number)
        with self.timeline.span("step", flight.number, flow="t" if update else "f") as span:
            span["rows"] = len(flight.batch)
            self._model.await_prepared(flight.prepared)
            begin = self._staging.clock()
            if self._on_host:
                pulled = [rows.arrived() for rows in flight.rows]
            else:
                pulled = [part.lookup(part.table, flight.prepared.ids) for part in self._embeddings]
            value, grads = step(flight.prepared, pulled)
            if update and not self._on_host:
                for part, grad in zip(self._embeddings, grads, strict=True):
                    part.update(part.table, flight.prepared.ids, grad)
                grads = []
                self._after_update(flight.number, flight.prepared)
            flight.clocks = begin, self._staging.clock()
            flight.grads, flight.received = self._staging.receive(grads)
        if not update:
            self._end_step(flight)
        return value

    def _end_step(self, flight: _Flight) -> None:
        """Wait until the device is done with a step, and take down its time."""
        self._staging.await_received(flight.received)
        self.timeline.device_was_busy(self._staging.nanoseconds(*flight.clocks))

    def _update(self, flight: _Flight, line: _Line | None) -> None:
        """Update a batch's rows: first those that the next batch waits for, then the others."""
        self._before_stage("update", flight.number)
        if line is None:
            self._end_step(flight)
        shared = None
        if line is not None:
            with line.changed:
                flight.closed, shared = True, flight.shared
        ids = flight.prepared.ids
        rest = Part(ids, None)
        if shared is not None:
            mine, successor, theirs = shared
            assert line is not None
            with urgent():  # the device may be waiting
                with self.timeline.span("update first", flight.number) as span:
                    span["rows"] = len(mine)
                    self._update_rows(flight, mine)
                self._deliver(successor, theirs, line)
            assert mine.positions is not None
            rest = _part(ids, others(len(ids), mine.positions))
        with self.timeline.span("update", flight.number, flow="f") as span:
            span["rows"] = len(rest)
            self._update_rows(flight, rest)
            for rows in flight.rows:
                rows.updated()
        if self._on_host:
            self._after_update(flight.number, flight.prepared)
        if line is None:
            self._updated = flight.number
            return
        flight.rows, flight.grads, flight.shared = [], [], None
        with line.changed:
            self._updated = flight.number  # from here on nobody waits for it
            waiting, flight.after = flight.after, []
            line.changed.notify_all()
        for later, part in waiting:
            self._deliver(later, part, line)

    def _update_rows(self, flight: _Flight, part: Part) -> None:
        for rows, grad in zip(flight.rows, flight.grads, strict=True):
            rows.update(grad, part)

    @property
    def _row_bytes(self) -> int:
        return 4 * sum(embedding.table.dim for embedding in self._embeddings)
