"""Batches that do not fit in the memory of a table on disk: they end no training and change no bit."""

import numpy as np
import pytest
import torch

from hostdev import Disk, Feature, HostTable, LazyAdam, Runtime, Unused
from hostdev.kernels import disk_records

ROWS, DIM, STEPS = 3_000, 8, 12
FRAME = 4 * DIM * 3 + 32  # bytes of a row in memory
BUFFERS = 4 << 14


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(disk_records, "_CHUNK", 1 << 14)
    monkeypatch.setattr("hostdev.host.disk.tier.SEGMENT_BYTES", 1 << 16)


def growing(seed, steps=STEPS, most=1_200):
    """Yield batches of ids; later ones are larger, but for some small ones."""
    random = np.random.default_rng(seed)
    for step in range(steps):
        size = 40 if step % 5 == 4 else 40 + most * step // steps
        yield {name: torch.from_numpy(random.integers(0, ROWS, size)) for name in ("one", "other")}


def make_tables(folder, frames, keys, window=16):
    """Return two tables on disk with memory for so many rows each, of which the second has half; None: in memory."""
    options = {"rows": ROWS} if keys is None else {"rows": None, **keys}
    storage = [None, None]
    if frames is not None:
        storage = [Disk(folder, BUFFERS + count * FRAME, window) for count in (frames, frames // 2)]
    return [
        HostTable(dim=DIM, optimizer=LazyAdam(), name=name, seed=3, storage=one, **options)
        for name, one in zip(("one", "other"), storage, strict=True)
    ]


def train(folder, frames, *, keys=None, window=16, depth=2, cache=0, accumulate=1, inner=True):
    """Train; return the tables, and all that was seen of their rows."""
    one, other = make_tables(folder, frames, keys, window)
    seen = []
    with Runtime({"one": Feature(one), "other": Feature(other)}, device="cpu", depth=depth, cache=cache) as runtime:
        loop = runtime.train(growing(0), ids=dict, accumulate=accumulate, read_ahead=True)
        for step, (batch, rows) in enumerate(loop):
            total = rows["one"].square().sum() + (rows["other"] * torch.arange(DIM)).sum()
            total.backward()
            seen.append(total.item())
            if inner and step % 4 == 2:  # larger than any batch of the loop so far
                for _, scored in runtime.predict(growing(1, 3, 2_900), ids=dict, read_ahead=True):
                    seen.append(float(scored["one"].sum() + scored["other"].sum()))
                seen.append(float(runtime.lookup(batch)["one"].sum()))
        for _, scored in runtime.predict(growing(2, 3, 2_900), ids=dict, read_ahead=True):
            seen.append(float(scored["one"].sum()))
    ids = np.arange(ROWS)
    return (one, other), [seen, *(table.lookup(ids).tobytes() for table in (one, other))]


WAYS = {
    "overlapped": {},
    "serial": {"depth": 0},
    "deep": {"depth": 4, "window": 40},
    "without a window": {"depth": 2, "window": 0},
    "a cache": {"depth": 3, "cache": "5%"},
    "micro-batches": {"accumulate": 4},
    "serial micro-batches": {"accumulate": 4, "depth": 0, "window": 3},
    "by key": {"keys": {"capacity": ROWS}},
    "keys evicted": {"keys": {"capacity": ROWS, "evict": Unused(steps=4, every=2)}, "depth": 3},
}


@pytest.mark.parametrize("way", WAYS)
def test_batches_that_do_not_fit_change_no_bit(way, tmp_path, capsys):
    options = WAYS[way]
    _, expected = train(tmp_path, None, **options)
    capsys.readouterr()
    tables, found = train(tmp_path, 300, **options)
    assert found == expected
    error = capsys.readouterr().err.splitlines()
    assert sorted(line.split("'")[1] for line in error) == ["one", "other"]
    for table in tables:
        tier = table.storage.tier
        table.apply(np.arange(3), np.zeros((3, DIM), np.float32))  # it gives back what it had more
        assert table.storage.summary()["exceeded"] > 2
        assert tier.nbytes == tier.count * FRAME + tier.store.nbytes
        assert tier._pinned == 0 and not tier._pins.any()


def test_the_first_table_fits_and_the_second_does_not(tmp_path):
    """A batch that has pinned rows of one table does not wait for itself."""
    for depth in (0, 2):
        _, expected = train(tmp_path, None, depth=depth, inner=False)
        assert train(tmp_path, 2_000, depth=depth, inner=False)[1] == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_batches_that_do_not_fit_change_no_bit_at_any_memory(way, tmp_path):
    _, expected = train(tmp_path, None, **WAYS[way])
    for frames in (2, 40, 150, 600, 1_000, 2_000, 4_000, 6_000):
        assert train(tmp_path, frames, **WAYS[way])[1] == expected, frames
