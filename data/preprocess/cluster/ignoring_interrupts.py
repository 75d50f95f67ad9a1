"""Preloaded by local workers: Ctrl-C in a terminal reaches them, too, and the command that started them ends them."""

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
