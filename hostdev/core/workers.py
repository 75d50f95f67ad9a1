"""Background threads that, unlike those of concurrent.futures, accept work even while the interpreter exits."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

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
        if sys.is_finalizing():  # Python has stopped them
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
    """Make calls in threads; yield their results in order. After an error, those that have not begun are dropped."""
    with Workers(threads, name) as workers, workers.drop_queued_on_error():
        for future in [workers.submit(call) for call in calls]:
            yield future.result()
