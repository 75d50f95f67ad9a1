"""Makes the page of `hostdev report` from run directories."""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from hostdev.core.errors import UserError, naming
from hostdev.core.outputs import new_file, remove_abandoned, replacing
from hostdev.ext.report import facts, quality, resources
from hostdev.ext.report.page import GENERATOR, render
from hostdev.ext.report.reading import read_runs, require_run

_HEAD = 4096  # bytes of a page within which its generator is named


def run(arguments: Namespace) -> None:
    """Write the page that the command line asks for, and print where it is."""
    write(arguments.runs, arguments.out)
    count = f"{len(arguments.runs)} runs" if len(arguments.runs) > 1 else "1 run"
    print(f"{arguments.out}: a report of {count}, {arguments.out.stat().st_size / 1e6:.1f} MB")


def write(paths: Sequence[Path], out: Path) -> None:
    """Write the page of some run directories; an earlier page is replaced.

    Raises:
        UserError: A path is not a run directory, or `out` is another file.
    """
    for path in paths:
        require_run(path)
    is_again = require_replaceable(out)
    text = make(paths)
    remove_abandoned(out)
    with naming(out.parent), replacing(out) if is_again else new_file(out) as partial:
        partial.write_text(text, encoding="utf-8")


def make(paths: Sequence[Path]) -> str:
    """Return the page of some run directories as HTML."""
    runs = read_runs(paths)
    several = len(runs) > 1
    sections = [
        *([facts.summary(runs)] if several else []),
        quality.losses(runs),
        quality.arrivals(runs),
        quality.scores(runs),
        resources.time(runs),
        resources.memory(runs),
        facts.data_set(runs),
        facts.configuration(runs),
        facts.checkpoints(runs),
    ]
    head = [] if several else facts.head(runs[0])
    return render(runs, head, [section for section in sections if section is not None])


def require_replaceable(out: Path) -> bool:
    """Return whether `out` is an earlier report; raise UserError if it is another file, or cannot be written."""
    if not os.path.lexists(out):
        if not out.parent.is_dir():
            raise UserError(f"--out {out}: there is no folder {out.parent}; create it, or choose another file")
        return False
    try:
        with out.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        head = b""
    if f'<meta name="generator" content="{GENERATOR}">'.encode() not in head:
        raise UserError(f"--out {out} exists and is not a report; choose another file")
    return True
