"""What a training writes for its report: counts of scores, memory by part, the data set, and the page itself."""

import json

import pytest

from hostdev.checkpoint.folder import names_in, remove
from hostdev.data import manifest
from hostdev.ext.report import cli as report
from hostdev.ext.training import cli as train
from tests.conftest import digest_of

OPTIONS = ["--host-device-mix", "--device", "cpu", "--model", "deepfm", "--emb-dim", 4, "--batch-size", 500]


def rows(line):
    return sum(negatives + positives for _, negatives, positives, _ in line["labels"]["label"])


def lines(run):
    return [json.loads(line) for line in (run / "scores.jsonl").read_text().splitlines()]


def test_train_report(run, small_data, tmp_path):
    out = run(train, "--data", small_data, *OPTIONS, "--epochs", 2, "--run-dir", "run", "--report")
    assert "curve.png, report.html\n" in out
    page = (tmp_path / "run/report.html").read_text()
    assert '<span class="status">finished</span>' in page and "cannot be read" not in page
    found = manifest.read(small_data)
    for line, epoch in zip(lines(tmp_path / "run"), (1, 2), strict=True):
        assert (line["epoch"], line["split"], rows(line)) == (epoch, "test", found.rows("test"))
    positives = sum(each[2] for each in line["labels"]["label"])
    assert positives == pytest.approx(found.statistics["label_mean"]["test"] * found.rows("test"))
    summary, config = (json.loads((tmp_path / "run" / name).read_text()) for name in ("summary.json", "config.json"))
    memory = summary["memory"]
    assert (
        memory["host"]["tables"] > 0 and memory["device"]["dense optimizer state"] > memory["device"]["dense weights"]
    )
    assert config["data_set"]["rows"] == {"train": found.rows("train"), "test": found.rows("test")}
    run(report, "run", "--out", "again.html")
    run(train, "--data", small_data, *OPTIONS, "--epochs", 2, "--run-dir", "plain")
    assert digest_of(tmp_path / "plain") == summary["state_sha256"]


def test_a_resumed_run_has_each_evaluation_once(run, small_data, tmp_path):
    options = ["--data", small_data, *OPTIONS, "--epochs", 3, "--checkpoint-every", 5, "--keep-checkpoints", 9]
    run(train, *options, "--run-dir", "run")
    whole = (tmp_path / "run/scores.jsonl").read_text()
    assert len(whole.splitlines()) == 3
    checkpoints = tmp_path / "run/checkpoints"
    for name in names_in(checkpoints)[2:]:
        remove(checkpoints / name)
    run(train, *options, "--run-dir", "run", "--resume")
    assert (tmp_path / "run/scores.jsonl").read_text() == whole


def test_scores_of_two_processes(command, small_data, run, tmp_path):
    """Rank 0 counts the samples of all ranks, with the numbers of one process."""
    options = ["--data", small_data, *OPTIONS, "--micro-batches", 2, "--epochs", 1]
    run(train, *options, "--run-dir", "alone")
    done = command("hostdev.train", *options, "--spawn", 2, "--run-dir", "two", "--report")
    assert done.returncode == 0, done.stderr
    assert lines(tmp_path / "two") == lines(tmp_path / "alone")
    assert (tmp_path / "two/report.html").exists()
    assert not list((tmp_path / "two/rank1").glob("*.html")) and not (tmp_path / "two/rank1/scores.jsonl").exists()
    page = (tmp_path / "two/report.html").read_text()
    assert "2 processes on one host" in page and "Processes" in page


def test_a_report_that_fails_leaves_the_run_well(run, small_data, tmp_path, monkeypatch):
    def fail(*arguments):
        raise ZeroDivisionError("no ink")

    monkeypatch.setattr("hostdev.ext.report.command.make", fail)
    out = run(train, "--data", small_data, *OPTIONS, "--max-steps", 2, "--run-dir", "run", "--report")
    assert "no report.html: ZeroDivisionError: no ink" in out and not (tmp_path / "run/report.html").exists()


def test_a_missing_package_ends_the_run_before_it_begins(in_process, small_data, tmp_path, monkeypatch):
    monkeypatch.setattr("hostdev.ext.report.cli.find_spec", lambda name: None)
    code, _, error = in_process(train, "--data", small_data, *OPTIONS, "--run-dir", "run", "--report")
    assert code == 2 and "--report needs" in error and not (tmp_path / "run").exists()
