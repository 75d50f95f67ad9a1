"""A missing input is reported first, before options that would only matter later."""

import pytest

from hostdev.commands import (
    advise,
    checkpoint,
    launch,
    neighbours,
    predict,
    preprocess,
    quickstart,
    report,
    serve,
    train,
    verify,
)

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
