"""Every batch of a reader against an obvious twin: windows, parts, starts, record batches; threads, and their ends."""

import gc
import os
import shutil
import threading
import time
from itertools import chain, pairwise
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest

from hostdev import UserError
from hostdev.core.errors import StoppedError
from hostdev.core.workers import Workers
from hostdev.data import manifest, shards
from hostdev.data.shard_files import ShardFiles
from hostdev.data.shards import ShardReader, windows_of
from hostdev.kernels.counter import key64
from hostdev.kernels.pool import host_threads, set_host_threads
from tests import naive
from tests.data import twins
from tests.test_shards import bag_columns, rewrite

SHARDS = 8
WINDOWS = [1, 3, 100]


@pytest.fixture(scope="module", params=[None, 30], ids=["whole", "30 rows"])
def data(request, tmp_path_factory):
    """A data set with bags in shards of 100 rows and a small one, each of one record batch, or of several."""
    folder = tmp_path_factory.mktemp("reader")
    path = twins.write_arrow(folder / "t.arrow", bag_columns(730))
    twins.build_table(
        path,
        folder / "data",
        options=twins.Options(threshold=0, rows_per_shard=100, test_fraction=0.01),
        label="y",
        numeric=("x",),
        categorical=("c",),
        bags=(("often", None), ("rare", None)),
        share=(("rare", "often"),),
    )
    assert len(manifest.read(folder / "data").train) == SHARDS
    for shard in range(SHARDS):
        rewrite(folder / "data", lambda table: table.combine_chunks(), shard=shard, rows_per_batch=request.param)
    return folder / "data"


@pytest.fixture
def own(data, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(data, tmp_path / "own")


def reader(folder, window=1):
    return ShardReader(folder, manifest.read(folder), "train", shuffle_window=window)


def shard_rows(path):
    table = pa.ipc.open_file(path).read_all()
    names = ("label", "dense", "cat", "bag:often", "bag:rare")
    return list(zip(*(table[name].to_pylist() for name in names), strict=True))


def twin(folder, seed, epoch, window):
    """All rows of an epoch in order, as Python values."""
    found = [shard_rows(folder / shard.file) for shard in manifest.read(folder).train]
    if seed is None:
        return list(chain(*found))
    order = naive.permutation(SHARDS, key64(seed, "shard order", epoch)).tolist()
    rows = []
    for number, start in enumerate(range(0, SHARDS, window)):
        mine = order[start : start + window]
        mixed = list(chain(*(found[shard] for shard in mine)))
        key = ("row order", epoch, mine[0]) if window == 1 else ("window order", epoch, number)
        rows += [mixed[row] for row in naive.permutation(len(mixed), key64(seed, *key))]
    return rows


def values(batch):
    """A batch's rows, as Python values."""
    columns = [array.tolist() for array in (batch.label, batch.dense, batch.ids)]
    for inside, lengths in batch.bags.values():
        ends, ids = np.cumsum([0, *lengths]).tolist(), inside.tolist()
        columns.append([ids[start:stop] for start, stop in pairwise(ends)])
    return list(zip(*columns, strict=True))


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "hostdev-shards"]


@pytest.mark.parametrize(("seed", "window"), [(None, 1), *((5, window) for window in WINDOWS)])
@pytest.mark.parametrize("batch_size", [1, 70, 100, 350, 10_000])
def test_batches(data, seed, batch_size, window):
    expected = twin(data, seed, 3, window)
    if seed is not None:
        assert sorted(expected) == sorted(twin(data, None, 0, 1))
    found = [values(batch) for batch in reader(data, window).batches(batch_size, seed=seed, epoch=3)]
    assert found == [expected[start : start + batch_size] for start in range(0, len(expected), batch_size)]


@pytest.mark.parametrize(("seed", "window"), [(None, 3), *((5, window) for window in WINDOWS)])
def test_any_batch_is_a_start(data, seed, window):
    rows = reader(data, window)
    batches = [values(batch) for batch in rows.batches(110, seed=seed, epoch=1)]
    for skip in range(len(batches) + 2):
        assert [values(batch) for batch in rows.batches(110, seed=seed, epoch=1, skip=skip)] == batches[skip:]


@pytest.mark.parametrize("window", WINDOWS)
def test_parts_of_each_batch(data, window):
    rows = reader(data, window)
    batches = [values(batch) for batch in rows.batches(70, seed=5, epoch=1, skip=2)]
    for parts in (2, 3):
        readers = [rows.batches(70, seed=5, epoch=1, skip=2, part=(part, parts)) for part in range(parts)]
        for whole, mine in zip(batches, zip(*readers, strict=True), strict=True):
            assert list(chain(*map(values, mine))) == whole
            assert {part.step_rows for part in mine} == {len(whole)}


@pytest.mark.parametrize("batch_size", [70, 10_000])
def test_any_number_of_host_threads(small_data, batch_size):
    found = []
    for n in (1, 2, 5):
        set_host_threads(n)
        found.append(list(reader(small_data, 2).batches(batch_size, seed=1)))
    assert host_threads() == 5
    for batches in zip(*found, strict=True):
        for name in ("label", "dense", "ids"):
            arrays = [getattr(batch, name) for batch in batches]
            assert arrays[0].tobytes() == arrays[1].tobytes() == arrays[2].tobytes()


def test_windows():
    rows = [10, 20, 30, 40, 50]
    for width in (2, 5, 9):
        windows = windows_of(rows, 1, 7, width)
        assert sorted(number for window in windows for number in window.shards) == [0, 1, 2, 3, 4]
        assert [len(window.shards) for window in windows] == {2: [2, 2, 1], 5: [5], 9: [5]}[width]
        assert [window.rows for window in windows] == [sum(rows[i] for i in window.shards) for window in windows]
        assert windows == windows_of(rows, 1, 7, width)
        others = [windows_of(rows, 2, 7, width), windows_of(rows, 1, 8, width)]
        keys = [window.key for some in (windows, *others) for window in some]
        assert len(set(keys)) == len(keys)
    with pytest.raises(ValueError, match="shuffle_window must be at least 1, not 0"):
        ShardReader(None, None, "train", shuffle_window=0)


def damage(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("window", [1, 2, 3])
@pytest.mark.parametrize("batch_size", [40, 100, 150])
def test_an_error_comes_with_the_first_batch_that_needs_the_shard(own, window, batch_size):
    files = manifest.read(own).train
    order = naive.permutation(SHARDS, key64(5, "shard order", 1)).tolist()
    intact = sum(files[number].rows for number in order[: 3 // window * window])
    expected = [values(batch) for batch in reader(own, window).batches(batch_size, seed=5, epoch=1)]
    damage(own / files[order[3]].file)
    found = []
    with pytest.raises(UserError, match=f"part-0000{order[3]}.arrow has a wrong checksum"):
        found.extend(map(values, reader(own, window).batches(batch_size, seed=5, epoch=1)))
    assert found == expected[: intact // batch_size]
    assert not threads()


@pytest.mark.parametrize("window", WINDOWS)
def test_what_is_passed_over_is_not_read(own, window):
    files = manifest.read(own).train
    windows = windows_of([shard.rows for shard in files], 5, 1, window)
    skip = -(-windows[0].rows // 50)
    expected = [values(batch) for batch in reader(own, window).batches(50, seed=5, epoch=1, skip=skip)]
    for number in windows[0].shards:
        (own / files[number].file).unlink()
    assert [values(batch) for batch in reader(own, window).batches(50, seed=5, epoch=1, skip=skip)] == expected


@pytest.mark.parametrize("window", [1, 3])
def test_few_shards_are_open_ahead(data, monkeypatch, window):
    begun, real = [], ShardFiles.open
    monkeypatch.setattr(ShardFiles, "open", lambda self, shard, stop: (begun.append(1), real(self, shard, stop))[1])
    rows = reader(data, window)
    ends = np.cumsum([each.rows for each in windows_of([100] * 7 + [rows.rows - 700], 1, 0, window)])
    given = 0
    for batch in rows.batches(20, seed=1):
        given += len(batch)
        if given in ends:
            continue
        most = min(SHARDS, (int(np.searchsorted(ends, given)) + 1) * window + (2 if window == 1 else window))
        wait_until(lambda: len(begun) >= most)  # noqa: B023
        assert len(begun) == most


def wait_until(done):
    deadline = time.monotonic() + 20
    while not done() and time.monotonic() < deadline:
        time.sleep(0.001)


@pytest.mark.parametrize("end", ["last batch", "close", "dropped", "garbage", "interrupted"])
def test_threads_end_with_the_iterator(small_data, monkeypatch, end):
    batches = reader(small_data).batches(10, seed=1)
    next(batches)
    assert len(threads()) == 2
    if end == "last batch":
        assert len(list(batches)) > 60
    elif end == "close":
        batches.close()
    elif end == "dropped":
        del batches
    elif end == "garbage":
        ring = [batches]
        ring.append(ring)
        del batches, ring
        gc.collect()
    else:
        monkeypatch.setattr(shards, "gathered", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    assert not threads()


def test_one_shard_needs_no_threads(small_data):
    found = manifest.read(small_data)
    batches = ShardReader(small_data, found, "test").batches(10)
    assert len(found.test) == 1
    next(batches)
    assert not threads()


def test_workers_that_are_freed_by_one_of_them():
    workers = Workers(2, "hostdev-shards").__enter__()
    workers.submit(workers.__exit__).result(20)
    wait_until(lambda: not threads())
    assert not threads()


def test_a_file_is_given_up_when_nobody_wants_it(small_data):
    found, stop = manifest.read(small_data), threading.Event()
    stop.set()
    with pytest.raises(StoppedError):
        ShardFiles(small_data, found).open(found.train[0], stop)


def test_columns_are_the_file(data):
    """Nothing of it is copied to Arrow's memory, and every record batch is a piece."""
    found = manifest.read(data)
    before = pa.total_allocated_bytes()
    pieces = ShardFiles(data, found).open(found.train[0], threading.Event())
    assert pa.total_allocated_bytes() == before
    assert len(pieces) == pa.ipc.open_file(data / found.train[0].file).num_record_batches
    for piece in pieces:
        for column in (piece.label, piece.dense, piece.ids, *(inside for inside, _ in piece.bags.values())):
            assert not column.flags.owndata
            assert not column.flags.writeable


def test_a_shard_that_changes_between_epochs(own):
    rows, (first, second, *_) = reader(own), manifest.read(own).train
    assert sum(map(len, rows.batches(100))) == rows.rows
    os.utime(own / first.file)  # hashed again, and found to be as it was
    assert sum(map(len, rows.batches(100))) == rows.rows
    replace_by(own / second.file, own / first.file)
    with pytest.raises(UserError, match="part-00001.arrow has a wrong checksum"):
        list(rows.batches(100))


def replace_by(path, other):
    shutil.copy(other, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: os.truncate(path, 1000), "part-00001.arrow is not an Arrow file"),
        (lambda path: replace_by(path, path), "part-00001.arrow has a wrong checksum: it is damaged or was changed"),
    ],
)
def test_a_shard_that_changes_between_reading_and_mapping(own, monkeypatch, change, message):
    real = pa.memory_map

    def changed(path):
        if b"part-00001" in path:
            change(Path(os.fsdecode(path)))
        return real(path)

    monkeypatch.setattr(pa, "memory_map", changed)
    with pytest.raises(UserError, match=message):
        list(reader(own).batches(100))


def test_a_shard_that_cannot_be_read(own):
    path = own / manifest.read(own).train[1].file
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match="part-00001.arrow cannot be read: Is a directory"):
        list(reader(own).batches(100))
