"""A data set without test rows, by --test-fraction 0: made, checked, trained on and predicted."""

import json

import pytest

from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.check import check
from hostdev.ext.predict import cli as predict
from tests.checkpoint.runs import MIX, small
from tests.data import movies


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("all")
    movies.make(rows=1200, users=40, items=30).write_csv(folder / "films.csv")
    flags = ["--label", "liked", "--numeric", "age", "--categorical", "user,item", "--bag", "genres=|"]
    arguments = ["table", folder / "films.csv", "--out", folder / "data", *flags, "--test-fraction", 0]
    preprocess.main(list(map(str, arguments)))
    return folder / "data"


def test_all_rows_are_for_training(data, in_process, tmp_path):
    found = manifest.read(data)
    assert (found.rows("train"), found.rows("test"), found.test) == (1200, 0, [])
    assert check(data).wrong == []
    code, out, error = in_process(preprocess, "info", data, "--out", tmp_path / "info.png")
    assert (code, error) == (0, "")
    assert (tmp_path / "info.png").stat().st_size > 10_000
    [line] = [line for line in out.splitlines() if line.startswith("test ")]
    assert line.split() == ["test", "0", "0", "0", "bytes", "-"]
    assert "nan" not in out
    assert "inf" not in out.replace("info.png", "")


def test_no_labels_of_test_rows_are_told_of(tmp_path, in_process):
    (tmp_path / "t.csv").write_text("y,c\n" + "".join(f"{i % 2},v{i % 5}\n" for i in range(50)))
    flags = ["--label", "y", "--categorical", "c", "--test-fraction", 0]
    code, out, error = in_process(preprocess, "table", tmp_path / "t.csv", "--out", tmp_path / "d", *flags)
    assert (code, error) == (0, "")
    assert out.startswith(f"{tmp_path / 'd'}: 50 training and 0 test rows in 1 shards, 6 ids, labels 50.0% positive")
    assert out.count("\n") == 1


def test_it_is_trained_on_and_predicted(data, trained, tmp_path, capsys):
    flags = [*small(data, "run", *MIX, "--model", "deepfm"), "--checkpoint-every", 99]
    code, out, error = trained(*flags)
    assert (code, error) == (0, "")
    assert f"data     {data}: 1,200 training and 0 test rows; nothing is evaluated\n" in out
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["auc"], summary["best_epoch"]) == ("finished", 6, None, None)
    assert (tmp_path / "run/eval.log").read_text() == ""
    assert trained(*flags, "--resume", "--epochs", 3)[0] == 0
    code, _, error = trained(*small(data, "other", *MIX), "--early-stop", 1, "--epochs", 3)
    assert code == 2
    assert f"--early-stop 1 needs validation or test rows, and {data} has none; leave out --early-stop" in error
    arguments = ["--checkpoint", "run", "--data", str(data), "--out", "p.parquet"]
    assert cli.run("p", predict.main, arguments) == 2
    assert f"--data {data} has no test rows; give --split train" in capsys.readouterr().err
    assert cli.run("p", predict.main, [*arguments, "--split", "train"]) == 0
