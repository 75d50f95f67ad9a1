"""Progress bars: live on a terminal; in a log, a line of the output now and then; nothing for work that is quick."""

import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

_LOG_SECONDS = 10.0


class _Lines(tqdm):  # type: ignore[misc]
    """A bar for output that is not a terminal: whole lines, so that standard error keeps to errors."""

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """Return what prints a state of the bar."""

        def write(text: str) -> None:
            if text.strip():
                print(text, flush=True)

        return write


def bar(total: int | None, description: str, unit: str, **options: Any) -> Any:
    """Return a tqdm bar: a context manager with `update(n)`; on a terminal it vanishes when done."""
    if sys.stderr.isatty():
        return tqdm(total=total, desc=description, unit=unit, leave=False, dynamic_ncols=True, **options)
    return _Lines(
        total=total,
        desc=description,
        unit=unit,
        leave=False,
        delay=_LOG_SECONDS,
        mininterval=_LOG_SECONDS,
        bar_format="{desc}: {percentage:3.0f}% of {total_fmt} {unit}, {elapsed}<{remaining}, {rate_fmt}{postfix}",
        **options,
    )
