"""What ends all ranks where one has failed, was killed or hangs: signs of life in a store, twice a second."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from hostdev.parallel.place import Place

HUNG_SECONDS = 24.0  # without a sign of life: a machine that is short of memory may stall a process for some
LOST_SECONDS = 3.0  # the same, where a connection has broken
_EVERY = 0.5
_ANSWER_SECONDS = 3.0
_GONE = "does not answer any more; was it killed?"
_HANGS = f"has given no sign of life for {HUNG_SECONDS:g} s; it hangs"


class Watch:
    """Gives signs of life of this rank, looks for those of others, and for what ranks have failed with.

    place     of this process
    prefix    of the store's keys
    on_fault  called once, in a thread of the watch, with the rank that has failed and why; is to end the process
    """

    def __init__(self, place: Place, prefix: str, on_fault: Callable[[int, str], None]) -> None:
        self._place, self._on_fault = place, on_fault
        store = TCPStore(place.address, place.port, is_master=False, timeout=timedelta(seconds=HUNG_SECONDS))
        self._store = PrefixStore(prefix, store)
        self._stop = threading.Event()
        self._found = threading.Lock()
        self._lost = False
        self._looked = time.monotonic()  # when the store has answered last
        self._store.set(f"alive/{self._place.rank}", "0")
        # Who asks the store may wait for ever where its host hangs: so another watches over the asking.
        self._threads = [
            threading.Thread(target=work, name=f"hostdev-watch-{name}", daemon=True)
            for name, work in (("asks", self._ask), ("waits", self._wait))
        ]

    def start(self) -> None:
        """Begin; all ranks have met."""
        self._looked = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End: this rank is about to leave."""
        self._stop.set()
        for thread in self._threads:
            thread.join(HUNG_SECONDS)

    def lost(self) -> None:
        """A connection has broken: who does not answer soon is gone."""
        self._lost = True

    def fail(self, why: str) -> None:
        """Tell all that this rank has failed, and wait a little until another knows: a launcher may end all then."""
        self._stop.set()

        until = time.monotonic() + _ANSWER_SECONDS

        def tell() -> None:
            self._tell(self._place.rank, why)
            while not self._store.check(["answer"]) and time.monotonic() < until:
                time.sleep(_EVERY / 10)  # others look now and then

        # A thread that is still in torch's code when Python ends would abort the process.
        within(2 * _ANSWER_SECONDS, tell)

    def answer(self) -> None:
        """Tell who has failed that it is known."""
        within(1.0, lambda: self._store.set("answer", ""))

    def _tell(self, rank: int, why: str) -> None:
        said = why.encode(errors="backslashreplace").decode()  # a path may be in no encoding
        self._store.compare_set("fault", "", f"{rank} {said}")

    def _ask(self) -> None:
        ranks, rank = self._place.ranks, self._place.rank
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self._stop.wait(_EVERY):
            count += 1
            watched = range(ranks) if self._lost else {(rank + 1) % ranks, 0}
            try:
                found = self._look(count, [other for other in watched if other != rank], seen)
            except Exception:
                found = 0, _GONE
            self._looked = time.monotonic()
            if found is not None:
                self._report(*found)
                return

    def _wait(self) -> None:
        while not self._stop.wait(_EVERY):
            if time.monotonic() - self._looked > HUNG_SECONDS:
                self._report(0, _HANGS)
                return

    def _report(self, rank: int, why: str) -> None:
        if not self._found.acquire(blocking=False) or self._stop.is_set():
            return
        self._stop.set()
        within(1.0, lambda: self._tell(rank, why))
        self._on_fault(rank, why)

    def _look(self, count: int, watched: list[int], seen: dict[int, tuple[bytes, float]]) -> tuple[int, str] | None:
        self._store.set(f"alive/{self._place.rank}", str(count))
        if self._store.check(["fault"]):
            failed, _, why = self._store.get("fault").decode().partition(" ")
            return int(failed), why
        patience = LOST_SECONDS if self._lost else HUNG_SECONDS
        for rank in watched:
            sign = self._store.get(f"alive/{rank}") if self._store.check([f"alive/{rank}"]) else b""
            now = time.monotonic()
            if rank not in seen or seen[rank][0] != sign:
                seen[rank] = sign, now
            elif now - seen[rank][1] > patience:
                return rank, _GONE if self._lost else _HANGS
        return None


def within(seconds: float, work: Callable[[], Any]) -> None:
    """Do something that may wait for ever, or fail, and wait only so long for it."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            work()

    thread = threading.Thread(target=quietly, daemon=True)
    thread.start()
    thread.join(seconds)
