"""Progress display: a live bar on a terminal or in a notebook, occasional lines in a log, nothing for quick work."""

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Protocol, Self

from tqdm import tqdm

from hostdev.core.printable import printable

_LOG_SECONDS, _MOST_LOG_SECONDS = 10.0, 60.0  # between two lines; 60 if < 1/50 of the work was done between them
_LOG_PARTS = 50
ERASE_LINE = "\r\x1b[K"  # erases the line of a terminal


class ProgressBar(Protocol):
    """The context that `bar` returns; leaving it ends the bar."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def update(self, n: int = 1) -> Any:
        """Count n more units of work."""

    def set_postfix_str(self, s: str = "", refresh: bool = True) -> None:
        """Show a text after the amounts and the speed."""


def bar(
    total: int,
    description: str,
    unit: str,
    *,
    unit_scale: bool = False,
    begin: int = 0,
    left: Callable[[], float | None] | None = None,
) -> ProgressBar:
    """Return a progress display: a bar in a notebook or on a terminal (standard error), else lines on standard output.

    A notebook's bar needs ipywidgets; without it, a notebook gets lines on standard output, too.
    A bar always disappears at the end. The first line is written after ten seconds; quicker work writes no line.

    Args:
        total: The amount of work, of which `begin` is already done.
        unit: The unit of the amounts, such as "steps", or "B" for bytes.
        unit_scale: Whether to write large amounts as 1.2k or 3.4M.
        left: If the work is part of a larger task, a function that returns the seconds left for the whole task, or None
            if they are unknown.
    """
    kind: type[Any] = _Bar
    if _is_in_notebook():
        from tqdm.notebook import tqdm as notebook_tqdm  # only here, because it needs ipywidgets

        kind = type("NotebookBar", (BarFormat, notebook_tqdm), {})
    elif not sys.stderr.isatty():
        return _Lines(total, description, unit, unit_scale, begin, left)
    made = kind(
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
    shown: ProgressBar = made
    return shown


def note(text: str) -> None:
    """Write lines to standard error, above the bar if there is one."""
    tqdm.write("\n".join(printable(line) for line in text.splitlines()), file=sys.stderr)


def overwrite(text: str = "") -> None:
    """Replace the current line of the terminal at standard error, such as a bar's; an empty text erases the line."""
    print(f"{ERASE_LINE}{text}", end="", file=sys.stderr, flush=True)


def _is_in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook that can show bars."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    return "IPKernelApp" in getattr(shell, "config", ()) and find_spec("ipywidgets") is not None


class BarFormat:
    """The texts of a bar such as "epoch 1/2 (00:18 left):  32%|███      | 29/91, 7.6 steps/s, loss 0.5"."""

    desc: str
    left: Callable[[], float | None] | None = None

    @property
    def format_dict(self) -> dict[str, Any]:
        """The values that tqdm puts into the placeholders of `bar_format`."""
        found: dict[str, Any] = super().format_dict  # type: ignore[misc]  # of tqdm
        n, total, unit, scale = (found[name] for name in ("n", "total", "unit", "unit_scale"))
        rate = found["rate"] or (n / found["elapsed"] if found["elapsed"] else 0.0)
        left = self.left() if self.left is not None else (total - n) / rate if rate else None
        return found | {
            "description": self.desc,  # tqdm would add a colon
            "left": "?" if left is None else interval(left),
            "amounts": "/".join(_amount(number, unit, scale, named=False) for number in (n, total)),
            "speed": _speed(rate, unit, scale),
        }


class _Bar(BarFormat, tqdm):  # type: ignore[misc]
    """A bar on a terminal."""


class _Lines:
    """Progress as lines on standard output, used if standard error is not a terminal, to keep it for errors."""

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
        """Count n more units of work, and write a line if one is due."""
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
        self._postfix = s


class TimeLeft:
    """An estimate of the time left for steps of several kinds, from the mean time of each kind's finished steps.

    A kind without finished steps gets the mean time of all finished steps.

    Args:
        steps: The number of steps of each kind, by name.
    """

    def __init__(self, **steps: int) -> None:
        self._to_do = steps
        self._done = dict.fromkeys(steps, 0)
        self._seconds = dict.fromkeys(steps, 0.0)
        self._since = 0.0

    def begin(self) -> None:
        """Start the clock for the next step."""
        self._since = time.monotonic()

    def step(self, kind: str) -> None:
        """Record a finished step of this kind."""
        now = time.monotonic()
        self._seconds[kind] += now - self._since
        self._done[kind] += 1
        self._since = now

    def seconds(self) -> float | None:
        """Return the seconds left, or None before the first step."""
        done = sum(self._done.values())
        if not done:
            return None
        mean = sum(self._seconds.values()) / done
        return sum(
            max(0, to_do - self._done[kind]) * (self._seconds[kind] / self._done[kind] if self._done[kind] else mean)
            for kind, to_do in self._to_do.items()
        )


def counted(n: int, what: str) -> str:
    """Format a count with its noun, such as "1 step" or "2,000 steps"."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def interval(seconds: float) -> str:
    """Format a duration, such as "01:05" or "1:02:03"."""
    return str(tqdm.format_interval(seconds))


def _amount(n: int, unit: str, scale: bool, *, named: bool = True) -> str:
    number = tqdm.format_sizeof(n) if scale else f"{n:,}"
    if unit == "B":
        return f"{number}B"
    return f"{number} {_plural(unit)}" if named else number


def _speed(rate: float, unit: str, scale: bool) -> str:
    """Format a rate as units per second or, if it is below one, as seconds per unit."""
    if unit == "B":
        return f"{tqdm.format_sizeof(rate)}B/s"
    if 0 < rate < 1:
        return f"{1 / rate:.1f} s/{unit.removesuffix('s')}"
    return f"{tqdm.format_sizeof(rate) if scale else f'{rate:.1f}'} {_plural(unit)}/s"


def _plural(unit: str) -> str:
    return unit.removesuffix("s") + "s"
