"""--initial-vectors and --frozen-vectors: embeddings that begin with a file's vectors."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hostdev
from hostdev.core.initializers import GivenRows, Normal
from hostdev.core.optimizers import OPTIMIZERS
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.training import cli as train

N, ITEMS, DIM = 600, 30, 4
RUN = ["--data", "data", "--batch-size", 50, "--emb-dim", DIM, "--device", "cpu", "--run-dir", "run"]


@pytest.fixture
def vectors():
    """Vectors of the items i0, i1, ..., without the last two, and with one that the data does not have."""
    return np.random.default_rng(2).normal(size=(ITEMS - 1, DIM)).round(3)


@pytest.fixture
def data(in_process, tmp_path):
    rng = np.random.default_rng(3)
    items = rng.integers(0, ITEMS, N)
    history = [[f"i{one}" for one in rng.integers(0, ITEMS, rng.integers(0, 4))] for _ in range(N)]
    table = pa.table(
        {
            "y": (items % 3 == 0).astype(np.int64),
            "u": [f"u{one}" for one in rng.integers(0, 20, N)],
            "item": [f"i{one}" for one in items],
            "history": history,
            "x": rng.random(N),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet")
    flags = ["--label", "y", "--categorical", "u,item", "--bag", "history", "--share", "history=item", "--numeric", "x"]
    assert in_process(preprocess, "table", "t.parquet", *flags, "--threshold", 0, "--out", "data")[0] == 0
    return tmp_path


def names():
    return [*(f"i{i}" for i in range(ITEMS - 2)), "unknown"]


FORMS = {
    "list.parquet": lambda path, v: pq.write_table(pa.table({"item": names(), "emb": v.tolist()}), path),
    "float.parquet": lambda path, v: pq.write_table(
        pa.table({"emb": pa.array(v.astype(np.float32).tolist(), pa.list_(pa.float32())), "item": names()}), path
    ),
    "columns.csv": lambda path, v: pd.DataFrame(v, index=pd.Index(names(), name="item")).to_csv(path),
    "text.csv": lambda path, v: pd.DataFrame({"item": names(), "emb": [str(row.tolist()) for row in v]}).to_csv(
        path, index=False
    ),
}


def rows_of(folder, run="run", table="vectors"):
    """Return the weights of each item in the newest checkpoint of a run, by the item's name, and all weights."""
    with pa.memory_map(str(folder / "data" / "vocabulary.arrow")) as file:
        known = pa.ipc.open_file(file).read_all().to_pydict()
    saved = hostdev.open(folder / run)[table]
    weights = saved.lookup(np.arange(saved.rows))
    fields = zip(known["field"], known["value"], strict=True)
    return {value: weights[i] for i, (field, value) in enumerate(fields) if field == "item" and value}, weights


@pytest.mark.parametrize("form", FORMS)
def test_rows_begin_with_the_vectors(in_process, data, vectors, form):
    FORMS[form](data / form, vectors)
    more = ["--model", "deepfm", "--table-lr", 0, "--max-steps", 1, "--checkpoint-every", 1]
    code, out, error = in_process(train, *RUN, *more, "--initial-vectors", f"item={form}")
    assert code == 0, error
    assert f"vectors  item: 28 values of 30 have a vector in {form}; their rows begin as the model's others" in out, out
    assert in_process(train, *RUN[:-1], "plain", *more)[0] == 0
    (found, all_rows), (_, before) = rows_of(data), rows_of(data, "plain")
    for name, vector in zip(names()[:-1], vectors[:-1], strict=True):
        np.testing.assert_array_equal(found[name], vector.astype(np.float32))
    given = [np.flatnonzero((all_rows == found[name]).all(1))[0] for name in names()[:-1]]
    others = np.setdiff1d(np.arange(len(all_rows)), given)
    np.testing.assert_array_equal(all_rows[others], before[others])


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("model", "frozen"),
    [("wide_deep", False), *((name, True) for name in ("wide_deep", "deepfm", "dlrm", "dcn", "shared_bottom", "mmoe"))],
)
def test_every_model_trains_the_others(in_process, data, vectors, model, frozen):
    """Frozen rows keep their vectors (zeros without one); all other rows in use change, and so do trained vectors."""
    FORMS["list.parquet"](data / "v.parquet", vectors)
    more = ["--model", model, "--initial-vectors", "item=v.parquet", *(["--frozen-vectors", "item"] if frozen else [])]
    code, out, error = in_process(train, *RUN, *more, "--host-device-mix", "--max-steps", 3, "--checkpoint-every", 100)
    assert code == 0, error
    assert ("the others are zeros" in out) == frozen
    found, _ = rows_of(data, table="deep" if model == "wide_deep" else "vectors")
    expected = dict(zip(names()[:-1], vectors.astype(np.float32), strict=False))
    expected |= {f"i{ITEMS - 2}": np.zeros(DIM), f"i{ITEMS - 1}": np.zeros(DIM)}
    same = [np.array_equal(found[name], vector) for name, vector in expected.items()]
    assert all(same) if frozen else not any(same)


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("optimizer", "dtype"),
    [*((name, "fp32") for name in OPTIMIZERS if name != "ftrl"), ("lazy_adam", "bfloat16")],
)
def test_no_optimizer_moves_frozen_rows(in_process, data, vectors, optimizer, dtype):
    FORMS["list.parquet"](data / "v.parquet", vectors)
    more = ["--model", "deepfm", "--initial-vectors", "item=v.parquet", "--frozen-vectors", "item"]
    more += ["--table-optimizer", optimizer, "--table-dtype", dtype, "--table-slots", dtype, "--table-lr", 0.1]
    more += ["--host-device-mix", "--micro-batches", 2]
    assert in_process(train, *RUN, *more, "--max-steps", 1, "--checkpoint-every", 1)[0] == 0
    first, every = rows_of(data)
    code, _, error = in_process(train, *RUN[:-1], "later", *more, "--max-steps", 6, "--checkpoint-every", 100)
    assert code == 0, error
    later, trained = rows_of(data, "later")
    for name, row in first.items():
        np.testing.assert_array_equal(row, later[name])
    assert (every != trained).any()


def test_a_resumed_run_has_the_same_bits(in_process, data, vectors):
    FORMS["list.parquet"](data / "v.parquet", vectors)
    given = ["--initial-vectors", "item=v.parquet", "--frozen-vectors", "item", "--model", "deepfm"]
    mix = [*given, "--host-device-mix", "--epochs", 2]
    assert in_process(train, *RUN, *mix, "--checkpoint-every", 7, "--max-steps", 7)[0] == 0
    assert in_process(train, *RUN[:-2], *mix, "--run-dir", "whole")[0] == 0
    code, _, error = in_process(
        train, *RUN[:-2], *mix, "--checkpoint-every", 7, "--resume", "run", "--run-dir", "resumed"
    )
    assert code == 0, error
    one, other = (json.loads((data / run / "summary.json").read_text()) for run in ("whole", "resumed"))
    assert one["state_sha256"] == other["state_sha256"]
    code, _, error = in_process(
        train, *RUN[:-2], *mix[2:], "--checkpoint-every", 7, "--resume", "run", "--run-dir", "r"
    )
    assert code == 2 and "--initial-vectors" in error, error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--initial-vectors", "item"], "--initial-vectors item: write it as NAME=FILE"),
        (["--initial-vectors", "x=v.parquet"], "the data has no column of ids 'x'; it has u, item, history"),
        (["--initial-vectors", "history=v.parquet"], "'history' shares the ids of 'item'; name 'item' instead"),
        (["--initial-vectors", "u=v.parquet"], "v.parquet has no column 'u' with the values of 'u'; it has"),
        (["--initial-vectors", "item=no.parquet"], "no.parquet"),
        (
            ["--initial-vectors", "item=v.parquet", "--emb-dim", 5],
            "the vector has 4 numbers, not 5; the tables have 5",
        ),
        (["--initial-vectors", "item=two.parquet"], "two.parquet has two vectors for the same value of 'item'"),
        (["--initial-vectors", "item=wide.csv"], "wide.csv has 2 columns beside the values, but the tables have 4"),
        (["--initial-vectors", "item=gap.parquet"], "gap.parquet, row 2: the vector has a number that is missing"),
        (
            ["--frozen-vectors", "item"],
            "--frozen-vectors item: the column has no file",
        ),
        (
            ["--initial-vectors", "item=v.parquet", "--frozen-vectors", "item", "--table-optimizer", "ftrl"],
            "changes rows of table 'vectors' that get no gradient; give another --table-optimizer",
        ),
        (
            ["--initial-vectors", "item=v.parquet", "--frozen-vectors", "item", "--table-weight-decay", 0.1],
            "--frozen-vectors cannot be combined with --table-weight-decay",
        ),
        (["--initial-vectors", "item=v.parquet,item=two.parquet"], "--initial-vectors names 'item' twice"),
        (["--initial-vectors", "item=none.parquet"], "none.parquet has no vector for any value of 'item' in the data"),
        (["--initial-vectors", "item=columns.csv"], "columns.csv has 2 columns named 'item'; keep one"),
    ],
)
def test_wrong_options(in_process, data, vectors, flags, message):
    FORMS["list.parquet"](data / "v.parquet", vectors)
    pq.write_table(pa.table({"item": ["i1", "i1"], "emb": [[1.0] * DIM] * 2}), data / "two.parquet")
    pq.write_table(pa.table({"item": ["i1", "i2"], "emb": [[1.0] * DIM, None]}), data / "gap.parquet")
    pq.write_table(pa.table({"item": ["x"], "emb": [[1.0] * DIM]}), data / "none.parquet")
    (data / "wide.csv").write_text("item,a,b\ni1,0.5,2\n")
    (data / "columns.csv").write_text("item,item,a,b,c,d\ni1,i1,1,2,3,4\n")
    code, _, error = in_process(train, *RUN, "--model", "deepfm", *flags)
    assert code == 2 and message in error and len(error.splitlines()) == 1, error


def test_a_grown_data_set_gets_vectors_for_its_new_values(in_process, data, vectors):
    """With --start-from, known rows continue, new rows begin with their vectors, and a line names rows that thaw."""
    FORMS["list.parquet"](data / "v.parquet", vectors)
    frozen = ["--model", "deepfm", "--initial-vectors", "item=v.parquet", "--frozen-vectors", "item"]
    assert in_process(train, *RUN, *frozen, "--max-steps", 3, "--checkpoint-every", 3)[0] == 0
    before, _ = rows_of(data)
    more = pq.read_table(data / "t.parquet").to_pandas()
    more["item"] = [f"n{i % 3}" for i in range(len(more))]
    pq.write_table(pa.Table.from_pandas(more), data / "more.parquet")
    flags = ["--vocabulary", "data", "--threshold", 0, "--out", "grown"]
    code, _, error = in_process(preprocess, "table", "more.parquet", *flags)
    assert code == 0, error
    given = {"item": ["n0", "n1", "n2"], "emb": [[k + 0.5] * DIM for k in range(3)]}
    pq.write_table(pa.table(given), data / "new.parquet")
    run = ["--data", "grown", *RUN[2:-1], "later", "--start-from", "run", "--table-lr", 0, "--max-steps", 1]
    run += ["--model", "deepfm", "--initial-vectors", "item=new.parquet", "--checkpoint-every", 1]
    code, out, error = in_process(train, *run)
    assert code == 0, error
    assert "start    rows of item, frozen then, are trained now" in out
    (data / "data").rename(data / "old")
    (data / "grown").rename(data / "data")
    after, _ = rows_of(data, "later")
    for name, row in before.items():
        np.testing.assert_array_equal(after[name], row)
    assert [after[f"n{k}"].tolist() for k in range(3)] == given["emb"]


def test_given_rows_among_others():
    """Rows by range and by ids, with and without given ones."""
    ids, values = np.array([2, 3, 9]), np.arange(12, dtype=np.float32).reshape(3, 4)
    init, plain, slots = GivenRows(Normal(0.1), lambda: (ids, values)), Normal(0.1), np.array([7], np.float32)
    for first, n in ((0, 10), (3, 1), (4, 5), (9, 4), (10, 2)):
        block, other = np.zeros((n, 2, 4), np.float32), np.zeros((n, 2, 4), np.float32)
        init.fill(block, 1, "t", slots, first_row=first)
        plain.fill(other, 1, "t", slots, first_row=first)
        for row in range(n):
            if first + row in ids:
                other[row, 0] = values[ids.tolist().index(first + row)]
        np.testing.assert_array_equal(block, other)
    some = np.array([9, 0, 3, 11, 2])
    block, other = np.zeros((5, 2, 4), np.float32), np.zeros((5, 2, 4), np.float32)
    init.fill(block, 1, "t", slots, ids=some)
    plain.fill(other, 1, "t", slots, ids=some)
    other[[0, 2, 4], 0] = values[[2, 1, 0]]
    np.testing.assert_array_equal(block, other)
    assert repr(init) == repr(GivenRows(plain, lambda: (ids, values)))
    assert repr(init) != repr(GivenRows(plain, lambda: (ids, values + 1)))
