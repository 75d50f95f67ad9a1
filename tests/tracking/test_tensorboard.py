"""--log-to tensorboard, read back by TensorBoard's own reader."""

import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import hostdev
from hostdev.ext.tracking.tensorboard import TensorBoardTracker
from hostdev.ext.tracking.tracker import EndInfo, EpochInfo, RunInfo
from hostdev.ext.training import cli as train
from tests.conftest import digest_of
from tests.tracking.cases import FLAGS, keep_checkpoint, read_evaluations, read_losses, read_scalars

LOG = ["--log-to", "tensorboard"]


def require_equal(run):
    """The scalars are those of loss.log, eval.log and summary.json; each step is there once."""
    scalars, events = read_scalars(run / "tensorboard")
    losses, summary = read_losses(run), json.loads((run / "summary.json").read_text())
    for number, name in enumerate(("wide_loss", "deep_loss")):
        assert scalars[f"loss/{name}"] == [
            (step, pytest.approx(pair[number], abs=1e-7)) for step, pair in enumerate(losses, 1)
        ]
    points = read_evaluations(run)
    assert scalars["test/auc"] == [(step, pytest.approx(auc, abs=1e-6)) for step, auc, _ in points]
    assert scalars["test/logloss"] == [(step, pytest.approx(loss, abs=1e-6)) for step, _, loss in points]
    for name in ("auc", "logloss", "best_auc", "samples_per_second", "peak_rss_bytes", "steps"):
        assert scalars[f"summary/{name}"][-1] == (summary["steps"], pytest.approx(summary[name], rel=1e-6))
    return scalars, events, summary


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--host-device-mix", "--cache-rows", "10%"],
        ["--host-device-mix", "--tables", "dynamic", "--admit-count", 2, "--cache-rows", 500],
        ["--host-device-mix", "--table-dtype", "bfloat16", "--table-slots", "8bit"],
        ["--host-device-mix", "--table-dir", "disk", "--table-memory", "5MiB", "--emb-dim", 16],
    ],
    ids=["device", "cache", "keys", "bfloat16", "disk"],
)
def test_what_is_read_back(run, small_data, tmp_path, more):
    """Equal to the logs; the digest, the cache's figures and those of the disk are those without --log-to."""
    (tmp_path / "disk").mkdir()
    every = ["--data", small_data, *FLAGS, "--epochs", 2, *more]
    run(train, *every, "--run-dir", "plain")
    run(train, *every, "--run-dir", "run", *LOG)
    scalars, events, summary = require_equal(tmp_path / "run")
    plain = json.loads((tmp_path / "plain" / "summary.json").read_text())
    assert summary["state_sha256"] == plain["state_sha256"]
    for tag in ("speed/samples_per_second", "pipeline/step_waits_ms", "ops/EmbeddingLookup_ms"):
        assert len(scalars[tag]) == 2 + summary["steps"] // 20 - 1 and all(value >= 0 for _, value in scalars[tag])
    if "cache" in summary:
        assert {**summary["cache"], "host_us_saved": 0} == {**plain["cache"], "host_us_saved": 0}
        for name in ("hit_rate", "bytes_to_device", "bytes_to_host"):
            [tag] = [tag for tag in scalars if tag.startswith("cache/") and tag.endswith(name)]
            assert scalars[tag][-1] == (summary["steps"], pytest.approx(summary["cache"][name], rel=1e-6))
    if "disk" in summary:
        for name, disk in summary["disk"].items():
            assert disk["used"] == plain["disk"][name]["used"]
    for name in ("wide", "deep"):
        histograms = events.Histograms(f"rows/{name}/norm")
        assert [one.step for one in histograms] == [step for step, *_ in read_evaluations(tmp_path / "run")]
    text = events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| batch_size | 250 |" in text and "| versions.hostdev |" in text


def test_norms_are_those_of_the_table(run, small_data, tmp_path):
    run(train, "--data", small_data, *FLAGS, "--epochs", 1, "--checkpoint-every", 99, "--run-dir", "run", *LOG)
    _, events = read_scalars(tmp_path / "run" / "tensorboard")
    table = hostdev.open(tmp_path / "run" / "checkpoints")["deep"]
    weights = table.lookup(np.arange(len(table)))
    [found] = events.Histograms("rows/deep/norm")
    norms = np.linalg.norm(weights.astype(np.float64), axis=1)
    value = found.histogram_value
    assert value.num == len(norms) and value.sum == pytest.approx(norms.sum(), rel=1e-5)
    assert (value.min, value.max) == pytest.approx((norms.min(), norms.max()), rel=1e-5)


@pytest.mark.parametrize("every", [5, "epoch"])
def test_a_killed_run_that_is_resumed(run, small_data, tmp_path, every):
    """Steps after the checkpoint, and the evaluation after it, are there once."""
    steps = len(range(0, 3600, 250)) if every == "epoch" else every
    flags = [
        "--data",
        small_data,
        *FLAGS,
        "--epochs",
        2,
        "--run-dir",
        "run",
        *LOG,
        "--keep-checkpoints",
        99,
        "--checkpoint-every",
        steps,
    ]
    run(train, *flags)
    whole = digest_of(tmp_path / "run")
    keep_checkpoint(tmp_path / "run", steps)
    run(train, *flags, "--resume")
    scalars, events, _ = require_equal(tmp_path / "run")
    assert [one.step for one in events.Histograms("rows/deep/norm")] == [step for step, _ in scalars["test/auc"]]
    assert digest_of(tmp_path / "run") == whole


def test_values_that_are_not_finite(run, own_data, tmp_path):
    """The AUC of rows with one label is NaN; rows of NaN make no histogram."""
    tracker = TensorBoardTracker()

    start = RunInfo(
        run_dir=tmp_path, config={"a|b": "x\ny", "none": None}, rows={}, steps=None, first_step=0, processes=1
    )
    tracker.on_start(start)
    tracker.on_epoch(EpochInfo(epoch=1, step=3, metrics={"test": {"auc": float("nan"), "rows": 2}}))
    tracker.on_end(EndInfo(status="failed", steps=3, summary={"auc": None, "logloss": float("nan"), "steps": 3}))
    tracker.close()
    scalars, events = read_scalars(tmp_path / "tensorboard")
    assert np.isnan(scalars["test/auc"][0][1]) and scalars["summary/steps"] == [(3, 3.0)]
    text = events.Tensors("configuration/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| a\\|b | x y |" in text and "none" not in text


def test_a_tracker_that_fails(in_process, small_data, tmp_path, monkeypatch):
    """One warning when it fails and one at the end; training goes on to the same digest."""
    real = TensorBoardTracker.add_scalar

    def fail(self, tag, value, step):
        if step == 4:
            raise OSError(28, "No space left on device")
        real(self, tag, value, step)

    monkeypatch.setattr(TensorBoardTracker, "add_scalar", fail)
    every = ["--data", small_data, *FLAGS, "--epochs", 1]
    code, _, error = in_process(train, *every, "--run-dir", "run", *LOG)
    assert code == 0
    lines = error.splitlines()
    assert len(lines) == 2 and all("tensorboard" in line and "No space left" in line for line in lines)
    assert "off from now on" in lines[0] and "after step 4" in lines[1]
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Scalars("loss/wide_loss")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("value", "words"),
    [("tensorbord", "mlflow,tensorboard"), ("tensorboard,tensorboard", "twice"), ("", "tensorboard")],
)
def test_a_wrong_name(in_process, small_data, tmp_path, value, words):
    code, _, error = in_process(train, "--data", small_data, *FLAGS, "--run-dir", "run", f"--log-to={value}")
    assert code == 2 and len(error.splitlines()) == 1 and words in error and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["tensorboard", "mlflow"])
def test_a_package_that_is_missing(in_process, small_data, tmp_path, monkeypatch, name):
    module = {"tensorboard": "tensorboard", "mlflow": "mlflow_tracker"}[name]
    monkeypatch.setattr(f"hostdev.ext.tracking.{module}.find_spec", lambda wanted: None if wanted == name else object())
    code, _, error = in_process(train, "--data", small_data, *FLAGS, "--run-dir", "run", "--log-to", name)
    assert code == 2 and len(error.splitlines()) == 1 and "pip install" in error and name in error
    assert not (tmp_path / "run").exists()
