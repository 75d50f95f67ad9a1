"""Loading of rows in segments into a table on disk: it holds the segments by hard links, and reads no rows.

Also, which rows of a checkpoint's files belong to a process.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.files import check_file, mapped
from hostdev.checkpoint.folder import Checkpoint
from hostdev.checkpoint.manifest import RangeFile, Table
from hostdev.checkpoint.ranges import SPREAD, parse_range
from hostdev.checkpoint.segment_rows import SegmentRows, count_records, require_locations
from hostdev.host.disk.segments import SegmentFile
from hostdev.host.disk.snapshot import LOCATION_BITS
from hostdev.host.disk.storage import DiskStorage
from hostdev.kernels.shards import get_positions, ids_of

Ids = npt.NDArray[np.int64]

_RECORD = (1 << LOCATION_BITS) - 1


def has_local_rows(about: Table, file: RangeFile, table: Any) -> bool:
    """Return whether a file may have rows that this process holds."""
    if getattr(table, "part", None) is None or about.order != SPREAD or about.rows != table.total_rows:
        return True
    return bool(file.start < table.start + table.rows and table.start < file.stop)


def map_rows(about: Table, numbers: Any, table: Any) -> tuple[Any, Any]:
    """Return the local rows to load, and the indices of their values among the file's rows (None for all).

    Args:
        about: The table's entry in the manifest.
        numbers: The file's rows: ascending ids, or ascending positions if the rows were divided among processes.
        table: The table to load into.
    """
    part = getattr(table, "part", None)
    if about.order == SPREAD and (part is None or about.rows != table.total_rows):
        numbers = ids_of(numbers, about.rows)  # positions depend on the table's number of rows
    if part is None:
        return numbers, None
    same = about.order == SPREAD and about.rows == table.total_rows
    positions = numbers if same else get_positions(numbers, table.total_rows)
    chosen = np.flatnonzero((table.start <= positions) & (positions < table.start + table.rows))
    return positions[chosen] - table.start, chosen


def open_segments(checkpoint: Checkpoint, name: str) -> SegmentRows | None:
    """Return the rows in segments of a checkpoint's table, or None if they are not in segments."""
    table = checkpoint.manifest.table(name)
    return None if table.segments is None else SegmentRows(checkpoint.path, table)


def can_adopt(about: Table, table: Any) -> bool:
    """Return whether a table can hold a checkpoint's segments in place of loading their rows."""
    state, storage = about.segments, getattr(table, "storage", None)
    if state is None or not isinstance(storage, DiskStorage):
        return False
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

    def __init__(self, checkpoint: Checkpoint, about: Table, storage: DiskStorage, used: npt.NDArray[np.bool_]) -> None:
        assert about.segments is not None
        self._tier = storage.tier
        files = [
            SegmentFile(checkpoint.path / file.file, file.bytes, file.sha256, file.number)
            for file, is_used in zip(about.segments.files, used.tolist(), strict=True)
            if is_used
        ]
        self._at = np.full(len(used), -1, np.int64)
        self._at[used] = self._tier.store.adopt(files)

    def place(self, rows: npt.NDArray[Any], locations: Ids) -> None:
        """Take the records at locations [N], none of which is 0, for rows [N]."""
        self._tier.forget(rows)
        positions = self._at[(locations - 1) >> LOCATION_BITS] * self._tier.store.format.per_segment
        self._tier.adopt(rows, positions + ((locations - 1) & _RECORD))

    def __enter__(self) -> "Adopted":
        return self

    def __exit__(self, *_: object) -> None:
        self._tier.store.use_adopted()


def find_used(checkpoint: Checkpoint, about: Table, files: list[RangeFile], *, check: bool) -> npt.NDArray[np.bool_]:
    """Return which segments have rows of these files; with `check`, verify the files' checksums."""
    assert about.segments is not None
    used, records = np.zeros(len(about.segments.files), np.bool_), count_records(about.segments)
    for file in files:
        if check:
            check_file(checkpoint.path / file.file, file)
        locations = read_locations(checkpoint.path / file.file, about, file)
        locations = locations[locations != 0]
        require_locations(checkpoint.path, about, locations, records)
        used[(locations - 1) >> LOCATION_BITS] = True
    return used


def read_locations(path: Path, about: Table, file: RangeFile) -> Ids:
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
