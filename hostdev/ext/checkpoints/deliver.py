"""Delivery of a checkpoint to another folder or a store, such as the one that a server follows.

First, all files of the source and of the target are compared with their checksums. A damaged file of the target is
replaced from the source, and only files that the target lacks are copied. A checkpoint appears atomically, after its
parents, so that a reader finds all of it or nothing. The next delivery removes the leftovers of a killed one.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from hostdev.checkpoint import folder, manifest
from hostdev.checkpoint.folder import Chain, Checkpoint, check_entry, check_segment
from hostdev.checkpoint.loading import verify
from hostdev.checkpoint.manifest import (
    FILE_NAME,
    BrokenCheckpointError,
    CheckpointManifest,
    File,
    SegmentEntry,
    SegmentState,
)
from hostdev.checkpoint.remote import WRITER, fetch_file, remove_stored
from hostdev.checkpoint.uploads import Key, send_checkpoint
from hostdev.core.addresses import address_of, shown_place
from hostdev.core.checksums import hash_stream
from hostdev.core.errors import HostdevError, StoreError, UserError
from hostdev.core.memory import format_bytes
from hostdev.core.names import inside
from hostdev.core.outputs import replacing, sync_folder
from hostdev.core.progress import bar, note
from hostdev.core.stores import About, Store
from hostdev.core.workers import call_all

_THREADS = 4


class Delivered(NamedTuple):
    """The result of a delivery.

    Attributes:
        checkpoints: Number of checkpoints that were added or repaired.
        copied: Bytes that were copied.
        there: Bytes of the delivered checkpoints that the target had already.
    """

    checkpoints: int
    copied: int
    there: int


def deliver(chain: Chain, path: Path, keep: int) -> Delivered:
    """Copy what the target lacks of a checkpoint and its parents; repair damaged checkpoints, and remove old ones.

    Args:
        chain: The checkpoint with its parents.
        path: The target, a folder or a store, as `addresses.checkpoint_path` returns it.
        keep: Number of newest checkpoints to keep in the target, together with their parents.

    Raises:
        BrokenCheckpointError: A file of the checkpoint is damaged or gone; unless that happened during the delivery,
            the target is unchanged.
        UserError: The folder is in use, has another checkpoint of the same name or a newer one, or cannot be written.
        StoreError: The store cannot be read or written.
    """
    verify(chain, segments=True)
    address = address_of(path)
    if address is not None:
        return _deliver_to_store(chain, Store(address), keep)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    with folder.locked(path):
        folder.clean(path)
        return _deliver_to_folder(chain, path, keep)


def _deliver_to_folder(chain: Chain, path: Path, keep: int) -> Delivered:
    manifests: dict[str, CheckpointManifest] = {}
    lost: set[str] = set()  # names of checkpoints whose manifest cannot be read
    for name in folder.names_in(path):
        try:
            manifests[name] = manifest.read(path / name)
        except BrokenCheckpointError as error:
            if name not in (checkpoint.name for checkpoint in chain):
                note(f"{error}; {name} is removed there")
                lost.add(name)
    new = _choose_new(chain, manifests, str(path))
    compared: dict[tuple[int, int], bool] = {}  # whether a file is intact, by device and inode: checkpoints share files

    def is_intact(name: str, file: File, find_source: Callable[[], Path | None]) -> bool:
        try:
            state = inside(path / name, file.file).stat()
        except (OSError, ValueError):
            return False
        key = state.st_dev, state.st_ino
        if key not in compared:
            compared[key] = _is_right(path / name, file, manifests[name])
        return compared[key]

    compared_files = _compare(chain, manifests, str(path), is_intact)
    known = {key: path / name for key, name in compared_files.known.items()}
    total = sum(checkpoint.manifest.nbytes for checkpoint in new)
    with bar(total, "delivering", "B", unit_scale=True) as progress:
        copied = _replace_in_folder(compared_files.damaged, path, known)
        copied += sum(_copy_checkpoint(checkpoint, path, known, progress.update) for checkpoint in new)
    for name in compared_files.lost | lost:
        folder.remove(path / name)
    folder.prune(path, keep)
    return _count(chain, new, compared_files, copied)


def _replace_in_folder(damaged: "list[_Damaged]", path: Path, known: dict[Key, Path]) -> int:
    """Replace damaged files by new ones; return the bytes that were copied.

    A new file is renamed into place, because other names may be linked to the damaged file.
    """
    if not damaged:
        return 0
    copied = 0
    partial_ = folder.begin(path, "replaced")
    for name, file, source, state in damaged:
        target = path / name / file.file
        target.parent.mkdir(parents=True, exist_ok=True)
        with replacing(target, partial_) as replacement:
            copied += _link_or_copy(source, replacement, file, state, known)
        sync_folder(target.parent)
        known[file.bytes, file.sha256] = target
    partial_.rmdir()
    return copied


def _copy_checkpoint(checkpoint: Checkpoint, to: Path, known: dict[Key, Path], done: Callable[[int], object]) -> int:
    """Copy a checkpoint to the folder `to`; return the bytes that were copied.

    `known` has the folder's intact files by size and SHA-256: such files are linked, and new files are added to it.
    `done` receives the size of each file in bytes.
    """
    partial_ = folder.begin(to, checkpoint.name)
    states = checkpoint.manifest.segment_states
    copied = 0
    for file in checkpoint.manifest.files:
        target = partial_ / file.file
        target.parent.mkdir(parents=True, exist_ok=True)
        copied += _link_or_copy(checkpoint.path / file.file, target, file, states.get(file.file), known)
        known[file.bytes, file.sha256] = to / checkpoint.name / file.file
        done(file.bytes)
    if (to / checkpoint.name).exists():  # a checkpoint with a damaged manifest
        folder.remove(to / checkpoint.name)
    folder.commit(partial_, checkpoint.name, checkpoint.manifest)
    return copied


def _link_or_copy(source: Path, target: Path, file: File, state: SegmentState | None, known: Mapping[Key, Path]) -> int:
    """Link `target` to a file in `known` with the same content, or copy and sync the source; return the bytes copied.

    Raises:
        BrokenCheckpointError: The source does not have the manifest's content.
    """
    with contextlib.suppress(OSError, KeyError):
        os.link(known[file.bytes, file.sha256], target)
        return 0
    try:
        stream = source.open("rb", buffering=0)
    except OSError as error:
        raise BrokenCheckpointError(f"{source} cannot be read ({error.strerror})") from None
    with stream, target.open("xb") as out:
        digest = hash_stream(stream, out=out)
        out.flush()
        os.fsync(out.fileno())
    if state is not None and isinstance(file, SegmentEntry):
        check_segment(target, file, state)
    elif digest != file.sha256:
        raise BrokenCheckpointError(f"{source} is broken (its checksum is wrong)")
    return file.bytes


def _deliver_to_store(chain: Chain, store: Store, keep: int) -> Delivered:
    names = {name.partition("/")[0] for name in store.list() if "/" in name}
    stored = {name: _read_stored(store, name) for name in names if folder.is_name(name)}
    manifests = {name: content for name, content in stored.items() if content is not None}
    new = _choose_new(chain, manifests, store.shown)
    token = secrets.token_hex(16).encode()
    store.write(WRITER, token)  # a run that writes to this store notices it

    def is_intact(name: str, file: File, find_source: Callable[[], Path | None]) -> bool:
        if (source := find_source()) is not None:
            return store.compare(f"{name}/{file.file}", source) is not None
        return _is_intact_stored(store, name, file, manifests[name])

    compared_files = _compare(chain, manifests, store.shown, is_intact)
    known, copied = compared_files.known, 0
    with bar(sum(checkpoint.manifest.nbytes for checkpoint in new), "delivering", "B", unit_scale=True) as progress:
        for name, file, source, _ in compared_files.damaged:
            store.put(source, f"{name}/{file.file}")
            known[file.bytes, file.sha256] = f"{name}/{file.file}"
            copied += file.bytes

        def require_alone() -> None:
            if store.read_if_there(WRITER) != token:
                raise StoreError(f"{store.shown} is in use: another process has begun to write checkpoints there")

        def note_sent(file: File | None, about: About, size: int) -> None:
            nonlocal copied
            copied += size
            progress.update(0 if file is None else file.bytes)

        for checkpoint in new:
            check = partial(check_entry, checkpoint.path, states=checkpoint.manifest.segment_states)
            send_checkpoint(checkpoint, store, known, check, require_alone, note_sent)
            known |= {(file.bytes, file.sha256): f"{checkpoint.name}/{file.file}" for file in checkpoint.manifest.files}
            manifests[checkpoint.name] = checkpoint.manifest
    kept = _choose_kept({name: manifests[name] for name in manifests.keys() - compared_files.lost}, keep)
    for name in stored.keys() - kept:
        remove_stored(store, name)
    return _count(chain, new, compared_files, copied)


def _is_intact_stored(store: Store, name: str, file: File, content: CheckpointManifest) -> bool:
    """Read a file of a checkpoint in a store; return whether it is intact."""
    with tempfile.TemporaryDirectory() as folder_path:
        try:
            return fetch_file(store, name, Path(folder_path), file, content)
        except StoreError as error:
            if error.is_transient:
                raise
            return False  # the file is missing


def _choose_new(chain: Chain, manifests: Mapping[str, CheckpointManifest], where: str) -> Chain:
    """Return the chain's checkpoints that the target lacks; raise UserError if the target has newer or foreign ones."""
    own_manifests = {checkpoint.name: checkpoint.manifest for checkpoint in chain}
    for name, content in manifests.items():
        if name in own_manifests and content.checksum != own_manifests[name].checksum:
            raise UserError(f"{where} has another checkpoint {name}; deliver to a folder of its own")
    newest = max(manifests, key=lambda name: manifests[name].serial, default=None)
    if newest is not None and newest not in own_manifests and manifests[newest].serial >= chain[-1].manifest.serial:
        raise UserError(
            f"{where} has the checkpoint {newest}, which is newer than {chain[-1].path} or of another run; deliver to "
            "a folder of its own"
        )
    return [checkpoint for checkpoint in chain if checkpoint.name not in manifests]


def _choose_kept(manifests: Mapping[str, CheckpointManifest], keep: int) -> set[str]:
    """Return the names of the `keep` newest checkpoints that have all their parents, and of these parents."""
    kept: set[str] = set()
    count = 0
    for name in sorted(manifests, key=lambda name: manifests[name].serial, reverse=True):
        chain = [name]
        while (parent := manifests[chain[-1]].parent) is not None and parent.name in manifests.keys() - chain:
            chain.append(parent.name)
        if count < keep and manifests[chain[-1]].parent is None:
            kept |= set(chain)
            count += 1
    return kept


class _Damaged(NamedTuple):
    """A damaged file in the target.

    Attributes:
        name: The checkpoint.
        file: The file's entry in the manifest.
        source: An intact file with the same content.
        state: If the file is a segment, the entry of its table's segments.
    """

    name: str
    file: File
    source: Path
    state: SegmentState | None


class _Compared(NamedTuple):
    """The target's files, compared with their checksums.

    Attributes:
        known: Names of the intact files, by size and SHA-256.
        damaged: Files to replace.
        lost: Checkpoints to remove: they, or their parents, have a damaged file that the source does not have.
    """

    known: dict[Key, str]
    damaged: list[_Damaged]
    lost: set[str]


def _compare(
    chain: Chain,
    manifests: Mapping[str, CheckpointManifest],
    where: str,
    is_intact: Callable[[str, File, Callable[[], Path | None]], bool],
) -> _Compared:
    """Compare the files of the target's checkpoints with their checksums; report and return which are damaged.

    Args:
        chain: The checkpoint to deliver, whose files are intact.
        manifests: The manifests of the target's checkpoints.
        where: The target, for messages.
        is_intact: Returns whether a file of the target is intact; called with a checkpoint's name, the file's entry,
            and a function that returns a file of this machine with the right content, or None.
    """
    sources = {(file.bytes, file.sha256): each.path / file.file for each in chain for file in each.manifest.files}
    root = chain[-1].path.parent
    beside = {name: _read(root / name) for name in manifests}  # the source may still have older checkpoints
    compared = _Compared({}, [], set())

    def find_source(name: str, file: File) -> Path | None:
        if (source := sources.get((file.bytes, file.sha256))) is not None:
            return source
        other = beside[name]
        same = other is not None and other.checksum == manifests[name].checksum
        return root / name / file.file if same and _is_right(root / name, file, manifests[name]) else None

    def look(name: str, file: File) -> tuple[bool, Path | None]:
        find = cache(partial(find_source, name, file))
        intact = is_intact(name, file, find)
        return intact, None if intact else find()

    files = [(name, file) for name, content in manifests.items() for file in content.files]
    calls = (partial(look, name, file) for name, file in files)
    with bar(sum(file.bytes for _, file in files), f"comparing {where}", "B", unit_scale=True) as progress:
        for (name, file), (intact, source) in zip(files, call_all(_THREADS, "hostdev-compare", calls), strict=True):
            progress.update(file.bytes)
            if intact:
                compared.known[file.bytes, file.sha256] = f"{name}/{file.file}"
            elif source is not None:
                note(f"{where}/{name}/{file.file} is damaged; it is replaced from {source}")
                compared.damaged.append(_Damaged(name, file, source, manifests[name].segment_states.get(file.file)))
            else:
                note(f"{where}/{name}/{file.file} is damaged, and {root} does not have it; {name} is removed there")
                compared.lost.add(name)
    while more := {
        name
        for name, content in manifests.items()
        if content.parent is not None and content.parent.name in compared.lost and name not in compared.lost
    }:
        compared.lost.update(more)
    return compared


def _count(chain: Chain, new: Chain, compared: _Compared, copied: int) -> Delivered:
    changed = {checkpoint.name for checkpoint in new} | {checkpoint.name for checkpoint in compared.damaged}
    return Delivered(len(changed), copied, max(0, sum(checkpoint.manifest.nbytes for checkpoint in chain) - copied))


def _is_right(root: Path, file: File, content: CheckpointManifest) -> bool:
    """Return whether a file of the checkpoint at `root` is intact."""
    try:
        check_entry(root, file, content.segment_states)
    except BrokenCheckpointError:
        return False
    return True


def _read(path: Path) -> CheckpointManifest | None:
    """Return a checkpoint's manifest, or None if it is missing or damaged."""
    try:
        return manifest.read(path)
    except HostdevError:
        return None


def _read_stored(store: Store, name: str) -> CheckpointManifest | None:
    """Return the manifest of a checkpoint in a store, or None if it is missing or damaged."""
    content = store.read_manifest(f"{name}/{FILE_NAME}")
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as folder_path, contextlib.suppress(BrokenCheckpointError):
        (Path(folder_path) / FILE_NAME).write_bytes(content)
        return manifest.read(Path(folder_path))
    return None


def describe(chain: Chain, path: Path, delivered: Delivered) -> str:
    """Return a line that tells the user what was delivered."""
    step, where = f"step {chain[-1].manifest.step:,}", shown_place(path)
    if not delivered.checkpoints:
        return f"{where} has {step} already ({format_bytes(delivered.there)}); nothing was copied"
    unchanged = f"; {format_bytes(delivered.there)} were there" if delivered.there else ""
    return f"{step} delivered to {where}: {format_bytes(delivered.copied)} copied{unchanged}"
