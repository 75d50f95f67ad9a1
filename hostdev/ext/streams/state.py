"""The position of a run that follows a folder: the files taken, their rows that are not trained on yet, and the logs.

files.jsonl has a line for each file that was taken, and set_aside.jsonl a line for each file that was set aside.
"""

import contextlib
import json
import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, Any

from hostdev.core import json_files
from hostdev.core.errors import naming
from hostdev.core.run_files import ASIDE_LOG, FILES_LOG, GROWN, REPLACED
from hostdev.ext.streams.folder import hash_of
from hostdev.ext.streams.progressive import ScoreWindow
from hostdev.ext.streams.seen import UNKNOWN, Seen, Taken


@dataclass
class Pending:
    """A file that was taken, but that is not finished: only its first `done` of `rows` rows are trained on.

    Attributes:
        nbytes: How many bytes of the file were taken; None for all.
        after: Number of rows in these bytes that had been taken before, with rejected rows; `rows` and `done` do not
            count them.
    """

    name: str
    sha256: str
    rows: int
    done: int = 0
    nbytes: int | None = None
    after: int = 0


class FollowState:
    """The state of the files after the last recorded step, which a checkpoint holds besides the model.

    Its size grows with the number of files in the folder, not with the length of the run.
    """

    def __init__(self, window: ScoreWindow) -> None:
        self.seen, self.window = Seen(), window
        self.pending: deque[Pending] = deque()  # in the order of training; all but the first have no row done
        self.set_aside = 0  # number of files that were set aside
        self.changed = 0  # files that have changed after they were taken or set aside

    def take(
        self, name: str, sha256: str, rows: int, nbytes: int | None = None, after: int = 0, taken: Taken = UNKNOWN
    ) -> None:
        """Record that a file was scored, and that its rows are next."""
        self.seen.take(name, sha256, taken)
        self.pending.append(Pending(name, sha256, rows, 0, nbytes, after))

    def advance(self, rows: int) -> None:
        """Record that the next rows, of one step, are trained on."""
        while rows:
            first = self.pending[0]
            some = min(rows, first.rows - first.done)
            first.done, rows = first.done + some, rows - some
            if first.done == first.rows:
                self.pending.popleft()

    def needed(self) -> dict[str, Any]:
        """Return the files that a run that resumes from here reads: "needed", and those that sort after "last"."""
        return {"needed": [each.name for each in self.pending], "last": self.seen.last, "taken": self.seen.taken}

    @property
    def waiting(self) -> int:
        """The number of rows of the files taken that are not trained on yet."""
        return sum(each.rows - each.done for each in self.pending)

    def as_values(self) -> dict[str, Any]:
        """Return the state as values for a checkpoint."""
        return {
            "seen": self.seen.as_values(),
            "window": self.window.as_values(),
            "pending": [list(astuple(each)) for each in self.pending],
            "set_aside": self.set_aside,
            "changed": self.changed,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Set the state to values that `as_values` returned."""
        self.seen = Seen.of(values["seen"])
        self.window.restore(values["window"])
        self.pending = deque(Pending(*each) for each in values["pending"])
        self.set_aside = values["set_aside"]
        self.changed = values.get("changed", 0)


class FileLogs:
    """The logs files.jsonl and set_aside.jsonl; a file's line in files.jsonl is written before training on the file.

    A run that resumes takes the files of files.jsonl in the same order, even if other files have arrived since.

    Args:
        folder: The run directory.
        taken: The number of files that the checkpoint has, whose lines stay; 0 for a new run.

    Attributes:
        changed: Number of lines about changes of known files.
    """

    def __init__(self, folder: Path, taken: int) -> None:
        self.folder, self.changed = folder, 0
        self.expected: list[Pending] = []  # files that the killed process took after the checkpoint
        with naming(folder):
            self._files = (folder / FILES_LOG).open("a+", buffering=1)
            self._aside = (folder / ASIDE_LOG).open("a+", buffering=1)
            end = 0
            for after, line in _lines(self._files):
                if not isinstance(line.get("number"), int):
                    continue
                if line["number"] <= taken:
                    end = after
                else:
                    self.expected.append(_expected(line))
            self._files.truncate(end)
            self._known: set[int] = set()
            end = 0
            for end, line in _lines(self._aside):  # noqa: B007  (used after the loop)
                self._known.add(_number(line))
                self.changed += line.get("why") in (GROWN, REPLACED)
            self._aside.truncate(end)

    def write(self, line: dict[str, Any]) -> None:
        """Append a line about the file that is taken next, and flush it to the operating system."""
        with naming(self.folder):
            self._files.write(json.dumps(line) + "\n")

    def set_aside(self, line: dict[str, Any]) -> bool:
        """Append a line about a file, unless the log has one with the same `why`; return whether it was appended."""
        if (number := _number(line)) in self._known:
            return False
        self._known.add(number)
        self.changed += line.get("why") in (GROWN, REPLACED)
        with naming(self.folder):
            self._aside.write(json.dumps(line) + "\n")
        return True

    def close(self) -> None:
        """Close the files."""
        for file in (self._files, self._aside):
            with contextlib.suppress(OSError):
                file.close()


def _expected(line: dict[str, Any]) -> Pending:
    nbytes, after = (value if isinstance(value := line.get(name), int) else None for name in ("bytes", "after"))
    return Pending(str(line.get("file")), str(line.get("sha256")), 0, 0, nbytes, after or 0)


def _number(line: dict[str, Any]) -> int:
    return hash_of(f"{line.get('file')}\0{line.get('why')}")


def _lines(file: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the lines of a log, each with the position of its end in bytes; broken lines are left out."""
    with open(file.fileno(), "rb", closefd=False) as raw:
        raw.seek(0)
        end = 0
        for text in raw:
            end += len(text)
            try:
                line = json_files.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict) and text.endswith(b"\n"):
                yield end, line
    os.lseek(file.fileno(), 0, os.SEEK_END)
