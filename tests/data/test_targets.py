"""Labels, tasks and weights from a table to predictions: flags and a features file, rows set aside, refusals."""

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import mean_absolute_error, roc_auc_score

import hostdev
from hostdev.commands import train
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.shards import ShardReader
from hostdev.ext.predict import cli as predict

FEATURES = """
weight = "w"
[labels.click]
[labels.stars]
task = "regression"
missing = ["-1"]
[labels.liked]
column = "stars"
positive = ">=4"
missing = ["-1"]
[features.user]
kind = "categorical"
[features.price]
kind = "numeric"
"""
ROLES = ["--categorical", "user", "--numeric", "price"]
TRAIN = ["--batch-size", 100, "--device", "cpu", "--emb-dim", 4, "--host-device-mix"]


@pytest.fixture
def frame(tmp_path):
    rng = np.random.default_rng(5)
    user, price = rng.integers(0, 12, 600), rng.random(600).round(3)
    stars = (3 + np.sin(user) + price).round(2)
    click = (rng.random(600) < 0.2 + 0.6 * (user % 3 == 0)).astype(int)
    found = pd.DataFrame({"user": [f"u{i}" for i in user], "price": price, "click": click, "stars": stars})
    found["w"] = (1 + user % 2).astype(float)
    found.to_csv(tmp_path / "t.csv", index=False)
    (tmp_path / "f.toml").write_text(FEATURES)
    return found


def rows_of(folder, split="train"):
    [batch] = ShardReader(folder, manifest.read(folder), split).batches(1 << 20)
    return batch


def test_labels_numbers_and_weights(in_process, tmp_path, frame):
    """A column is a number and a rule's label; every row's targets arrive in order, also across shards."""
    more = ["--features", "f.toml", "--rows-per-shard", 100, "--test-fraction", 0]
    code, out, _ = in_process(preprocess, "table", "t.csv", *more, "--out", "data")
    assert code == 0
    assert (
        f"labels 'click' {frame.click.mean():.1%} positive, labels 'stars' {frame.stars.mean():.4g} on average" in out
    )
    found, batch = manifest.read(tmp_path / "data"), rows_of(tmp_path / "data")
    assert found.schema.labels == ("click", "stars", "liked")
    assert found.schema.targets.numeric == ("stars",)
    np.testing.assert_array_equal(
        batch.label, np.stack([frame.click, frame.stars, frame.stars >= 4], 1).astype(np.float32)
    )
    np.testing.assert_array_equal(batch.weight, frame.w.astype(np.float32))
    parts = list(batch.split([0, 7, 600]))
    np.testing.assert_array_equal(np.concatenate([part.weight for part in parts]), batch.weight)
    np.testing.assert_array_equal(np.concatenate([part.label for part in parts]), batch.label)
    assert in_process(preprocess, "check", "data")[0] == 0
    code, out, _ = in_process(preprocess, "info", "data")
    assert f"{frame.click.mean():.2%}" in out
    assert f"{frame.stars.mean():.4g}" in out


def test_flags_and_the_features_file_give_the_same(in_process, tmp_path, frame):
    (tmp_path / "g.toml").write_text(FEATURES.replace("[labels.liked]", "[labels.buy]").replace('"stars"', '"click"'))
    flags = ["--label", "click,stars", "--weight", "w", "--task", "regression", *ROLES]
    (tmp_path / "h.toml").write_text(
        'task = "regression"\nweight = "w"\n[labels.click]\n[labels.stars]\n' + FEATURES[FEATURES.index("[features") :]
    )
    for name, how in (("a", flags), ("b", ["--features", "h.toml"])):
        assert in_process(preprocess, "table", "t.csv", *how, "--out", name)[0] == 0
    assert manifest.read(tmp_path / "a").train == manifest.read(tmp_path / "b").train
    assert manifest.read(tmp_path / "a").schema.targets.numeric == ("click", "stars")


def test_rows_without_a_label_or_weight_are_set_aside(in_process, tmp_path, frame):
    lines = (tmp_path / "t.csv").read_text().splitlines()
    lines[3] = "u1,0.5,1,-1,1"  # missing by its marker
    lines[5] = "u1,0.5,1,inf,1"
    lines[7] = "u1,0.5,1,3,-2"
    lines[9] = "u1,0.5,1,many,1"
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    assert in_process(preprocess, "table", "t.csv", "--features", "f.toml", "--out", "data")[0] == 0
    found = [line.split("\t") for line in (tmp_path / "data" / "rejected.tsv").read_text().splitlines()]
    assert [int(line[1]) for line in found] == [4, 6, 8, 10]
    assert [line[2].split(":")[0] for line in found] == [
        f"column '{name}'" for name in ("stars", "stars", "w", "stars")
    ]
    assert "'many'" in found[3][2]


def test_from_a_table_to_predictions(in_process, tmp_path, frame):
    """The figures of a run, of `predict` on the data set and on the file, and of scikit-learn are the same."""
    assert in_process(preprocess, "table", "t.csv", "--features", "f.toml", "--out", "data")[0] == 0
    run = [*TRAIN, "--data", "data", "--model", "mmoe", "--run-dir"]
    code, out, _ = in_process(train, *run, "run", "--epochs", 3, "--checkpoint-every", 3)
    assert code == 0
    assert "click AUC" in out
    assert "stars RMSE" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert set(summary["labels"]) == {"click", "stars", "liked"}
    assert summary["labels"]["click"]["rmse"] is None
    assert "rmse is" in (tmp_path / "run" / "eval.log").read_text()

    code, out, _ = in_process(predict, "--checkpoint", "run", "--data", "data", "--out", "p.parquet", "--by", "user")
    assert code == 0
    assert f"stars: RMSE {summary['labels']['stars']['rmse']:.4f}" in out
    assert "click: by user: GAUC" in out
    found = pq.read_table(tmp_path / "p.parquet").to_pandas()
    names = ["probability_click", "label_click", "prediction_stars", "label_stars", "probability_liked", "label_liked"]
    assert list(found.columns) == names
    assert summary["labels"]["click"]["auc"] == pytest.approx(roc_auc_score(found.label_click, found.probability_click))
    mae = mean_absolute_error(found.label_stars, found.prediction_stars)
    assert summary["labels"]["stars"]["mae"] == pytest.approx(mae, rel=1e-6)

    code, out, _ = in_process(predict, "--checkpoint", "run", "--data", "t.csv", "--out", "p.csv", "--keep", "price")
    assert code == 0
    found = pd.read_csv(tmp_path / "p.csv")
    direct = hostdev.Predictor(tmp_path / "run")(frame)
    assert direct.shape == (600, 3)
    np.testing.assert_allclose(direct, found[names[::2]], rtol=1e-5)
    np.testing.assert_array_equal(found.label_click, frame.click)
    np.testing.assert_allclose(found.label_stars, frame.stars, rtol=1e-6)
    assert (
        in_process(predict, "--checkpoint", "run", "--data", "t.csv", "--out", "q.csv", "--keep", "label_click")[0] == 2
    )

    frame.drop(columns=["stars", "w", "click"]).to_csv(tmp_path / "new.csv", index=False)
    code, out, _ = in_process(predict, "--checkpoint", "run", "--data", "new.csv", "--out", "n.parquet")
    assert code == 0
    assert "AUC" not in out


def test_a_resumed_run_with_early_stop_by_rmse(in_process, tmp_path, frame):
    how = ["--label", "stars", "--task", "regression", *ROLES]
    assert in_process(preprocess, "table", "t.csv", *how, "--out", "data")[0] == 0
    run = [*TRAIN, "--data", "data", "--model", "deepfm", "--epochs", 5, "--early-stop", 3, "--checkpoint-every", 2]
    code, out, _ = in_process(train, *run, "--run-dir", "whole")
    assert code == 0
    assert "RMSE" in out
    assert "AUC" not in out
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    assert whole["auc"] is None
    assert whole["best_rmse"] <= whole["rmse"]
    assert in_process(train, *run, "--run-dir", "part", "--max-steps", 11)[0] == 0
    code, _, error = in_process(train, "--resume", "part", *run, "--run-dir", "again")
    assert code == 0, error
    again = json.loads((tmp_path / "again" / "summary.json").read_text())
    assert again["state_sha256"] == whole["state_sha256"]
    assert again["best_rmse"] == whole["best_rmse"]
    code, out, _ = in_process(predict, "--checkpoint", "whole", "--data", "data", "--out", "p.parquet")
    assert code == 0
    assert f"(the best: RMSE {whole['best_rmse']:.4f}" in out or f"newest: RMSE {whole['best_rmse']:.4f}" in out
    assert pq.read_table(tmp_path / "p.parquet").column_names == ["prediction", "label"]
    line = in_process(predict, "--checkpoint", "whole", "--data", "data", "--out", "q.csv", "--by", "user")[2]
    assert "--by user has no effect on predictions of numbers" in line


def test_a_later_data_set_has_the_same_targets(in_process, tmp_path, frame):
    assert in_process(preprocess, "table", "t.csv", "--features", "f.toml", "--out", "a")[0] == 0
    assert in_process(preprocess, "table", "t.csv", "--vocabulary", "a", "--out", "b")[0] == 0
    one, other = (manifest.read(tmp_path / name) for name in "ab")
    assert other.schema == one.schema
    assert [shard.sha256 for shard in other.train] == [shard.sha256 for shard in one.train]
    for wrong in (["--weight", "price"], ["--label", "click"], ["--task", "regression"]):
        code, _, error = in_process(preprocess, "table", "t.csv", "--vocabulary", "a", *wrong, "--out", "c")
        assert (code, wrong[0] in error) == (2, True), error


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--label", "stars", "--task", "regression", "--positive", ">3"], "--positive has no effect on labels of"),
        (["--label", "click,click"], "column 'click' is named twice among --label, --weight"),
        (["--label", "click", "--weight", "click"], "column 'click' is named twice among --label, --weight"),
        (["--label", "click", "--weight", "nothing"], "has no column 'nothing'"),
        (["--label", "click,stars", "--positive", ">9"], "is not 0 or 1"),
        (["--label", "stars,click", "--positive", ">9"], "none of the 600 labels 'stars' is positive by --positive >9"),
        (["--label", "click", "--task", "ranking"], "invalid choice: 'ranking'"),
    ],
)
def test_wrong_flags(in_process, frame, flags, message):
    code, _, error = in_process(preprocess, "table", "t.csv", *flags, *ROLES, "--out", "data")
    if message == "is not 0 or 1":  # --positive applies to all labels
        assert "none of the 600 labels 'click' is positive" in error
        return
    assert code == 2
    assert message in error, error


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('weight = "w"', 'label = "click"', "both label and [labels.click] are given"),
        ('task = "regression"', 'task = "ranking"', "task must be one of binary, regression"),
        (
            'task = "regression"',
            'task = "regression"\npositive = "1"',
            "positive has no effect on a regression label",
        ),
        ('column = "stars"', 'colunm = "stars"', "did you mean column?"),
        ("[labels.click]", "labels.click = 3", "label"),
    ],
)
def test_wrong_features_files(in_process, tmp_path, frame, before, after, message):
    (tmp_path / "f.toml").write_text(FEATURES.replace(before, after))
    code, _, error = in_process(preprocess, "table", "t.csv", "--features", "f.toml", "--out", "data")
    assert code == 2
    assert message in error, error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "told"),
    [("0,1,-1", True), ("0,1,-1.0", True), ("-1,1", False), ("1.0,-1.0", False), ("0,1", False), ("5,4,1", False)],
)
def test_a_label_below_0_beside_0_is_told(in_process, tmp_path, values, told):
    """-1 often means that a label is unknown; alone beside 1, it is a negative label."""
    labels = values.split(",")
    lines = [f"{labels[i % len(labels)]},{i / 90},u{i % 5}" for i in range(90)]
    (tmp_path / "t.csv").write_text("\n".join(["click,price,user", *lines]) + "\n")
    more = ["--label", "click", *ROLES, "--positive", "1"]
    code, out, error = in_process(preprocess, "table", "t.csv", *more, "--out", "data")
    assert code == 0
    below = labels[-1]
    line = f"label 'click': --positive 1 makes {below} a negative label, like 0; if {below} means that the label is"
    assert (line in error) == told, error
    assert error.count("label 'click'") == told
    if told:
        code, out, error = in_process(preprocess, "table", "t.csv", *more, f"--missing={labels[2]}", "--out", "other")
        assert "label 'click'" not in error
        assert (code, "more than 1" in error or "rows" in error) == (2, True), (out, error)
