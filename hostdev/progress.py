"""Progress bars: live on a terminal, a line now and then in a log, nothing for work that is quick."""

import sys
from typing import Any

from tqdm import tqdm

_LOG_SECONDS = 10.0


def bar(total: int | None, description: str, unit: str, **options: Any) -> Any:
    """Return a tqdm bar on standard error: a context manager with `update(n)`; it vanishes when done."""
    live = sys.stderr.isatty()
    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        leave=False,
        dynamic_ncols=live,
        delay=0.0 if live else _LOG_SECONDS,
        mininterval=0.1 if live else _LOG_SECONDS,
        **options,
    )
