"""--log-to mlflow, read back by MLflow's own client from a store of files; servers that are gone or slow."""

import json
import socket
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from mlflow.tracking import MlflowClient

from hostdev.core.errors import UserError
from hostdev.core.run_files import MLFLOW
from hostdev.ext.tracking import MLflowWriter
from hostdev.ext.tracking import mlflow_tracker as sending
from hostdev.ext.training import cli as train
from tests.conftest import digest_of
from tests.tracking.cases import FLAGS, keep_checkpoint, read_evaluations, read_losses

LOG = ["--log-to", "mlflow"]


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A client of an empty store of files, which this version of MLflow allows on request only."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # set for good by the tracker
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return MlflowClient()


def read(client, name="hostdev"):
    """Return the only run of an experiment, and its metrics: values by step."""
    [found] = client.search_runs([client.get_experiment_by_name(name).experiment_id])

    def history(tag):
        return [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, tag)]

    return found, history


def require_equal(client, run):
    found, history = read(client)
    losses, summary = read_losses(run), json.loads((run / "summary.json").read_text())
    for number, name in enumerate(("wide_loss", "deep_loss")):
        wanted = [(step, pytest.approx(pair[number], abs=1e-7)) for step, pair in enumerate(losses, 1)]
        assert history(f"loss/{name}") == wanted
    points = read_evaluations(run)
    assert history("test/auc") == [(step, pytest.approx(auc, abs=1e-6)) for step, auc, _ in points]
    assert history("rows/deep/norm/p50")[-1][0] == summary["steps"]
    for name in ("auc", "logloss", "best_auc", "samples_per_second", "peak_rss_bytes"):
        assert history(f"summary/{name}")[-1] == (summary["steps"], summary[name])
    return found, summary


def test_what_is_read_back(run, small_data, tmp_path, client):
    every = ["--data", small_data, *FLAGS, "--epochs", 2, "--host-device-mix", "--cache-rows", "10%"]
    run(train, *every, "--run-dir", "plain")
    run(train, *every, "--run-dir", "run", *LOG, "--report")
    found, summary = require_equal(client, tmp_path / "run")
    assert summary["state_sha256"] == digest_of(tmp_path / "plain")
    assert (found.info.run_name, found.info.status) == ("run", "FINISHED")
    params = found.data.params
    assert params["batch_size"] == "250" and params["log_to"] == "mlflow" and "versions.torch" in params
    for name in ("config.json", "summary.json", "curve.png", "report.html"):
        path = client.download_artifacts(found.info.run_id, name, str(tmp_path))
        assert (tmp_path / "run" / name).read_bytes() == Path(path).read_bytes()


def test_a_killed_run_that_is_resumed(run, small_data, tmp_path, client, monkeypatch):
    """The same run of MLflow goes on, and has each step once."""
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    every = [
        "--data",
        small_data,
        *FLAGS,
        "--epochs",
        1,
        "--run-dir",
        "run",
        "--checkpoint-every",
        5,
        "--keep-checkpoints",
        99,
        *LOG,
    ]
    run(train, *every)
    keep_checkpoint(tmp_path / "run", 5)
    before = json.loads((tmp_path / "run" / MLFLOW).read_text())["run_id"]
    run(train, *every, "--resume")
    found, history = read(client, "mine")
    steps = len(read_losses(tmp_path / "run"))
    assert found.info.run_id == before and found.info.status == "FINISHED"
    assert [step for step, _ in history("loss/wide_loss")] == list(range(1, steps + 1))
    assert [step for step, _ in history("test/auc")] == [steps]


def test_a_server_that_closes_connections(in_process, small_data, tmp_path, client, monkeypatch):
    """Training goes on, with a warning then and one at the end, in which no password is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def refuse():
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        thread = threading.Thread(target=refuse)
        thread.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://me:hunter2@127.0.0.1:{port}")
        try:
            every = ["--data", small_data, *FLAGS, "--epochs", 2, "--run-dir", "run"]
            code, out, error = in_process(train, *every, *LOG, "--callback", "tests.tracking.cases:Sleeper")
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()
    assert code == 0 and digest_of(tmp_path / "run")
    lines = error.splitlines()
    assert len(lines) == 2 and all("--log-to mlflow" in line for line in lines), error
    assert "off from now on" in lines[0] and "nothing after step" in lines[1]
    assert "hunter2" not in out + error


def test_a_store_that_is_not_there(in_process, small_data, tmp_path, client, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    module = "hostdev.ext.tracking.mlflow_tracker"
    monkeypatch.setattr(f"{module}.find_spec", lambda name: None if name == "sqlalchemy" else name)
    code, _, error = in_process(train, "--data", small_data, *FLAGS, "--run-dir", "run", *LOG)
    assert code == 2 and len(error.splitlines()) == 1 and "MLFLOW_TRACKING_URI" in error
    assert not (tmp_path / "run").exists()


def test_a_run_that_fails(in_process, small_data, tmp_path, client):
    every = ["--data", small_data, *FLAGS, "--epochs", 1, "--run-dir", "run"]
    code, _, _ = in_process(train, *every, *LOG, "--callback", "tests.tracking.cases:RaisesInStep")
    assert code == 2 and read(client)[0].info.status == "FAILED"


def test_a_writer_of_ones_own(client):
    """Distributions become quantiles; names and values that MLflow or a mean does not take."""
    run_id = client.create_run(client.create_experiment("x")).info.run_id
    with MLflowWriter(run_id) as writer:
        writer.add_scalar("a#b/c", float("nan"), 1)
        for step in range(2500):
            writer.add_scalar("many", step, step)
        writer.add_histogram("h", np.arange(101, dtype=np.float32), 7)
        writer.flush()
        assert len(client.get_metric_history(run_id, "many")) == 2500
    assert np.isnan(client.get_metric_history(run_id, "a_b/c")[0].value)
    found = {name: client.get_metric_history(run_id, f"h/{name}")[0].value for name in ("mean", "p1", "p50", "p99")}
    assert found == {"mean": 50, "p1": 1, "p50": 50, "p99": 99}
    writer.close()
    with pytest.raises(UserError, match="no run of MLflow is active"):
        MLflowWriter()
    with pytest.raises(UserError, match="MLflow"), MLflowWriter("0" * 32) as writer:
        writer.add_scalar("x", 1.0, 1)


def test_a_server_that_is_slow(monkeypatch):
    """The loop does not wait: values beyond the bound are dropped, and counted."""
    monkeypatch.setattr(sending, "MOST_WAITING", 2000)
    go = threading.Event()
    sent = []

    def begin():
        go.wait()
        return sent.extend

    sender = sending.Sender(begin)
    for step in range(2500):
        sender.add("x", step, step)
    assert sender.dropped == 500 and not sender.close(None, 0.01)
    go.set()
    until = time.monotonic() + 30
    while len(sent) < 2000 and time.monotonic() < until:
        time.sleep(0.01)
    assert [one.step for one in sent] == list(range(2000))
    sender.close(None, 30)


@pytest.mark.parametrize(
    "text", ["http://me:p%40ss@host/x", "cannot reach //me@host", "wrong p@ss", "token s3cret", "key p%40ss"]
)
def test_no_secret_is_printed(monkeypatch, text):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:p%40ss@host")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "s3cret")
    found = sending.describe_error(ValueError(text))
    assert not any(secret in found for secret in ("p%40ss", "p@ss", "s3cret", "me@"))


def test_names_that_mlflow_refuses_stay_distinct(client):
    """Also labels with odd characters; MLflow takes the names that it allows as they are."""
    usual = ["test/a b-c.d:e/auc", "loss/training", "test/käufe/auc", "x" * 250]
    names = sending.Names()
    assert list(map(names.clean, usual)) == usual
    labels = ["buy?", "buy!", "buy_", "", ".", "..", "...", "..a", "a\n", "a\t", "a_", "é\udcff", "é\udcfe"]
    odd = [f"test/{label}/auc" for label in labels]
    odd += ["..", "...", "..b/a", "/b/a", "b//a", "c/", "x" * 251, "x" * 250 + "y", "x" * 300, "x" * 299 + "y"]
    cleaned = list(map(names.clean, odd))
    assert len({*cleaned, *usual}) == len(odd) + len(usual)
    assert cleaned == list(map(names.clean, odd))
    assert cleaned[0] == "test/buy_/auc"
    assert max(map(len, cleaned)) <= 250
    run_id = client.create_run("0").info.run_id
    for step, name in enumerate(cleaned):
        client.log_metric(run_id, name, step)
    assert sorted(client.get_run(run_id).data.metrics.values()) == list(range(len(odd)))


def test_labels_whose_names_become_equal(client):
    run_id = client.create_run(client.create_experiment("x")).info.run_id
    with MLflowWriter(run_id) as writer:
        for step in range(3):
            writer.add_scalar("test/buy?/auc", 0.25, step)
            writer.add_scalar("test/buy!/auc", 0.75, step)
    metrics = client.get_run(run_id).data.metrics
    assert sorted(metrics.values()) == [0.25, 0.75]
    for name, value in metrics.items():
        assert [one.value for one in client.get_metric_history(run_id, name)] == [value] * 3
