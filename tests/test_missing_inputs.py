"""A missing input is reported first, before options that would only matter later."""

import pytest

from hostdev.commands import quickstart, train
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.advice import cli as advise
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.launch import cli as launch
from hostdev.ext.neighbours import cli as neighbours
from hostdev.ext.predict import cli as predict
from hostdev.ext.report import cli as report
from hostdev.ext.serving import cli as serve
from hostdev.ext.verify import cli as verify

CASES = [
    (report, "NOTHERE"),
    (report, "NOTHERE --out missing/x.html"),
    (predict, "--checkpoint NOTHERE"),
    (predict, "--checkpoint . --data NOTHERE"),
    (predict, "--checkpoint . --data NOTHERE --out p.txt --at 3"),
    (checkpoint, "export NOTHERE"),
    (checkpoint, "export NOTHERE --out x --dtype float32 --format onnx"),
    (checkpoint, "reshard NOTHERE"),
    (checkpoint, "reshard NOTHERE --ranks 0 --out x"),
    (checkpoint, "diff . NOTHERE"),
    (checkpoint, "deliver NOTHERE"),
    (neighbours, "--checkpoint NOTHERE"),
    (neighbours, "--checkpoint NOTHERE --of a --k 0"),
    (serve, "--checkpoint NOTHERE --port 99999"),
    (serve, "--checkpoint . --token-file NOTHERE --port 99999"),
    (preprocess, "table NOTHERE"),
    (preprocess, "table NOTHERE --out x"),
    (preprocess, "table NOTHERE --out x --label y --threads 0"),
    (preprocess, "table . --features NOTHERE"),
    (preprocess, "table . --vocabulary NOTHERE"),
    (preprocess, "query --query NOTHERE"),
    (preprocess, "criteo NOTHERE"),
    (preprocess, "suggest NOTHERE --out /"),
    (preprocess, "info NOTHERE --out x.txt"),
    (quickstart, "--criteo NOTHERE --epochs 0"),
    (train, "--data NOTHERE --epochs 0"),
    (train, "--data NOTHERE --cache-policy lru"),
    (advise, "--data NOTHERE --step-ms 3"),
    (verify, "--data NOTHERE --steps 0"),
    (launch, "--rank-table NOTHERE"),
]


@pytest.mark.parametrize(("module", "line"), CASES, ids=[f"{m.__name__.split('.')[-1]} {line}" for m, line in CASES])
def test_a_missing_input_comes_first(in_process, module, line):
    code, _, error = in_process(module, *line.split())
    assert code == 2
    assert error.count("\n") == 1
    assert "NOTHERE" in error
    assert "required" not in error


def test_an_input_that_is_none_comes_before_a_file_that_exists(in_process, tmp_path):
    (tmp_path / "taken.png").write_text("")
    for module, command in ((report, ["empty"]), (preprocess, ["info", "empty"])):
        (tmp_path / "empty").mkdir(exist_ok=True)
        code, _, error = in_process(module, *command, "--out", "taken.png")
        assert code == 2
        assert "empty is not a " in error


def test_advice_does_not_ask_for_what_is_given(in_process, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/manifest.json").write_text("{}")
    (tmp_path / "t.csv").write_text("a,b\n1,x\n")
    (tmp_path / "f.toml").write_text('[features.b]\nkind = "categorical"\n')
    _, _, error = in_process(quickstart, "--criteo", "t.csv", "--data", "data")
    assert "--criteo" not in error
    assert "--data" in error
    _, _, error = in_process(quickstart, "--data", "data")
    assert "--criteo" in error
    _, _, error = in_process(preprocess, "table", "t.csv", "--features", "f.toml", "--out", "x")
    assert "f.toml names no label" in error
