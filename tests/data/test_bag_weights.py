"""Weighted bags: every form gives the same ids and weights, in training and in prediction."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import hostdev
from hostdev.core.checksums import checksum
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.schema import Column, Schema, Space
from hostdev.data.shards import ShardReader
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from hostdev.models import fields
from tests.data.test_vectors import batch_of
from tests.manifests import edit_manifest

N = 400
ROLES = ["--label", "y", "--categorical", "u", "--threshold", 0, "--test-fraction", 0]
PREPARED = ["--features", "f.toml", "--threshold", 0, "--test-fraction", 0]
WORDS = [f"w{i}" for i in range(12)]


def draw_bags(seed=5):
    """Return for each row its values and their weights."""
    rng = np.random.default_rng(seed)
    return [
        (rng.choice(WORDS, n, replace=False).tolist(), rng.random(n).round(3).tolist())
        for n in rng.integers(0, 5, N).tolist()
    ]


def table_of(bags, **columns):
    label = [int(sum(w * (int(v[1:]) < 6) for v, w in zip(*bag, strict=True)) > 0.5) for bag in bags]
    return pa.table({"y": label, "u": [f"u{i % 7}" for i in range(len(bags))], **columns})


def joined(bags, separator, inner=":", decimal="."):
    def text(weight):
        return str(weight).replace(".", decimal)

    return [separator.join(f"{v}{inner}{text(w)}" for v, w in zip(*bag, strict=True)) for bag in bags]


def write_features(folder, lines):
    """Write a features file; `lines` are about the bag."""
    text = 'label = "y"\n[features.u]\nkind = "categorical"\n[features.tags]\nkind = "bag"\n'
    (folder / "f.toml").write_text(text + lines)


def prepare(in_process, folder, table, lines):
    """Preprocess a table with a features file; `lines` are about the bag."""
    pq.write_table(table, folder / "t.parquet")
    write_features(folder, lines)
    code, _, error = in_process(preprocess, "table", "t.parquet", *PREPARED, "--out", "data")
    assert code == 0, error


FORMS = {
    "text": (lambda bags: {"tags": joined(bags, "|")}, ["--bag", "tags=|", "--bag-weights", "tags=:"]),
    "words": (lambda bags: {"tags": joined(bags, " ", "=")}, ["--bag", "tags= ", "--bag-weights", "tags=="]),
    "decimal": (
        lambda bags: {"tags": joined(bags, "|", decimal=",")},
        ["--bag", "tags=|", "--bag-weights", "tags=:", "--decimal", ","],
    ),
    "list": (
        lambda bags: {"tags": pa.array([row.split("|") if row else [] for row in joined(bags, "|")])},
        ["--bag", "tags", "--bag-weights", "tags=:"],
    ),
    "brackets": (
        lambda bags: {"tags": [str(row.split("|") if row else []) for row in joined(bags, "|")]},
        ["--bag", "tags=,", "--bag-weights", "tags=:"],
    ),
}


def expected_weights(bags):
    return np.array([weight for _, weights in bags for weight in weights], np.float32)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_values_and_weights(in_process, tmp_path, form):
    bags = draw_bags()
    columns, flags = FORMS[form]
    pq.write_table(table_of(bags, **columns(bags)), tmp_path / "t.parquet")
    code, _, error = in_process(preprocess, "table", "t.parquet", *ROLES, *flags, "--out", "data")
    assert code == 0, error
    check_batch(tmp_path / "data", bags)
    assert in_process(preprocess, "check", "data")[0] == 0


def check_batch(folder, bags):
    """Check that a data set has the values and weights of `bags`."""
    batch, found = batch_of(folder), manifest.read(folder)
    assert found.schema.weighted_bags == ("tags",)
    values, lengths = batch.bags["tags"]
    np.testing.assert_array_equal(lengths, [len(values) for values, _ in bags])
    np.testing.assert_array_equal(batch.bag_weights["tags"], expected_weights(bags))
    words = [word for values, _ in bags for word in values]
    ids = dict(zip(words, values.tolist(), strict=True))
    assert [ids[word] for word in words] == values.tolist() and len(set(ids.values())) == len(ids) == len(WORDS)


@pytest.mark.parametrize("form", ["lists", "text"])
def test_weights_in_a_column_of_their_own(in_process, tmp_path, form):
    bags = draw_bags()
    values, weights = [values for values, _ in bags], [weights for _, weights in bags]
    table = table_of(bags, tags=values, w=pa.array(weights, pa.list_(pa.float64())))
    if form == "text":
        table = table_of(bags, tags=["|".join(v) for v in values], w=["|".join(map(str, w)) for w in weights])
    prepare(in_process, tmp_path, table, 'weights_column = "w"\n' + ('separator = "|"\n' if form == "text" else ""))
    check_batch(tmp_path / "data", bags)


def test_padding_and_length_take_the_weights_along(in_process, tmp_path):
    rows = ["a:1|0:9|b:2|c:3", "0:7|0", "", "c:5|a:4"] * 100
    pq.write_table(pa.table({"y": [1, 0] * 200, "u": ["x", "z"] * 200, "tags": rows}), tmp_path / "t.parquet")
    flags = ["--bag", "tags=|", "--bag-weights", "tags=:", "--padding", "tags=0", "--last", "tags=2"]
    code, _, error = in_process(preprocess, "table", "t.parquet", *ROLES, *flags, "--out", "data")
    assert code == 0, error
    batch = batch_of(tmp_path / "data")
    np.testing.assert_array_equal(batch.bags["tags"][1][:4], [2, 0, 0, 2])
    np.testing.assert_array_equal(batch.bag_weights["tags"][:4], [2, 3, 5, 4])


WRONG = {
    "a": "value 'a' has no weight after ':'",
    "b:": "value 'b' has the weight '', which is not a number of at least 0",
    "b:x": "value 'b' has the weight 'x', which is not a number of at least 0",
    "b:-1": "value 'b' has the weight '-1', which is not a number of at least 0",
    "b:nan": "value 'b' has the weight 'nan', which is not a number of at least 0",
    "b:inf": "value 'b' has the weight 'inf', which is not a number of at least 0",
    "b:1e39": "value 'b' has the weight '1e39', which is too large",
}


def test_rows_without_a_valid_weight_are_set_aside(in_process, tmp_path):
    rows = [*WRONG, *["a:1|b:2"] * 1000]
    table = pa.table(
        {"y": [i % 2 for i in range(len(rows))], "u": ["x"] * len(rows), "tags": [f"a:1|{r}" for r in rows]}
    )
    pq.write_table(table, tmp_path / "t.parquet")
    code, _, error = in_process(
        preprocess, "table", "t.parquet", *ROLES, "--bag", "tags=|", "--bag-weights", "tags=:", "--out", "data"
    )
    assert code == 0, error
    aside = pd.read_csv(tmp_path / "data" / "rejected.tsv", sep="\t", header=None, quoting=3)
    told = aside.to_string(max_colwidth=None)
    for message in WRONG.values():
        assert f"column 'tags': {message}" in told, (message, told)
    assert len(batch_of(tmp_path / "data")) == 1000


def test_one_bad_text_hides_no_other_row(in_process, tmp_path):
    """A value that is not UTF-8 is set aside like the rows with invalid weights, with the right row."""
    tags, weights = [[b"a", b"b"]] * 2000, [[1.0, 2.0]] * 2000
    tags[7], weights[9], weights[11], weights[13] = [b"a", b"\xff"], [1.0, -1.0], [1.0], [float("nan"), 1.0]
    label = [i % 2 for i in range(2000)]
    label[7] = None
    binary = pa.array(tags, pa.list_(pa.binary()))
    table = pa.table({"y": label, "u": ["x"] * 2000, "tags": binary, "w": weights})
    prepare(in_process, tmp_path, table, 'weights_column = "w"\n')
    lines = [line.split("\t") for line in (tmp_path / "data" / "rejected.tsv").read_text().splitlines()]
    assert [line[1] for line in lines] == ["8", "10", "12", "14"]
    assert in_process(preprocess, "check", "data")[0] == 0
    table = table.set_column(0, "y", pa.array([i % 2 for i in range(2000)])).slice(7, 1)
    pq.write_table(table, tmp_path / "t.parquet")
    error = in_process(preprocess, "table", "t.parquet", *PREPARED, "--out", "e")[2]
    assert "t.parquet:1: column 'tags': not text in UTF-8" in error


def test_padding_needs_no_weight(in_process, tmp_path):
    rows, weights = [[0, 5], [5, 6], [0, 5]] * 100, [[None, 2.0], [1.0, 3.0], [None, 1.0]] * 100
    weights[2] = [None, -1.0]
    table = pa.table({"y": [0, 1, 1] * 100, "u": ["x"] * 300, "tags": rows, "w": weights})
    prepare(in_process, tmp_path, table, 'weights_column = "w"\nmissing = ["0"]\n')
    told = (tmp_path / "data" / "rejected.tsv").read_text()
    assert "column 'tags': value 5 has the weight -1.0, which is not a number of at least 0" in told
    np.testing.assert_array_equal(batch_of(tmp_path / "data").bag_weights["tags"][:4], [2, 1, 3, 2])


def test_uneven_lists_are_set_aside(in_process, tmp_path):
    tags, weights = [["a", "b"]] * 300, [[1.0, 2.0]] * 300
    tags[7], weights[9], weights[11], tags[11] = ["a"], [1.0], None, None
    table = pa.table({"y": [0, 1] * 150, "u": ["x"] * 300, "tags": tags, "w": weights})
    prepare(in_process, tmp_path, table, 'weights_column = "w"\n')
    told = (tmp_path / "data" / "rejected.tsv").read_text()
    assert "column 'tags': 1 value, but 2 weights in column 'w'" in told
    assert "column 'tags': 2 values, but 1 weight in column 'w'" in told
    assert len(batch_of(tmp_path / "data")) == 298


def test_from_a_table_to_predictions(in_process, tmp_path):
    """A data set, its file, frames and dicts get the same predictions."""
    bags = draw_bags()
    text = joined(bags, "|")
    table = table_of(bags, tags=text)
    pq.write_table(table, tmp_path / "t.parquet")
    flags = [*ROLES[:6], "--bag", "tags=|", "--bag-weights", "tags=:", "--test-fraction", 0.2]
    assert in_process(preprocess, "table", "t.parquet", *flags, "--out", "data")[0] == 0
    run = ["--data", "data", "--batch-size", 50, "--emb-dim", 4, "--model", "deepfm", "--device", "cpu"]
    train_more = ["--epochs", 20, "--run-dir", "run", "--checkpoint-every", 1000]
    code, _, error = in_process(train, *run, *train_more)
    assert code == 0, error
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["auc"] > 0.9
    assert in_process(predict, "--checkpoint", "run", "--data", "t.parquet", "--out", "q.parquet")[0] == 0
    expected = pq.read_table(tmp_path / "q.parquet")["probability"].to_numpy()
    predictor = hostdev.Predictor(tmp_path / "run")
    for rows in (table, table.to_pandas(), {"u": table["u"].to_pylist(), "tags": text}):
        np.testing.assert_allclose(predictor(rows), expected, rtol=1e-5)
    np.testing.assert_allclose(predictor({"u": "u0", "tags": text[0]}), expected[:1], rtol=1e-5)
    with pytest.raises(hostdev.errors.UserError, match=r"row 2, column 'tags': value 'w1' has no weight after ':'"):
        predictor({"u": ["u0", "u1"], "tags": ["w1:2", "w1"]})


def test_a_mean_is_weighted():
    """The factors give sum(w * row) / sum(w), and zeros for a bag whose weights are all 0."""
    rng = np.random.default_rng(0)
    lengths = np.array([3, 0, 2, 1], np.int32)
    weights = np.array([1, 2, 5, 0, 0, 0.3], np.float32)
    rows = rng.normal(size=(6, 4))
    bags = {"tags": (np.arange(6, dtype=np.int32), lengths)}
    batch = SimpleNamespace(bags=bags, bag_weights={"tags": weights})

    schema = Schema("y", (), (Column("tags", "bag", "tags", weighted=True),), (Space("tags", 0, 1, 9),), 10)
    bag = fields.collect_bags(schema, batch)["bag:tags"]
    table = torch.nn.EmbeddingBag.from_pretrained(torch.from_numpy(rows), mode="sum")
    ends = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    factors = torch.from_numpy(np.asarray(bag.weights, np.float64) / np.repeat(lengths, lengths))
    found = table(torch.arange(6), ends, per_sample_weights=factors).numpy()
    np.testing.assert_allclose(found[0], weights[:3] @ rows[:3] / weights[:3].sum(), rtol=1e-6)
    np.testing.assert_allclose(found[1:], [np.zeros(4), np.zeros(4), rows[5]], rtol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--bag", "tags=|", "--bag-weights", "tags"], "--bag-weights tags: write it as NAME=VALUE"),
        (["--bag", "tags=|", "--bag-weights", "u=:"], "--bag-weights apply only to --bag columns, but 'u' is not one"),
        (
            ["--bag", "tags=|", "--bag-weights", "tags=|"],
            "the separator of weights is also the separator of its values",
        ),
        (["--bag", "n", "--bag-weights", "n=:"], "its values are of type int64, not text with weights after ':'"),
    ],
)
def test_wrong_flags(in_process, tmp_path, flags, message):
    table = table_of(draw_bags(), tags=joined(draw_bags(), "|"), n=[[1, 2]] * N)
    pq.write_table(table, tmp_path / "t.parquet")
    code, _, error = in_process(preprocess, "table", "t.parquet", *ROLES, *flags, "--out", "data")
    assert code == 2 and message in error, error


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('weights = ":"\nweights_column = "w"', "both weights and weights_column are given; leave out one of the two"),
        ('weights_column = "w"', "no column 'w'"),
        ('weights_column = "y"', "column 'y': it is of type int64; the weights of 'tags' must be a list of numbers"),
        ('weights = ""', "the separator of weights is empty"),
    ],
)
def test_wrong_features_files(in_process, tmp_path, lines, message):
    pq.write_table(table_of(draw_bags(), tags=[["a"]] * N), tmp_path / "t.parquet")
    write_features(tmp_path, lines)
    code, _, error = in_process(preprocess, "table", "t.parquet", "--features", "f.toml", "--out", "data")
    assert code == 2 and message in error, error


def test_a_later_data_set_keeps_the_weights(in_process, tmp_path):
    bags = draw_bags()
    pq.write_table(table_of(bags, tags=joined(bags, "|")), tmp_path / "t.parquet")
    flags = ["--bag", "tags=|", "--bag-weights", "tags=:"]
    assert in_process(preprocess, "table", "t.parquet", *ROLES, *flags, "--out", "a")[0] == 0
    more = ["--vocabulary", "a", "--test-fraction", 0]
    code, _, error = in_process(preprocess, "table", "t.parquet", *more, "--out", "b")
    assert code == 0, error
    check_batch(tmp_path / "b", bags)


def test_small_batches_and_a_shuffled_order_keep_each_weight_beside_its_id(in_process, tmp_path):
    bags = draw_bags()
    pq.write_table(table_of(bags, tags=joined(bags, "|")), tmp_path / "t.parquet")
    flags = ["--bag", "tags=|", "--bag-weights", "tags=:", "--rows-per-shard", 64, "--hash-buckets", 50_000]
    assert in_process(preprocess, "table", "t.parquet", *ROLES[:4], *ROLES[6:], *flags, "--out", "data")[0] == 0
    found = manifest.read(tmp_path / "data")
    whole, pairs = batch_of(tmp_path / "data"), []
    for batch in ShardReader(tmp_path / "data", found, "train", shuffle_window=3).batches(37, seed=7):
        for part in batch.split([0, len(batch) // 2, len(batch)]):
            pairs += zip(part.bags["tags"][0].tolist(), part.bag_weights["tags"].tolist(), strict=True)
    assert sorted(pairs) == sorted(zip(whole.bags["tags"][0].tolist(), whole.bag_weights["tags"].tolist(), strict=True))
    assert pairs != sorted(pairs)


def test_damaged_weights_are_found(in_process, tmp_path):
    bags = draw_bags()
    pq.write_table(table_of(bags, tags=joined(bags, "|")), tmp_path / "t.parquet")
    flags = ["--bag", "tags=|", "--bag-weights", "tags=:"]
    assert in_process(preprocess, "table", "t.parquet", *ROLES, *flags, "--out", "data")[0] == 0
    [path] = (tmp_path / "data" / "train").iterdir()
    with pa.ipc.open_file(path) as file:
        table = file.read_all()
    weights = table["weights:tags"].combine_chunks().to_pylist()
    row = next(i for i, one in enumerate(weights) if one)
    weights[row][0] = -1.0
    place = table.schema.get_field_index("weights:tags")
    changed = table.set_column(place, table.schema.field(place), pa.array(weights, pa.list_(pa.float32())))
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(changed)

    def change(content):
        [shard] = content["train"]
        shard["sha256"] = checksum(path)

    edit_manifest(tmp_path / "data", change)
    code, out, error = in_process(preprocess, "check", "data")
    assert code == 1 and f"row {row}: -1.0" in out, out + error
    code, _, error = in_process(train, "--data", "data", "--batch-size", 50, "--run-dir", "run")
    assert code == 2 and f"row {row}, weights of tags: -1.0 is not a finite weight of at least 0" in error, error


def test_the_suggestion(in_process, tmp_path):
    bags = draw_bags()
    pq.write_table(table_of(bags, tags=joined(bags, "|")), tmp_path / "t.parquet")
    assert in_process(preprocess, "suggest", "t.parquet")[0] == 0
    text = (tmp_path / "features.toml").read_text()
    assert 'separator = "|"' in text and 'weights = ":"' in text
    assert in_process(preprocess, "table", "t.parquet", "--features", "features.toml", "--out", "data")[0] == 0
