"""What each rank does together with the others, by number, so that ranks that wait for different things are told.

Collectives are called on all ranks in the same order. Where one rank predicts and another takes a training step, both
wait: for each other. So each rank counts what it begins, and its heartbeat carries the number and the name.
"""

from collections.abc import Sequence
from typing import NamedTuple

from hostdev.core.errors import UserError
from hostdev.core.printable import printable

ADVICE = "all ranks are to call the same, in the same order (docs/parallel.md)"
_MOST_RECENT = 8
LEFT = "left"  # the kind of a call by which a loop was left, maybe by an error that is still on its way


class Call(NamedTuple):
    """Something that all ranks do together.

    number  of calls that this rank has begun, in step with the others
    kind    ranks whose calls of one number are of different kinds wait for each other for ever
    text    for messages, such as "runtime.predict()"
    """

    number: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.number}|{self.kind}|{self.text}"

    @classmethod
    def parse(cls, text: str) -> "Call | None":
        """Return a call of another rank's heartbeat; None for what is none."""
        number, _, rest = text.partition("|")
        kind, _, name = rest.partition("|")
        return cls(int(number), kind, printable(name, 120)) if number.isdecimal() and len(number) < 19 else None


def format_calls(calls: Sequence[Call]) -> str:
    """Return calls as a heartbeat carries them."""
    return "\n".join(map(str, calls))


def parse_calls(text: str) -> tuple[Call, ...]:
    """Return the calls that a heartbeat carries."""
    found = (Call.parse(line) for line in text.split("\n"))
    return tuple(call for call in found if call is not None)


class Calls:
    """The calls of this rank; its main thread begins them, and the thread of its heartbeat reads the last one.

    rank, ranks  which this is, and of how many
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self.recent: tuple[Call, ...] = (Call(0, "join", "hostdev.join()"),)  # since all were known to be at the same
        self.wrong: str | None = None  # why what this rank waits for does not come

    @property
    def last(self) -> Call:
        """The one that this rank is in."""
        return self.recent[-1]

    def begin(self, kind: str, text: str) -> None:
        """Begin something that all ranks do together; UserError where the one before did not come to its end."""
        self.require_same_calls()
        self._count(kind, text)

    def leave(self, text: str) -> None:
        """Leave a loop before its end, as all ranks are to do."""
        self._count(LEFT, text)

    def _count(self, kind: str, text: str) -> None:
        self.recent = (*self.recent, Call(self.last.number + 1, kind, text))[-_MOST_RECENT:]

    def require_same_calls(self) -> None:
        """Raise UserError where ranks have been found to call different things."""
        if self.wrong is not None:
            raise UserError(f"rank {self._rank} of {self._ranks} {self.wrong}")

    def catch_up(self, number: int) -> None:
        """Count as many calls as the rank that has counted most: all of them are at the same one."""
        self.recent = (self.last._replace(number=max(number, self.last.number)),)


def find_mismatch(mine: Sequence[Call], others: Sequence[Call]) -> tuple[Call, Call] | None:
    """Return the first calls of one number in which two ranks wait for each other for ever; None where none are known.

    That they do wait, and do not go on, the caller has seen.
    """
    theirs = {call.number: call for call in others}
    for call in mine:
        other = theirs.get(call.number)
        if other is not None and other.kind != call.kind:
            return call, other
    return None


def describe_mismatch(mine: Call, rank: int, other: Call) -> str:
    """Return what is wrong, after the name of the rank whose call `mine` is."""
    return f"is in {mine.text}, and rank {rank} in {other.text}: {ADVICE}"
