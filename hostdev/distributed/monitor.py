"""The monitor: heartbeats in a store, so that all ranks end if one fails, dies, hangs, or makes a different call."""

import hashlib
import hmac
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import Any, NamedTuple

from torch._C._distributed_c10d import PrefixStore

from hostdev.core.printable import printable
from hostdev.core.workers import run_in_thread
from hostdev.distributed import agreement
from hostdev.distributed.rank_environment import RankEnvironment
from hostdev.distributed.rendezvous import connect

HUNG_SECONDS = 24.0  # a rank without a heartbeat for so long counts as hung; a lack of memory may stall it for seconds
LOST_SECONDS = 3.0  # the same after a connection has broken
_UNLIKE_SECONDS = 1.2  # time that ranks may wait in different calls before they are ended
_LEFT_SECONDS = 4.0  # the same after a rank has left a loop: longer, because its error would explain more
_EVERY = 0.5  # seconds between heartbeats
_ANSWER_SECONDS = 3.0  # time for another rank to acknowledge a failure
_GONE = "stopped answering; was it killed?"
_HANGS = f"has sent no heartbeat for {HUNG_SECONDS:g} s; it hangs"


class _Seen(NamedTuple):
    """A rank's last heartbeat and calls, and the times at which each last changed."""

    sign: bytes
    since: float
    calls: tuple[agreement.Call, ...]
    calls_since: float


class Monitor:
    """Sends this rank's heartbeats, checks other ranks' heartbeats, and reports failures.

    Args:
        env: The rank environment of this process.
        prefix: Prefix of the store's keys.
        calls: The calls of this rank.
        on_fault: Called once, in a thread of the monitor, with the failed rank and the cause. It must end the process.
    """

    def __init__(
        self, env: RankEnvironment, prefix: str, calls: agreement.RankCalls, on_fault: Callable[[int, str], None]
    ) -> None:
        self._env, self._calls, self._on_fault = env, calls, on_fault
        self._store = PrefixStore(prefix, connect(env, HUNG_SECONDS, is_master=False))
        self._stop = threading.Event()
        self._found = threading.Lock()
        self._lost = False
        self._looked = time.monotonic()  # time of the store's last answer
        self._mine = calls.recent, self._looked  # this rank's calls, and the time of the latest
        self._beat(0)
        # A request hangs forever if the store's host hangs, so a second thread watches the requesting one.
        self._threads = [
            threading.Thread(target=work, name=f"hostdev-watch-{name}", daemon=True)
            for name, work in (("asks", self._ask), ("waits", self._wait))
        ]

    def start(self) -> None:
        """Start the threads, after the rendezvous."""
        self._looked = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stop the threads, before this rank leaves."""
        self._stop.set()
        for thread in self._threads:
            thread.join(HUNG_SECONDS)

    def lost(self) -> None:
        """Watch all ranks, with a shorter timeout, from now on. Called after a connection has broken."""
        self._lost = True

    def fail(self, why: str) -> None:
        """Report this rank's failure, and wait briefly until another rank acknowledges it.

        A launcher may kill all ranks once this rank ends.
        """
        self._stop.set()

        until = time.monotonic() + _ANSWER_SECONDS

        def tell() -> None:
            self._tell(self._env.rank, why)
            while not self._store.check(["answer"]) and time.monotonic() < until:
                time.sleep(_EVERY / 10)

        # A thread still inside torch at Python's exit would abort the process.
        run_within(2 * _ANSWER_SECONDS, tell)

    def answer(self) -> None:
        """Acknowledge a failure to the rank that reported it."""
        run_within(1.0, lambda: self._store.set("answer", ""))

    def absent(self) -> str | None:
        """Return text about the ranks that have not reached this rank's call; None if all have, or if one may be dead.

        This takes about two seconds, and at most ten.
        """
        found: list[str] = []

        def look() -> None:
            before = self._signs()
            time.sleep(4 * _EVERY)
            now = self._signs()
            others = [rank for rank in range(self._env.ranks) if rank != self._env.rank]
            if not all(rank in before and rank in now and before[rank] != now[rank] for rank in others):
                return
            calls = {rank: _parse_calls(now[rank]) for rank in others}
            last = self._calls.last
            behind = [rank for rank in others if calls[rank] and calls[rank][-1].number < last.number]
            if behind:
                which = (
                    ", which is alive and in " if len(behind) == 1 else f"; they are alive, and rank {behind[0]} is in "
                )
                found.append(
                    f"waits in {last.text} for {agreement.format_ranks(behind)}{which}{calls[behind[0]][-1].text}"
                )

        run_within(10.0, look)
        return found[0] if found else None

    def _signs(self) -> dict[int, bytes]:
        return {
            rank: self._store.get(f"alive/{rank}")
            for rank in range(self._env.ranks)
            if self._store.check([f"alive/{rank}"])
        }

    def _beat(self, count: int) -> None:
        self._store.set(f"alive/{self._env.rank}", f"{count} {agreement.format_calls(self._calls.recent)}")

    def _tell(self, rank: int, why: str) -> None:
        said = why.encode(errors="backslashreplace").decode()  # a path in it may contain surrogates
        self._store.compare_set("fault", "", _signed(self._env.token, f"{rank} {said}"))

    def _ask(self) -> None:
        ranks, rank = self._env.ranks, self._env.rank
        seen: dict[int, _Seen] = {}
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
        run_within(1.0, lambda: self._tell(rank, why))
        if self._env.rank == 0 and not self._env.hosted:
            time.sleep(2 * _EVERY)  # the store ends with this process; the others must read the cause first
        self._on_fault(rank, why)

    def _look(self, count: int, watched: list[int], seen: dict[int, _Seen]) -> tuple[int, str] | None:
        self._beat(count)
        if self._store.check(["fault"]):
            fault = _verified(self._env, self._store.get("fault"))
            if fault is not None:
                return fault
        patience = LOST_SECONDS if self._lost else HUNG_SECONDS
        for rank in watched:
            sign = self._store.get(f"alive/{rank}") if self._store.check([f"alive/{rank}"]) else b""
            now = time.monotonic()
            if rank not in seen or seen[rank].sign != sign:
                calls, before = _parse_calls(sign), seen.get(rank)
                since = before.calls_since if before is not None and before.calls == calls else now
                seen[rank] = _Seen(sign, now, calls, since)
            elif now - seen[rank].since > patience:
                return rank, _GONE if self._lost else _HANGS
        return self._unlike(seen)

    def _unlike(self, seen: dict[int, _Seen]) -> tuple[int, str] | None:
        """Return one of two ranks that are making different calls, with a message; None if no rank's call differs."""
        now, recent = time.monotonic(), self._calls.recent
        if self._mine[0] != recent:
            self._mine = recent, now
        for rank, one in seen.items():
            together = now - max(self._mine[1], one.calls_since)
            found = agreement.find_mismatch(recent, one.calls)
            if found is None or together < _UNLIKE_SECONDS:
                continue
            mine, other = found
            self._calls.wrong = agreement.describe_mismatch(mine, rank, other)
            if agreement.LEFT in (mine.kind, other.kind) and together < _LEFT_SECONDS:
                continue
            if rank > self._env.rank:
                return rank, agreement.describe_mismatch(other, self._env.rank, mine)
            return self._env.rank, self._calls.wrong
        return None


def run_within(seconds: float, work: Callable[[], Any]) -> None:
    """Run a function in a thread, wait for it for a limited time, and ignore its errors."""
    wait([run_in_thread("hostdev-monitor", work)], seconds)


def _parse_calls(sign: bytes) -> tuple[agreement.Call, ...]:
    return agreement.parse_calls(sign.decode(errors="replace").partition(" ")[2])


def _signed(token: str, text: str) -> str:
    """Return a message preceded by its signature with the run's token."""
    return f"{hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()} {text}"


def _verified(env: RankEnvironment, message: bytes) -> tuple[int, str] | None:
    """Return the rank and the text of a signed message, or None if no rank of this run wrote it."""
    text = message.decode(errors="replace").partition(" ")[2]
    if not hmac.compare_digest(message, _signed(env.token, text).encode()):
        return None
    rank, _, why = text.partition(" ")
    if not rank.isdecimal() or len(rank) > 9 or int(rank) >= env.ranks:
        return None
    return int(rank), printable(why)
