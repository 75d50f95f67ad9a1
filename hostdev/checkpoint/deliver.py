"""Delivery of a checkpoint to another folder or a store, such as the one that a server follows.

Only files that are not there are copied. A checkpoint appears at once, after its parents, so that a reader finds either
all of it or none; what a killed delivery has left is removed by the next one.
"""

import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from hostdev.checkpoint import folder, manifest
from hostdev.checkpoint.files import check_file, check_segment
from hostdev.checkpoint.folder import Chain, Checkpoint
from hostdev.checkpoint.manifest import FILE_NAME, BrokenCheckpointError, File, Manifest, SegmentEntry
from hostdev.checkpoint.remote import WRITER
from hostdev.core.errors import HostdevError, UserError
from hostdev.core.memory import format_bytes
from hostdev.core.progress import bar
from hostdev.core.workers import call_all
from hostdev.stores.address import address_of, shown_place
from hostdev.stores.store import Store, StoreError

_THREADS = 4
_PIECE = 1 << 22  # bytes

Key = tuple[int, str]  # a file's size and SHA-256


class Delivered(NamedTuple):
    """What a delivery did: the number of new checkpoints, the bytes copied, and the bytes that were there already."""

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
        BrokenCheckpointError: A file of the checkpoint is damaged or gone.
        UserError: The folder is in use, has another checkpoint of the same name or a newer one, or cannot be written.
        StoreError: The store cannot be read or written.
    """
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
    there = {name: found for name in folder.names_in(path) if (found := _read(path / name)) is not None}
    new = _choose_new(chain, there, str(path))
    for each in new:
        if (path / each.name).exists():  # a damaged one
            folder.remove(path / each.name)
    known = {key: path / name for name, key in _list_files(there)}
    with bar(sum(each.manifest.nbytes for each in new), "delivering", "B", unit_scale=True) as progress:
        copied = sum(_copy_checkpoint(each, path, known, progress.update) for each in new)
    folder.prune(path, keep)
    return Delivered(len(new), copied, sum(each.manifest.nbytes for each in chain) - copied)


def _copy_checkpoint(checkpoint: Checkpoint, to: Path, known: dict[Key, Path], done: Callable[[int], object]) -> int:
    """Copy a checkpoint; return the bytes that were copied. Files in `known` are linked."""
    partial_ = folder.begin(to, checkpoint.name)
    states = _get_segment_states(checkpoint.manifest)
    copied = 0
    for file in checkpoint.manifest.files:
        target, same = partial_ / file.file, known.get((file.bytes, file.sha256))
        target.parent.mkdir(parents=True, exist_ok=True)
        if same is None or not _link(same, target):
            _copy_file(checkpoint.path / file.file, target, file)
            if isinstance(file, SegmentEntry):
                check_segment(target, file, states[file.file])
            copied += file.bytes
        known[file.bytes, file.sha256] = to / checkpoint.name / file.file
        done(file.bytes)
    folder.commit(partial_, checkpoint.name, checkpoint.manifest)
    return copied


def _copy_file(source: Path, target: Path, file: File) -> None:
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
    if not isinstance(file, SegmentEntry) and digest.hexdigest() != file.sha256:
        raise BrokenCheckpointError(f"{source} is broken (its checksum is wrong)")


def _link(source: Path, target: Path) -> bool:
    """Give a file a second name; return whether the file system can."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def _deliver_to_store(chain: Chain, store: Store, keep: int) -> Delivered:
    files = store.list()
    names = {name.partition("/")[0] for name in files if "/" in name}
    there = {name: found for name in names if folder.is_name(name) and (found := _read_stored(store, name)) is not None}
    new = _choose_new(chain, there, store.shown)
    token = secrets.token_hex(16).encode()
    store.write(WRITER, token)  # a run that writes there notices
    known = {key: name for name, key in _list_files(there)}
    copied = 0
    with bar(sum(each.manifest.nbytes for each in new), "delivering", "B", unit_scale=True) as progress:
        for each in new:
            copied += _put_checkpoint(each, store, known, progress.update)
            if store.read_if_there(WRITER) != token:
                raise StoreError(f"{store.shown} is in use: another process has begun to write checkpoints there")
            store.put(each.path / FILE_NAME, f"{each.name}/{FILE_NAME}")
            there[each.name] = each.manifest
    complete = _choose_kept(there, keep)
    for name in names:
        if folder.is_name(name) and name not in complete:
            store.remove(f"{name}/{FILE_NAME}")  # first, so that no reader takes it for complete
            for file in store.list(name):
                store.remove(f"{name}/{file}")
    return Delivered(len(new), copied, sum(each.manifest.nbytes for each in chain) - copied)


def _put_checkpoint(checkpoint: Checkpoint, store: Store, known: dict[Key, str], done: Callable[[int], object]) -> int:
    """Copy a checkpoint's files to a store, all but the manifest; return the bytes that were sent."""
    states = _get_segment_states(checkpoint.manifest)

    def put(file: File) -> int:
        source, target = checkpoint.path / file.file, f"{checkpoint.name}/{file.file}"
        same = known.get((file.bytes, file.sha256))
        if same is not None:
            store.copy(same, target)
            return 0
        if isinstance(file, SegmentEntry):
            check_segment(source, file, states[file.file])
        else:
            check_file(source, file)
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


def _list_files(there: Mapping[str, Manifest]) -> Iterable[tuple[str, Key]]:
    """Yield the files of checkpoints: their names in the folder, and their keys."""
    for name, found in there.items():
        for file in found.files:
            yield f"{name}/{file.file}", (file.bytes, file.sha256)


def _get_segment_states(content: Manifest) -> dict[str, manifest.SegmentState]:
    """Return the state of each segment's table, by the segment's name."""
    return {file.file: table.segments for table in content.tables if table.segments for file in table.segments.files}


def _read(path: Path) -> Manifest | None:
    """Return a checkpoint's manifest if its files are there, or None."""
    try:
        return folder.read_chain(path)[-1].manifest
    except HostdevError:
        return None


def _read_stored(store: Store, name: str) -> Manifest | None:
    """Return the manifest of a checkpoint in a store, or None if it is missing or damaged."""
    content = store.read_if_there(f"{name}/{FILE_NAME}")
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
