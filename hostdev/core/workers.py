"""Background threads. Unlike those of concurrent.futures, they accept work even while the interpreter exits.

`Worker` repeats one call, `Workers` runs submitted calls, and `run_in_thread` makes one call.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

from hostdev.core.errors import TransientError

T = TypeVar("T")


class Workers:
    """Threads that run submitted calls in order; leaving the context waits for all calls.

    Args:
        threads: The number of threads.
        name: The name of each thread.
        begin: Called once in each thread before any submitted call.
    """

    def __init__(self, threads: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._begin = begin
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(threads)]

    def __enter__(self) -> "Workers":
        wanted, self._threads = self._threads, []
        for thread in wanted:
            try:
                thread.start()
            except RuntimeError as error:  # the system's thread limit
                self.__exit__()
                raise TransientError(
                    f"only {len(self._threads):,} of {len(wanted):,} threads could be started ({error}); use fewer, "
                    "for example with --threads, or allow more, for example with ulimit -u"
                ) from None
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._threads:
            self._work.put(None)
        if sys.is_finalizing():  # Python has stopped the threads
            return
        for thread in self._threads:
            if thread is not threading.current_thread():  # a worker may hold the last reference to this object
                thread.join()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Queue a call; return its future."""
        future: Future[T] = Future()
        self._work.put((future, call))
        return future

    @contextmanager
    def drop_queued_on_error(self) -> Iterator[None]:
        """Drop all queued calls if the block raises."""
        try:
            yield
        except BaseException:
            with suppress(Empty):
                while True:
                    self._work.get_nowait()
            raise

    def _run(self) -> None:
        self._begin()
        while (work := self._work.get()) is not None:
            future, call = work
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
            del work, future, call  # hold no results while waiting


def call_all(threads: int, name: str, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Make calls in threads; yield their results in order. After an error, calls that have not begun are dropped."""
    with Workers(threads, name) as workers, workers.drop_queued_on_error():
        for future in [workers.submit(call) for call in calls]:
            yield future.result()


def run_in_thread(name: str, call: Callable[[], T]) -> "Future[T]":
    """Make a call in a daemon thread of its own; return its future, which also holds the call's error."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class Worker:
    """A daemon thread that makes a call when it is asked to and, with `seconds`, this long after the last call.

    An error of the call ends the thread, and is raised by the next `wait`, `wait_for`, `check` or `close`.

    Args:
        name: The thread's name.
        call: The call, without arguments.
        seconds: Time from the end of a call to the beginning of the next; None makes calls only when asked to.
        drains: Whether `stop` makes one more call, for work that still waits.

    Attributes:
        changed: Guards what `call` shares with other threads; notified after each call and by `ask` and `stop`.
        closing: Set when the thread is to end.
        failure: The error that ended the thread.
        begun: The number of calls that have begun.
        ended: The number of calls that have ended.
    """

    def __init__(
        self, name: str, call: Callable[[], object], *, seconds: float | None = None, drains: bool = False
    ) -> None:
        self.changed, self.closing = threading.Condition(), threading.Event()
        self.failure: BaseException | None = None
        self.begun = self.ended = self.asked = 0
        self._call, self._seconds, self._calls_again = call, seconds, drains
        self._last: Callable[[], object] | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> Self:
        """Start the thread; `ask` does this, too."""
        if self._thread.ident is None:
            self._thread.start()
        return self

    def ask(self) -> int:
        """Ask for a call that begins after this; return its number, for `wait`."""
        with self.changed:
            self.asked = self.begun + 1
            self.changed.notify_all()
            self.start()
            return self.asked

    def wait(self, number: int, seconds: float | None = None) -> bool:
        """Wait until the call of this number has ended; return whether it ended within `seconds`."""
        return self.wait_for(lambda: self.ended >= number, seconds)

    def wait_for(self, is_met: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a condition that `changed` guards is met; return whether it was met within `seconds`."""
        with self.changed:
            met = self.changed.wait_for(lambda: is_met() or self.failure is not None, seconds)
        self.check()
        return met

    def check(self) -> None:
        """Raise the error that has ended the thread, if any."""
        if self.failure is not None:
            raise self.failure

    def close(self, seconds: float | None = None, last: Callable[[], object] | None = None) -> bool:
        """End the thread as `stop` does, and raise the error that has ended it, if any."""
        has_ended = self.stop(seconds, last)
        self.check()
        return has_ended

    def stop(self, seconds: float | None = None, last: Callable[[], object] | None = None) -> bool:
        """End the thread after the current call and a call of `last`; return whether it ended within `seconds`."""
        with self.changed:
            self._last = last
            self.closing.set()
            self.changed.notify_all()
        if self._thread.ident is None or self._thread is threading.current_thread():
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._await_turn():
                self._call()
                with self.changed:
                    self.ended += 1
                    self.changed.notify_all()
            if self._last is not None:
                self._last()
        except BaseException as error:
            with self.changed:
                self.failure = error
                self.changed.notify_all()

    def _await_turn(self) -> bool:
        """Wait for the next call; return False if there is none."""
        with self.changed:
            self.changed.wait_for(lambda: self.asked > self.begun or self.closing.is_set(), self._seconds)
            if self.closing.is_set():
                if not self._calls_again:
                    return False
                self._calls_again = False
            self.begun += 1
            return True
