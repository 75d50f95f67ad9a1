"""Delivery of a checkpoint to another folder or a store, such as the one that a server follows.

All files of the source are compared with their checksums first, and so is what the target has: a damaged file there is
replaced from the source, and only files that are not there are copied. A checkpoint appears at once, after its parents,
so that a reader finds either all of it or none; what a killed delivery has left is removed by the next one.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from hostdev.checkpoint import folder, manifest
from hostdev.checkpoint.files import check_entry, check_segment
from hostdev.checkpoint.folder import Chain, Checkpoint
from hostdev.checkpoint.loading import verify
from hostdev.checkpoint.manifest import FILE_NAME, BrokenCheckpointError, File, Manifest, SegmentEntry, SegmentState
from hostdev.checkpoint.remote import WRITER, fetch_file, remove_stored
from hostdev.core.addresses import address_of, shown_place
from hostdev.core.disk import sync_folder
from hostdev.core.errors import HostdevError, UserError
from hostdev.core.memory import format_bytes
from hostdev.core.names import inside
from hostdev.core.progress import bar, note
from hostdev.core.workers import call_all
from hostdev.ext.stores.store import Store, StoreError

_THREADS = 4
_PIECE = 1 << 22  # bytes

Key = tuple[int, str]  # a file's size and SHA-256


class Delivered(NamedTuple):
    """What a delivery did: the number of checkpoints that are new or were mended, the bytes copied, and those there."""

    checkpoints: int
    copied: int
    there: int


def deliver(chain: Chain, path: Path, keep: int) -> Delivered:
    """Copy a checkpoint and its parents to the folder, or the store, at `path`, unless they are there.

    Args:
        chain: The checkpoint with its parents.
        path: From `address.checkpoint_path`.
        keep: Number of checkpoints that stay there, besides their parents; older ones are removed.

    Raises:
        BrokenCheckpointError: A file of the checkpoint is damaged or gone; the target is as it was.
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
    there: dict[str, Manifest] = {}
    lost: set[str] = set()  # without a manifest that can be read
    for name in folder.names_in(path):
        try:
            there[name] = manifest.read(path / name)
        except BrokenCheckpointError as error:
            if name not in (each.name for each in chain):
                note(f"{error}; {name} is removed there")
                lost.add(name)
    new = _choose_new(chain, there, str(path))
    compared: dict[tuple[int, int], bool] = {}  # by device and inode, which checkpoints share

    def is_intact(name: str, file: File, find_source: Callable[[], Path | None]) -> bool:
        try:
            found = inside(path / name, file.file).stat()
        except (OSError, ValueError):
            return False
        key = found.st_dev, found.st_ino
        if key not in compared:
            compared[key] = _is_right(path / name, file, there[name])
        return compared[key]

    held = _compare(chain, there, str(path), is_intact)
    known = {key: path / name for key, name in held.known.items()}
    total = sum(each.manifest.nbytes for each in new)
    with bar(total, "delivering", "B", unit_scale=True) as progress:
        copied = _replace_in_folder(held.damaged, path, known)
        copied += sum(_copy_checkpoint(each, path, known, progress.update) for each in new)
    for name in held.lost | lost:
        folder.remove(path / name)
    folder.prune(path, keep)
    return _count(chain, new, held, copied)


def _replace_in_folder(damaged: "list[_Damaged]", path: Path, known: dict[Key, Path]) -> int:
    """Put new files in the place of damaged ones, which may have other names; return the bytes that were copied."""
    if not damaged:
        return 0
    copied = 0
    partial_ = folder.begin(path, "replaced")
    for name, file, source, state in damaged:
        made, target, key = partial_ / "file", path / name / file.file, (file.bytes, file.sha256)
        if (same := known.get(key)) is None or not _link(same, made):
            _copy_file(source, made, file, state)
            copied += file.bytes
        target.parent.mkdir(parents=True, exist_ok=True)
        made.replace(target)
        sync_folder(target.parent)
        known[key] = target
    partial_.rmdir()
    return copied


def _copy_checkpoint(checkpoint: Checkpoint, to: Path, known: dict[Key, Path], done: Callable[[int], object]) -> int:
    """Copy a checkpoint; return the bytes that were copied. Files in `known` are linked."""
    partial_ = folder.begin(to, checkpoint.name)
    states = checkpoint.manifest.segment_states
    copied = 0
    for file in checkpoint.manifest.files:
        target, same = partial_ / file.file, known.get((file.bytes, file.sha256))
        target.parent.mkdir(parents=True, exist_ok=True)
        if same is None or not _link(same, target):
            _copy_file(checkpoint.path / file.file, target, file, states.get(file.file))
            copied += file.bytes
        known[file.bytes, file.sha256] = to / checkpoint.name / file.file
        done(file.bytes)
    if (to / checkpoint.name).exists():  # one with a damaged manifest
        folder.remove(to / checkpoint.name)
    folder.commit(partial_, checkpoint.name, checkpoint.manifest)
    return copied


def _copy_file(source: Path, target: Path, file: File, state: SegmentState | None) -> None:
    """Copy a file and sync it; raise BrokenCheckpointError if its content is not the manifest's."""
    digest = sha256()
    try:
        stream = source.open("rb")
    except OSError as error:
        raise BrokenCheckpointError(f"{source} cannot be read ({error.strerror})") from None
    with stream, target.open("xb") as out:
        while piece := stream.read(_PIECE):
            digest.update(piece)
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
    if state is not None and isinstance(file, SegmentEntry):
        check_segment(target, file, state)
    elif digest.hexdigest() != file.sha256:
        raise BrokenCheckpointError(f"{source} is broken (its checksum is wrong)")


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name; return whether the file system can."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _deliver_to_store(chain: Chain, store: Store, keep: int) -> Delivered:
    names = {name.partition("/")[0] for name in store.list() if "/" in name}
    there = {name: found for name in names if folder.is_name(name) and (found := _read_stored(store, name)) is not None}
    new = _choose_new(chain, there, store.shown)
    token = secrets.token_hex(16).encode()
    store.write(WRITER, token)  # a run that writes there notices

    def is_intact(name: str, file: File, find_source: Callable[[], Path | None]) -> bool:
        if (source := find_source()) is not None:
            return store.compare(f"{name}/{file.file}", source) is not None
        return _is_intact_stored(store, name, file, there[name])

    held = _compare(chain, there, store.shown, is_intact)
    known, copied = held.known, 0
    with bar(sum(each.manifest.nbytes for each in new), "delivering", "B", unit_scale=True) as progress:
        for name, file, source, _ in held.damaged:
            store.put(source, f"{name}/{file.file}")
            known[file.bytes, file.sha256] = f"{name}/{file.file}"
            copied += file.bytes
        for each in new:
            copied += _put_checkpoint(each, store, known, progress.update)
            if store.read_if_there(WRITER) != token:
                raise StoreError(f"{store.shown} is in use: another process has begun to write checkpoints there")
            store.put(each.path / FILE_NAME, f"{each.name}/{FILE_NAME}")
            there[each.name] = each.manifest
    complete = _choose_kept({name: found for name, found in there.items() if name not in held.lost}, keep)
    for name in names:
        if folder.is_name(name) and name not in complete:
            remove_stored(store, name)
    return _count(chain, new, held, copied)


def _is_intact_stored(store: Store, name: str, file: File, content: Manifest) -> bool:
    """Read a file of a checkpoint in a store; return whether it is intact."""
    with tempfile.TemporaryDirectory() as made:
        try:
            return fetch_file(store, name, Path(made), file, content)
        except StoreError as error:
            if error.may_pass:
                raise
            return False  # it is missing


def _put_checkpoint(checkpoint: Checkpoint, store: Store, known: dict[Key, str], done: Callable[[int], object]) -> int:
    """Copy a checkpoint's files to a store, all but the manifest; return the bytes that were sent."""

    def put(file: File) -> int:
        source, target = checkpoint.path / file.file, f"{checkpoint.name}/{file.file}"
        same = known.get((file.bytes, file.sha256))
        if same is not None:
            store.copy(same, target)
            if store.compare(target, source) is not None:
                return 0
        check_entry(checkpoint.path, file, checkpoint.manifest.segment_states)
        store.put(source, target)
        return file.bytes

    store.remove(f"{checkpoint.name}/{FILE_NAME}")  # of a damaged one
    sent = 0
    every = checkpoint.manifest.files
    calls = (partial(put, file) for file in every)
    for file, size in zip(every, call_all(_THREADS, "hostdev-deliver", calls), strict=True):
        sent += size
        done(file.bytes)
    known.update({(file.bytes, file.sha256): f"{checkpoint.name}/{file.file}" for file in every})
    return sent


def _choose_new(chain: Chain, there: Mapping[str, Manifest], where: str) -> Chain:
    """Return the checkpoints of a chain that are not there; raise UserError if those there are of another run."""
    mine = {each.name: each.manifest for each in chain}
    for name, found in there.items():
        if name in mine and found.checksum != mine[name].checksum:
            raise UserError(f"{where} has another checkpoint {name}; deliver to a folder of its own")
    newest = max(there, key=lambda name: there[name].serial, default=None)
    if newest is not None and newest not in mine and there[newest].serial >= chain[-1].manifest.serial:
        raise UserError(
            f"{where} has the checkpoint {newest}, which is newer than {chain[-1].path} or of another run; deliver to "
            "a folder of its own"
        )
    return [each for each in chain if each.name not in there]


def _choose_kept(there: Mapping[str, Manifest], keep: int) -> set[str]:
    """Return the names of the newest checkpoints and of their parents."""
    kept: set[str] = set()
    found = 0
    for name in sorted(there, key=lambda name: there[name].serial, reverse=True):
        chain = [name]
        while (parent := there[chain[-1]].parent) is not None and parent.name in there and parent.name not in chain:
            chain.append(parent.name)
        if found < keep and there[chain[-1]].parent is None:
            kept |= set(chain)
            found += 1
    return kept


class _Damaged(NamedTuple):
    """A damaged file of a checkpoint that is there: the checkpoint, the file's entry, and an intact file to copy."""

    name: str
    file: File
    source: Path
    state: SegmentState | None


class _Compared(NamedTuple):
    """What the target has: its intact files, by size and SHA-256, and what to do about the others.

    Attributes:
        known: The intact files.
        damaged: Files to replace.
        lost: Checkpoints with damaged files that the source does not have, and those that build on them.
    """

    known: dict[Key, str]
    damaged: list[_Damaged]
    lost: set[str]


def _compare(
    chain: Chain,
    there: Mapping[str, Manifest],
    where: str,
    is_intact: Callable[[str, File, Callable[[], Path | None]], bool],
) -> _Compared:
    """Read the files of the checkpoints that are there, and say which ones are damaged.

    Args:
        chain: The checkpoint to deliver, whose files are intact.
        there: The manifests of the target's checkpoints.
        where: The target, for messages.
        is_intact: Called with a checkpoint's name, a file's entry, and a function that returns a file of this machine
            with the right content, or None.
    """
    own = {(file.bytes, file.sha256): each.path / file.file for each in chain for file in each.manifest.files}
    root = chain[-1].path.parent
    beside = {name: _read(root / name) for name in there}  # older checkpoints of the source, which it may still have
    found = _Compared({}, [], set())

    def find_source(name: str, file: File) -> Path | None:
        if (source := own.get((file.bytes, file.sha256))) is not None:
            return source
        other = beside[name]
        same = other is not None and other.checksum == there[name].checksum
        return root / name / file.file if same and _is_right(root / name, file, there[name]) else None

    def look(name: str, file: File) -> tuple[bool, Path | None]:
        find = cache(partial(find_source, name, file))
        intact = is_intact(name, file, find)
        return intact, None if intact else find()

    files = [(name, file) for name, content in there.items() for file in content.files]
    calls = (partial(look, *each) for each in files)
    with bar(sum(file.bytes for _, file in files), f"comparing {where}", "B", unit_scale=True) as progress:
        for (name, file), (intact, source) in zip(files, call_all(_THREADS, "hostdev-compare", calls), strict=True):
            progress.update(file.bytes)
            if intact:
                found.known[file.bytes, file.sha256] = f"{name}/{file.file}"
            elif source is not None:
                note(f"{where}/{name}/{file.file} is damaged; it is replaced from {source}")
                found.damaged.append(_Damaged(name, file, source, there[name].segment_states.get(file.file)))
            else:
                note(f"{where}/{name}/{file.file} is damaged, and {root} does not have it; {name} is removed there")
                found.lost.add(name)
    while more := {
        name
        for name, each in there.items()
        if each.parent is not None and each.parent.name in found.lost and name not in found.lost
    }:
        found.lost.update(more)
    return found


def _count(chain: Chain, new: Chain, held: _Compared, copied: int) -> Delivered:
    changed = {each.name for each in new} | {each.name for each in held.damaged}
    return Delivered(len(changed), copied, max(0, sum(each.manifest.nbytes for each in chain) - copied))


def _is_right(root: Path, file: File, content: Manifest) -> bool:
    """Return whether a file of the checkpoint at `root` is intact."""
    try:
        check_entry(root, file, content.segment_states)
    except BrokenCheckpointError:
        return False
    return True


def _read(path: Path) -> Manifest | None:
    """Return a checkpoint's manifest, or None if it is missing or damaged."""
    try:
        return manifest.read(path)
    except HostdevError:
        return None


def _read_stored(store: Store, name: str) -> Manifest | None:
    """Return the manifest of a checkpoint in a store, or None if it is missing or damaged."""
    content = store.read_manifest(f"{name}/{FILE_NAME}")
    if content is None:
        return None
    with tempfile.TemporaryDirectory() as made, contextlib.suppress(BrokenCheckpointError):
        (Path(made) / FILE_NAME).write_bytes(content)
        return manifest.read(Path(made))
    return None


def describe(chain: Chain, path: Path, found: Delivered) -> str:
    """Return a line for the user."""
    step, where = f"step {chain[-1].manifest.step:,}", shown_place(path)
    if not found.checkpoints:
        return f"{where} has {step} already ({format_bytes(found.there)}); nothing was copied"
    there = f"; {format_bytes(found.there)} were there" if found.there else ""
    return f"{step} delivered to {where}: {format_bytes(found.copied)} copied{there}"
