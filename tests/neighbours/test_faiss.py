"""`checkpoint export --format faiss`: indexes that find what an exact search finds, and files of ids and names."""

import json
import os
import sys
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.parquet as pq
import pytest

import hostdev
from hostdev.checkpoint.layers import Layers
from hostdev.core import cli
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.neighbours import METRICS, faiss_export, search
from hostdev.ext.neighbours.search import open_source
from hostdev.ext.training import cli as train

faiss = pytest.importorskip("faiss")
OPTIONS = ["--model", "deepfm", "--batch-size", 200, "--emb-dim", 4, "--device", "cpu", "--max-steps", 3]


def call(module, *arguments):
    return cli.run(module.PROG, module.main, list(map(str, arguments)))


@pytest.fixture(scope="module")
def run(tmp_path_factory, films):
    path = tmp_path_factory.mktemp("run") / "run"
    assert call(train, "--data", films, "--run-dir", path, *OPTIONS, "--checkpoint-every", 3) == 0
    return path


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Tables of a program: by row, by key, and one of one column."""
    path = tmp_path_factory.mktemp("saved")
    table = hostdev.HostTable(300, 6, hostdev.LazyAdam(), name="t")
    by_key = hostdev.HostTable(None, 3, hostdev.LazyAdam(), name="a/b", capacity=100)
    wide = hostdev.HostTable(300, 1, hostdev.LazyAdam(), name="wide")
    runtime = hostdev.Runtime({"x": (table, wide), "y": by_key}, depth=0)
    for _, found in runtime.train([np.arange(40)], ids=lambda batch: {"x": batch, "y": batch * 10 - 5}):
        (found["x"][0].sum() + found["x"][1].sum() + found["y"].sum()).backward()
    runtime.save(path)
    return path


def read(path):
    return faiss.read_index(str(path))


@pytest.mark.parametrize("kind", ["flat", "hnsw"])
@pytest.mark.parametrize("metric", METRICS)
def test_an_index_finds_what_numpy_finds(run, in_process, monkeypatch, kind, metric):
    monkeypatch.setattr(search, "_BLOCK_BYTES", 7 * 4 * 4)  # blocks of 7 rows
    given = ["export", run, "--format", "faiss", "--out", "out", "--index", kind, "--metric", metric]
    code, out, error = in_process(checkpoint, *given)
    assert (code, error) == (0, "")
    model = hostdev.open(run)
    listed = json.loads(Path("out/indexes.json").read_text())
    assert [each["column"] for each in listed] == ["user", "item", "genres"]
    for each in listed:
        assert (each["kind"], each["metric"], each["table"], each["step"]) == (kind, metric, "vectors", 3)
        index, names = read(f"out/{each['index']}"), pq.read_table(f"out/{each['names']}")
        assert index.ntotal == len(names) == each["rows"] > 0
        assert names["position"].to_pylist() == list(range(len(names)))
        assert set(names["column"].to_pylist()) == {each["column"]}
        source = open_source(run)
        assert names["value"].to_pylist() == source.vocabulary["value"].take(names["id"]).to_pylist()
        weights = model["vectors"].lookup(names["id"].to_numpy())
        vectors = weights
        if metric == "cosine":
            vectors = weights / np.linalg.norm(weights, axis=1, keepdims=True)
        scores = vectors.astype(np.float64) @ vectors[:5].T.astype(np.float64)
        if metric == "l2":
            scores = -np.square(vectors[:, None].astype(np.float64) - vectors[None, :5]).sum(2)
        found, positions = index.search(vectors[:5], 3)
        for number in range(5):
            expected = np.argsort(-scores[:, number], kind="stable")[:3]
            assert positions[number].tolist() == expected.tolist()
            sign = -1 if metric == "l2" else 1
            np.testing.assert_allclose(found[number], sign * scores[expected, number], atol=1e-5)
        assert f"vectors, {each['column']}: {len(names)} rows x 4, {kind}, {metric}; " in out


def test_one_column(run, in_process):
    code, out, _ = in_process(checkpoint, "export", run, "--format", "faiss", "--out", "out", "--column", "history")
    assert code == 0
    assert "vectors, item: 60 rows x 4, flat, cosine; scores within 1e-05 of exact ones" in out
    assert {"out/indexes.json", "out/vectors.item.faiss", "out/vectors.item.parquet"} == {
        line.partition(":")[0] for line in out.splitlines()[:3]
    }


def test_tables_of_a_program(saved, in_process):
    given = ["export", saved, "--format", "faiss", "--out", "out", "--metric", "dot"]
    assert in_process(checkpoint, *given)[0] == 0
    assert {each["index"] for each in json.loads(Path("out/indexes.json").read_text())} == {"t.faiss", "a%2Fb.faiss"}
    keys = pq.read_table("out/a%2Fb.parquet")
    assert keys.schema.names == ["position", "key"]
    layers = Layers(open_source(saved).chain)
    assert keys["key"].to_pylist() == layers.merged("a/b").columns.keys.tolist()
    model = hostdev.open(saved)
    for name, at, ids in (("a/b", "a%2Fb", keys["key"].to_numpy()), ("t", "t", np.arange(300))):
        index = read(f"out/{at}.faiss")
        np.testing.assert_array_equal(index.reconstruct_n(0, index.ntotal), model[name].lookup(ids))


class FewRows(list):
    """What an index is named after."""

    def __init__(self, table, space):
        super().__init__(range(4))
        self.table, self.space, self.dim, self.has_names = table, space, 2, True


def test_names_that_become_equal_stay_distinct(tmp_path, monkeypatch):
    """A table `a` with a column `b.c`, and a table `a.b` with a column `c`."""

    def fill(faiss, options, rows, path, names, progress):
        path.write_text(rows.space)
        return 0

    monkeypatch.setattr(faiss_export, "_fill", fill)
    monkeypatch.setattr(faiss_export, "_check", lambda *given: 1.0)
    options = faiss_export.FaissOptions(None, None, "flat", "cosine")
    named = {}
    for table, space in (("a", "b.c"), ("a.b", "c")):
        entry, _ = faiss_export._write_index(faiss, options, FewRows(table, space), tmp_path, None)
        named[space] = entry["index"]
    assert {space: (tmp_path / name).read_text() for space, name in named.items()} == {"b.c": "b.c", "c": "c"}
    assert named["b.c"] == "a.b.c.faiss"


def test_a_wrong_index_is_told(run, in_process, monkeypatch):
    monkeypatch.setattr(faiss_export, "as_vectors", lambda weights, metric: np.ascontiguousarray(weights[:, ::-1] + 1))
    code, out, error = in_process(checkpoint, "export", run, "--format", "faiss", "--out", "out")
    assert (code, out) == (2, "")
    assert "the index gives other scores than an exact search" in error
    assert list(run.parent.glob("*")) and not (run.parent / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--table", "first_order"], "has one number per row, and no vectors to compare; tables with vectors: vectors"),
        (["--table", "nope"], "has no table 'nope'; it has first_order, vectors"),
        (["--column", "nope"], "has no column of ids 'nope'"),
        (["--slots"], "--slots has no effect with --format faiss"),
        (["--dtype", "float32"], "--dtype has no effect with --format faiss"),
        (["--model", "a:B"], "--model has no effect with --format faiss, only with onnx"),
        (["--format", "npy", "--index", "hnsw"], "--index has no effect with --format npy, only with faiss"),
        (["--format", "npy", "--metric", "dot"], "--metric has no effect with --format npy"),
    ],
)
def test_errors(run, in_process, arguments, message):
    code, out, error = in_process(checkpoint, "export", run, "--format", "faiss", "--out", "out", *arguments)
    assert (code, out) == (2, "")
    assert message in error and error.count("\n") == 1


def test_one_column_of_numbers_and_no_memory(run, saved, in_process, monkeypatch):
    code, _, error = in_process(checkpoint, "export", saved, "--format", "faiss", "--out", "out", "--column", "c")
    assert code == 2 and "was written by Runtime.save, which records no columns" in error
    monkeypatch.setattr("hostdev.core.memory.available_bytes", lambda: 1000)
    code, _, error = in_process(checkpoint, "export", run, "--format", "faiss", "--out", "out")
    assert code == 2 and "an index of 80 rows needs 1.2 KiB, but 1000 bytes of host memory are free" in error
    monkeypatch.setitem(sys.modules, "faiss", None)
    code, _, error = in_process(checkpoint, "export", run, "--format", "faiss", "--out", "out")
    assert code == 2
    assert "--format faiss needs FAISS, and faiss is not installed; pip install 'hostdev[faiss]'" in error


def test_odd_names(run, tmp_path):
    odd = tmp_path / os.fsdecode(b"odd\xff")
    try:
        odd.mkdir()
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    assert call(checkpoint, "export", run, "--format", "faiss", "--column", "genres", "--out", odd / "out") == 0
    with (odd / "out/vectors.genres.faiss").open("rb") as file:
        assert faiss.read_index(faiss.PyCallbackIOReader(file.read)).ntotal == 10


def test_a_full_disk(run, tmp_path, in_process, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(faiss, "write_index", fail)
    code, out, error = in_process(checkpoint, "export", run, "--format", "faiss", "--out", "full")
    assert (code, out, error) == (2, "", "hostdev.checkpoint: error: full: No space left on device\n")
    assert list(tmp_path.iterdir()) == []


def test_in_a_store(run, in_process, tmp_path, monkeypatch):
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "cache"))
    place = f"memory://{tmp_path.name}/faiss"
    given = ["export", run, "--format", "faiss", "--column", "genres", "--out", place]
    code, out, _ = in_process(checkpoint, *given)
    assert code == 0 and f"{place}/vectors.genres.faiss: " in out
    stored = fsspec.filesystem("memory").cat(f"/{tmp_path.name}/faiss/vectors.genres.faiss")
    assert faiss.deserialize_index(np.frombuffer(stored, np.uint8)).ntotal == 10
    assert in_process(checkpoint, *given)[0] == 2  # it is there already


def test_rows_that_are_not_finite(saved, in_process, monkeypatch):
    whole = search.NamedRows.lookup

    def lookup(self, ids):
        found = whole(self, ids)
        found[np.asarray(ids) == 7] = np.nan
        return found

    monkeypatch.setattr(search.NamedRows, "lookup", lookup)
    code, _, _ = in_process(checkpoint, "export", saved, "--format", "faiss", "--out", "out", "--table", "t")
    assert code == 0
    [entry] = json.loads(Path("out/indexes.json").read_text())
    assert (entry["rows"], entry["not_finite"]) == (299, 1)
    assert pq.read_table("out/t.parquet")["id"].to_pylist() == [*range(7), *range(8, 300)]
