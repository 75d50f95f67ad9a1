"""Threads that do work behind, until the end of the program too: an executor takes none once the interpreter ends."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from hostdev.core.errors import PassingError

T = TypeVar("T")


class Workers:
    """Some threads that call what they are given, in order; a context, which waits for all of it at its end.

    begin  what each thread calls first
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
            except RuntimeError as error:  # the system allows no more
                self.__exit__()
                raise PassingError(
                    f"only {len(self._threads):,} of {len(wanted):,} threads could be started ({error}); ask for "
                    "fewer, such as with --threads, or allow more, as with ulimit -u"
                ) from None
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        for _thread in self._threads:
            self._work.put(None)
        if sys.is_finalizing():  # Python has stopped them
            return
        for thread in self._threads:
            if thread is not threading.current_thread():  # which may free who holds this
                thread.join()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Have a call made; return its result to be."""
        future: Future[T] = Future()
        self._work.put((future, call))
        return future

    @contextmanager
    def dropping_what_waits(self) -> Iterator[None]:
        """Drop the calls that have not begun where there is an error within."""
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
            del work, future, call  # nobody's result is held while this waits
