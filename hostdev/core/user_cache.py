"""The folder for what hostdev keeps for a user between runs."""

import os
import sys
from pathlib import Path

from hostdev.core.errors import UserError


def user_cache() -> Path:
    """Return $XDG_CACHE_HOME/hostdev, or hostdev in the platform's cache folder; raise UserError if there is none."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # the XDG specification ignores other paths
        return base / "hostdev"
    try:
        home = Path.home()
    except RuntimeError:
        raise UserError("there is no home folder to keep files in; set XDG_CACHE_HOME, or give --data") from None
    return (home / "Library/Caches" if sys.platform == "darwin" else home / ".cache") / "hostdev"
