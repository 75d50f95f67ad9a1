"""Checkpoints that hold a disk table's segments by hard links in place of rows, and tables that adopt such segments."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from hostdev.checkpoint.folder import Checkpoint, check_file, mapped, segments_of, still_exists
from hostdev.checkpoint.items import FROM_FIRST, Held
from hostdev.checkpoint.manifest import RangeFile, SegmentState, Table
from hostdev.checkpoint.ranges import RowChunk, has_local_rows, map_rows, parse_range
from hostdev.checkpoint.segment_rows import count_records, require_locations
from hostdev.core.initializers import Constant, Normal, Uniform
from hostdev.core.optimizers import OPTIMIZERS
from hostdev.host.disk.segments import SegmentFile
from hostdev.host.snapshot import split_locations
from hostdev.kernels.arrays import AnyIds, Mask


def can_adopt(about: Table, table: Any) -> bool:
    """Return whether a table can hold a checkpoint's segments in place of loading their rows."""
    state = about.segments
    if state is None or not table.capabilities.on_disk:
        return False
    storage = table.storage
    records = storage.tier.store.format
    same = (about.dtype, about.slots_dtype) == (table.dtype, table.slots_dtype)
    sizes = storage.row_bytes, records.record_bytes, records.block_bytes
    fits = all(file.bytes % records.chunk_bytes == 0 and file.bytes <= records.segment_bytes for file in state.files)
    fits = fits and 2 * len(state.files) <= storage.tier.store.segments.most
    return same and fits and sizes == (state.row_bytes, state.record_bytes, state.block_bytes)


def adopt_files(
    checkpoint: Checkpoint,
    about: Table,
    table: Any,
    files: Iterable[RangeFile],
    used: Mask,
    place: Callable[[RowChunk], tuple[AnyIds, Any]],
) -> None:
    """Let a table on disk hold segments of a checkpoint, and use the records in them as its rows.

    Args:
        checkpoint: The checkpoint.
        about: The table's entry in its manifest.
        table: The table.
        files: The files with the locations of rows.
        used: bool [segments], which of the segments have rows of `files`.
        place: Called with a file's rows [N]; returns rows of the table, and an index that selects their values from
            arrays [N] of the file's rows.
    """
    assert about.segments is not None
    tier, at = table.storage.tier, np.full(len(used), -1, np.int64)
    at[used] = tier.store.adopt(
        [
            SegmentFile(checkpoint.path / file.file, file.bytes, file.sha256, file.number)
            for file, is_used in zip(about.segments.files, used.tolist(), strict=True)
            if is_used
        ]
    )
    try:
        for file in files:
            path = checkpoint.path / file.file
            found = parse_range(path, mapped(path), about, file)
            rows, chosen = place(found)
            assert found.locations is not None
            locations = found.locations[chosen]
            rows, locations = rows[locations > 0], locations[locations > 0]  # rows at location 0 keep initial values
            tier.forget(rows)
            segments, records = split_locations(locations)
            tier.adopt(rows, at[segments] * tier.store.format.per_segment + records)
    finally:
        tier.store.use_adopted()


def find_used(checkpoint: Checkpoint, about: Table, files: list[RangeFile], *, check: bool) -> Mask:
    """Return which segments have rows of `files`, bool [segments]; with `check`, verify the files' checksums."""
    assert about.segments is not None
    used, records = np.zeros(len(about.segments.files), np.bool_), count_records(about.segments)
    for file in files:
        if check:
            check_file(checkpoint.path / file.file, file)
        path = checkpoint.path / file.file
        locations = parse_range(path, mapped(path), about, file).locations
        assert locations is not None
        locations = locations[locations != 0]
        require_locations(checkpoint.path, about, locations, records)
        used[split_locations(locations)[0]] = True
    return used


def adopt_rows(checkpoint: Checkpoint, name: str, table: Any, *, check: bool) -> bool:
    """Let a table by row on disk hold a checkpoint's segments in place of loading rows; return False if it cannot.

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
        return False  # rows without a location would get different initial values here
    files = [file for file in about.files if has_local_rows(about, file, table)]
    used = find_used(checkpoint, about, files, check=check)
    table.forget_rows()

    def place(rows: RowChunk) -> tuple[AnyIds, Any]:
        return map_rows(about, np.arange(rows.start, rows.start + len(rows)), table)

    adopt_files(checkpoint, about, table, files, used, place)
    return True


def can_locate(table: Any) -> bool:
    """Return whether a checkpoint can hold a table's segments in place of copying its rows.

    It cannot if the manifest cannot describe the table's initializer or optimizer. It also cannot while the disk is
    full, since changed rows must be written first, or while a segment still has records of erased rows.
    """
    if not table.capabilities.on_disk:
        return False
    store = table.storage.tier.store
    known = type(table.storage.format.init) in (Normal, Uniform, Constant)
    return known and type(table.optimizer) in OPTIMIZERS.values() and not (store.is_tainted or store.segments.is_full)


def describe_segments(table: Any) -> SegmentState:
    """Return the manifest's entry for the segments of a table, with no files yet."""
    format_, records = table.storage.format, table.storage.tier.store.format
    return SegmentState(
        files=[],
        numbering=FROM_FIRST,
        row_bytes=table.storage.row_bytes,
        record_bytes=records.record_bytes,
        block_bytes=records.block_bytes,
        seed=format_.seed,
        init=repr(format_.init),
    )


def find_held(last: Checkpoint | None) -> Held:
    """Return the segments that a checkpoint holds; {} for None, or if the checkpoint no longer exists."""
    return {} if last is None or not still_exists(last) else segments_of(last)
