"""A small synthetic data set for runs without --data, created once in the user's cache folder."""

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from hostdev.core.addresses import user_cache
from hostdev.core.errors import HostdevError
from hostdev.data.manifest import FILE_NAME, VERSION
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import GENERATOR_VERSION, Synthetic

ROWS = 60_000
SEED = 2020
OPTIONS = Options(threshold=5, dense="log", seed=SEED)


def there() -> Path | None:
    """Return the synthetic data set's folder, or None if it does not exist."""
    folder = _folder()
    return folder if (folder / FILE_NAME).is_file() else None


def _folder() -> Path:
    recipe = json.dumps([ROWS, SEED, asdict(OPTIONS), GENERATOR_VERSION, VERSION])
    return user_cache() / f"lookalike-{sha256(recipe.encode()).hexdigest()[:8]}"


def ensure() -> tuple[Path, bool]:
    """Create the synthetic data set unless it exists; return its folder, and whether it was missing.

    Concurrent processes may call this; all of them get the same folder.
    """
    folder = _folder()
    if (folder / FILE_NAME).is_file():
        return folder, False
    try:
        build(Synthetic(ROWS, SEED), folder, OPTIONS)
    except (HostdevError, OSError):
        if not (folder / FILE_NAME).is_file():  # otherwise another process created it first
            raise
    return folder, True
