"""Checkpoints in a store: copying them to a folder on this machine, and finding the copies.

A checkpoint in a store has the same files as on a disk. Its manifest is written last and removed first, so a checkpoint
with a manifest is complete. A copy gets the checkpoint's name when all files are there and have the manifest's
checksums. A process verifies the files again when it first uses the copy, and replaces damaged ones. `uploads` copies
in the other direction.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from hostdev.checkpoint import folder, manifest
from hostdev.checkpoint.folder import FOLDER, Found, check_entry, is_checkpoint, names_in, read_chain
from hostdev.checkpoint.manifest import FILE_NAME, BrokenCheckpointError, CheckpointManifest, File
from hostdev.core import locks
from hostdev.core.addresses import address_of, shown_place
from hostdev.core.checksums import is_whole_json
from hostdev.core.errors import HostdevError, UserError, in_words, raise_if_transient
from hostdev.core.names import inside
from hostdev.core.progress import bar, note
from hostdev.core.stores import Store
from hostdev.core.workers import call_all

# A file with a random text, in the store and in the folder of copies. If both texts are equal, the store's last writer
# used the folder.
WRITER = ".writer"
IN_STORE = ".in-store"  # an empty file in the copy of a checkpoint that the store has, or had
_FETCHED, _LOCK, _ASIDE = ".fetched-", ".store-lock", ".aside"
_THREADS = 8

_compared: set[tuple[str, int, int, int]] = (
    set()
)  # the results of `_state_of` for the copied files that this process has found intact


def fetch(path: Path, *, everything: bool = False, step: int | None = None) -> None:
    """Copy checkpoints from a store to the folder of their copies, and verify those that were copied before.

    This does nothing if `path` is not in a store, or while another process of this machine writes checkpoints to the
    folder.

    Args:
        path: A checkpoint, which is copied with its parents; or a folder, whose newest valid checkpoint is copied.
        everything: Whether to copy all checkpoints in the folder.
        step: Copy the newest valid checkpoint of this step instead.

    Raises:
        BrokenCheckpointError: The manifest of the checkpoint `path` is damaged; or none of the checkpoints to copy is
            valid, and the folder has no copies.
        UserError: The store cannot be read or lacks the checkpoint `path`, or a copy cannot be written.
    """
    root, only = (path.parent, path.name) if folder.is_name(path.name) else (path, None)
    address = address_of(root)
    if address is None:
        return
    with _locked(root):
        if not _is_written(root):
            pull(Store(address), root, only=only, everything=everything, step=step)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Let one process at a time copy to a folder."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        file = (root / _LOCK).open("a")
    except OSError as error:
        raise_if_transient(error)
        raise UserError(
            f"{root} cannot have copies of checkpoints ({in_words(error)}); set HOSTDEV_STORE_CACHE to another folder"
        ) from None
    with file:
        if locks.lock_state(file.fileno()) == "held":
            note(f"another process copies checkpoints to {root}; waiting for it")
            locks.lock_state(file.fileno(), wait=True)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # the file system has no locks
                locks.unlock(file)


def _is_written(root: Path) -> bool:
    """Return whether a process of this machine holds the lock for writing checkpoints."""
    try:
        with folder.locked(root):
            return False
    except folder.FolderInUseError:
        return True


def begin_writing(store: Store, root: Path) -> None:
    """Copy all checkpoints from a store. The caller has locked the folder, to write checkpoints."""
    with _locked(root):
        pull(store, root, everything=True)


def pull(
    store: Store, root: Path, *, only: str | None = None, everything: bool = False, step: int | None = None
) -> None:
    """Copy checkpoints from a store to the folder `root`; see `fetch`. Remove copies that the store no longer has."""
    files = store.list()
    names = [name for name in map(_owner, files) if name is not None]
    if not names and only is None and any(_owner(name.removeprefix(f"{FOLDER}/")) for name in files):
        below = Store(f"{address_of(root)}/{FOLDER}")  # the address is that of a run directory
        (root / FOLDER).mkdir(exist_ok=True)
        pull(below, root / FOLDER, everything=everything, step=step)
        return
    for abandoned in root.glob(f"{_FETCHED}*"):
        shutil.rmtree(abandoned, ignore_errors=True)
    contents = {name: content for name in names if (content := store.read_manifest(f"{name}/{FILE_NAME}")) is not None}
    _drop_others(store, root, contents)
    manifests: dict[str, CheckpointManifest] = {}
    broken: dict[str, BrokenCheckpointError] = {}
    for name, content in contents.items():
        try:
            manifests[name] = _parse(root, name, content)
        except BrokenCheckpointError as error:
            broken[name] = error
    newest_first = sorted(manifests, key=lambda name: manifests[name].serial, reverse=True)
    if only is not None and only not in manifests and not (root / only).is_dir():
        raise broken.get(only) or UserError(f"{store.shown} has no checkpoint {only}")
    if everything:
        wanted = newest_first[::-1]
    elif only is not None:
        wanted = [only] if only in manifests else []
    else:
        wanted = [name for name in newest_first if step is None or manifests[name].step == step]
    first = next(iter(broken.values()), None)
    for name in wanted:
        try:
            for part in _chain(name, manifests, store):
                if (root / part).is_dir():
                    _mend(store, root, part, manifests[part])
                else:
                    _fetch(store, root, part, manifests[part])
        except BrokenCheckpointError as error:
            first = first or error
            note(f"{store.shown}/{name} is broken in the store: {error}")
            continue
        if not everything:
            return
    if first is not None and not folder.names_in(root):
        raise first


def remove_stored(store: Store, name: str) -> None:
    """Remove a checkpoint from a store; the manifest first, so that no reader takes it for complete."""
    store.remove(f"{name}/{FILE_NAME}")
    for file in store.list(name):
        store.remove(f"{name}/{file}")


def _owner(name: str) -> str | None:
    """Return the name of the checkpoint whose manifest this file of a store is; None for other files."""
    owner, _, rest = name.partition("/")
    return owner if rest == FILE_NAME and folder.is_name(owner) else None


def _drop_others(store: Store, root: Path, contents: dict[str, bytes]) -> None:
    """Remove copies of checkpoints that the store no longer has, and set copies aside that it never had.

    If the store is empty, copies are set aside, not removed. If the store's last writer used this folder, copies that
    the store lacks stay, since they may not be uploaded yet.

    Args:
        store: The store.
        root: The folder of copies.
        contents: The content of the manifest of each checkpoint in the store.
    """
    token = store.read_if_there(WRITER)
    with contextlib.suppress(OSError):
        if token is not None and (root / WRITER).read_bytes() == token:
            contents = {**{name: b"" for name in folder.names_in(root) if name not in contents}, **contents}
    for name in folder.names_in(root):
        path, content = root / name, contents.get(name)
        if content and not is_whole_json(content) and (path / IN_STORE).exists():
            continue  # the store's manifest is damaged
        with contextlib.suppress(OSError):
            if content == b"" or (path / FILE_NAME).read_bytes() == content:
                if content:
                    (path / IN_STORE).touch()
                continue
        if (path / IN_STORE).exists() and contents:
            folder.remove(path)
            continue
        aside = _set_aside(root, name)
        note(f"{store.shown} does not have the checkpoint {name} of this machine, which is now in {aside}")


def _set_aside(root: Path, name: str) -> Path:
    """Move a copy to a folder that nobody reads, and return this folder."""
    aside = root / _ASIDE
    aside.mkdir(exist_ok=True)
    number = 1 + sum(1 for _ in aside.iterdir())
    (root / name).rename(aside / f"{name}-{number}")
    return aside


def _parse(root: Path, name: str, content: bytes) -> CheckpointManifest:
    """Return the manifest of a checkpoint's copy; if there is no copy, begin one with the manifest `content`."""
    if (root / name).is_dir():
        return manifest.read(root / name)
    part = root / f"{_FETCHED}{name}"
    part.mkdir(exist_ok=True)
    (part / FILE_NAME).write_bytes(content)
    try:
        return manifest.read(part)
    except BrokenCheckpointError:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _chain(name: str, manifests: dict[str, CheckpointManifest], store: Store) -> list[str]:
    """Return the names of a checkpoint and its parents, from the full checkpoint on."""
    names = [name]
    while (parent := manifests[names[0]].parent) is not None:
        if parent.name not in manifests or parent.name in names:
            raise BrokenCheckpointError(f"{store.shown}/{name} is incomplete: its parent {parent.name} is missing")
        names.insert(0, parent.name)
    return names


def _fetch(store: Store, root: Path, name: str, content: CheckpointManifest) -> None:
    """Copy the files of a checkpoint whose manifest was copied by `_parse`."""
    part = root / f"{_FETCHED}{name}"
    (part / IN_STORE).touch()
    segments: dict[tuple[int, str], Path] = {}
    for other in folder.names_in(root) if content.segment_states else ():
        with contextlib.suppress(HostdevError):
            segments |= folder.segments_of(folder.Checkpoint(root / other, manifest.read(root / other)))

    def get(file: File) -> None:
        path = inside(part, file.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        if (existing := segments.get((file.bytes, file.sha256))) is not None:
            with contextlib.suppress(OSError):
                os.link(existing, path)
                with contextlib.suppress(BrokenCheckpointError):
                    check_entry(part, file, content.segment_states)
                    return
                path.unlink()
        if not fetch_file(store, name, part, file, content):
            raise BrokenCheckpointError(f"{store.shown}/{name}/{file.file} is broken (its checksum is wrong)")

    try:
        calls = (partial(get, file) for file in content.files)
        with bar(content.nbytes, f"copying {name}", "B", unit_scale=True) as progress:
            for file, _ in zip(content.files, call_all(_THREADS, "hostdev-fetch", calls), strict=True):
                progress.update(file.bytes)
        part.rename(root / name)
        _compared.update(_state_of(root / name / file.file) for file in content.files)
    except OSError as error:
        raise _no_space(error, store, root, name) from None


def fetch_file(store: Store, name: str, root: Path, file: File, content: CheckpointManifest) -> bool:
    """Copy a file of the checkpoint `name` to the folder `root`; return False if it is damaged in the store."""
    path = inside(root, file.file)
    path.parent.mkdir(parents=True, exist_ok=True)

    def is_intact(digest: str) -> bool:
        with contextlib.suppress(BrokenCheckpointError):
            check_entry(root, file, content.segment_states)
            return True
        return False

    return store.fetch_intact(f"{name}/{file.file}", path, is_intact)


def _mend(store: Store, root: Path, name: str, content: CheckpointManifest) -> None:
    """Verify the files of a copy that this process has not verified yet, and fetch damaged ones again.

    If a file is damaged in the store, too, set the copy aside and raise BrokenCheckpointError.
    """
    part = root / f"{_FETCHED}{name}"

    def look(file: File) -> None:
        path = inside(root / name, file.file)
        with contextlib.suppress(OSError):
            if _state_of(path) in _compared:
                return
        try:
            check_entry(root / name, file, content.segment_states)
        except BrokenCheckpointError as error:
            note(f"{error}; it is replaced from {store.shown}")
            if not fetch_file(store, name, part, file, content):
                raise
            path.parent.mkdir(parents=True, exist_ok=True)
            (part / file.file).replace(path)  # not overwritten: other copies may have hard links to the damaged file
        _compared.add(_state_of(path))

    try:
        for _ in call_all(_THREADS, "hostdev-compare", (partial(look, file) for file in content.files)):
            pass
    except OSError as error:
        raise _no_space(error, store, root, name) from None
    except BrokenCheckpointError as error:
        raise BrokenCheckpointError(f"{error}, and so is it in the store; now in {_set_aside(root, name)}") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _state_of(path: Path) -> tuple[str, int, int, int]:
    """Return path, inode, size and time of a file; the result changes if the file is written to or replaced."""
    state = path.stat()
    return str(path), state.st_ino, state.st_size, state.st_mtime_ns


def _no_space(error: OSError, store: Store, root: Path, name: str) -> UserError:
    raise_if_transient(error)
    return UserError(
        f"{store.shown}/{name} cannot be copied to {root} ({in_words(error)}); set HOSTDEV_STORE_CACHE to a folder "
        "with more space"
    )


def candidates(path: Path, *, everything: bool = False) -> list[Path]:
    """Return the path itself if it is a checkpoint, or the checkpoints in the folder `path`, newest first.

    For a run directory, this looks in its subfolder `checkpoints`. If the path is in a store, its newest checkpoint, or
    with `everything` all of them, is copied first; see `fetch`. Raise UserError if there are no checkpoints.
    """
    if address_of(path) is not None:
        fetch(path, everything=everything)
    if is_checkpoint(path):
        return [path]
    for place in (path, path / FOLDER):
        if found := [place / name for name in reversed(names_in(place))]:
            return found
    raise UserError(f"{shown_place(path)} has no checkpoint" if path.exists() else f"there is no file or folder {path}")


def newest(path: Path) -> Found:
    """Return the checkpoint at `path`, or the newest one in the folder `path`, that `read_chain` accepts.

    If it rejects all of them, raise its error for the newest.
    """
    broken: dict[str, tuple[Path, BrokenCheckpointError]] = {}  # by message: several may share a broken parent
    for each in candidates(path):
        try:
            chain = read_chain(each)
        except BrokenCheckpointError as error:
            broken.setdefault(str(error), (each, error))
            continue
        return Found(chain, [line for line, (other, _) in broken.items() if not _is_removed(other, each)])
    raise next(iter(broken.values()))[1]


def _is_removed(path: Path, found: Path) -> bool:
    """Return whether a checkpoint is being removed: its manifest is gone, and by its name it is older than `found`."""
    return not (path / FILE_NAME).exists() and folder.numbers_of(path.name) < folder.numbers_of(found.name)
