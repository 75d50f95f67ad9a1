"""Callbacks of `hostdev train`: what they receive and when, their errors; results do not depend on them."""

import json
import signal
import subprocess
import sys
import time

import pytest

from hostdev.ext.tracking.tracker import Tracker
from hostdev.ext.training import cli as train
from hostdev.ext.training.run_callbacks import RunCallbacks
from hostdev.train.interrupt import GracefulStop
from tests import forks
from tests.conftest import ROOT, digest_of, environment
from tests.own_models import __name__ as own_models
from tests.tracking.cases import FLAGS, read_evaluations, read_losses, seen

CASES = "tests.tracking.cases"


@pytest.fixture(autouse=True)
def _nothing_seen():
    seen.clear()


def test_what_a_callback_receives(run, small_data, tmp_path):
    """All methods in order, with the figures of the logs; the digest is that of a run without callbacks."""
    every = ["--data", small_data, *FLAGS, "--epochs", 2, "--checkpoint-every", 7]
    run(train, *every, "--run-dir", "plain")
    run(train, *every, "--run-dir", "run", "--callback", f"{CASES}:Recorder")
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "plain")
    steps = [info for name, info in seen if name == "on_step"]
    epochs = [info for name, info in seen if name == "on_epoch"]
    saved = [info for name, info in seen if name == "on_checkpoint"]
    (first, start), (last, end) = seen[0], seen[-1]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (first, last) == ("on_start", "on_end")
    assert (start.first_step, start.steps, start.processes) == (0, len(steps), 1)
    assert str(start.run_dir) == "run" and start.config == json.loads((tmp_path / "run" / "config.json").read_text())
    assert start.rows["train"] + start.rows["test"] == 4000
    assert [info.step for info in steps] == list(range(1, summary["steps"] + 1))
    losses = [(info.losses["wide_loss"], info.losses["deep_loss"]) for info in steps]
    assert losses == [pytest.approx(pair, abs=1e-7) for pair in read_losses(tmp_path / "run")]
    assert sum(info.samples for info in steps) == 2 * start.rows["train"]
    assert [info.epoch for info in steps] == [1] * (len(steps) // 2) + [2] * (len(steps) // 2)
    found = [(info.step, info.metrics["test"]["auc"], info.metrics["test"]["logloss"]) for info in epochs]
    assert found == [pytest.approx(one, abs=1e-6) for one in read_evaluations(tmp_path / "run")]
    assert epochs[-1].metrics["test"]["auc"] == summary["auc"]
    assert epochs[-1].metrics["training"]["rows"] > 0 and epochs[-1].file is None
    order = [(name, info.step) for name, info in seen if name in ("on_step", "on_epoch")]
    assert order.index(("on_epoch", epochs[0].step)) == order.index(("on_step", epochs[0].step)) + 1
    assert [info.step for info in saved] == [*range(7, len(steps), 7), len(steps)]
    assert all(info.seconds > 0 and info.path.name.startswith("step-") for info in saved)
    assert (end.status, end.steps, end.summary) == ("finished", len(steps), summary)


def test_random_draws_change_nothing(run, small_data, tmp_path):
    """torch's own dropout draws from the global generator, from which the callback draws, too."""
    every = ["--data", small_data, *FLAGS, "--max-steps", 6, "--model", f"{own_models}:Dropout"]
    run(train, *every, "--run-dir", "plain")
    run(train, *every, "--run-dir", "run", "--callback", f"{CASES}:Recorder")
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "plain")


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("method", ["on_start", "on_step", "on_epoch", "on_checkpoint", "on_end"])
def test_an_error_of_a_callback(in_process, small_data, tmp_path, method, saves):
    """One line names the callback and the method; the steps are saved, and resumed to the digest of a whole run."""
    name = f"{CASES}:Raises{method.title().replace('_', '').replace('On', 'In')}"
    every = ["--data", small_data, *FLAGS, "--epochs", 1, *(["--checkpoint-every", 6] if saves else [])]
    code, _, error = in_process(train, *every, "--run-dir", "run", "--callback", f"{CASES}:Recorder,{name}")
    if method == "on_checkpoint" and not saves:
        assert code == 0
        return
    assert code == 2 and len(error.splitlines()) == 1
    assert name in error and method in error and "LookupError: no such room" in error
    if method == "on_start":
        assert not (tmp_path / "run" / "config.json").exists()
        assert [name for name, _ in seen] == ["on_start", "on_end"]
        return
    status = json.loads((tmp_path / "run" / "summary.json").read_text())["status"]
    assert status == ("finished" if method == "on_end" else "failed")
    assert [name for name, _ in seen][-1] == "on_end" and seen[-1][1].status == status
    if saves and method != "on_end":
        assert "saved; continue with --resume" in error
        code, _, error = in_process(train, *every, "--run-dir", "run", "--resume")
        assert code == 0, error
        in_process(train, *every, "--run-dir", "whole")
        assert digest_of(tmp_path / "run") == digest_of(tmp_path / "whole")


class NeverClosed(Tracker):
    """A tracker that cannot be closed, with or without an error before."""

    name = "never closed"

    def on_end(self, end):
        if self.fails:
            raise LookupError("no such room")

    def close(self):
        raise OSError("the server is gone")


@pytest.mark.parametrize(("fails", "why"), [(False, "the server is gone"), (True, "no such room")])
def test_a_tracker_that_cannot_be_closed_is_named(capsys, fails, why):
    tracker = NeverClosed()
    tracker.fails = fails
    callbacks = RunCallbacks([], [tracker], GracefulStop(None))
    callbacks._is_started = True
    callbacks.end("finished", {})
    error = capsys.readouterr().err
    assert error.count("the end of the run is not complete there") == 1 and why in error


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tests.nowhere:Class", "tests.nowhere"),
        (f"{CASES}:Nobody", "Recorder"),
        (CASES, "package.module:Class"),
        (f"{CASES}:Misspelt", "on_steps"),
        (f"{CASES}:read_losses", "must be a class"),
        (f"{CASES}:NeedsAnArgument", "without arguments"),
        (f"{CASES}:Recorder,{CASES}:Recorder", "twice"),
        ("", "package.module:Class"),
    ],
)
def test_a_class_that_cannot_be_used(in_process, small_data, tmp_path, name, words):
    code, _, error = in_process(train, "--data", small_data, *FLAGS, "--run-dir", "run", "--callback", name)
    assert code == 2 and len(error.splitlines()) == 1 and words in error
    assert not (tmp_path / "run").exists()


def test_a_signal_in_a_callback(small_data, tmp_path):
    """It ends the run after the step, with a checkpoint, as elsewhere."""
    every = ["--data", small_data, *FLAGS, "--epochs", 9, "--checkpoint-every", 1000, "--run-dir", "run"]
    command = [sys.executable, "-m", "hostdev.train", *every, "--callback", f"{CASES}:Sleeper"]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with forks.Popen(list(map(str, command)), cwd=tmp_path, env=environment(tmp_path), **options) as process:
        try:
            until = time.monotonic() + 60
            while not (tmp_path / "run" / "loss.log").is_file() or not (tmp_path / "run" / "loss.log").stat().st_size:
                assert time.monotonic() < until and process.poll() is None, process.communicate()
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130 and "saved; continue with --resume" in error and len(error.splitlines()) == 1


def test_a_callback_in_ranks(small_data, tmp_path, command):
    """Only rank 0 has callbacks; its error ends all ranks, after one checkpoint of all."""
    every = ["--data", small_data, *FLAGS, "--host-device-mix", "--micro-batches", 2, "--epochs", 1, "--spawn", 2]
    name = f"{CASES}:RaisesInStep"
    found = command("hostdev.train", *every, "--checkpoint-every", 100, "--run-dir", "run", "--callback", name)
    assert found.returncode == 2 and len(found.stderr.splitlines()) == 1, found.stderr
    assert name in found.stderr and "saved; continue with --resume" in found.stderr
    found = command("hostdev.train", *every, "--checkpoint-every", 100, "--run-dir", "run", "--resume")
    assert found.returncode == 0, found.stderr
    found = command("hostdev.train", *every[:-2], "--run-dir", "whole")
    assert found.returncode == 0, found.stderr
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "whole")


def test_the_example(run, small_data, tmp_path, monkeypatch):
    """examples/callback.py, with a module that has the shape of wandb."""
    logged, ended = [], []

    class FakeRun:
        summary: dict = {}  # noqa: RUF012

        def log(self, values, *, step):
            logged.append((step, values))

        def finish(self, *, exit_code):
            ended.append(exit_code)

    class Fake:
        @staticmethod
        def init(*, project, name, config, resume):
            assert (project, name, config["batch_size"]) == ("hostdev", "run", 250)
            return FakeRun()

    monkeypatch.setitem(sys.modules, "wandb", Fake)
    monkeypatch.syspath_prepend(ROOT / "examples")
    every = ["--data", small_data, *FLAGS, "--epochs", 1, "--checkpoint-every", 9, "--run-dir", "run"]
    run(train, *every, "--callback", "callback:Wandb")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [step for step, values in logged if "wide_loss" in values] == list(range(10, summary["steps"] + 1, 10))
    assert logged[-1] == (summary["steps"], {**logged[-1][1], "test/auc": summary["auc"], "epoch": 1})
    assert FakeRun.summary["auc"] == summary["auc"] and "step-" in FakeRun.summary["checkpoint"]
    assert ended == [0]
