"""The choice of the next file: the first complete one by name. Late, repeated and unreadable files are set aside."""

import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice

from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.core.run_files import FILES_LOG, GROWN, REPLACED
from hostdev.ext.streams.converting import LATE, REPEATED, Again, Converted, FilePart, Refused
from hostdev.ext.streams.folder import Folder, key_of
from hostdev.ext.streams.options import Until
from hostdev.ext.streams.seen import SAME, UNSETTLED, Change, Taken, digest_bits
from hostdev.ext.streams.state import FileLogs, FollowState, Pending
from hostdev.ext.streams.watcher import AHEAD, Look, Watcher

_SECONDS = 0.1  # between two checks for a signal
_SPARE = 1024  # with more names of removed files than this, all of them are forgotten

Wait = Callable[[str], bool]


class NextFile:
    """Takes the files of a folder in the order of their names.

    Args:
        watcher: Looks at the folder and converts files.
        logs: Receives a line for each file that is set aside. The files of `FileLogs.expected` are taken first.
        until: When to stop taking files; None for never.
        note: Writes a line for the user.
        takes_grown: Whether to take lines that are added to the file taken last.
    """

    def __init__(
        self,
        watcher: Watcher,
        folder: Folder,
        state: FollowState,
        logs: FileLogs,
        until: Until | None,
        note: Callable[[str], object],
        *,
        takes_grown: bool = False,
    ) -> None:
        self._note, self._takes_grown = note, takes_grown
        self._watcher, self._folder, self._state, self._logs, self._until = watcher, folder, state, logs, until
        self._expected = deque(logs.expected)
        self._asked: int | None = None  # looks with higher numbers began after all files were taken
        self._since = time.monotonic()  # when the last file was taken or set aside
        self._troubles: set[str] = set()  # names of files whose trouble was mentioned; "" for the folder
        last = state.seen.last
        if takes_grown and last is not None and (taken := state.seen.get(last)) is not None:
            state.seen.note(last, taken._replace(stamp=-1))  # so that rows which an earlier run left out are found

    def take(self, wait: Wait) -> Converted | None:
        """Return the next file; None if no more is to be taken, or `wait` returns False.

        Args:
            wait: Called repeatedly with the reason for waiting; returns whether to wait longer.

        Raises:
            UserError: A file that a killed process had taken after its last checkpoint is gone or has changed.
            SpoolError: The disk is full.
        """
        if self._expected:
            file = self.find(self._expected[0], wait, f"remove {self._logs.folder / FILES_LOG} to go on without it")
            if file is not None:
                self._expected.popleft()
            return file
        look = self._watcher.look(0, 0.0)
        while True:
            names, changing = self._names(look), self._note_changes(look)
            if not changing and self._is_over(names, look):
                return None
            found: Converted | Refused | Again | None = Again("", None)
            last = self._state.seen.last
            if last is not None and last in changing and self._takes_grown:  # its new rows come before other files
                names = [last]
                if look.changed[last].kind == GROWN:
                    found = self._convert_grown(last, look.changed[last], wait)
            elif names and names[0] in look.settled:
                self._watcher.prepare([(name, look.settled[name]) for name in names if name in look.settled])
                found = self._convert(names[0], look, wait)
            elif not names and not changing and self._asked is None:
                self._asked = self._watcher.look_again()
            if isinstance(found, Converted):
                self._since, self._asked = time.monotonic(), None
                return found
            if isinstance(found, Refused):
                self._set_aside(found)
                continue
            if found is None or not wait(self._describe_wait(names)):
                return None
            look = self._watcher.look(look.number, _SECONDS)

    def find(self, expected: Pending, wait: Wait, otherwise: str) -> Converted | None:
        """Return a file that was taken before; None if `wait` returns False.

        Args:
            otherwise: Advice, for the error message, if the file cannot be read again.

        Raises:
            UserError: The file is gone or has changed.
        """
        name = expected.name
        path = self._folder.open(name)

        def lost(what: str) -> UserError:
            return UserError(
                f"{shown_place(path)} {what}, but was taken before, and its rows are not all trained on; put it back "
                f"and resume again, or {otherwise}"
            )

        while True:
            state = self._folder.state(name)
            if state is None:
                raise lost("is gone")
            if expected.nbytes is not None and state.size < expected.nbytes:
                raise lost("has changed")
            part = FilePart(expected.nbytes, expected.after)
            found = self._watcher.convert(name, state, lambda: wait(f"reads {name} again"), part)
            if found is None or isinstance(found, Converted):
                if found is not None and found.sha256 != expected.sha256:
                    found.close()
                    raise lost("has changed")
                return found
            if isinstance(found, Refused):
                raise lost(f"cannot be read ({found.reason})")
            if found.reason is not None:
                self._mention(name, found.reason)
            if not wait(f"reads {name} again"):
                return None

    def _names(self, look: Look) -> list[str]:
        """Return the names of the next few files; set aside late files."""
        seen = self._state.seen
        if look.error is not None:
            self._mention(
                "", f"{shown_place(self._folder.path)}: the folder cannot be listed ({look.error}); trying again"
            )
            return []
        for name in look.late:
            if not seen.is_known(name):
                where = shown_place(self._folder.open(name))
                reason = f"{where}: the name sorts before {seen.last}, which was taken already"
                self._set_aside(Refused(name, LATE, reason))
        if seen.size > len(look.names) + _SPARE:
            seen.keep(look.names)
        return list(islice((name for name in look.next if not (seen.is_known(name) or seen.is_late(name))), 1 + AHEAD))

    def _note_changes(self, look: Look) -> set[str]:
        """Report changes of known files; return the files that still change, or have new rows to take."""
        seen, changing = self._state.seen, set()
        for name, change in look.changed.items():
            taken = seen.get(name)
            if taken is None or taken.stamp == change.state.stamp:
                continue  # its change was noted after this look
            if change.kind == UNSETTLED and change.about:
                self._mention(name, f"{shown_place(self._folder.open(name))}: {change.about}; trying again")
            elif change.kind == UNSETTLED or (change.kind == GROWN and name == seen.last and self._takes_grown):
                changing.add(name)
            else:
                self._note_change(name, change)
        return changing

    def _note_change(self, name: str, change: Change) -> None:
        """Report that a file has changed, and record its state, so that only its next change is examined."""
        if change.kind != SAME:
            what = "taken" if change.taken.lines else "set aside"
            where = shown_place(self._folder.open(name))
            reason = f"{where} has changed after it was {what}: {change.about}; {self._advise(name, change)}"
            self._write_aside(Refused(name, change.kind, reason))
            self._state.changed = self._logs.changed
        self._state.seen.note(name, change.taken._replace(stamp=change.state.stamp))

    def _advise(self, name: str, change: Change) -> str:
        if change.kind == GROWN and change.taken.lines:
            late = "" if name == self._state.seen.last else ", as it is not the file taken last"
            option = "" if late or self._takes_grown else "; --follow-grown would take its new lines"
            return f"these are not trained on{late}{option}"
        return "it is not trained on again; give new rows to a file with a later name"

    def _convert_grown(self, name: str, change: Change, wait: Wait) -> Converted | Refused | Again | None:
        """Return the new rows of the file taken last; None if `wait` returns False; `Again` if they are refused."""
        part = FilePart(after=change.taken.lines)
        found = self._watcher.convert(name, change.state, lambda: wait(f"reads {name}"), part)
        if isinstance(found, Again) and found.reason is not None:
            self._mention(name, found.reason)
        if isinstance(found, Refused):
            self._write_aside(found)
            self._state.seen.note(name, change.taken._replace(stamp=change.state.stamp))
            return Again(name, None)
        return found

    def _is_over(self, names: list[str], look: Look) -> bool:
        """Return whether `until` is reached, so that no more files are taken."""
        until, seen = self._until, self._state.seen
        if until is None or look.number == 0 or look.error is not None:
            return False
        if until.name is not None and names:
            return key_of(names[0]) > key_of(until.name)
        if names or self._asked is None or look.number <= self._asked:
            return False
        if until.name is not None:
            return seen.is_known(until.name) or seen.is_late(until.name)
        return until.idle is None or time.monotonic() - self._since >= 60 * until.idle

    def _convert(self, name: str, look: Look, wait: Wait) -> Converted | Refused | Again | None:
        """Return a file's rows, or why it is not taken: its content may be known. None if `wait` returns False."""
        found = self._watcher.convert(name, look.settled[name], lambda: wait(f"reads {name}"))
        if isinstance(found, Again) and found.reason is not None:
            self._mention(name, found.reason)
        if not isinstance(found, Converted) or (same := self._state.seen.find_same(found.sha256)) is None:
            return found
        found.close()
        reason = f"{shown_place(self._folder.open(name))}: the content is that of {same}, which was taken already"
        return Refused(name, REPEATED, reason, found.sha256, found.state)

    def _set_aside(self, refused: Refused) -> None:
        """Record that a file is not trained on."""
        self._since = time.monotonic()
        state = refused.state
        taken = Taken() if state is None else Taken(state.size, state.stamp, digest_bits(refused.sha256))
        self._state.seen.note(refused.name, taken)
        self._state.set_aside += 1
        self._write_aside(refused)

    def _write_aside(self, refused: Refused) -> None:
        """Log and print a line about rows that are not trained on, unless the log has such a line already."""
        line = {"file": refused.name, "why": refused.why, "reason": refused.reason, "sha256": refused.sha256}
        if self._logs.set_aside({**line, "at": datetime.now(UTC).isoformat(timespec="seconds")}):
            what = "" if refused.why in (GROWN, REPLACED) else f"set aside ({refused.why}): "
            self._note(what + refused.reason)

    def _mention(self, about: str, text: str) -> None:
        """Print a line about a trouble that may be transient, once for each file."""
        if about not in self._troubles:
            self._troubles = {*list(self._troubles)[-100:], about}
            self._note(text)

    def _describe_wait(self, names: list[str]) -> str:
        if names:
            return f"waits until {names[0]} is complete"
        seen = self._state.seen
        after = "" if seen.last is None else f" after {seen.last}"
        rest = f", {counted(self._state.waiting, 'row')} wait for a full batch" if self._state.waiting else ""
        where = shown_place(self._folder.path)
        return f"waits for the next file in {where}{after}: {counted(seen.taken, 'file')} taken{rest}"
