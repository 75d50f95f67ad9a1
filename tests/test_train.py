"""The training command: its files, what it prints, what wrong input gets, how it ends."""

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from hostdev.core import cli
from hostdev.data import manifest
from hostdev.data.preprocess import synthetic
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.device import backend
from hostdev.ext.training import cli as train
from hostdev.ext.training.config import CommandConfig
from hostdev.train import room
from tests import forks
from tests.conftest import environment
from tests.test_shards import rewrite

OPS_LINE = re.compile(
    r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO (cpu|device) kernel: Default/(\w+/)?\w+-op\d+ costs \d+ us\.$"
)
EVAL_LINE = re.compile(
    r"^epoch: \d+ step: \d+, auc is 0\.\d{6}, logloss is 0\.\d{6}, rows: \d+, "
    r"training auc is 0\.\d{6}, training logloss is 0\.\d{6}, training rows: \d+$"
)
LOSS_LINE = re.compile(r"^epoch: (\d+) step: (\d+), wide_loss is \d\.\d{7}, deep_loss is \d\.\d{7}$")


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """Run the command in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        return cli.run(train.PROG, train.main, list(map(str, arguments)))

    return run


def small(data, *more, device=None):
    name = "cpu" if device is None else device.type
    return ["--data", data, "--device", name, "--batch-size", 500, "--emb-dim", 4, "--run-dir", "run", *more]


def test_the_list_of_flags():
    """The flags are frozen: a new option is a key of --config files only (`is_flag=False`)."""
    flags = {option for action in train.parser()._actions for option in action.option_strings}
    assert flags - {"-h", "--help", "--debug", "--local-rank", "--local_rank"} == {
        "--config",
        "--data",
        "--host-device-mix",
        "--device",
        "--epochs",
        "--batch-size",
        "--emb-dim",
        "--initial-vectors",
        "--frozen-vectors",
        "--l2",
        "--precision",
        "--tf32",
        "--host-threads",
        "--pipeline-depth",
        "--staleness",
        "--trace",
        "--cache-rows",
        "--cache-policy",
        "--cache-window",
        "--model",
        "--table-optimizer",
        "--table-lr",
        "--table-weight-decay",
        "--lr",
        "--table-dtype",
        "--table-slots",
        "--early-stop",
        "--seed",
        "--max-steps",
        "--run-dir",
        "--checkpoint-every",
        "--checkpoint-minutes",
        "--keep-checkpoints",
        "--checkpoint-dir",
        "--report",
        "--resume",
        "--micro-batches",
        "--gradients",
        "--torch-threads",
        "--batch-per-rank",
        "--spawn",
        "--dist-backend",
        *("--dist-url", "--dist-timeout", "--dense-exchange", "--exchange-levels"),
        *("--parallel", "--mesh", "--schedule", "--stage-cut", "--plan"),
        "--ops-log",
        "--shuffle-window",
        "--start-from",
        "--order",
        "--tables",
        "--capacity",
        "--admit-count",
        "--unknown-ids",
        "--evict-unused",
        *(f"--table-{name}" for name in ("dir", "memory", "window")),
        *("--log-to", "--callback"),
        "--follow",
        *(f"--follow-{name}" for name in ("until", "mark", "poll", "quiet", "grown", "window")),
    }


def test_flags_and_settings_are_inverse():
    parser = cli.parser("x", "")
    CommandConfig.add_flags(parser)
    flags = ["--host-device-mix", "--epochs", "3", "--l2", "batch", "--run-dir", "a b"]
    settings = CommandConfig.from_flags(parser.parse_args(flags))
    assert settings.to_flags() == flags
    for dtypes in (["--table-dtype", "bfloat16"], ["--table-slots", "bfloat16"], ["--table-slots", "8bit"]):
        assert CommandConfig.from_flags(parser.parse_args(dtypes)).to_flags() == dtypes
    for resume in (["--resume"], ["--resume", "x"]):
        flags = ["--checkpoint-every", "2", "--checkpoint-dir", "c", *resume]
        assert CommandConfig.from_flags(parser.parse_args(flags)).to_flags() == flags
    assert CommandConfig().resolved().epochs == 2
    reference = CommandConfig(data="x").resolved()
    assert (reference.epochs, reference.batch_size, reference.emb_dim, reference.l2) == (15, 16000, None, "none")


def test_the_run_directory(device, trained, small_data, tmp_path, capsys):
    assert trained(*small(small_data, "--host-device-mix", "--epochs", 2, device=device)) == 0
    run = tmp_path / "run"
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json",
        "curve.png",
        "eval.log",
        "loss.log",
        "ops.log",
        "scores.jsonl",
        "summary.json",
    ]
    steps = -(-manifest.read(small_data).rows("train") // 500)
    losses = (run / "loss.log").read_text().splitlines()
    assert [LOSS_LINE.match(line).groups() for line in losses] == [
        (str(epoch), str(step)) for epoch in (1, 2) for step in range(1, steps + 1)
    ]
    evaluations = (run / "eval.log").read_text().splitlines()
    assert len(evaluations) == 2
    assert all(EVAL_LINE.match(line) for line in evaluations)
    operations = (run / "ops.log").read_text().splitlines()
    assert all(OPS_LINE.match(line) for line in operations)
    for name in ("deep/EmbeddingLookup", "wide/EmbeddingLookup", "wide/FusedSparseFtrl", "deep/FusedSparseLazyAdam"):
        calls = sum(f"cpu kernel: Default/{name}-op" in line for line in operations)
        evaluated = (
            2 * 4 if "Lookup" in name else 0
        )  # an epoch: a batch of test rows, one of each shard's training rows
        assert calls == 2 * steps + evaluated, name
    assert any("device kernel: Default/network/DenseBackward-op" in line for line in operations)

    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 2 * steps
    assert summary["epochs"] == 2
    assert summary["device"].split(" ")[0].split(":")[0] == device.type
    assert f"auc is {summary['auc']:.6f}" in evaluations[1]
    assert (
        f"training auc is {summary['training_auc']:.6f}, training logloss is {summary['training_logloss']:.6f}"
        in (evaluations[1])
    )
    assert summary["samples_per_second"] > 0
    assert summary["peak_rss_bytes"] > 1 << 20
    for name in ("EmbeddingLookup", "FusedSparseFtrl", "FusedSparseLazyAdam"):
        assert set(summary["ops"][name]) >= {"count", "total_us", "mean_us", "p50_us", "p99_us", "bytes"}
        assert summary["ops"][name]["bytes"] > 0
    settings = json.loads((run / "config.json").read_text())
    assert settings["epochs"] == 2
    assert settings["host_device_mix"] is True
    assert settings["tf32"] is False
    assert settings["versions"]["torch"]
    out = capsys.readouterr().out
    assert summary["state_sha256"] in out
    assert f"\nAUC {summary['auc']:.4f}" in out
    assert f"epoch 2: AUC {summary['auc']:.4f} (training {summary['training_auc']:.4f}), log loss " in out
    assert (
        "files          run/: loss.log, eval.log, scores.jsonl, ops.log, config.json, summary.json, curve.png\n" in out
    )
    assert "FusedSparseLazyAdam" in out


@pytest.mark.parametrize("option", ["table_dtype", "table_slots"])
@pytest.mark.parametrize("word", ["bfloat16", "bf16"])
def test_both_words_for_the_dtypes_of_tables(option, word):
    """The second one is accepted for one release; files have it."""
    parser = argparse.ArgumentParser()
    CommandConfig.add_flags(parser)
    flag = f"--{option.replace('_', '-')}"
    settings = CommandConfig.from_flags(parser.parse_args([flag, word]))
    assert settings == CommandConfig(**{option: word})
    assert settings.as_json()[option] == "bf16"
    assert settings.to_flags() == [flag, "bfloat16"]
    known = "fp32,bfloat16" if option == "table_dtype" else "fp32,bfloat16,8bit"
    assert f"{flag} {{{known}}}" in parser.format_help()


def test_a_run_with_a_cache(device, trained, small_data, tmp_path, capsys):
    options = small(small_data, "--host-device-mix", "--cache-rows", "10%", "--cache-policy", "static", device=device)
    assert trained(*options, "--epochs", 2) == 0
    run = tmp_path / "run"
    summary = json.loads((run / "summary.json").read_text())
    cache = summary["cache"]
    rows = manifest.read(small_data).vocabulary_size
    assert cache["rows"] == -(-rows // 10)
    assert (cache["policy"], cache["window"], cache["batches"]) == ("static", 0, summary["steps"])
    assert 0 < cache["hit_rate"] < 1
    assert cache["bytes_to_device"] == 4 * (cache["bypassed"] * (4 + 1) + cache["admitted"] * (3 * 4 + 3))
    assert json.loads((run / "config.json").read_text())["cache_window"] is None
    operations = (run / "ops.log").read_text()
    for name in (
        "device kernel: Default/deep/CacheLookup",
        "device kernel: Default/wide/CacheUpdate",
        "device kernel: Default/deep/CacheExchange",
        "cpu kernel: Default/cache/CachePlan",
    ):
        assert f"{name}-op" in operations
    out = capsys.readouterr().out
    assert f"cache    {cache['rows']:,} rows of each table, " in out
    assert f"{cache['hit_rate']:.2%} of lookups hit; a step admits" in out
    saved = cache["host_us_saved"] / summary["steps"] / 1e3
    says = (
        f"saves the host {saved:.2f} ms per step"
        if saved >= 0
        else f"costs the host {-saved:.2f} ms per step more than"
    )
    assert f"; it {says}" in out


def test_without_the_mix_the_ops_are_the_devices(device, trained, small_data, tmp_path):
    assert trained(*small(small_data, "--max-steps", 1, device=device)) == 0
    operations = (tmp_path / "run" / "ops.log").read_text()
    for name in ("deep/EmbeddingLookup", "wide/FusedSparseFtrl", "deep/FusedSparseLazyAdam"):
        assert f"device kernel: Default/{name}-op" in operations


def test_max_steps_ends_within_an_epoch(device, trained, small_data, tmp_path):
    assert trained(*small(small_data, "--host-device-mix", "--epochs", 3, "--max-steps", 3, device=device)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["steps"] == 3
    assert summary["epochs"] == 0
    assert summary["auc"] is not None


def error_of(capsys):
    """The one line of standard error."""
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert error.startswith("hostdev.train: error: ")
    return error


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bogus"], "unrecognized arguments: --bogus (see hostdev.train --help)"),
        (["--host-device"], "unrecognized arguments: --host-device"),
        (["--l2", "all"], "invalid choice: 'all'"),
        (["--epochs", "0"], "--epochs must be at least 1, not 0"),
        (["--epochs", "x"], "argument --epochs: invalid int value: 'x'"),
        (["--batch-size", "-5"], "--batch-size must be at least 1, not -5"),
        (["--seed", "-1"], "--seed must be at least 0, not -1"),
        (["--data", "nowhere"], "nowhere is not a data set"),
        (["--batch-size", "4000"], "--batch-size 4000 is larger than the"),
        (["--device", "abacus"], "--device abacus: unknown kind of device"),
        (["--emb-dim", "2000000000"], "out of memory; use a smaller --batch-size or --emb-dim"),
        (["--shuffle-window", "0"], "--shuffle-window must be at least 1, not 0"),
        (["--early-stop", "0"], "--early-stop must be at least 1, not 0"),
        (
            ["--early-stop", "1", "--epochs", "1"],
            "--early-stop 1 has no effect with 1 epoch: training can stop after epoch 2 at",
        ),
        (["--early-stop", "14"], "--early-stop 14 has no effect with 15 epochs: training can stop after epoch 15 at"),
        (
            ["--run-dir", "/dev/null/run"],
            "--run-dir /dev/null/run: Not a directory; choose a writable folder",
        ),
        (["--trace", "/dev/null/t"], "--trace /dev/null/t: Not a directory; choose another file"),
        (["--trace", "no/t"], "--trace no/t: No such file or directory; choose another file"),
        (["--cache-rows", "some"], "a cache's size must be a number of rows or a share from 0% to 100%, not 'some'"),
        (["--cache-rows", "5", "--cache-policy", "mru"], "invalid choice: 'mru'"),
        (["--cache-policy", "lru"], "--cache-policy lru has no effect without --cache-rows"),
        (
            ["--cache-rows", "5", "--cache-policy", "lru", "--cache-window", "3"],
            "--cache-window has no effect without --cache-policy lookahead",
        ),
        (["--cache-rows", "5", "--cache-window", "33"], "--cache-window must be in 0..32, not 33"),
        (["--tf32"], "--tf32 has no effect on cpu; leave out --tf32"),
        (["--tf32", "--precision", "bf16"], "--tf32 cannot be combined with --precision bf16"),
        (["--cache-rows", "5", "--l2", "table"], "--cache-rows 5 cannot be combined with --l2 table: "),
        (["--cache-rows", "5", "--staleness", "1"], "--staleness cannot be combined with --cache-rows"),
    ],
)
def test_a_wrong_option_gets_one_line(trained, small_data, tmp_path, capsys, options, message):
    assert trained(*small(small_data, "--host-device-mix", *options)) == 2
    assert message in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_is_not_there(trained, small_data, tmp_path, capsys):
    if backend.select("auto").type == "cuda":
        pytest.skip("there is one")
    assert trained(*small(small_data, "--device", "cuda")) == 2
    assert "--device cuda: torch" in error_of(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mix", [True, False])
def test_a_table_that_does_not_fit(device, trained, small_data, tmp_path, capsys, monkeypatch, mix):
    rows = manifest.read(small_data).vocabulary_size
    monkeypatch.setattr(room, "available_bytes", lambda: 10**6)
    monkeypatch.setattr(room, "free_bytes", lambda device: 10**6)
    assert trained(*small(small_data, *["--host-device-mix"][:mix], "--emb-dim", 1000, device=device)) == 2
    needed = rows * 1000 * 3 * 4
    assert f"needs {rows} rows x 1000 x (1 + 2 slots) x 4 = {needed} bytes" in (error := error_of(capsys))
    assert "1000000 bytes" in error
    assert list(tmp_path.iterdir()) == []


def test_an_option_without_effect(trained, small_data, capsys, monkeypatch):
    monkeypatch.setattr(backend, "is_accelerator", lambda device: True)
    assert trained(*small(small_data, "--host-threads", 2)) == 2
    assert "--host-threads has no effect on an accelerator without --host-device-mix" in error_of(capsys)
    assert trained(*small(small_data, "--cache-rows", "5%")) == 2
    assert "--cache-rows 5% has no effect without --host-device-mix" in error_of(capsys)


def test_a_cache_that_needs_counts_of_hashed_ids(trained, tmp_path, capsys):
    """There is no vocabulary that has them, so they are counted."""
    build(Synthetic(2000, 3), tmp_path / "hashed", Options(hash_buckets=500))
    options = ["--host-device-mix", "--cache-rows", "5%", "--cache-policy", "static"]
    assert trained(*small(tmp_path / "hashed", *options)) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["cache"]["hit_rate"] > 0.3


def test_a_place_for_the_runs_files(trained, small_data, tmp_path, capsys, monkeypatch):
    """It is named by its option."""
    (tmp_path / "runs").write_text("mine")
    options = ["--data", small_data, "--device", "cpu", "--batch-size", 500, "--emb-dim", 4, "--host-device-mix"]
    assert trained(*options) == 2
    assert error_of(capsys).endswith(
        f"cannot create a run in {tmp_path / 'runs'}: File exists; give a writable --run-dir\n"
    )

    def fail(*arguments, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", fail)
    assert trained(*options, "--run-dir", "run") == 2
    assert error_of(capsys).endswith("error: --run-dir run: Permission denied; choose a writable folder\n")
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_a_damaged_shard(trained, own_data, tmp_path, capsys):
    path = own_data / "train/part-00001.arrow"
    path.write_bytes(path.read_bytes()[:-10])
    assert trained(*small(own_data, "--batch-size", 50, "--host-device-mix")) == 2
    assert "part-00001.arrow has a wrong checksum" in error_of(capsys)


def test_an_id_beyond_the_table(trained, own_data, capsys):
    def change(table):
        cat = np.array(table["cat"].to_pylist(), np.int32)
        cat[3, 25] = 10**6
        return table.set_column(2, "cat", pa.FixedSizeListArray.from_arrays(pa.array(cat.ravel()), 26))

    rewrite(own_data, change)
    assert trained(*small(own_data, "--batch-size", 50, "--host-device-mix")) == 2
    assert "part-00001.arrow, row 3, field C26: id 1000000 is not one of" in error_of(capsys)


def test_a_run_directory_is_used_once(trained, small_data, tmp_path, capsys):
    options = small(small_data, "--host-device-mix", "--max-steps", 1)
    assert trained(*options) == 0
    before = (tmp_path / "run" / "summary.json").read_text()
    capsys.readouterr()
    assert trained(*options) == 2
    assert "run already holds a run (loss.log); choose another --run-dir" in error_of(capsys)
    assert (tmp_path / "run" / "summary.json").read_text() == before


def test_a_failure_before_the_first_step_leaves_no_run_directory(trained, own_data, tmp_path, capsys):
    for shard in manifest.read(own_data).train:
        (own_data / shard.file).write_bytes(b"")
    assert trained(*small(own_data, "--batch-size", 50)) == 2
    assert "has a wrong checksum" in error_of(capsys)
    assert not (tmp_path / "run").exists()


def test_nothing_but_the_flag(command, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    done = command("hostdev.train", "--host-device-mix", "--max-steps", 2, cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    first = done.stdout.splitlines()[0]
    assert re.match(
        rf"no --data: a synthetic data set of {synthetic.LOOKALIKE_ROWS:,} samples, made in .*cache/hostdev/lookalike-",
        first,
    )
    assert "batch size 1,000, 2 epochs" in done.stdout
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]
    again = command("hostdev.train", "--host-device-mix", "--max-steps", 2, cwd=elsewhere)
    assert ", from " in again.stdout.splitlines()[0]
    assert len(list((elsewhere / "runs").iterdir())) == 2


@pytest.mark.parametrize(
    ("number", "batch_size"), [pytest.param(signal.SIGINT, 15_000, marks=pytest.mark.slow), (signal.SIGTERM, 100)]
)
def test_a_signal_ends_the_run_with_complete_logs(tmp_path, command, number, batch_size):
    """Between short steps, and in the middle of one that takes seconds."""
    command("hostdev.data.preprocess", "synthetic", "--rows", 18_000, "--out", "data")
    options = [
        "--data",
        "data",
        "--host-device-mix",
        "--epochs",
        "1000",
        "--batch-size",
        str(batch_size),
        "--run-dir",
        "run",
        *(["--cache-rows", "10%"] if batch_size == 100 else []),
    ]
    process = forks.Popen(
        [sys.executable, "-m", "hostdev.train", *options],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = tmp_path / "run" / "loss.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= 1):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert "Traceback" not in error
    assert "interrupted" in error
    lines = log.read_text()
    assert lines.endswith("\n")
    assert all(LOSS_LINE.match(line) for line in lines.splitlines())
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert summary["steps"] == len(lines.splitlines())
    assert summary["state_sha256"] is None
    operations = (tmp_path / "run" / "ops.log").read_text()
    assert all(OPS_LINE.match(line) for line in operations.splitlines())
    assert operations.count("FusedSparseLazyAdam") >= summary["steps"]


def test_nobody_reads_what_is_printed(small_data, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "hostdev.train", *map(str, small(small_data, "--max-steps", 1))],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == b""
    assert process.wait(120) == 141


def test_debug_shows_the_traceback(command):
    done = command("hostdev.train", "--data", "nowhere", "--debug")
    assert done.returncode == 2
    assert "Traceback" in done.stderr
