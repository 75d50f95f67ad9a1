"""Values that must be equal on all ranks, compared at the rendezvous and before each shared operation."""

from collections.abc import Mapping, Sequence
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.printable import printable

Values = Mapping[str, Any]  # by name: JSON values, or results of `shown`
_MOST_SHOWN = 160  # maximum number of characters of a value in a message


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
    """Return, for each of this rank's values, the least over the ranks that have it; `each` has those of all ranks."""
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
