"""Which tables on disk a checkpoint saves by holding their segments, and what its manifest says about these."""

from typing import Any

from hostdev.checkpoint.folder import Checkpoint, segments_of, still_exists
from hostdev.checkpoint.items import FROM_FIRST, Held
from hostdev.checkpoint.manifest import SegmentState
from hostdev.core.initializers import Constant, Normal, Uniform
from hostdev.core.optimizers import OPTIMIZERS


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
