"""What ends all ranks where one has failed, was killed or hangs: a thread that looks at a store twice a second."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from hostdev.parallel.place import Place

HUNG_SECONDS = 20.0  # without a sign of life
LOST_SECONDS = 3.0  # the same, where a connection has broken
_EVERY = 0.5
_ANSWER_SECONDS = 3.0
_ANSWER = 10.0  # seconds that the store may take


class Watch:
    """Gives signs of life of this rank, and looks for those of two others and for what ranks have failed with.

    place     of this process
    prefix    of the store's keys
    on_fault  called in the watching thread, once, with a line that names the rank and the cause; is to end the process
    """

    def __init__(self, place: Place, prefix: str, on_fault: Callable[[int, str], None]) -> None:
        self._place, self._on_fault = place, on_fault
        store = dist.TCPStore(place.address, place.port, is_master=False, timeout=timedelta(seconds=_ANSWER))
        self._store = dist.PrefixStore(prefix, store)
        self._stop = threading.Event()
        self._lost = False
        self._using = threading.Lock()
        self._beat(0)
        self._thread = threading.Thread(target=self._watch, name="hostdev-watch", daemon=True)

    def start(self) -> None:
        """Begin; all ranks have met."""
        self._thread.start()

    def fail(self, why: str) -> None:
        """Tell all that this rank has failed."""
        self._stop.set()
        self._tell(self._place.rank, why)

    def answer(self) -> None:
        """Tell who has failed that it is known."""
        with contextlib.suppress(Exception), self._using:
            self._store.set("answer", "")

    def await_answer(self) -> None:
        """Wait a little until another rank knows that this one has failed: a launcher may end all when it ends."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        with contextlib.suppress(Exception):
            while time.monotonic() < deadline and not self._store.check(["answer"]):
                time.sleep(0.05)  # others look twice a second

    def lost(self) -> None:
        """A connection has broken: who does not answer now is gone."""
        self._lost = True

    def stop(self) -> None:
        """End: this rank is about to leave."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _tell(self, rank: int, why: str) -> None:
        with contextlib.suppress(Exception), self._using:  # the store may be what is gone
            self._store.compare_set("fault", "", f"{rank} {why}")

    def _beat(self, count: int) -> None:
        self._store.set(f"alive/{self._place.rank}", str(count))

    def _watch(self) -> None:
        ranks, rank = self._place.ranks, self._place.rank
        watched = sorted({(rank + 1) % ranks, 0} - {rank})
        seen: dict[int, tuple[bytes, float]] = {}
        count = 0
        while not self._stop.wait(_EVERY):
            count += 1
            try:
                with self._using:
                    found = self._look(count, watched, seen)
            except Exception:
                if self._stop.is_set():
                    return
                found = 0, "does not answer any more; was it killed?"
            if found is not None and not self._stop.is_set():
                self._stop.set()
                self._tell(*found)
                self._on_fault(*found)
                return

    def _look(self, count: int, watched: list[int], seen: dict[int, tuple[bytes, float]]) -> tuple[int, str] | None:
        self._beat(count)
        if self._store.check(["fault"]):
            rank, _, why = self._store.get("fault").decode().partition(" ")
            return int(rank), why
        patience = LOST_SECONDS if self._lost else HUNG_SECONDS
        if self._lost:
            watched = [rank for rank in range(self._place.ranks) if rank != self._place.rank]
        for rank in watched:
            sign = self._store.get(f"alive/{rank}")
            before = seen.get(rank)
            now = time.monotonic()
            if before is None or before[0] != sign:
                seen[rank] = sign, now
            elif now - before[1] > patience:
                killed = "does not answer any more; was it killed?"
                return rank, killed if self._lost else f"has given no sign of life for {patience:g} s; it hangs"
        return None
