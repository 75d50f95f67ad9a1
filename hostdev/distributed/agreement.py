"""Values that must be equal on all ranks, and the numbered calls that reveal ranks in different collectives.

All ranks must call collectives in the same order. If one rank predicts while another trains, each waits for the other.
So each rank numbers its calls, and its heartbeat carries the calls' numbers and names.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hostdev.core.errors import UserError
from hostdev.core.printable import printable

Values = Mapping[str, Any]  # by name: JSON values, or results of `shown`
_MOST_SHOWN = 160  # maximum number of characters of a value in a message
ADVICE = "all ranks must make the same calls in the same order (docs/guides/networks-in-parts.md)"
_MOST_RECENT = 8
LEFT = "left"  # kind of a call that leaves a loop early, perhaps because of an error yet to be reported


class UnlikeError(UserError):
    """Raised on all ranks, with the same message, if a value that must be equal differs between ranks."""


def compare(each: Sequence[Values], where: str = "") -> None:
    """Raise UnlikeError unless all ranks have the same values.

    Args:
        each: The values of each rank, decoded from JSON. If a value is a list [value, text], `value` is compared and
            `text` is shown.
        where: The call that begins the message, such as "hostdev.Runtime(...)".
    """
    names = list(dict.fromkeys(name for values in each for name in values))
    unlike = [name for name in names if len({_key(values.get(name)) for values in each}) > 1]
    if not unlike:
        return
    first, *others = unlike
    ranks: dict[str, list[int]] = {}
    for rank, values in enumerate(each):
        ranks.setdefault(_shown(values.get(first)), []).append(rank)
    values_text = "; ".join(f"{value} on {format_ranks(mine)}" for value, mine in ranks.items())
    more = ", ".join(others[:4]) + ", ..." * (len(others) > 4)
    also = f"; {more} also differ{'s' * (len(others) == 1)}" if others else ""
    begin = f"{where}: " if where else ""
    raise UnlikeError(
        printable(f"{begin}{first} differs between processes: {values_text}{also}; give every process the same value")
    )


def take_least(values: Mapping[str, int], each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Return, for each name in `values`, the least value over the ranks that have it; `each` has all ranks' values."""
    return {name: min(other.get(name, value) for other in each) for name, value in values.items()}


def shown(value: Any, text: str) -> list[Any]:
    """Return a value for `compare`, which compares `value` and shows `text` in its message."""
    return [value, text]


def format_ranks(ranks: Sequence[int]) -> str:
    """Return text such as "rank 3" or "ranks 0, 2" that names at most eight ranks."""
    return f"rank{'s' * (len(ranks) > 1)} " + ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)


def _key(value: Any) -> str:
    return repr(value[0] if isinstance(value, list) else value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return printable(str(value[1]), _MOST_SHOWN)
    return "not given" if value is None else printable(str(value), _MOST_SHOWN)


class Call(NamedTuple):
    """A call that all ranks make together."""

    number: int  # calls are counted on every rank, so the same call has the same number everywhere
    kind: str  # calls with the same number and different kinds deadlock
    text: str  # text for messages, such as "runtime.predict()"

    def __str__(self) -> str:
        return f"{self.number}|{self.kind}|{self.text}"

    @classmethod
    def parse(cls, text: str) -> "Call | None":
        """Return a call from another rank's heartbeat, or None if the text is not valid."""
        number, _, rest = text.partition("|")
        kind, _, name = rest.partition("|")
        return cls(int(number), kind, printable(name, 120)) if number.isdecimal() and len(number) < 19 else None


def format_calls(calls: Sequence[Call]) -> str:
    """Return calls as text for a heartbeat."""
    return "\n".join(map(str, calls))


def parse_calls(text: str) -> tuple[Call, ...]:
    """Return the calls of a heartbeat."""
    found = (Call.parse(line) for line in text.split("\n"))
    return tuple(call for call in found if call is not None)


class RankCalls:
    """The calls of a rank: its main thread begins them, and its heartbeat thread reads the latest."""

    def __init__(self, rank: int, ranks: int) -> None:
        self._rank, self._ranks = rank, ranks
        self.recent: tuple[Call, ...] = (Call(0, "join", "hostdev.join()"),)  # latest calls since the last `catch_up`
        self.wrong: str | None = None  # how this rank's calls differ from another rank's, if they do

    @property
    def last(self) -> Call:
        """This rank's current call."""
        return self.recent[-1]

    def begin(self, kind: str, text: str) -> None:
        """Record that this rank begins a call that all ranks must make.

        Raises UserError if this rank and another are already known to be making different calls.
        """
        self.require_same_calls()
        self._count(kind, text)

    def leave(self, text: str) -> None:
        """Record that this rank leaves a loop early; all ranks must leave the loop together."""
        self._count(LEFT, text)

    def _count(self, kind: str, text: str) -> None:
        self.recent = (*self.recent, Call(self.last.number + 1, kind, text))[-_MOST_RECENT:]

    def require_same_calls(self) -> None:
        """Raise UserError if this rank and another were found to be making different calls."""
        if self.wrong is not None:
            raise UserError(f"rank {self._rank} of {self._ranks} {self.wrong}")

    def catch_up(self, number: int) -> None:
        """Increase the current call's number to `number`, the largest on any rank, and forget earlier calls."""
        self.recent = (self.last._replace(number=max(number, self.last.number)),)


def find_mismatch(mine: Sequence[Call], others: Sequence[Call]) -> tuple[Call, Call] | None:
    """Return the first two calls, one of each rank, with equal numbers but different kinds; None if all kinds agree.

    The caller must also check that both ranks have been waiting in these calls.
    """
    theirs = {call.number: call for call in others}
    for call in mine:
        other = theirs.get(call.number)
        if other is not None and other.kind != call.kind:
            return call, other
    return None


def describe_mismatch(mine: Call, rank: int, other: Call) -> str:
    """Return text such as "is in A, and rank 1 in B", for a message that begins with the rank whose call is `mine`."""
    return f"is in {mine.text}, and rank {rank} in {other.text}: {ADVICE}"
