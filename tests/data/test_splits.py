"""Rows for training, validation and testing: by fraction, column, time and file; what a run does with them."""

import json

import numpy as np
import pytest

from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.shards import ShardReader
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from tests.data import movies


def prepare(out, *arguments):
    assert cli.run(preprocess.PROG, preprocess.main, ["table", *map(str, arguments), "--out", str(out)]) == 0
    return manifest.read(out)


def numbers_in(folder, found, split):
    """Return the column x of a split's rows, in order, as it was before its scaling by the maximum."""
    [batch] = ShardReader(folder, found, split).batches(1 << 20)
    return np.round(batch.dense[:, 0].astype(float) * found.statistics["dense_max"][0]).astype(int).tolist()


@pytest.fixture
def path(tmp_path):
    rows = [f"{i % 2},{i},u{i % 9},{'abc'[i % 3]}" for i in range(1, 301)]
    (tmp_path / "t.csv").write_text("\n".join(["y,x,u,s", *rows]) + "\n")
    return tmp_path / "t.csv"


ROLES = ("--label", "y", "--numeric", "x", "--categorical", "u,s")


def test_by_column_time_and_fraction(tmp_path, path):
    """Test rows stay test rows; what is drawn for validation leaves the test rows as they were."""
    found = prepare(tmp_path / "a", path, *ROLES, "--test-after", "x=250", "--validation-after", "x=200")
    assert found.splits == ("train", "test", "validation")
    split = {name: numbers_in(tmp_path / "a", found, name) for name in found.splits}
    assert split == {
        "train": list(range(1, 201)),
        "test": list(range(251, 301)),
        "validation": list(range(201, 251)),
    }
    assert found.statistics["rows"] == {"train": 200, "test": 50, "validation": 50}
    assert found.statistics["label_mean"]["validation"] == 0.5

    found = prepare(tmp_path / "b", path, *ROLES, "--test-column", "s=a", "--validation-column", "s=b")
    assert [len(numbers_in(tmp_path / "b", found, name)) for name in found.splits] == [100, 100, 100]

    plain = prepare(tmp_path / "c", path, *ROLES, "--test-fraction", 0.2)
    found = prepare(tmp_path / "d", path, *ROLES, "--test-fraction", 0.2, "--validation-fraction", 0.3)
    before, after = (
        {name: numbers_in(tmp_path / folder, of, name) for name in of.splits}
        for folder, of in (("c", plain), ("d", found))
    )
    assert after["test"] == before["test"]
    assert sorted(after["train"] + after["validation"]) == before["train"]
    assert 60 < len(after["validation"]) < 120
    assert "validation" not in json.loads((tmp_path / "c" / "manifest.json").read_text())

    found = prepare(tmp_path / "e", path, *ROLES, "--test-after", "x=250", "--validation-fraction", 0.2)
    split = {name: numbers_in(tmp_path / "e", found, name) for name in found.splits}
    assert split["test"] == list(range(251, 301))
    assert sorted(split["train"] + split["validation"]) == list(range(1, 251))


def test_files(tmp_path, path):
    """Rows of the files of --test and --validation; statistics are of the training rows alone."""
    rows = path.read_text().splitlines()
    for name, some in (("train", rows[1:101]), ("test", rows[101:151]), ("more", rows[151:181]), ("valid", rows[181:])):
        (tmp_path / f"{name}.csv").write_text("\n".join([rows[0], *some]) + "\n")
    files = [tmp_path / "train.csv", "--test", tmp_path / "test.csv", "--test", tmp_path / "more.csv"]
    found = prepare(tmp_path / "d", *files, "--validation", tmp_path / "valid.csv", *ROLES)
    split = {name: numbers_in(tmp_path / "d", found, name) for name in found.splits}
    assert split == {"train": list(range(1, 101)), "test": list(range(101, 181)), "validation": list(range(181, 301))}
    assert found.statistics["dense_max"] == [100.0]
    again = prepare(tmp_path / "e", *files, "--validation", tmp_path / "valid.csv", *ROLES, "--threads", 1)
    assert again.identity == found.identity


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--validation-fraction", 0], "--validation-fraction must be a number above 0 and below 1, not 0"),
        (["--validation-fraction", 0.95], "together leave no rows for training"),
        (["--validation-fraction", 0.1, "--validation-after", "x=3"], "both select rows for validation"),
        (["--test", "t.csv", "--test-fraction", 0.1], "--test and --test-fraction both select rows for testing"),
        (["--validation-column", "s=z"], "none of the 300 rows is in the validation split"),
        (["--validation", "no.csv"], "no.csv: no such file"),
        (["--validation-after", "u=3"], "column 'u': 'u1' is not a number"),
    ],
)
def test_wrong_splits(path, in_process, flags, message):
    code, _, error = in_process(preprocess, "table", path, "--out", "out", *ROLES, *flags)
    assert code == 2
    assert message in error


def test_check_and_info_of_three_splits(tmp_path, path, in_process):
    prepare(tmp_path / "d", path, *ROLES, "--validation-fraction", 0.3)
    code, printed, _ = in_process(preprocess, "check", tmp_path / "d")
    assert code == 0
    assert f"{tmp_path / 'd'}/validation: 1 shard, " in printed
    code, printed, _ = in_process(preprocess, "info", tmp_path / "d", "--out", "i.png")
    assert code == 0
    assert "\nvalidation" in printed
    shard = tmp_path / "d" / "validation" / "part-00000.arrow"
    shard.write_bytes(shard.read_bytes()[:-8] + b"\0" * 8)
    code, printed, _ = in_process(preprocess, "check", tmp_path / "d")
    assert code == 1


def test_training_watches_the_validation_rows(tmp_path, capsys):
    """It stops by them; the test rows give one figure, that of the best epoch; a resumed run ends with the same one."""
    movies.make(rows=3000, users=60, items=40).write_csv(tmp_path / "films.csv")
    flags = ("--label", "liked", "--categorical", "user,item", "--validation-fraction", 0.2, "--test-fraction", 0.2)
    found = prepare(tmp_path / "data", tmp_path / "films.csv", *flags)
    options = ["--data", tmp_path / "data", "--batch-size", 200, "--device", "cpu", "--emb-dim", 4, "--lr", 0.01]
    options += ["--table-lr", 0.05, "--epochs", 8, "--early-stop", 2]

    def run(*more):
        capsys.readouterr()
        assert cli.run(train.PROG, train.main, list(map(str, [*options, *more]))) == 0
        return capsys.readouterr().out

    printed = run("--run-dir", tmp_path / "run", "--checkpoint-every", 5)
    rows = found.statistics["rows"]
    assert f"{rows['train']:,} training, {rows['validation']:,} validation and {rows['test']:,} test rows" in printed
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert f"epoch 1: AUC {first_auc(tmp_path / 'run'):.4f} (training " in printed
    assert f" on {rows['validation']:,} validation rows" in printed
    best = summary["best_epoch"]
    assert best < 8
    line = f"test rows, after epoch {best} (the best on validation rows): AUC {summary['auc']:.4f}, log loss "
    assert line in printed
    assert summary["best_auc"] != summary["auc"] != summary["validation_auc"]
    arguments = ["--checkpoint", tmp_path / "run", "--data", tmp_path / "data", "--out", tmp_path / "p.parquet"]
    assert cli.run(predict.PROG, predict.main, list(map(str, arguments))) == 0
    assert f"AUC {summary['auc']:.4f}   log loss {summary['logloss']:.4f}" in capsys.readouterr().out
    again = run("--run-dir", tmp_path / "run2", "--max-steps", 12, "--checkpoint-every", 5)
    assert "test rows, after epoch" in again
    again = run("--resume", tmp_path / "run2", "--run-dir", tmp_path / "run2", "--max-steps", 10_000)
    resumed = json.loads((tmp_path / "run2/summary.json").read_text())
    same = ("auc", "logloss", "validation_auc", "best_epoch", "best_auc", "state_sha256")
    assert {name: resumed[name] for name in same} == {name: summary[name] for name in same}
    assert line in again


def first_auc(folder):
    return float((folder / "eval.log").read_text().split("auc is ")[1].split(",")[0])
