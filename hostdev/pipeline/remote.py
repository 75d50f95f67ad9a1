"""Rows that other ranks hold, and gradients for them: what stages do where tables are spread over processes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hostdev.core.timeline import Timeline
from hostdev.device.staging import Staging
from hostdev.distributed.exchange import Asked, Exchange, Incoming
from hostdev.distributed.gradients import RowSubset
from hostdev.kernels.pool import urgent
from hostdev.pipeline.flight import Flight, Gradients, Outgoing
from hostdev.pipeline.groups import Group
from hostdev.pipeline.hazards import LateRows

_NONE = np.empty(0, np.int32)


def _buffer(flight: Flight) -> Callable[[int, int], Any]:
    """Return what makes a batch's host memory for rows."""
    return lambda rows, dim: flight.memory.buffer(rows, dim).numpy()


class Remote:
    """Exchanges a batch's rows and gradients, in the thread of the stage that calls.

    groups     the tables, of which this rank has a part each
    staging    the way to the device and back
    exchanges  for passes that update (True) and others
    """

    def __init__(
        self, groups: Sequence[Group], staging: Staging, exchanges: Mapping[bool, Exchange], timeline: Timeline
    ) -> None:
        self.groups, self.staging, self.exchanges, self.timeline = groups, staging, exchanges, timeline
        self._cached = any(group.cache is not None for group in groups)
        self._before: tuple[int, list[Asked]] = 0, []  # the last batch in training, and what was asked for in it

    def to_owners(self, flight: Flight, gradients: Gradients) -> Gradients | None:
        """Let gradients be on their way to the owners of the rows; return those that are to be used on the device."""
        if not gradients.parts:  # none has come, to any rank
            return gradients
        self._send_gradients(flight, gradients)
        if not self._cached:
            return None
        if flight.check is not None:
            flight.check.get()
        sums = self.sums(flight)
        flight.outgoing = None
        there = [
            [None if one is None else one.to(self.staging.device if group.cache is not None else "cpu") for one in mine]
            for group, mine in zip(self.groups, sums, strict=True)
        ]
        return gradients._replace(grads=there)

    def give_early(
        self, flight: Flight, late: LateRows | None, update: bool, *, hazards: bool, before: Flight | None = None
    ) -> None:
        """Give other ranks the rows that they have asked for and that need not wait, and take theirs.

        hazards  of a batch that updates rows: some may have to wait, here or elsewhere
        before   the batch right before, if it is unfinished here
        """
        exchange = self.exchanges[update]
        with self.timeline.span("exchange rows", flight.number):
            asked = [part.asked for part in flight.groups if part.asked is not None]
            values = [None if part.plan is not None else [rows.host for rows in part.rows] for part in flight.groups]
            early = None
            if update and (hazards or self._cached):
                early = [np.full(part.size, part.plan is None) for part in flight.groups]
                edges = flight.reads.edges
                at = np.searchsorted(late.rows, edges).tolist() if late is not None else []
                for group, (mask, part) in enumerate(zip(early, flight.groups, strict=True)):
                    if late is not None and part.plan is None:
                        mask[late.rows[at[group] : at[group + 1]] - edges[group]] = False

            buffer = _buffer(flight)
            in_two = update and hazards and not self._cached
            known = self._before[1] if in_two and self._before[0] == flight.number - 1 else []
            shared = self._shared(known, late, before)
            flight.incoming = exchange.early_rows(asked, values, early, buffer, known, [one.wanted for one in shared])
            if in_two:
                self._before = flight.number, asked
            if known and before is not None:
                before.first = [
                    one._replace(asked=mask) for one, mask in zip(shared, flight.incoming.shared, strict=True)
                ]
            if self.staging.copies:
                flat = [torch.from_numpy(rows) for group in flight.incoming.rows for rows in group]
                flight.arriving, mark = self.staging.send(flat, flight.memory)
                flight.sent.append((flight.arriving, mark))

    def _shared(self, asked: Sequence[Asked], late: LateRows | None, before: Flight | None) -> list[RowSubset]:
        """Return which rows of the batch before are late in this one, here."""
        found = []
        edges = before.writes.edges if before is not None else [0] * (len(asked) + 1)
        positions = _NONE
        if before is not None and late is not None and late.shared is not None:
            assert late.shared.first.positions is not None
            positions = late.shared.first.positions
        at = np.searchsorted(positions, edges)
        for group, one in enumerate(asked):
            rows = np.zeros(edges[group + 1] - edges[group], np.bool_)
            rows[positions[at[group] : at[group + 1]] - edges[group]] = True
            wanted = rows[one.inverse] if before is not None else np.zeros(len(one.inverse), np.bool_)
            found.append(RowSubset(rows[:0], wanted, rows))
        return found

    def give_late(self, flight: Flight, update: bool) -> None:
        """Give and take the rows that had to wait; let those of the batch be on the device."""
        incoming: Incoming = flight.incoming
        if incoming.given is not None:
            with urgent(), self.timeline.span("exchange late rows", flight.number):
                asked = [part.asked for part in flight.groups if part.asked is not None]
                values = [[value.cpu().numpy() for value in part.values] for part in flight.groups]
                # Those that came early may still be on their way to the device, from where they are.
                buffer = _buffer(flight) if self.staging.copies else None
                places, late = self.exchanges[update].late_rows(incoming, asked, values, buffer)
            if self.staging.copies:
                there = iter(flight.arriving)
                for group, at in zip(late, places, strict=True):
                    for rows in group:
                        to = next(there)
                        if len(at):
                            mark = self.staging.patch(to, at, torch.from_numpy(rows), flight.memory)
                            self.staging.await_sent([mark], [to])
        arrived = iter(flight.arriving if self.staging.copies else [])
        for part, group in zip(flight.groups, incoming.rows, strict=True):
            part.values = [next(arrived) if self.staging.copies else torch.from_numpy(rows) for rows in group]
        flight.incoming, flight.arriving = None, []

    def _send_gradients(self, flight: Flight, gradients: Gradients) -> None:
        """Let the gradients of the rows come to host memory, for their owners; count the tables' steps."""
        flat = [part for group in gradients.parts for table in group for part in table or ()]
        host, flight.received = self.staging.receive(flat, flight.memory)
        left = iter(host)
        parts = [
            [None if table is None else [next(left).numpy() for _ in table] for table in group]
            for group in gradients.parts
        ]
        sums = [
            [
                None if table is None else np.empty((part.size, one.table.dim), np.float32)
                for table, one in zip(mine, group.embeddings, strict=True)
            ]
            for mine, part, group in zip(parts, flight.groups, self.groups, strict=True)
        ]
        flight.outgoing = Outgoing(parts, gradients.micro_batches, flight.first if gradients.in_two else None, sums)
        for part, group in zip(flight.groups, gradients.parts, strict=True):
            part.stepped = [table is not None for table in group]
            for rows, stepped in zip(part.rows, part.stepped, strict=True):
                if stepped and not self._cached:
                    rows.begin_step()

    def sums(self, flight: Flight) -> list[list[Tensor | None]]:
        """Give the owners of the rows their gradients; return the sums of those of the rows here, in host memory.

        Where some rows' go first, these; `rest_of_sums` is to follow.
        """
        self.staging.await_mark(flight.received)
        outgoing = flight.outgoing
        assert outgoing is not None
        if outgoing.chosen is None:
            self._give(flight, outgoing, None)
        else:
            with urgent():
                self._give(flight, outgoing, outgoing.chosen)
        return [[None if one is None else torch.from_numpy(one) for one in group] for group in outgoing.sums]

    def rest_of_sums(self, flight: Flight) -> None:
        """Give the gradients that `sums` has left out, and complete the sums."""
        outgoing, flight.outgoing = flight.outgoing, None
        if outgoing is not None and outgoing.chosen is not None:
            self._give(flight, outgoing, [one.others() for one in outgoing.chosen])

    def _give(self, flight: Flight, outgoing: Outgoing, chosen: list[RowSubset] | None) -> None:
        with self.timeline.span("exchange gradients", flight.number):
            asked = [part.asked for part in flight.groups if part.asked is not None]
            self.exchanges[True].gradients(asked, outgoing.grads, outgoing.micro_batches, outgoing.sums, chosen)
