"""Columns of vectors: lists and text become numeric columns, the same in training and in prediction."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hostdev
from hostdev.commands import train
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.shards import ShardReader
from hostdev.ext.predict import cli as predict

N, WIDTH = 400, 6
ROLES = ["--label", "y", "--categorical", "u"]


@pytest.fixture
def vectors():
    return np.random.default_rng(2).normal(size=(N, WIDTH)).round(4)


def table_of(vectors, emb):
    rng = np.random.default_rng(3)
    label = (vectors[:, 0] + 0.3 * rng.normal(size=N) > 0).astype(np.int64)
    return pa.table({"y": label, "x": np.arange(N) / N, "u": [f"u{i % 7}" for i in range(N)], "emb": emb})


FORMS = {
    "list": lambda v: pa.array(v.tolist()),
    "float": lambda v: pa.array(v.astype(np.float32).tolist(), pa.list_(pa.float32())),
    "fixed": lambda v: pa.FixedSizeListArray.from_arrays(pa.array(v.ravel()), WIDTH),
    "commas": lambda v: pa.array([", ".join(map(str, row)) for row in v]),
    "brackets": lambda v: pa.array([str(row.tolist()) for row in v]),
    "numpy": lambda v: pa.array([str(row) for row in v]),
}


def batch_of(folder, split="train"):
    [batch] = ShardReader(folder, manifest.read(folder), split).batches(1 << 20)
    return batch


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_numbers(in_process, tmp_path, vectors, form):
    pq.write_table(table_of(vectors, FORMS[form](vectors)), tmp_path / "t.parquet")
    flags = [*ROLES, "--numeric", "x", "--vector", f"emb={WIDTH}", "--test-fraction", 0]
    code, _, error = in_process(preprocess, "table", "t.parquet", *flags, "--out", "data")
    assert code == 0, error
    found = manifest.read(tmp_path / "data")
    assert found.schema.dense == ("x", *(f"emb[{i}]" for i in range(WIDTH)))
    scale = np.array(found.statistics["dense_max"])[1:]
    np.testing.assert_allclose(batch_of(tmp_path / "data").dense[:, 1:] * scale, vectors, rtol=1e-5, atol=1e-6)


def test_a_features_file_and_rows_set_aside(in_process, tmp_path, vectors):
    """A vector of another length, or with a text in it, is set aside; a missing vector is 0."""
    emb = [" ".join(map(str, row)) for row in vectors]
    emb[3], emb[4], emb[5] = "1 2 3", "1 2 x 4 5 6", "?"
    frame = table_of(vectors, emb).to_pandas()
    frame.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "f.toml").write_text(
        'label = "y"\n[features.u]\nkind = "categorical"\n[features.item]\nkind = "vector"\ncolumn = "emb"\n'
        f'length = {WIDTH}\nseparator = " "\nmissing = ["?"]\nscaling = "standard"\n'
    )
    code, _, error = in_process(
        preprocess, "table", "t.csv", "--features", "f.toml", "--test-fraction", 0, "--out", "data"
    )
    assert code == 0, error
    aside = [line.split("\t") for line in (tmp_path / "data" / "rejected.tsv").read_text().splitlines()]
    assert [line[1] for line in aside] == ["5", "6"]
    assert "column 'emb': the vector has 3 numbers, not 6" in aside[0][2]
    assert "'x' is not a number" in aside[1][2]
    dense = batch_of(tmp_path / "data").dense
    kept = np.delete(vectors, [3, 4, 5], 0)
    scaled = (kept - kept.mean(0)) / kept.std(0)
    np.testing.assert_allclose(np.delete(dense, 3, 0), scaled, atol=1e-5)
    assert not dense[3].any()


def test_from_a_table_to_predictions(in_process, tmp_path, vectors):
    """Predictions of a data set, its file, frames, dicts and arrays are the same; a wrong vector is refused."""
    table = table_of(vectors, FORMS["list"](vectors))
    pq.write_table(table, tmp_path / "t.parquet")
    flags = [*ROLES, "--vector", f"emb={WIDTH}"]
    assert in_process(preprocess, "table", "t.parquet", *flags, "--out", "data")[0] == 0
    run = ["--data", "data", "--model", "deepfm", "--batch-size", 50, "--device", "cpu", "--run-dir", "run"]
    assert in_process(train, *run, "--epochs", 3, "--checkpoint-every", 100)[0] == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    out = in_process(predict, "--checkpoint", "run", "--data", "data", "--out", "p.parquet")[1]
    assert f"AUC {summary['auc']:.4f}" in out
    assert in_process(predict, "--checkpoint", "run", "--data", "t.parquet", "--out", "q.parquet")[0] == 0
    expected = pq.read_table(tmp_path / "q.parquet")["probability"].to_numpy()
    predictor = hostdev.Predictor(tmp_path / "run")
    frame = table.to_pandas()
    for rows in (
        table,
        frame,
        {"u": frame.u.tolist(), "emb": vectors},
        {"u": frame.u.tolist(), "emb": vectors.tolist()},
    ):
        np.testing.assert_allclose(predictor(rows), expected, rtol=1e-5)
    one = predictor({"u": "u0", "emb": vectors[0].tolist()})
    np.testing.assert_allclose(one, expected[:1], rtol=1e-5)
    with pytest.raises(hostdev.errors.UserError, match=r"row 2, column 'emb': the vector has 2 numbers, not 6"):
        predictor({"u": ["u0", "u1"], "emb": [vectors[0].tolist(), [1.0, 2.0]]})
    with pytest.raises(hostdev.errors.UserError, match="emb"):
        predictor({"u": ["u0"], "emb": [3.5]})


def test_a_later_data_set_has_the_same_vectors(in_process, tmp_path, vectors):
    pq.write_table(table_of(vectors, FORMS["list"](vectors)), tmp_path / "t.parquet")
    assert in_process(preprocess, "table", "t.parquet", *ROLES, "--vector", f"emb={WIDTH}", "--out", "a")[0] == 0
    assert in_process(preprocess, "table", "t.parquet", "--vocabulary", "a", "--out", "b")[0] == 0
    one, other = (manifest.read(tmp_path / name) for name in "ab")
    assert [shard.sha256 for shard in other.train] == [shard.sha256 for shard in one.train]
    error = in_process(preprocess, "table", "t.parquet", "--vocabulary", "a", "--vector", "emb=7", "--out", "c")[2]
    assert "--vector" in error or "--numeric" in error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--vector", "emb"], "--vector emb: write it as NAME=VALUE"),
        (["--vector", "emb=x"], "--vector emb=x: write it as NAME=N"),
        (["--vector", "emb=100000"], "a vector has 1 to 65,536 numbers, not 100000"),
        (["--vector", "other=3"], "no column 'other'"),
        (["--vector", "x=3"], "of type double, not a list of numbers; name it with --numeric"),
        (["--vector", "emb=5"], "the vector has 6 numbers, not 5"),
    ],
)
def test_wrong_flags(in_process, tmp_path, vectors, flags, message):
    pq.write_table(table_of(vectors, FORMS["list"](vectors)), tmp_path / "t.parquet")
    code, _, error = in_process(preprocess, "table", "t.parquet", *ROLES, *flags, "--out", "data")
    assert code == 2
    assert message in error, error
    assert error.count("\n") == 1


def test_the_suggestion_for_a_list_of_numbers(in_process, tmp_path, vectors):
    pq.write_table(table_of(vectors, FORMS["list"](vectors)), tmp_path / "t.parquet")
    assert in_process(preprocess, "suggest", "t.parquet", "--label", "y")[0] == 0
    text = (tmp_path / "features.toml").read_text()
    assert 'kind = "vector"' in text
    assert f"length = {WIDTH}" in text
    assert in_process(preprocess, "table", "t.parquet", "--features", "features.toml", "--out", "data")[0] == 0
    assert pd.Series(manifest.read(tmp_path / "data").schema.dense).str.startswith("emb[").sum() == WIDTH
