"""Checkpoints that hold the segments of a table on disk by hard links, in place of its rows; and tables that do so."""

from pathlib import Path
from typing import Any

import numpy as np

from hostdev.checkpoint.folder import Checkpoint, check_file, mapped, segments_of, still_exists
from hostdev.checkpoint.items import FROM_FIRST, Held
from hostdev.checkpoint.manifest import RangeFile, SegmentState, Table
from hostdev.checkpoint.ranges import has_local_rows, map_rows, parse_range
from hostdev.checkpoint.segment_rows import count_records, require_locations
from hostdev.core.initializers import Constant, Normal, Uniform
from hostdev.core.optimizers import OPTIMIZERS
from hostdev.host.disk.segments import SegmentFile
from hostdev.host.disk.storage import DiskStorage
from hostdev.host.snapshot import split_locations
from hostdev.kernels.arrays import AnyIds, LongIds, Mask


def can_adopt(about: Table, table: Any) -> bool:
    """Return whether a table can hold a checkpoint's segments in place of loading their rows."""
    state = about.segments
    if state is None or not table.capabilities.on_disk:
        return False
    storage = table.storage
    records, own = storage.tier.store.format, storage.format
    same = (about.dtype, about.slots_dtype) == (table.dtype, table.slots_dtype)
    sizes = own.row_bytes, records.record_bytes, records.block_bytes
    fits = all(file.bytes % records.chunk_bytes == 0 and file.bytes <= records.segment_bytes for file in state.files)
    fits = fits and 2 * len(state.files) <= storage.tier.store.segments.most
    return same and fits and sizes == (state.row_bytes, state.record_bytes, state.block_bytes)


class Adopted:
    """The segments of a checkpoint that a table on disk holds.

    Use it in a `with` block, in which `place` says which row has which location.

    Args:
        checkpoint: The checkpoint.
        about: The table's entry in its manifest.
        storage: The table's storage.
        used: bool [segments], which of the segments have rows of this process.
    """

    def __init__(self, checkpoint: Checkpoint, about: Table, storage: DiskStorage, used: Mask) -> None:
        assert about.segments is not None
        self._tier = storage.tier
        files = [
            SegmentFile(checkpoint.path / file.file, file.bytes, file.sha256, file.number)
            for file, is_used in zip(about.segments.files, used.tolist(), strict=True)
            if is_used
        ]
        self._at = np.full(len(used), -1, np.int64)
        self._at[used] = self._tier.store.adopt(files)

    def place(self, rows: AnyIds, locations: LongIds) -> None:
        """Take the records at locations [N], none of which is 0, for rows [N]."""
        self._tier.forget(rows)
        segments, records = split_locations(locations)
        self._tier.adopt(rows, self._at[segments] * self._tier.store.format.per_segment + records)

    def __enter__(self) -> "Adopted":
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.store.use_adopted()


def find_used(checkpoint: Checkpoint, about: Table, files: list[RangeFile], *, check: bool) -> Mask:
    """Return which segments have rows of these files; with `check`, verify the files' checksums."""
    assert about.segments is not None
    used, records = np.zeros(len(about.segments.files), np.bool_), count_records(about.segments)
    for file in files:
        if check:
            check_file(checkpoint.path / file.file, file)
        locations = read_locations(checkpoint.path / file.file, about, file)
        locations = locations[locations != 0]
        require_locations(checkpoint.path, about, locations, records)
        used[split_locations(locations)[0]] = True
    return used


def read_locations(path: Path, about: Table, file: RangeFile) -> LongIds:
    """Return the locations of a file's rows, int64 [N]; raise BrokenCheckpointError if one cannot be."""
    rows = parse_range(path, mapped(path), about, file)
    assert rows.locations is not None
    return rows.locations


def adopt_rows(checkpoint: Checkpoint, name: str, table: Any, *, check: bool) -> bool:
    """Let a table by row on disk hold the segments of a checkpoint, if it can; return whether all rows are loaded so.

    Raises:
        BrokenCheckpointError: A file is damaged.
        UserError: A segment cannot be held.
    """
    about = checkpoint.manifest.table(name)
    if not can_adopt(about, table) or about.rows != table.total_rows:
        return False
    state, storage = about.segments, table.storage
    assert state is not None
    if (state.seed, state.init) != (storage.format.seed, repr(storage.format.init)):
        return False  # rows with initial values have others here
    files = [file for file in about.files if has_local_rows(about, file, table)]
    used = find_used(checkpoint, about, files, check=check)
    table.forget_rows()
    with Adopted(checkpoint, about, storage, used) as adopted:
        for file in files:
            locations = read_locations(checkpoint.path / file.file, about, file)
            numbers, chosen = map_rows(about, np.arange(file.start, file.stop), table)
            locations = locations if chosen is None else locations[chosen]
            there = locations > 0
            adopted.place(numbers[there], locations[there])
    return True


def can_locate(table: Any) -> bool:
    """Return whether a checkpoint can hold a table's segments in place of copying its rows.

    It cannot if rows may have initial values that the manifest cannot describe; while the disk is full, since changed
    rows are written first; or after `erase`, until no segment has records of erased rows.
    """
    if not table.capabilities.on_disk:
        return False
    store = table.storage.tier.store
    known = type(table.storage.format.init) in (Normal, Uniform, Constant)
    return known and type(table.optimizer) in OPTIMIZERS.values() and not (store.is_tainted or store.segments.is_full)


def describe_segments(table: Any) -> SegmentState:
    """Return the manifest's entry for the segments of a table, yet without files."""
    format_, records = table.storage.format, table.storage.tier.store.format
    return SegmentState(
        files=[],
        numbering=FROM_FIRST,
        row_bytes=format_.row_bytes,
        record_bytes=records.record_bytes,
        block_bytes=records.block_bytes,
        seed=format_.seed,
        init=repr(format_.init),
    )


def find_held(last: Checkpoint | None) -> Held:
    """Return the segments that a checkpoint holds."""
    return {} if last is None or not still_exists(last) else segments_of(last)
