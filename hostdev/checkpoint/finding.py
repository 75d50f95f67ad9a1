"""Finding of checkpoints in a folder, which may be in a store."""

from pathlib import Path

from hostdev.checkpoint import remote
from hostdev.checkpoint.folder import FOLDER, Found, is_checkpoint, names_in, read_chain
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.core.addresses import address_of, shown_place
from hostdev.core.errors import UserError


def candidates(path: Path, *, everything: bool = False) -> list[Path]:
    """Return the path itself if it is a checkpoint, or the checkpoints in the folder `path`, newest first.

    For a run directory, this looks in its subfolder `checkpoints`. Of a folder in a store, the newest checkpoint is
    copied first, or with `everything` all are (see `remote.fetch`). Raise UserError if there are no checkpoints.
    """
    if address_of(path) is not None:
        remote.fetch(path, everything=everything)
    if is_checkpoint(path):
        return [path]
    for place in (path, path / FOLDER):
        if found := [place / name for name in reversed(names_in(place))]:
            return found
    raise UserError(f"{shown_place(path)} has no checkpoint" if path.exists() else f"there is no file or folder {path}")


def newest(path: Path) -> Found:
    """Return the checkpoint at `path`, or the newest one in the folder `path`, that `read_chain` accepts.

    If it rejects all, raise its error for the newest.
    """
    broken: dict[str, BrokenCheckpointError] = {}  # by message: several checkpoints may share a broken parent
    for each in candidates(path):
        try:
            return Found(read_chain(each), list(broken))
        except BrokenCheckpointError as error:
            broken.setdefault(str(error), error)
    raise next(iter(broken.values()))
