"""Tables on disk with few rows in memory, beside equal ones in memory."""

import numpy as np

from hostdev import Disk, HostTable, LazyAdam
from hostdev.host.disk.readers import Planes
from hostdev.host.key_table import KeyTable

ROWS = 3_000
FORMATS = ({}, {"dtype": "bfloat16", "slots": "bfloat16"}, {"dtype": "bfloat16", "slots": "8bit"})


def memory_for(rows, dim, optimizer, **formats):
    """Return bytes for a table's buffers and for about so many of its rows."""
    table = HostTable(8, dim, optimizer(), name="size", **formats)
    return 4 * (1 << 14) + rows * (Planes.of(table.storage.planes).row_bytes + 32)


def pair(tmp_path, rows=ROWS, dim=8, optimizer=LazyAdam, kept=300, **options):
    """Return a table in memory, and the same with `kept` rows in memory and the others on disk."""
    formats = {name: options[name] for name in ("dtype", "slots") if name in options}
    disk = Disk(tmp_path / "disk", memory=memory_for(kept, dim, optimizer, **formats))
    return [HostTable(rows, dim, optimizer(), name="t", seed=3, storage=storage, **options) for storage in (None, disk)]


def require_equal(one, other):
    if isinstance(one, KeyTable):
        assert np.array_equal(one.keys, other.keys)
    assert np.array_equal(one.weights, other.weights)
    for name, values in one.slots.items():
        assert np.array_equal(values, other.slots[name]), name
    assert one.sum_of_squares() == other.sum_of_squares()


def flip(path, at):
    with path.open("rb+") as file:
        file.seek(at)
        value = file.read(1)[0]
        file.seek(at)
        file.write(bytes([value ^ 0x40]))


def on_disk(table):
    """Return rows that are on disk, not in memory or buffers."""
    tier = table.storage.tier
    rows = np.flatnonzero(tier.where > 0)
    chunks = (tier.where[rows].astype(np.int64) - 1) // tier.store.format.per_chunk
    return rows[tier.store._buffer_of[chunks] < 0]


def filled(tmp_path, rows=ROWS, kept=200):
    _, table = pair(tmp_path, kept=kept)
    for start in range(0, rows, 100):
        table.apply(np.arange(start, start + 100), np.ones((100, 8), np.float32))
    return table
