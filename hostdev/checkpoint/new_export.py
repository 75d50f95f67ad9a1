"""The steps that all exports of a checkpoint share: choose and verify it, write a new folder, send it to a store."""

import os
from collections.abc import Callable
from pathlib import Path

from hostdev.checkpoint.finding import newest
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.loading import verify
from hostdev.core import outputs
from hostdev.core.addresses import shown_place
from hostdev.core.errors import naming
from hostdev.core.memory import format_bytes
from hostdev.core.progress import note
from hostdev.core.sync import sending


def write_export(path: Path, out: Path, prog: str, write: Callable[[Chain, Path], list[str]]) -> None:
    """Write a new folder from the newest valid checkpoint, and print its files and more lines.

    Args:
        path: A checkpoint, a folder of checkpoints, or a run directory.
        out: The new folder, from `addresses.result_path`.
        prog: The command's name in messages.
        write: Writes files into an empty folder from a checkpoint whose checksums were compared; returns the lines.

    Raises:
        UserError: `out` exists.
        BrokenCheckpointError: A file is damaged.
        OSError: A file cannot be written.
    """
    with sending(out):
        if os.path.lexists(out):
            raise outputs.taken_folder(out)
        found = newest(path)
        for line in found.notes():
            note(f"{prog}: {line}")
        verify(found.chain, segments=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        with outputs.new_folder(out) as partial, naming(out):
            lines = write(found.chain, partial)
        files = [f"{shown_place(file)}: {format_bytes(file.stat().st_size)}" for file in sorted(out.iterdir())]
    print("\n".join(files + lines))
