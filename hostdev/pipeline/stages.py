"""The stages of a batch's way, each for all groups at once; who calls them in which thread is `passes`'s business.

read -> unique -> plan -> lookup -> send -> (the caller's step) -> update
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from hostdev.cache.planner import renumber
from hostdev.core.primitive import OpLog, Primitive
from hostdev.core.timeline import Timeline
from hostdev.device.staging import Staging
from hostdev.distributed.exchange import Exchange
from hostdev.kernels.claims import Claims, others
from hostdev.kernels.groups import unique_groups
from hostdev.kernels.pool import run_tasks, urgent
from hostdev.pipeline.flight import End, Flight, Gradients, GroupBatch, Request, Stopped
from hostdev.pipeline.groups import Group, Ids, Numbering, Part
from hostdev.pipeline.hazards import LateRows, ask_for, find_late
from hostdev.pipeline.line import Line
from hostdev.pipeline.remote import Remote
from hostdev.pipeline.rows import bytes_of, fetch_late, on_device, receive_rows, rows_of

import numpy as np  # isort: skip

_MANY_LATE = 4  # of so many rows one; then those that come late are not looked up before
AfterUpdate = Callable[[int, int, Any, list[tuple[Any, Any]]], None]


class Stages:
    """What is done to a batch in flight.

    groups        the tables
    staging       the way to the device and back
    claims        of the rows of all groups on the host
    timeline      where the stages' durations go
    log           where the ops' do
    exchanges     with other ranks, each of which has a part of every table, for passes that update (True) and others;
                  none: this one has all rows
    staleness     **not exact**: a lookup may miss the updates of up to so many batches before it
    broken        groups whose read-after-write hazards are not seen: to test what must find the difference
    before_stage  called with a stage's name and a batch's number before its work, in its thread: for tests
    after_update  called when rows of a batch have been updated and no later batch has changed them, with its number,
                  the group's, the rows' ids, and for each table the memory they are in, [any, 1 + S, D], and where
    """

    def __init__(
        self,
        groups: Sequence[Group],
        staging: Staging,
        claims: Claims,
        timeline: Timeline,
        *,
        log: OpLog | None = None,
        exchanges: Mapping[bool, Exchange] = MappingProxyType({}),
        staleness: int = 0,
        broken: Sequence[int] = (),
        before_stage: Callable[[str, int], None] | None = None,
        after_update: AfterUpdate | None = None,
    ) -> None:
        self.groups, self.staging, self.timeline = groups, staging, timeline
        self.exchanges, self.remote = exchanges, Remote(groups, staging, exchanges, timeline)
        host = Staging(torch.device("cpu")) if exchanges else staging  # rows that go on to others stay there
        self._row_stagings = [host if group.cache is None else staging for group in groups]
        self.claims, self._staleness, self._broken = claims, staleness, broken
        self.numbering = Numbering(groups)
        self._unique = Primitive("Unique", unique_groups, log=log).add_prim_attr("primitive_target", "CPU")
        self.before_stage = before_stage or (lambda stage, number: None)
        self._after_update = after_update
        self._on_host = any(group.on_host for group in groups)
        self._cached = [number for number, group in enumerate(groups) if group.cache is not None]
        self._row_bytes = sum(group.row_bytes for group in groups if group.on_host)
        self.steps = 0  # whose updates are finished

    def read(self, source: Iterator[Request], number: int) -> Flight | End:
        """Take the next batch."""
        self.before_stage("read", number)
        with self.timeline.span("read", number, flow="s") as span:
            request = next(source, None)
            span["rows"] = request.rows if request is not None else 0
        return Flight(number, request) if request is not None else End(None)

    def deduplicate(self, flight: Flight, update: bool) -> None:
        """Find the unique ids of every group, in order of first occurrence over its features, end to end."""
        self.before_stage("unique", flight.number)
        with self.timeline.span("unique", flight.number) as span:
            if flight.request.check is not None:
                flight.request.check()
            flight.groups = [GroupBatch(*found) for found in self._unique(flight.request.ids)]
            span["rows"] = sum(part.size for part in flight.groups)
        if self.exchanges:
            with self.timeline.span("exchange ids", flight.number):
                asked = self.exchanges[update].ids([part.ids for part in flight.groups])
            for number, (part, (ids, one)) in enumerate(zip(flight.groups, asked, strict=True)):
                flight.groups[number] = GroupBatch(ids, renumber(part.inverse, one.places), one)

    def end(self, update: bool) -> None:
        """There is no further batch."""
        if self.exchanges:
            self.exchanges[update].end()

    def announce(self, waiting: Sequence[Flight]) -> None:
        """Tell the caches of the batches that come, each as far ahead as its window goes."""
        run_tasks([(self._announce, n, n + 1, (waiting,)) for n in self._cached])

    def _announce(self, number: int, _: int, waiting: Sequence[Flight]) -> None:
        cache = self.groups[number].cache
        for flight in waiting:
            if cache is None or len(cache.planner) > cache.window:
                break
            part = flight.groups[number]
            if not part.announced:
                cache.announce(part.ids, part.inverse if part.asked is None else part.asked.inverse)
                part.announced = True

    def plan(self, flight: Flight, line: Line | None) -> LateRows | None:
        """Ask the caches which rows they keep; find those of the others that an unfinished batch is going to write."""
        self.before_stage("plan", flight.number)
        with self.timeline.span("plan", flight.number) as span:
            run_tasks([(self._plan, n, n + 1, (flight,)) for n in self._cached])
            span["rows"] = sum(part.size for part in flight.groups)
            self._number(flight)
            if line is None:
                return None
            evicted = [part.plan.evicted if part.plan is not None else part.ids[:0] for part in flight.groups]
            claimed = flight.reads.ids
            if self._cached:
                claimed = np.concatenate([claimed, self.numbering.join(evicted).ids])
            oldest, newest = line.updated + 1, flight.number - 1 - self._staleness
            late = find_late(flight, line.flights.get(flight.number - 1), claimed, self.claims, oldest, newest,
                             self._excused(flight))  # fmt: skip
            span["conflicts"] = len(late.rows)
        return late

    def _plan(self, number: int, _: int, flight: Flight) -> None:
        part, cache = flight.groups[number], self.groups[number].cache
        assert cache is not None
        part.plan = plan = cache.plan()
        assert plan.ids is part.ids
        part.places = plan.places
        if part.asked is None:
            part.inverse = renumber(part.inverse, part.places)
        else:
            part.asked = part.asked._replace(inverse=renumber(part.asked.inverse, part.places))

    def _number(self, flight: Flight) -> None:
        """Number the rows that the batch reads and writes on the host among those of all groups."""
        held = [group.on_host for group in self.groups]
        parts = list(zip(held, flight.groups, strict=True))
        flight.reads = self.numbering.join([part.reads if here else part.ids[:0] for here, part in parts])
        flight.writes = flight.reads
        if self._cached:
            flight.writes = self.numbering.join([part.writes if here else part.ids[:0] for here, part in parts])

    def _excused(self, flight: Flight) -> list[tuple[int, int]]:
        """Of what the batch reads, the ranges of the groups whose hazards are not seen."""
        return [(flight.reads.edges[group], flight.reads.edges[group + 1]) for group in self._broken]

    def fetch(self, flight: Flight, line: Line | None, update: bool) -> None:
        """Plan a batch, look up and send the rows that need not wait; the others when they may."""
        late = None
        if self._on_host and update and (line is not None or self._cached):
            late = self.plan(flight, line)
        else:
            self._number(flight)
        copied = self.staging.copies
        needs = sum(
            bytes_of(group, part.size, part.plan, len(part.inverse))
            for group, part in zip(self.groups, flight.groups, strict=True) if copied
        )  # fmt: skip
        needs += sum(tensor.nbytes for tensor in flight.request.tensors if copied)
        needs += sum(  # from other ranks, and gradients for them
            2 * part.asked.size * group.row_bytes
            for group, part in zip(self.groups, flight.groups, strict=True) if copied and part.asked is not None
        )  # fmt: skip
        flight.memory = self.staging.slabs.take(needs)
        looking_up = nullcontext if line is None else line.looking_up
        if self._on_host:
            with looking_up():
                self._look_up(flight, late)
            if self.exchanges:
                before = line.flights.get(flight.number - 1) if line is not None else None
                self.remote.give_early(flight, late, update, hazards=line is not None, before=before)
            flight.missing = 0 if line is None else 1  # what is sent here
            if line is not None:
                self._await_room(flight, line)
        with looking_up():
            self._send(flight)
        if line is None:
            return
        for part in ask_for(flight, late, line) if late is not None else ():
            span = self.timeline.span("lookup", flight.number, rows=len(part), bytes=len(part) * self._row_bytes)
            with span, looking_up():
                self.fetch_late(flight, part)
        if self._on_host:
            line.arrived(flight)

    def _look_up(self, flight: Flight, late: LateRows | None) -> None:
        self.before_stage("lookup", flight.number)
        with self.timeline.span("lookup", flight.number) as span:
            reads = flight.reads.ids
            for group, mine, staging in zip(self.groups, flight.groups, self._row_stagings, strict=True):
                if group.on_host:
                    mine.rows = rows_of(group, mine.size, mine.plan, staging, flight.memory)
            part = Part.of(reads, None)  # a few late rows may be looked up twice, many not
            if late is not None and len(late.rows) * _MANY_LATE > len(reads):
                part = Part.of(reads, others(len(reads), late.rows))
            run_tasks([
                task
                for mine, theirs in zip(flight.groups, self.numbering.split(part, flight.reads.edges), strict=True)
                for rows in mine.rows
                for task in rows.fetch(theirs)
            ])  # fmt: skip
            span["rows"], span["bytes"] = len(part), len(part) * self._row_bytes

    def _await_room(self, flight: Flight, line: Line) -> None:
        """Wait until the device has taken in the rows of the batch before: only the next one's wait there."""
        if not self.staging.copies:
            return
        with self.timeline.stall("send"):
            line.wait(lambda: line.gathered[0] >= flight.number - 1)
            self.staging.await_mark(line.gathered[1])

    def _send(self, flight: Flight) -> None:
        self.before_stage("send", flight.number)
        with self.timeline.span("send", flight.number):
            arrays = [part.inverse for part in flight.groups]
            arrays += [part.ids for group, part in zip(self.groups, flight.groups, strict=True) if not group.on_host]
            tensors = [*(torch.from_numpy(array) for array in arrays), *flight.request.tensors]
            sent, mark = self.staging.send(tensors, flight.memory)
            flight.sent.append((sent, mark))
            left = iter(sent)
            for part in flight.groups:
                part.inverse = next(left)
            for group, part in zip(self.groups, flight.groups, strict=True):
                part.there = None if group.on_host else next(left)
            flight.tensors = list(left)
            for rows in flight.rows:
                rows.send()

    def fetch_late(self, flight: Flight, part: Part) -> None:
        """Look up and send rows that had to wait."""
        self.before_stage("lookup late", flight.number)
        parts = self.numbering.split(part, flight.reads.edges)
        fetch_late([(rows, mine) for group, mine in zip(flight.groups, parts, strict=True) for rows in group.rows])

    def reload(self, flight: Flight, table: Any, ids: Ids | None, *, in_step: bool) -> None:
        """Look rows of a table up again for a batch, where it has looked them up, as somebody has written them.

        ids      int32 or int64 [N]; None for all rows
        in_step  the caller has the batch: its rows stay, but those that a cache admits with it are read again
        """
        for part in flight.groups:
            for rows in part.rows:
                if rows.embedding.table is not table:
                    continue
                reads = part.reads
                at = np.arange(len(reads)) if ids is None else np.flatnonzero(np.isin(reads, ids))
                if len(at):
                    (rows.reload_in_step if in_step else rows.reload)(Part.of(reads, at.astype(np.int32)))

    def deliver(self, flight: Flight, line: Line) -> None:
        """Look up late rows of a batch, in the updater's thread or the caller's: whichever has nothing else to do."""
        part = line.begin_delivery(flight)
        if part is None:
            return
        try:
            with self.timeline.span("lookup late", flight.number) as span:
                span["rows"], span["bytes"] = len(part), len(part) * self._row_bytes
                with line.looking_up():
                    self.fetch_late(flight, part)
            line.arrived(flight)
        finally:
            line.end_delivery()

    def begin_step(self, flight: Flight, line: Line | None, update: bool) -> None:
        """Let the rows of all tables be on the device, for the caller's step."""
        self.before_stage("step", flight.number)
        span = self.timeline.span("step", flight.number, flow="t" if update else "f", rows=flight.request.rows)
        span.__enter__()
        flight.span = span
        for sent, mark in flight.sent:
            self.staging.await_sent([mark], sent)
        begin = self.staging.clock()
        for group, part in zip(self.groups, flight.groups, strict=True):
            if group.on_host:
                part.values = [rows.arrived() for rows in part.rows]
            else:
                part.values = [one.lookup(one.table, part.there) for one in group.embeddings]
        if self.exchanges:
            self.remote.give_late(flight, update)
        if self._on_host and line is not None and self.staging.copies:
            line.gather(flight.number, self.staging.mark())
        flight.clocks = begin, None

    def end_step(self, flight: Flight, gradients: Gradients | None) -> None:
        """Update the rows that are on the device, and let the host have the gradients of the others.

        gradients  None where nothing is to change, as in an evaluation
        """
        try:
            flight.check = gradients.check if gradients is not None else None
            if flight.check is not None and not self.staging.copies:
                flight.check.get()  # raises before anything is updated
            if gradients is not None and self.exchanges:
                gradients = self.remote.to_owners(flight, gradients)
            leaving = self._update_on_device(flight, gradients) if gradients is not None else []
            for part in flight.groups:
                part.values = []
            flight.clocks = flight.clocks[0], self.staging.clock()
            if leaving:
                shared = flight.shared  # if the next batch is planned by now
                first: list[Part | None] = [None] * len(self.groups)
                if shared is not None:
                    first[:] = self.numbering.split(shared.first, flight.writes.edges)
                marks = None, None
                for staging in {id(one): one for one in self._row_stagings}.values():
                    rows = [(table, left, first[group]) for group, table, left in leaving
                            if self._row_stagings[group] is staging]  # fmt: skip
                    if rows:
                        found = receive_rows(rows, staging, flight.memory)
                        marks = found if staging.copies else marks
                flight.received_first, flight.received = (shared, marks[0]), marks[1]
        finally:
            self._close_span(flight)

    def abandon_step(self, flight: Flight) -> None:
        """Leave a step whose batch is given up."""
        self._close_span(flight)

    def _close_span(self, flight: Flight) -> None:
        if flight.span is not None:
            flight.span.__exit__(None, None, None)
            flight.span = None

    def _update_on_device(self, flight: Flight, gradients: Gradients) -> list[tuple[int, Any, list[Tensor | None]]]:
        """Update the rows that are there; return of each table on the host what that is to receive."""
        skip = gradients.skip
        everything = list(zip(self.groups, flight.groups, gradients.grads, strict=True))
        for group, part, grads in everything:
            part.stepped = [grad is not None for grad in grads]
            if group.on_host:
                for rows, grad in zip(part.rows, grads, strict=True):
                    if grad is not None:
                        rows.update_cached(grad, skip)
                continue
            for embedding, grad in zip(group.embeddings, grads, strict=True):
                if grad is not None:
                    embedding.begun += 1
                    embedding.update(embedding.table, part.there, grad, skip)
        leaving: list[tuple[int, Any, list[Tensor | None]]] = []
        for number, (group, part, grads) in enumerate(everything):
            self._report_on_device(flight.number, number, group, part)
            if not group.on_host:
                continue
            for table, (rows, grad) in enumerate(zip(part.rows, grads, strict=True)):
                leaving.append((number, rows, rows.leave(grad)))
                if group.cache is not None and part.plan is not None:
                    group.cache.stepped(part.plan, table, partial(rows.bring_back, part.plan.evicted))
        return leaving

    def _report_on_device(self, flight: int, number: int, group: Group, part: GroupBatch) -> None:
        if self._after_update is None:
            return
        if not group.on_host:
            where = [one.table.where(part.there) for one in group.embeddings]
            self._after_update(flight, number, part.there, where)
        elif group.cache is not None and part.plan is not None:
            for ids, places in on_device(part.plan, group.cache.slots, part.rows):
                self._after_update(flight, number, ids, list(places))

    def await_step(self, flight: Flight) -> None:
        """Wait until the device is done with a step, and take down its time; raises where it came to nothing."""
        for outcome in flight.outcomes:
            outcome.arrive()
        if flight.check is not None:
            flight.check.get()
        self.staging.await_mark(flight.clocks[1] if self.staging.copies else None)
        self.timeline.device_was_busy(self.staging.nanoseconds(*flight.clocks))

    def update(self, flight: Flight, line: Line | None) -> None:
        """Update a batch's rows on the host: first those that the next batch waits for, then the others."""
        self.before_stage("update", flight.number)
        if line is None:
            self.await_step(flight)
        if flight.outgoing is not None:
            for part, sums in zip(flight.groups, self.remote.sums(flight), strict=True):
                for rows, total in zip(part.rows, sums, strict=True):
                    rows.receive([total], None)
        shared = None
        if line is not None:
            with line.changed:
                flight.closed, shared = True, flight.shared
        rest = Part.of(flight.writes.ids, None)
        if shared is not None:
            assert line is not None
            rest = shared.rest
            known, mark = flight.received_first
            self.staging.await_mark(mark if known is shared else flight.received)
            with urgent(), self.timeline.span("update first", flight.number) as span:  # the device may be waiting
                span["rows"] = len(shared.first)
                self._update_rows(flight, shared.first, first=known is shared)
            with line.changed:
                shared.next.late.append(shared.late)
                line.changed.notify_all()
        self.remote.rest_of_sums(flight)
        self.staging.await_mark(flight.received)
        with self.timeline.span("update", flight.number, flow="f") as span:
            span["rows"] = len(rest)
            self._update_rows(flight, rest)
            for group, part in zip(self.groups, flight.groups, strict=True):
                for table, rows in enumerate(part.rows):
                    rows.updated()
                    if group.cache is not None and part.plan is not None:
                        group.cache.left(part.plan, table)
        self._report_on_host(flight)
        for group, part in zip(self.groups, flight.groups, strict=True):
            for embedding, stepped in zip(group.embeddings, part.stepped, strict=True):
                embedding.steps += stepped
        self.steps += 1
        flight.release()
        if line is None:
            return
        with line.changed:
            line.updated = flight.number  # from here on nobody waits for it
            for later, late in flight.after:
                later.late.append(late)
            flight.after = []
            line.changed.notify_all()

    def _update_rows(self, flight: Flight, part: Part, *, first: bool = False) -> None:
        parts = self.numbering.split(part, flight.writes.edges)
        run_tasks([
            task
            for mine, theirs in zip(flight.groups, parts, strict=True)
            for rows in mine.rows
            for task in rows.update(theirs, first=first)
        ])  # fmt: skip

    def _report_on_host(self, flight: Flight) -> None:
        if self._after_update is None:
            return
        for number, (group, part) in enumerate(zip(self.groups, flight.groups, strict=True)):
            if group.on_host:
                ids = part.ids if part.plan is None else part.plan.ids[part.plan.passed]
                self._after_update(flight.number, number, ids, [one.table.where(ids) for one in group.embeddings])


def ahead(
    stages: Stages, take: Callable[[], Flight | End], window: int, update: bool
) -> Iterator[Flight | End]:  # fmt: skip
    """Yield batches with their unique ids, which the caches have been told of a window ahead; then the end."""
    waiting: list[Flight] = []
    position = 0
    ends: list[End] = []
    while True:
        while not ends and len(waiting) <= (window if update else 0):
            try:
                item = take()
                if isinstance(item, Flight):
                    position += 1
                    item.position = position
                    stages.deduplicate(item, update)
                    waiting.append(item)
                    if update:
                        stages.announce(waiting)
                else:
                    if item.error is None:
                        stages.end(update)
                    ends.append(item)
                del item  # or a batch that is done would live until the next one comes
            except Stopped:
                raise
            except Exception as error:  # what was read before comes first
                ends.append(End(error))
        if waiting:
            if update:
                stages.announce(waiting)
            yield waiting.pop(0)
        else:
            yield ends.pop()  # not kept: an error holds the frames that it has gone through, and so this one
            return
