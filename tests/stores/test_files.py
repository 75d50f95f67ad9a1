"""Files of a store as streams: whatever is read where, the bytes are those of the file."""

import io
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hostdev.core import stores
from hostdev.core.addresses import source_path
from hostdev.core.errors import StoreError, UserError
from hostdev.core.stores import Store
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess import places

SIZE = 20_000


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path):
    monkeypatch.setattr(places, "_FIRST", 16)
    monkeypatch.setattr(places, "_MOST", 1024)
    monkeypatch.setattr(stores, "_PAUSES", (0.001, 0.01))
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))


@pytest.fixture
def content():
    made = np.random.default_rng(0).bytes(SIZE)
    memory = fsspec.filesystem("memory")
    memory.pipe("/raw/file", made)
    yield made
    memory.rm("/raw", recursive=True)


PATH = "memory://raw/file"


def test_reads_in_order(content, monkeypatch):
    requests = []
    real = stores.Store.read_range
    monkeypatch.setattr(stores.Store, "read_range", lambda self, *args: requests.append(args[1:3]) or real(self, *args))
    with places.StoreFile(source_path(PATH), SIZE) as file:
        found = b"".join(iter(lambda: file.read(700), b""))
    assert found == content
    assert sum(stop - start for start, stop in requests) == SIZE and len(requests) < 30
    assert sorted(requests)[-2][1] - sorted(requests)[-2][0] == 1024  # of the largest size at last


@pytest.mark.parametrize("seed", range(20))
def test_reads_here_and_there(content, seed):
    draw = np.random.default_rng(seed)
    expected, at = io.BytesIO(content), 0
    with places.open_bytes(source_path(PATH), buffered=bool(seed % 2)) as file:
        for _ in range(60):
            if draw.random() < 0.5:
                at = int(draw.integers(0, SIZE + 100))
                assert file.seek(at) == expected.seek(at)
            elif draw.random() < 0.3:
                back = int(draw.integers(0, SIZE))
                assert file.seek(-back, io.SEEK_END) == expected.seek(-back, io.SEEK_END)
            size = int(draw.choice([0, 1, 15, 100, 3000]))
            got = b""
            while len(got) < size and (piece := file.read(size - len(got))):
                got += piece
            assert got == expected.read(size)
            assert file.tell() == expected.tell()


def test_a_parquet_file(content):
    table = pa.table({"a": np.arange(5000), "b": np.random.default_rng(1).normal(size=5000)})
    sink = io.BytesIO()
    pq.write_table(table, sink, row_group_size=700)
    fsspec.filesystem("memory").pipe("/raw/t.parquet", sink.getvalue())
    with places.open_arrow(source_path("memory://raw/t.parquet")) as source:
        assert pq.read_table(source).equals(table)


def test_a_failure_is_raised_where_it_is_read(content, monkeypatch):
    real = stores.Store.read_range

    def read(self, name, start, stop, stopped=None):
        if start > 5000:
            raise StoreError("the store is gone")
        return real(self, name, start, stop, stopped)

    monkeypatch.setattr(stores.Store, "read_range", read)
    with places.StoreFile(source_path(PATH), SIZE) as file:
        got = b""
        with pytest.raises(StoreError, match="the store is gone"):
            while piece := file.read(500):
                got += piece
        assert 4000 < len(got) < 7000 and content.startswith(got)


def test_closing_does_not_wait_for_what_is_read_ahead(content, monkeypatch):
    hold, real = threading.Event(), places.StoreFile._get

    def get(self, start, stop):
        if start > 2000:
            self._stop.wait(60)
        return real(self, start, stop)

    monkeypatch.setattr(places.StoreFile, "_get", get)
    start = time.monotonic()
    with places.StoreFile(source_path(PATH), SIZE) as file:
        assert file.read(16) == content[:16]
        assert file.read(16) == content[16:32]
    assert time.monotonic() - start < 30
    hold.set()


def test_what_is_known_of_files(content):
    assert places.is_file(source_path(PATH)) and not places.is_folder(source_path(PATH))
    assert places.is_folder(source_path("memory://raw"))
    assert not places.is_file(source_path("memory://raw/none"))
    before = places.stamp(source_path(PATH))
    assert before[0] == SIZE
    fsspec.filesystem("memory").pipe("/raw/file", content)
    assert places.stamp(source_path(PATH)) != before
    with pytest.raises(UserError, match="memory://raw/none: no such file"):
        places.stamp(source_path("memory://raw/none"))
    with pytest.raises(UserError, match="not the address of a file"):
        places.StoreFile(source_path("memory://raw"), 1)
    assert not places.is_file(source_path("memory://raw"))


def test_preparation_that_goes_on_compares_what_it_sent(tmp_path, monkeypatch):
    """A file that was damaged in the store since then is sent again, and only that one."""
    how = ["synthetic", "--rows", "3000", "--threshold", "1", "--rows-per-shard", "500", "--out"]
    monkeypatch.chdir(tmp_path)
    preprocess.main([*how, "here"])
    memory, put, sent = fsspec.filesystem("memory"), Store.put, []

    def fail_at_last(store, path, name):
        if name == "manifest.json":
            raise StoreError("the network is gone")
        return put(store, path, name)

    with monkeypatch.context() as patch, pytest.raises(StoreError, match="the network is gone"):
        patch.setattr(Store, "put", fail_at_last)
        preprocess.main([*how, "memory://prepared/data"])
    damaged = next(name for name in sorted(memory.find("/prepared/data")) if "/train/" in name)
    content = bytearray(memory.cat_file(damaged))
    content[len(content) // 2] ^= 1
    memory.pipe_file(damaged, bytes(content))
    monkeypatch.setattr(Store, "put", lambda store, path, name: sent.append(name) or put(store, path, name))
    preprocess.main([*how, "memory://prepared/data"])
    assert set(sent) - {"rejected.tsv"} == {damaged.removeprefix("/prepared/data/"), "manifest.json"}
    here = {str(path.relative_to("here")): path.read_bytes() for path in Path("here").rglob("*") if path.is_file()}
    there = {name.removeprefix("/prepared/data/"): memory.cat_file(name) for name in memory.find("/prepared/data")}
    del here["manifest.json"], there["manifest.json"]  # which has the time
    assert here == there
    memory.rm("/prepared", recursive=True)
