"""A thread that polls a folder, and converts the next files while earlier ones are trained on.

Files are found by listing, not by notifications, which network file systems do not have.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from hostdev.core.errors import in_words
from hostdev.core.workers import Worker, Workers
from hostdev.ext.streams.converting import REFUSED, WHOLE, Again, Converted, FilePart, Refused, convert
from hostdev.ext.streams.example import Example
from hostdev.ext.streams.folder import FileState, Folder
from hostdev.ext.streams.seen import UNSETTLED, Change, Seen, examine

AHEAD = 2  # files that are converted before they are needed, each in a thread
_MOST_UNSETTLED = 1024  # maximum number of next files whose states are compared between two looks
_ATTEMPTS = 3  # attempts to read a file that the system fails to read, one at each look

Result = Converted | Refused | Again


@dataclass(frozen=True)
class Look:
    """The result of a look at the folder.

    Attributes:
        number: The look's number, from 1; 0 before the first look.
        names: All listed names, sorted.
        next: The names that are neither known nor late, sorted.
        late: The unknown names that sort before a file that was taken.
        settled: The states of the complete files among the first next files, by name.
        changed: The changes of files that were taken or set aside earlier, by name.
        error: Why the folder could not be listed, in which case the other values are empty; None if it was listed.
    """

    number: int
    names: Sequence[str] = ()
    next: Sequence[str] = ()
    late: Sequence[str] = ()
    settled: dict[str, FileState] = field(default_factory=dict)
    changed: dict[str, Change] = field(default_factory=dict)
    error: str | None = None


class Watcher:
    """Looks at a folder, and converts the next files. A context manager, which starts and ends the threads.

    Args:
        folder: The folder.
        seen: The files that were taken; the caller must change it only between calls of this object's methods.
        example: Encodes rows.
        spools: The folder for temporary files.
        seconds: The time between two looks. A file that does not change meanwhile is complete, if it has an end.
        ahead: Files that are converted ahead, 1 or more.
        quiet: Seconds after which a file that has not changed is complete, even if it has no end.
    """

    def __init__(
        self,
        folder: Folder,
        seen: Seen,
        example: Example,
        spools: Path,
        seconds: float,
        ahead: int = AHEAD,
        quiet: float = 0.0,
    ) -> None:
        self._folder, self._seen, self._example, self._spools = folder, seen, example, spools
        self._seconds, self._ahead, self._quiet = seconds, ahead, quiet
        self._workers = Workers(ahead, "hostdev-arrivals")
        self._worker = Worker("hostdev-follow", self._take_look, seconds=seconds)
        self._changed, self._stop = self._worker.changed, self._worker.closing
        self._states: dict[str, tuple[FileState, float]] = {}  # by name: the state, and when it was first seen
        self._open: dict[str, FileState] = {}  # files without an end, which are complete once they are quiet
        self._turn = 0  # index of the first older known file to look at next; a few are looked at in turn
        self._converting: dict[str, tuple[tuple[FileState, FilePart], Future[Result]]] = {}
        self._failures: dict[str, int] = {}
        self._look = Look(0)
        self._own = ""  # the file that the caller has, or waits for

    def __enter__(self) -> Self:
        self._workers.__enter__()
        self._worker.ask()
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.stop()
        self._workers.__exit__()
        for _, future in self._converting.values():
            _discard(future)
        self._converting.clear()

    def look(self, after: int, seconds: float) -> Look:
        """Return the newest look when its number is above `after`, or after `seconds` in any case."""
        self._worker.wait_for(lambda: self._look.number > after, seconds)
        return self._look

    def look_again(self) -> int:
        """Ask for a look at once; return a number: looks with higher numbers began after this call."""
        return self._worker.ask() - 1

    def convert(self, name: str, state: FileState, wait: Callable[[], bool], part: FilePart = WHOLE) -> Result | None:
        """Return a file's rows, or why there are none; None if `wait`, which is called repeatedly, returns False."""
        if part.nbytes is None and self._open.get(name) == state and not self._is_quiet(name, state):
            return Again(name, None, is_open=True)
        with self._changed:
            self._own = name
        future = self._start(name, state, part)
        with self._changed:
            self._converting.pop(name, None)
        while not _is_done(future, 0.05):
            if not wait():
                future.add_done_callback(_discard)
                return None
        found = future.result()
        if isinstance(found, Again) and found.is_open:
            self._open = {**{other: state for other, state in self._open.items() if other in self._states}, name: state}
        if isinstance(found, Again) and found.reason is not None:
            self._failures[name] = self._failures.get(name, 0) + 1
            if self._failures[name] >= _ATTEMPTS:
                self._failures.pop(name)
                return Refused(name, REFUSED, f"{found.reason}, {_ATTEMPTS} times")
        else:
            self._failures.pop(name, None)
        return found

    def _is_quiet(self, name: str, state: FileState) -> bool:
        """Return whether a file has not changed for so long that it is complete, even without an end."""
        if not self._folder.must_settle or time.time() - state.modified / 1e9 >= self._quiet:
            return True
        before, since = self._states.get(name, (None, 0.0))
        return before == state and time.monotonic() - since >= self._quiet

    def _start(self, name: str, state: FileState, part: FilePart = WHOLE) -> "Future[Result]":
        """Return the future of a file's conversion; begin the conversion unless it has begun."""
        is_quiet = part.nbytes is not None or self._is_quiet(name, state)
        with self._changed:
            before = self._converting.get(name)
            if before is not None and before[0] == (state, part):
                return before[1]
            if before is not None:
                before[1].add_done_callback(_discard)
            future: Future[Result] = self._workers.submit(
                lambda: convert(
                    self._folder, name, state, self._example, self._spools, self._stop, part, is_quiet=is_quiet
                )
            )
            self._converting[name] = (state, part), future
            return future

    def prepare(self, files: Sequence[tuple[str, FileState]]) -> None:
        """Begin to convert the next files, given with their states, unless enough conversions are in progress."""
        for name, state in files:
            with self._changed:
                is_busy = name not in self._converting and len(self._converting) > self._ahead
            if not is_busy:
                self._start(name, state)

    def _take_look(self) -> None:
        look = self._make_look(self._worker.begun)
        self._convert_ahead(look)
        self._look = look

    def _make_look(self, number: int) -> Look:
        try:
            names = self._folder.names()
        except OSError as error:
            return Look(number, error=in_words(error))
        late: list[str] = []
        next_ones: list[str] = []
        for name in names:
            if not self._seen.is_known(name):
                (late if self._seen.is_late(name) else next_ones).append(name)
        states: dict[str, tuple[FileState, float]] = {}
        settled = {}
        for name in next_ones[:_MOST_UNSETTLED]:
            state = self._try_state(name)
            if state is None or not self._has_settled(name, state, states):
                continue
            if self._open.get(name) != state or self._is_quiet(name, state):
                settled[name] = state
        changed = {}
        for name in self._choose_known(names):
            taken, state = self._seen.get(name), self._try_state(name)
            if taken is None or taken.size < 0 or state is None or state.stamp == taken.stamp:
                continue
            if self._has_settled(name, state, states):
                changed[name] = examine(self._folder, name, taken, state, self._stop)
            else:
                changed[name] = Change(UNSETTLED, state, taken)
        self._states = states
        return Look(number, names, next_ones, late, settled, changed)

    def _try_state(self, name: str) -> FileState | None:
        try:
            return self._folder.state(name)
        except OSError:
            return None

    def _has_settled(self, name: str, state: FileState, states: dict[str, tuple[FileState, float]]) -> bool:
        """Record in `states` a file's state, and since when it has been the same; return whether it is settled."""
        now = time.monotonic()
        before, since = self._states.get(name, (None, now))
        states[name] = state, since if before == state else now
        return not self._folder.must_settle or (before == state and now - since >= self._seconds)

    def _choose_known(self, names: Sequence[str]) -> list[str]:
        """Return the known files to look at: the last ones, those that change, and some of the older ones in turn."""
        known = [name for name in names if self._seen.is_known(name)]
        half = self._folder.most_looked // 2
        older, last = known[:-half], known[-half:]
        turn = self._turn = self._turn % max(1, len(older))
        self._turn += half
        busy = [name for name in older if name in self._states]
        return list(dict.fromkeys([*last, *busy, *older[turn : turn + half]]))

    def _convert_ahead(self, look: Look) -> None:
        """Begin to convert the first next files if they are complete; drop conversions of files that are not next."""
        wanted = list(look.next[: self._ahead])
        with self._changed:
            dropped = [] if look.error else [name for name in self._converting if name not in look.next]
            for name in dropped:
                self._converting.pop(name)[1].add_done_callback(_discard)
            busy = len(self._converting)
        for name in wanted:
            if name not in look.settled:
                break
            if name == self._own:
                continue
            if busy < self._ahead or name in self._converting:
                busy += name not in self._converting
                self._start(name, look.settled[name])


def _is_done(future: "Future[Result]", seconds: float) -> bool:
    """Wait for a result, at most this time; return whether there is one."""
    try:
        future.exception(seconds)
    except TimeoutError:
        return False
    return True


def _discard(future: "Future[Result]") -> None:
    """Remove the rows of a conversion that is not needed."""
    if future.exception() is None and isinstance(found := future.result(), Converted):
        found.close()
