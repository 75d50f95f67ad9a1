"""Figures that commands draw, without pyplot's global state."""

import itertools
from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.outputs import new_file

_SUFFIXES = (".png", ".pdf", ".svg")


def new_path(stem: str) -> Path:
    """Return the first of STEM.png, STEM-2.png, ... that does not exist."""
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.png" for number in itertools.count(1))
    return next(path for path in map(Path, names) if not path.exists())


def require_new(out: Path) -> None:
    """Raise UserError unless --out is a new file of a known format in a writable folder; commands check this first."""
    if out.exists():
        raise UserError(f"--out {out} exists; choose another file")
    if out.suffix.lower() not in _SUFFIXES or not out.parent.is_dir():
        raise UserError(f"--out {out} must be a .png, .pdf or .svg file in a folder that exists")
    try:
        out.open("x").close()
    except OSError as error:
        raise _not_writable(out, error) from None
    out.unlink()


def figure(width: float, height: float) -> Any:
    """Return an empty figure; width and height are in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(made)  # pyplot would change the user's global state
    return made


def save(made: Any, out: Path) -> None:
    """Write a figure to --out; raise UserError if that fails or another process has created the file."""
    try:
        with new_file(out) as partial:
            made.savefig(partial, dpi=100, format=out.suffix.lower().removeprefix("."))
    except OSError as error:
        raise _not_writable(out, error) from None


def _not_writable(path: Path, error: OSError) -> UserError:
    return UserError(f"--out {path}: {error.strerror}; choose a file that can be written")
