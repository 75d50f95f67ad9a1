"""Runs of `hostdev train --follow`: their scores, their ends, other runs beside and before them, and options."""

import signal

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

import hostdev
from hostdev.checkpoint.folder import names_in
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from hostdev.train import scores as metrics
from tests.conftest import digest_of
from tests.follow.arriving import DAYS, END, MODEL, NAMES, QUICK, ROWS, RULES, await_lines, lines, read_labels, start


def test_scores_are_those_of_the_model_before(run, example, arrived, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, "--batch-size", 250, *END, "--follow-window", 2]
    run(train, *every, "--run-dir", "run", "--checkpoint-every", 2, "--keep-checkpoints", 99)
    found = lines(tmp_path / "run")
    scores, labels = [], []
    for number in range(1, DAYS):
        assert found[number]["step"] == 2 * number
        checkpoint = next(
            tmp_path / "run" / "checkpoints" / name
            for name in names_in(tmp_path / "run" / "checkpoints")
            if hostdev.open(tmp_path / "run" / "checkpoints" / name).step == 2 * number
        )
        run(predict, "--checkpoint", checkpoint, "--data", arrived / NAMES[number], "--out", f"{number}.parquet")
        predicted = pyarrow.parquet.read_table(tmp_path / f"{number}.parquet")
        probability = predicted.column("probability").to_numpy().astype(np.float64)
        scores.append(np.log(probability / (1 - probability)).astype(np.float32))
        labels.append(read_labels(arrived / NAMES[number]))
        line = found[number]
        assert line["auc"] == pytest.approx(metrics.auc(scores[-1], labels[-1]), abs=1e-4)  # float32 probabilities
        assert line["logloss"] == pytest.approx(metrics.log_loss(scores[-1], labels[-1]), abs=1e-6)
        assert line["calibration"] == pytest.approx(probability.mean() / labels[-1].mean(), abs=1e-6)
        if number > 1:
            both = np.concatenate(scores[-2:]), np.concatenate(labels[-2:])
            assert line["window"]["files"] == 2 and line["window"]["rows"] == 2 * ROWS
            assert line["window"]["auc"] == pytest.approx(metrics.auc(*both), abs=1e-4)
            assert line["window"]["logloss"] == pytest.approx(metrics.log_loss(*both), abs=1e-6)


def test_a_second_follower_and_the_end_by_a_signal(in_process, example, arrived, whole, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *QUICK, "--checkpoint-every", 4]
    with start(tmp_path, *every, "--checkpoint-dir", "c", "--run-dir", "one") as process:
        try:
            await_lines(tmp_path / "one", DAYS, process)
            more = ["--checkpoint-dir", "c", "--run-dir", "two", "--follow-until", "end"]
            code, _, error = in_process(train, *every, *more)
            assert code == 2 and len(error.splitlines()) == 1 and "c" in error
            process.send_signal(signal.SIGTERM)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and "10 steps are saved; continue with --resume" in error, (out, error)
    code, out, _ = in_process(train, *every, "--checkpoint-dir", "c", "--run-dir", "one", "--resume", *END[:2])
    assert code == 0 and "after step 10" in out
    assert digest_of(tmp_path / "one") == digest_of(whole)


def test_a_new_run_begins_with_the_tables_of_another(run, example, arrived, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--checkpoint-every", 100]
    run(train, *every, "--run-dir", "one")
    assert "steps of this run count from 0" in run(train, *every, "--run-dir", "two", "--start-from", "one/checkpoints")
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert two[0]["auc"] > one[0]["auc"] + 0.01  # the rows are known
    assert [line["step"] for line in two] == [line["step"] for line in one]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--epochs", 2], "--epochs"),
        (["--order", "stored"], "--order"),
        (["--early-stop", 1], "--early-stop"),
        (["--shuffle-window", 2], "--shuffle-window"),
        (["--spawn", 2], "--spawn"),
        (["--cache-rows", "auto"], "--cache-rows"),
        (["--follow-until", "idle:x"], "--follow-until"),
        (["--follow-poll", 0], "--follow-poll"),
        (["--follow-quiet", -1], "--follow-quiet"),
        (["--follow-window", 0], "--follow-window"),
        (["--follow-mark", "a/b"], "--follow-mark"),
        (["--follow", "missing"], "missing"),
    ],
)
def test_refused_options(in_process, example, tmp_path, options, named):
    (tmp_path / "in").mkdir()
    code, _, error = in_process(train, "--follow", "in", "--data", example, *MODEL, *options)
    assert code == 2 and named in error and len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_refused_data(in_process, small_data, example, arrived, tmp_path):
    (tmp_path / "in").mkdir()
    assert "--data" in in_process(train, "--follow", "in")[2]
    code, _, error = in_process(train, "--follow", "in", "--data", small_data)
    assert code == 2 and "--ids raw" in error
    flags = ("--follow-until", "--follow-mark", "--follow-poll", "--follow-quiet", "--follow-window")
    for flag in (*([flag, "1"] for flag in flags), ["--follow-grown"]):
        code, _, error = in_process(train, "--data", example, *flag)
        assert code == 2 and flag[0] in error and "without --follow" in error
    every = ["--data", example, *MODEL, *RULES, "--checkpoint-every", 1, "--run-dir", "run"]
    assert in_process(train, "--follow", arrived, *every, "--max-steps", 1, *END)[0] == 0
    more = ["--tables", "dynamic", "--host-device-mix", "--epochs", 1, "--resume"]
    code, _, error = in_process(train, *every, *more)
    assert code == 2 and "was trained with --follow" in error
