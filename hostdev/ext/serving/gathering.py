"""`Gatherer`: gathers requests into batches, and computes them in one thread."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import NamedTuple

from hostdev.core.errors import UserError, in_words
from hostdev.core.workers import Worker
from hostdev.ext.serving.columns import Columns
from hostdev.ext.serving.metrics import Metrics
from hostdev.ext.serving.model import ServedModel
from hostdev.ext.serving.refused import RefusedError, bad, values_of
from hostdev.kernels.arrays import Values

_MOST_BATCH_VALUES = 1 << 20  # maximum number of values in the lists of all requests of a batch together


class Predicted(NamedTuple):
    """Predictions, float32 [n, labels], and the model that made them."""

    values: Values
    model: ServedModel


@dataclass(slots=True, eq=False)
class _Ticket:
    """A request in the queue, with its numbers of rows and of values in lists.

    The future is cancelled if the client does not wait any more.
    """

    columns: Columns
    rows: int
    values: int
    version: str | None
    future: "asyncio.Future[Predicted]"
    arrived: float = field(default_factory=time.monotonic)


_Results = list[tuple[_Ticket, Predicted | Exception]]


class Gatherer:
    """Computes requests in batches, in the order of their arrival.

    A batch begins as soon as the thread is free and `wait` seconds have passed since the arrival of its first request,
    or earlier if it is full. It has the requests that wait then, up to `most_rows` rows; a larger request is a batch of
    its own, and is computed in pieces of `most_rows` rows. Each batch is encoded and computed by one model.

    Args:
        model: The model.
        most_rows: The largest number of rows that are computed together.
        wait: Seconds that a batch's first request waits for further requests.
        most_waiting: The largest number of waiting rows; their lists may have `values_of(most_waiting)` values. A
            request that does not fit is refused, but an empty queue takes any request.
        metrics: Counts batches and waiting rows.
        note: Called with a line for the log if the server itself fails.

    Attributes:
        model: The current model. A new value takes effect with the next batch.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        most_rows: int,
        wait: float,
        most_waiting: int,
        metrics: Metrics,
        note: Callable[[str], None],
    ) -> None:
        self.model = model
        self._most_rows, self._wait, self._most_waiting = most_rows, wait, most_waiting
        self._metrics, self._note = metrics, note
        self._queue: deque[_Ticket] = deque()
        self._rows = self._values = 0  # waiting rows, and values in their lists
        self._is_busy = False
        self._worker = Worker("hostdev-serving", self._work, drains=True)
        self._changed = self._worker.changed

    @property
    def is_closing(self) -> bool:
        """Whether new requests are refused."""
        return self._worker.closing.is_set()

    async def predict(
        self,
        columns: Columns,
        rows: int,
        version: str | None,
        gone: Callable[[], "asyncio.Future[None]"],
        values: int = 0,
    ) -> Predicted:
        """Return the predictions for a request's rows.

        Args:
            columns: The columns that the model reads.
            rows: The number of rows.
            version: The version of the model that the request demands, or None for any.
            gone: Called if the request has to wait; returns a future that is done when its client has gone.
            values: The number of values in the rows' lists.

        Raises:
            RefusedError: The queue is full, a value is invalid, another version is served, or the server is ending.
            ClientGoneError: The client has gone; its rows are not computed, unless their batch has begun.
        """
        future: asyncio.Future[Predicted] = asyncio.get_running_loop().create_future()
        if self._enter(_Ticket(columns, rows, values, version, future)):
            return await future
        watched = gone()
        try:
            await asyncio.wait((future, watched), return_when=asyncio.FIRST_COMPLETED)
            if not future.done():
                raise ClientGoneError
            return future.result()
        finally:
            future.cancel()  # no effect on a future that is done
            watched.cancel()

    def _enter(self, ticket: _Ticket) -> bool:
        """Add a request to the queue; return whether it is computed without waiting for others."""
        self._worker.check()
        with self._changed:
            if self.is_closing:
                raise RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is ending", closes=True)
            if self._queue and self._rows + ticket.rows > self._most_waiting:
                raise _full(f"{self._rows:,} rows")
            if self._queue and self._values + ticket.values > values_of(self._most_waiting):
                raise _full(f"rows with {self._values:,} values")
            is_next = not self._queue and not self._is_busy
            self._queue.append(ticket)
            self._rows += ticket.rows
            self._values += ticket.values
            self._metrics.waiting(self._rows)
            self._worker.ask()
        return is_next

    def close(self, seconds: float) -> bool:
        """Refuse new requests, compute waiting ones, and end the thread; return whether it ended within `seconds`."""
        return self._worker.stop(seconds)

    def _work(self) -> None:
        while tickets := self._take():
            start = time.perf_counter()
            rows = sum(ticket.rows for ticket in tickets)
            try:
                results = self._compute(tickets)
            except Exception as error:  # an error in one batch must not end the thread
                results = self._failures(tickets, error)
            self._metrics.batch(len(tickets), rows, time.perf_counter() - start)
            with self._changed:  # before the answers are sent: a client may send its next request at once
                self._is_busy = False
            _deliver(results)

    def _take(self) -> list[_Ticket]:
        """Wait until a batch begins; return its requests, or an empty list if the queue is empty."""
        with self._changed:
            while True:
                while self._queue and self._rows < self._most_rows and not self.is_closing:
                    left = self._queue[0].arrived + self._wait - time.monotonic()
                    if left <= 0:
                        break
                    self._changed.wait(left)
                found: list[_Ticket] = []
                rows = values = 0
                while self._queue and (not found or self._fits(self._queue[0], rows, values)):
                    ticket = self._queue.popleft()
                    self._rows -= ticket.rows
                    self._values -= ticket.values
                    if not ticket.future.cancelled():
                        found.append(ticket)
                        rows += ticket.rows
                        values += ticket.values
                self._metrics.waiting(self._rows)
                if found or not self._queue:
                    self._is_busy = bool(found)
                    return found

    def _fits(self, ticket: _Ticket, rows: int, values: int) -> bool:
        """Return whether a request fits into a batch that already has `rows` rows, and `values` values in lists."""
        return rows + ticket.rows <= self._most_rows and values + ticket.values <= _MOST_BATCH_VALUES

    def _compute(self, tickets: list[_Ticket]) -> "_Results":
        model = self.model
        results: _Results = []
        right = []
        for ticket in tickets:
            if ticket.version is None or ticket.version == model.version:
                right.append(ticket)
            else:
                results.append((ticket, wrong_version(ticket.version, model)))
        if not right:
            return results
        requests = [ticket.columns for ticket in right]
        outcomes = model.predict(requests, self._most_rows, lambda number: not right[number].future.cancelled())
        for ticket, outcome in zip(right, outcomes, strict=True):
            if isinstance(outcome, UserError):
                results.append((ticket, bad(str(outcome))))
            elif isinstance(outcome, Exception):  # only this request fails, not the others of its batch
                results += self._failures([ticket], outcome)
            elif outcome is not None:
                results.append((ticket, Predicted(outcome, model)))
        return results

    def _failures(self, tickets: list[_Ticket], error: Exception) -> "_Results":
        self._note(f"error: a request failed ({type(error).__name__}: {in_words(error)})")
        refusal = RefusedError(
            HTTPStatus.INTERNAL_SERVER_ERROR, "the server has failed to compute this; its log says why"
        )
        return [(ticket, refusal) for ticket in tickets]


class ClientGoneError(Exception):
    """A client has closed its connection before its answer."""


def wrong_version(version: str, model: ServedModel) -> RefusedError:
    """Return the refusal of a request for a version that is not served."""
    return RefusedError(
        HTTPStatus.NOT_FOUND, f"there is no version {version!r} of the model; version {model.version} is served"
    )


def _full(what: str) -> RefusedError:
    return RefusedError(HTTPStatus.SERVICE_UNAVAILABLE, f"{what} wait already, and there is no room for more")


def _deliver(results: "_Results") -> None:
    """Hand results to the event loop that waits for them."""
    if results:
        loop = results[0][0].future.get_loop()
        loop.call_soon_threadsafe(_set_results, results)


def _set_results(results: "_Results") -> None:
    for ticket, result in results:
        if ticket.future.done():
            continue
        if isinstance(result, Exception):
            ticket.future.set_exception(result)
        else:
            ticket.future.set_result(result)
