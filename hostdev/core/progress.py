"""Progress: a live bar on a terminal; in a log, a whole line now and then; nothing for work that is quick."""

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from tqdm import tqdm

from hostdev.core.printable import printable

_LOG_SECONDS, _MOST_LOG_SECONDS = 10.0, 60.0  # between two lines; longer where less than a part is done meanwhile
_LOG_PARTS = 50


class Progress(Protocol):
    """What `bar` returns: a context; leaving it ends the bar."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def update(self, n: int = 1) -> Any:
        """Count so many more."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Show a text beside the figures."""


def bar(
    total: int,
    description: str,
    unit: str,
    *,
    unit_scale: bool = False,
    begin: int = 0,
    left: Callable[[], float | None] | None = None,
) -> Progress:
    """Return the progress of some work, on standard error where that is a terminal, else in lines of standard output.

    On a terminal the bar vanishes when the work ends, however it does. Elsewhere there is no line before ten seconds
    have passed, and a last one when all is done, if there was one before.

    total       how many there are to do, of unit, such as "steps", or "B" for bytes
    begin       how many of them are done already
    unit_scale  write large numbers as 1.2k or 3.4M
    left        returns the seconds to be shown as left, where this is a part of more work; None: not known yet
    """
    if not sys.stderr.isatty():
        return _Lines(total, description, unit, unit_scale, begin, left)
    made = _Bar(
        total=total,
        initial=begin,
        desc=description,
        unit=unit,
        unit_scale=unit_scale,
        bar_format="{description} ({left} left): {percentage:3.0f}%|{bar}| {amounts}, {speed}{postfix}",
        leave=False,
        dynamic_ncols=True,
    )
    made.left = left
    shown: Progress = made
    return shown


def note(text: str) -> None:
    """Write a line to standard error, above a bar that is shown there."""
    tqdm.write("\n".join(printable(line) for line in text.splitlines()), file=sys.stderr)


class _Bar(tqdm):  # type: ignore[misc]
    """A bar that says what it counts: epoch 1/2 (00:18 left):  32%|███      | 29/91, 7.6 steps/s, loss 0.5."""

    left: Callable[[], float | None] | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """What the bar's format may name."""
        found: dict[str, Any] = super().format_dict
        n, total, unit, scale = (found[name] for name in ("n", "total", "unit", "unit_scale"))
        rate = found["rate"] or (n / found["elapsed"] if found["elapsed"] else 0.0)
        left = self.left() if self.left is not None else (total - n) / rate if rate else None
        return found | {
            "description": self.desc,  # tqdm would add a colon
            "left": "?" if left is None else interval(left),
            "amounts": "/".join(_amount(number, unit, scale, named=False) for number in (n, total)),
            "speed": _speed(rate, unit, scale),
        }


class _Lines:
    """Whole lines for output that is not a terminal, so that standard error keeps to errors."""

    def __init__(
        self, total: int, description: str, unit: str, scale: bool, begin: int, left: Callable[[], float | None] | None
    ) -> None:
        self._total, self._description, self._unit, self._scale, self._left = total, description, unit, scale, left
        self._done = self._shown = self._begin = begin
        self._postfix = ""
        self._start = self._printed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._printed > self._start and self._done >= self._total and kind is None:
            amount = _amount(self._done, self._unit, self._scale)
            print(f"{self._description}: {amount} in {interval(time.monotonic() - self._start)}", flush=True)

    def update(self, n: int = 1) -> None:
        """Count so many more, and write a line if it is time for one."""
        self._done += n
        now = time.monotonic()
        part = (self._done - self._shown) * _LOG_PARTS >= self._total
        due = self._printed + (_LOG_SECONDS if part or not self._shown else _MOST_LOG_SECONDS)
        if now < due or not 0 < self._done < self._total:
            return
        self._printed, self._shown = now, self._done
        rate = (self._done - self._begin) / (now - self._start)
        done = _amount(self._done, self._unit, self._scale, named=False)
        parts = [f"{done} of {_amount(self._total, self._unit, self._scale)}", _speed(rate, self._unit, self._scale)]
        if self._left is None:
            parts.append(f"{interval((self._total - self._done) / rate)} left")
        elif (left := self._left()) is not None:
            parts.append(f"{interval(left)} left in all")
        print(f"{self._description}: {', '.join(parts + [self._postfix] * bool(self._postfix))}", flush=True)

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Write this text in the lines to come."""
        self._postfix = s


class TimeLeft:
    """How long work of several kinds is going to take still, from the time that a step of each kind took so far.

    A kind of which no step is done yet is taken to be as quick as those that are known.

    steps  to be done of each kind, by its name
    """

    def __init__(self, **steps: int) -> None:
        self._to_do = steps
        self._done = dict.fromkeys(steps, 0)
        self._seconds = dict.fromkeys(steps, 0.0)
        self._since = 0.0

    def begin(self) -> None:
        """Time the first step of what follows from now on."""
        self._since = time.monotonic()

    def step(self, kind: str) -> None:
        """Note that a step of this kind is done."""
        now = time.monotonic()
        self._seconds[kind] += now - self._since
        self._done[kind] += 1
        self._since = now

    def seconds(self) -> float | None:
        """Return how many there are left; None before the first step."""
        done = sum(self._done.values())
        if not done:
            return None
        mean = sum(self._seconds.values()) / done
        return sum(
            max(0, to_do - self._done[kind]) * (self._seconds[kind] / self._done[kind] if self._done[kind] else mean)
            for kind, to_do in self._to_do.items()
        )


def counted(n: int, what: str) -> str:
    """Return a number of things as text: 1 step, 2,000 steps."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def interval(seconds: float) -> str:
    """Return a time as text: 01:05, or 1:02:03."""
    return str(tqdm.format_interval(seconds))


def _amount(n: int, unit: str, scale: bool, *, named: bool = True) -> str:
    number = tqdm.format_sizeof(n) if scale else f"{n:,}"
    if unit == "B":
        return f"{number}B"
    return f"{number} {_plural(unit)}" if named else number


def _speed(rate: float, unit: str, scale: bool) -> str:
    """So many a second, or where that is less than one, the seconds for one."""
    if unit == "B":
        return f"{tqdm.format_sizeof(rate)}B/s"
    if 0 < rate < 1:
        return f"{1 / rate:.1f} s/{unit.removesuffix('s')}"
    return f"{tqdm.format_sizeof(rate) if scale else f'{rate:.1f}'} {_plural(unit)}/s"


def _plural(unit: str) -> str:
    return unit.removesuffix("s") + "s"
