"""Copies of the repository, in which tests run after something was changed on purpose."""

import shutil
from pathlib import Path


def copy_of(root: Path, folder: Path) -> Path:
    """Return a copy of the repository, with its compiled kernels."""
    unneeded = shutil.ignore_patterns(".git", ".venv", ".peers", ".*_cache", "datasets", "runs", "*.egg-info")
    return Path(shutil.copytree(root, folder / "copy", symlinks=True, ignore=unneeded))
