"""The position of a run that follows a folder: the files taken, and their rows that are not trained on yet."""

from collections import deque
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any

from hostdev.ext.streams.arrivals.seen import UNKNOWN, Seen, Taken
from hostdev.ext.streams.following.progressive import ScoreWindow


@dataclass
class Pending:
    """A file with rows that are not trained on: its first `done` rows are.

    Attributes:
        nbytes: How many bytes of the file were taken; None for all.
        after: Rows in them that had been taken before, with rejected ones; `rows` and `done` do not count them.
    """

    name: str
    sha256: str
    rows: int
    done: int = 0
    nbytes: int | None = None
    after: int = 0


class FollowState:
    """What a checkpoint of a run that follows a folder holds besides the model; it belongs to the last step recorded.

    Its size does not depend on how long the run lasts.
    """

    def __init__(self, window: ScoreWindow) -> None:
        self.seen, self.window = Seen(), window
        self.pending: deque[Pending] = deque()  # in the order of training; all but the first have no row done
        self.set_aside = 0  # files
        self.changed = 0  # files that have changed after they were taken or set aside

    def take(
        self,
        name: str,
        sha256: str,
        rows: int,
        nbytes: int | None = None,
        after: int = 0,
        taken: Taken = UNKNOWN,
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
        """Return which files a run that resumes from here reads again: these, and those that sort after the last."""
        return {"needed": [each.name for each in self.pending], "last": self.seen.last, "taken": self.seen.taken}

    @property
    def waiting(self) -> int:
        """The number of rows of the files taken that are not trained on."""
        return sum(each.rows - each.done for each in self.pending)

    def as_values(self) -> dict[str, Any]:
        """Return the values for a checkpoint."""
        return {
            "seen": self.seen.as_values(),
            "window": self.window.as_values(),
            "pending": [list(astuple(each)) for each in self.pending],
            "set_aside": self.set_aside,
            "changed": self.changed,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Take the values that `as_values` returned."""
        self.seen = Seen.of(values["seen"])
        self.window.restore(values["window"])
        self.pending = deque(Pending(*each) for each in values["pending"])
        self.set_aside = values["set_aside"]
        self.changed = values.get("changed", 0)
