"""Batches through reading, unique, lookup, step and update: one after the other, or neighbours at once; the same bits.

The in-flight rule. A batch sees a row only after every earlier batch's update of it. When a batch is planned, the rows
that an unfinished batch will update are found: rows of the batch right before it are updated first when that one's
gradients arrive, and delivered late; rows of an older one are delivered after that one's update; all others are fetched
at once. Only the update stage writes the tables, in the order of the batches, so no row is locked.

Threads: a reader, a fetcher (unique, plan, lookup, send), the caller's (the model's step) and an updater. What they
share is under one condition; a batch carries its state, and an exception goes where its batch would have gone.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from hostdev.cache.cache import EmbeddingCache
from hostdev.cache.planner import renumber
from hostdev.core.timeline import Timeline
from hostdev.data.batch import WideBatch as Batch
from hostdev.device.staging import Staging
from hostdev.kernels.claims import MOST_UNFINISHED, Claims, others
from hostdev.kernels.pool import urgent
from hostdev.pipeline.flight import End, Flight, Line, Queue, Stopped
from hostdev.pipeline.hazards import LateRows, ask_for, find_late
from hostdev.pipeline.model import Model, Outcome, Result, Step
from hostdev.pipeline.rows import Embedding, Part, bytes_of, on_device, receive_rows, rows_of

_LONGEST_JOIN = 0.8  # seconds; a reader may be inside somebody's code
_MANY_LATE = 4  # of so many rows one; then those that come late are not looked up before
_MOST_DEPTH = MOST_UNFINISHED - 2
AfterUpdate = Callable[[int, Any, list[tuple[Any, Any]]], None]


class Pipeline:
    """Runs a model over batches.

    model         what to run
    embeddings    its tables, which share ids; all on the host or all on the device
    staging       the way to the device and back
    depth         how far reading and fetching run ahead: at most depth + 2 batches are alive, those being fetched, the
                  one in the step, and those being updated. 0: the stages run one after the other in the caller's
                  thread, which is the reference
    staleness     **not exact**: a lookup may miss the updates of up to so many batches before it
    cache         of the embeddings on the device; its plan needs batches to be read `cache.window` further ahead
    timeline      where durations go
    before_stage  called with a stage's name and a batch's number before its work, in its thread: for tests
    after_update  called when rows of a batch have been updated and no later batch has changed them, with its number,
                  the rows' ids, and for each embedding the memory they are in, [any, 1 + S, D], and where
    """

    def __init__(
        self,
        model: Model,
        embeddings: Sequence[Embedding],
        staging: Staging,
        *,
        depth: int,
        staleness: int = 0,
        cache: EmbeddingCache | None = None,
        timeline: Timeline | None = None,
        before_stage: Callable[[str, int], None] | None = None,
        after_update: AfterUpdate | None = None,
    ) -> None:
        if not 0 <= depth <= _MOST_DEPTH:
            raise ValueError(f"the depth must be in 0..{_MOST_DEPTH}, not {depth}")
        self.depth = depth
        self.timeline = timeline or Timeline()
        self._model = model
        self._embeddings = embeddings
        self._staging, self._staleness = staging, staleness
        self._before_stage = before_stage or (lambda stage, number: None)
        self._after_update = after_update
        self._cache = cache
        self._on_host = embeddings[0].target == "CPU"
        self._claims = Claims(embeddings[0].table.rows if self._on_host and depth else 0)
        self.steps = self._number = 0  # steps whose updates are finished; the last batch
        self._training = False

    def train(self, batches: Iterable[Batch]) -> Generator[Result, None, None]:
        """Step over batches, yield each one's result, and update the tables, all of it before the iterator ends.

        Closing the iterator finishes what has been stepped. Raises what a stage raised; what came before is finished.
        """
        return self._run(batches, self._model.step, update=True)

    def predict(
        self, batches: Iterable[Batch], step: Callable[[Any, list[Tensor]], Step]
    ) -> Generator[Result, None, None]:
        """Yield the results of another step of the model, which updates nothing."""
        return self._run(batches, step, update=False)

    def write_back(self) -> None:
        """Bring the host tables up to date with the cache; RuntimeError while other threads are changing them."""
        if self._training and self.depth:
            raise RuntimeError("the tables are being trained; end or close the iterator of `train` before")
        if self._cache is not None:
            self._cache.write_back_rows()

    def _run(
        self, batches: Iterable[Batch], step: Callable[[Any, list[Tensor]], Step], *, update: bool
    ) -> Generator[Result, None, None]:
        if not update:
            self.write_back()
        steps = [embedding.table.step - self.steps for embedding in self._embeddings]
        with self.timeline.run():
            self._training = update
            try:
                if self.depth:
                    yield from self._run_overlapped(batches, step, update)
                else:
                    yield from self._run_serially(batches, step, update)
            finally:
                self._training = False
                for embedding, before in zip(self._embeddings, steps, strict=True):
                    embedding.table.step = before + self.steps  # one whose update did not end was no step
                if update and self._cache is not None:
                    self._cache.write_back()

    def _run_serially(self, batches: Iterable[Batch], step: Any, update: bool) -> Iterator[Result]:
        source = iter(batches)
        for flight in self._ahead(lambda: self._read(source, None), update):
            if isinstance(flight, End):
                if flight.error is not None:
                    raise flight.error
                return
            self._fetch(flight, None, update)
            result = self._step(flight, None, step, update)
            if update:
                self._update(flight, None)
            yield result

    def _run_overlapped(self, batches: Iterable[Batch], step: Any, update: bool) -> Iterator[Result]:
        window = self._cache.window if update and self._cache is not None else 0
        line = Line(self.depth, window, self._number, update=update)
        threads = [
            threading.Thread(target=self._serve, args=(line, stage, *arguments), name=f"hostdev-{name}", daemon=True)
            for name, stage, *arguments in (
                ("reader", self._reader, line.read, iter(batches)),
                ("fetcher", self._fetcher, line.fetched, self._ahead(partial(self._take_read, line), update)),
                ("updater", self._updater, None),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            yield from iter(partial(self._step_next, line, step, update), None)  # a loop's variable would keep a batch
            line.put(line.stepped, [End(None)])
            with self.timeline.stall("step"):
                threads[-1].join()
            error = line.update_error or line.error
            if error is not None:
                raise error
        finally:
            line.put(line.stepped, [End(None)])  # what has been stepped is updated
            with line.changed:
                line.stopping = True
                line.changed.notify_all()
            for thread in threads[1:]:
                thread.join()
            threads[0].join(_LONGEST_JOIN)
            if line.update_error is not None and sys.exc_info()[0] is GeneratorExit:
                raise line.update_error  # whoever closes the iterator is told, too

    def _step_next(self, line: Line, step: Any, update: bool) -> Result | None:
        """Wait for a batch and all its rows, and step; None after the last one."""
        if line.yielded:  # the caller has come back, and is done with it
            line.let_go(line.yielded)
        with self.timeline.stall("step"):
            line.wait(lambda: line.fetched or line.update_error)
        item = line.fetched.popleft() if line.update_error is None else End(None)
        while isinstance(item, Flight):
            with self.timeline.stall("step"):
                line.wait(lambda: self._may_step(line, item) or (line.deliverable() is item))
            if self._may_step(line, item):
                break
            with urgent():  # the device has nothing to do
                self._deliver(item, line)
        if line.update_error is not None:
            raise line.update_error
        if isinstance(item, End):
            line.error = item.error
            return None
        result = self._step(item, line, step, update)
        line.yielded = item.number
        if update:
            line.put(line.stepped, [item])
        else:
            line.let_go(item.number)
        return result

    def _may_step(self, line: Line, flight: Flight) -> bool:
        whole = not (line.update and self._model.reads_whole_tables) or line.updated == flight.number - 1
        return (whole and not flight.missing) or line.update_error is not None

    def _serve(self, line: Line, stage: Any, out: Queue | None, *arguments: Any) -> None:
        """A thread: repeat its stage until the batches end; an exception goes on as the last item."""
        self._staging.enter_thread()
        try:
            while stage(line, *arguments):
                pass
        except Stopped:
            return
        except BaseException as error:
            if out is not None:
                line.put(out, [End(error)])
                return
            line.fail_update(error)

    def _reader(self, line: Line, source: Iterator[Batch]) -> bool:
        with self.timeline.stall("read"):
            line.wait(lambda: len(line.flights) < line.most_read)
        held = [self._read(source, line)]
        more = isinstance(held[0], Flight)
        line.put(line.read, held)
        return more

    def _take_read(self, line: Line) -> Flight | End:
        with self.timeline.stall("unique"):
            return line.take(line.read)

    def _ahead(self, take: Callable[[], Flight | End], update: bool) -> Iterator[Flight | End]:
        """Yield batches with their unique ids, which the cache has been told of its window ahead; then the end."""
        cache = self._cache if update else None
        waiting: deque[Flight] = deque()
        position = 0
        end: End | None = None
        while True:
            while end is None and len(waiting) <= (cache.window if cache is not None else 0):
                try:
                    item = take()
                    if isinstance(item, Flight):
                        position += 1
                        item.position = position
                        self._deduplicate(item, cache)
                        waiting.append(item)
                    else:
                        end = item
                    del item  # or a batch that is done would live until the next one comes
                except Stopped:
                    raise
                except Exception as error:  # what was read before comes first
                    end = End(error)
            if waiting:
                yield waiting.popleft()
            else:
                assert end is not None
                yield end

    def _deduplicate(self, flight: Flight, cache: EmbeddingCache | None) -> None:
        self._before_stage("unique", flight.number)
        with self.timeline.span("unique", flight.number) as span:
            flight.ids, flight.inverse = self._model.unique(flight.batch)
            flight.reads = flight.writes = flight.ids
            if cache is not None:
                cache.announce(flight.ids, flight.inverse)
            span["rows"] = len(flight.ids)

    def _fetcher(self, line: Line, ahead: Iterator[Flight | End]) -> bool:
        held = [next(ahead)]
        if more := isinstance(held[0], Flight):
            number = held[0].number
            with self.timeline.stall("lookup"):
                line.wait(lambda: number - next(iter(line.flights)) < line.most)
            self._fetch(held[0], line, line.update)
        line.put(line.fetched, held)
        return more

    def _updater(self, line: Line) -> bool:
        with self.timeline.stall("update"):
            line.wait(lambda: line.stepped or line.deliverable(), finish=True)
            item = line.stepped.popleft() if line.stepped else None
            if isinstance(item, End):
                return False
            if item is not None:
                self._end_step(item)
        if item is not None:
            self._update(item, line)
            number = item.number
            del item
            line.let_go(number)
        elif (flight := line.deliverable()) is not None:
            self._deliver(flight, line)
        return True

    def _read(self, source: Iterator[Batch], line: Line | None) -> Flight | End:
        number = self._number + 1
        self._before_stage("read", number)
        with self.timeline.span("read", number, flow="s") as span:
            batch = next(source, None)
            span["rows"] = len(batch) if batch is not None else 0
        if batch is None:
            return End(None)
        flight = Flight(number, batch)
        if line is None:
            self._number = number
            return flight
        with line.changed:
            if line.stopping:  # it was in somebody's code for so long that the next run may have begun
                raise Stopped
            self._number = number
            line.flights[number] = flight
        return flight

    def _fetch(self, flight: Flight, line: Line | None, update: bool) -> None:
        """Plan a batch, look up and send the rows that need not wait; the others when they may."""
        late = None
        if self._on_host and update and (line is not None or self._cache is not None):
            late = self._plan(flight, line)
        needs = (self._embeddings, len(flight.ids), flight.plan, flight.inverse.size)
        flight.memory = self._staging.slabs.take(bytes_of(*needs) if self._staging.copies else 0)
        if self._on_host:
            self._look_up(flight, late)
            flight.missing = 0 if line is None else 1  # what is sent here
            if line is not None:
                self._await_room(flight, line)
        self._before_stage("send", flight.number)
        with self.timeline.span("send", flight.number):
            batch = (flight.batch, flight.ids, flight.inverse, flight.memory, flight.places)
            flight.prepared = self._model.prepare(*batch)
            flight.inverse = None
            for rows in flight.rows:
                rows.send()
        if line is None:
            return
        for part in ask_for(flight, late, line) if late is not None else ():
            with self.timeline.span("lookup", flight.number, rows=len(part), bytes=len(part) * self._row_bytes):
                self._fetch_late(flight, part)
        if self._on_host:
            line.arrived(flight)

    def _look_up(self, flight: Flight, late: LateRows | None) -> None:
        self._before_stage("lookup", flight.number)
        with self.timeline.span("lookup", flight.number) as span:
            flight.rows = rows_of(self._embeddings, len(flight.ids), flight.plan, self._staging, flight.memory)
            part = Part.of(flight.reads, None)  # a few late rows may be looked up twice, many not
            if late is not None and len(late.rows) * _MANY_LATE > len(flight.reads):
                part = Part.of(flight.reads, others(len(flight.reads), late.rows))
            for rows in flight.rows:
                rows.fetch(part)
            span["rows"], span["bytes"] = len(part), len(part) * self._row_bytes

    def _await_room(self, flight: Flight, line: Line) -> None:
        """Wait until the device has taken in the rows of the batch before: only the next one's wait there."""
        if not self._staging.copies:
            return
        with self.timeline.stall("send"):
            line.wait(lambda: line.gathered[0] >= flight.number - 1)
            self._staging.await_mark(line.gathered[1])

    def _plan(self, flight: Flight, line: Line | None) -> LateRows | None:
        """Ask the cache which rows it keeps; find those of the others that an unfinished batch is going to write."""
        self._before_stage("plan", flight.number)
        with self.timeline.span("plan", flight.number) as span:
            claimed = flight.ids
            if self._cache is not None:
                flight.plan = plan = self._cache.plan()
                assert plan.ids is flight.ids
                flight.reads, flight.writes = plan.reads, plan.writes
                flight.places = plan.places
                flight.inverse = renumber(flight.inverse, flight.places)
                claimed = np.concatenate([flight.reads, plan.evicted])
            span["rows"] = len(flight.ids)
            if line is None:
                return None
            oldest, newest = line.updated + 1, flight.number - 1 - self._staleness
            late = find_late(flight, line.flights.get(flight.number - 1), claimed, self._claims, oldest, newest)
            span["conflicts"] = len(late.rows)
        return late

    def _fetch_late(self, flight: Flight, part: Part) -> None:
        self._before_stage("lookup late", flight.number)
        for rows in flight.rows:
            rows.fetch_late(part)

    def _deliver(self, flight: Flight, line: Line) -> None:
        """Look up late rows of a batch, in the updater's thread or the caller's: whichever has nothing else to do."""
        part = line.begin_delivery(flight)
        if part is None:
            return
        try:
            with self.timeline.span("lookup late", flight.number) as span:
                span["rows"], span["bytes"] = len(part), len(part) * self._row_bytes
                self._fetch_late(flight, part)
            line.arrived(flight)
        finally:
            line.end_delivery()

    def _step(self, flight: Flight, line: Line | None, step: Any, update: bool) -> Result:
        self._before_stage("step", flight.number)
        with self.timeline.span("step", flight.number, flow="t" if update else "f") as span:
            span["rows"] = len(flight.batch)
            self._model.await_prepared(flight.prepared)
            if self._cache is not None and update and self._model.reads_whole_tables:
                self._cache.write_back_rows()
            begin = self._staging.clock()
            if self._on_host:
                pulled = [rows.arrived() for rows in flight.rows]
                if line is not None and self._staging.copies:
                    line.gather(flight.number, self._staging.mark())
            else:
                pulled = [part.lookup(part.table, flight.prepared.ids) for part in self._embeddings]
            made = step(flight.prepared, pulled)
            del pulled  # before more is allocated
            flight.outcome = Outcome(made, flight.position, self._staging, flight.memory)
            if not self._staging.copies:
                flight.outcome.get()  # raises before anything is updated
            leaving = self._update_on_device(flight, made) if update else []
            flight.clocks = begin, self._staging.clock()
            if leaving:
                shared = flight.shared  # if the next batch is planned by now
                marks = receive_rows(flight.rows, leaving, shared and shared.first, self._staging, flight.memory)
                flight.received_first, flight.received = (shared, marks[0]), marks[1]
        if not update:
            self._end_step(flight)
            flight.release()
        return Result(flight.batch, flight.outcome)

    def _update_on_device(self, flight: Flight, step: Step) -> list[list[Tensor]]:
        """Update the rows that are there; return for each embedding what the host is to receive."""
        if not self._on_host:
            ids = flight.prepared.ids
            for embedding, grad in zip(self._embeddings, step.grads, strict=True):
                embedding.update(embedding.table, ids, grad, step.skip)
            if self._after_update is not None:
                self._after_update(flight.number, ids, [(part.table.block, ids) for part in self._embeddings])
            return []
        for rows, grad in zip(flight.rows, step.grads, strict=True):
            rows.update_cached(grad, step.skip)
        plan = flight.plan
        if plan is not None and self._cache is not None and self._after_update is not None:
            for ids, places in on_device(plan, self._cache.slots, flight.rows):
                self._after_update(flight.number, ids, places)
        leaving = []
        for table, (rows, grad) in enumerate(zip(flight.rows, step.grads, strict=True)):
            leaving.append(rows.leave(grad))
            if plan is not None and self._cache is not None:
                self._cache.stepped(plan, table, partial(rows.bring_back, plan.evicted))
        return leaving

    def _end_step(self, flight: Flight) -> None:
        """Wait until the device is done with a step, and take down its time; raises where it came to nothing."""
        flight.outcome.get()
        self._staging.await_mark(flight.clocks[1] if self._staging.copies else None)
        self.timeline.device_was_busy(self._staging.nanoseconds(*flight.clocks))

    def _update(self, flight: Flight, line: Line | None) -> None:
        """Update a batch's rows: first those that the next batch waits for, then the others."""
        self._before_stage("update", flight.number)
        if line is None:
            self._end_step(flight)
        shared = None
        if line is not None:
            with line.changed:
                flight.closed, shared = True, flight.shared
        rest = Part.of(flight.writes, None)
        if shared is not None:
            assert line is not None
            rest = shared.rest
            known, mark = flight.received_first
            self._staging.await_mark(mark if known is shared else flight.received)
            with urgent(), self.timeline.span("update first", flight.number) as span:  # the device may be waiting
                span["rows"] = len(shared.first)
                for rows in flight.rows:
                    rows.update(shared.first, first=known is shared)
            with line.changed:
                shared.next.late.append(shared.late)
                line.changed.notify_all()
        self._staging.await_mark(flight.received)
        with self.timeline.span("update", flight.number, flow="f") as span:
            span["rows"] = len(rest)
            for rows in flight.rows:
                rows.update(rest)
            for table, rows in enumerate(flight.rows):
                rows.updated()
                if self._cache is not None and flight.plan is not None:
                    self._cache.left(flight.plan, table)
        if self._on_host and self._after_update is not None:
            ids = flight.ids if flight.plan is None else flight.plan.ids[flight.plan.passed]
            self._after_update(flight.number, ids, [(part.table.block, ids) for part in self._embeddings])
        self.steps += 1
        flight.rows, flight.shared = [], None
        flight.release()
        if line is None:
            return
        with line.changed:
            line.updated = flight.number  # from here on nobody waits for it
            for later, part in flight.after:
                later.late.append(part)
            flight.after = []
            line.changed.notify_all()

    @property
    def _row_bytes(self) -> int:
        return 4 * sum(embedding.table.dim for embedding in self._embeddings)
