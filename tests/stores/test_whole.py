"""Everything in a store, every tenth request of which fails or is slow: from raw text to predictions and exports."""

import filecmp
import json
import signal
import subprocess
import sys
import time

import fsspec
import pyarrow.parquet as pq
import pytest

from tests import forks
from tests.conftest import digest_of, environment

TRAIN = ["hostdev.train", "--host-device-mix", "--device", "cpu", "--emb-dim", 8, "--batch-size", 200]
TRAIN += ["--epochs", 2, "--micro-batches", 2]
SAVING = ["--checkpoint-every", 7, "--keep-checkpoints", 2]


@pytest.fixture
def call(tmp_path, server):
    """Run a module in a process of its own, or begin to; return its output."""

    def run(*arguments, begin=False, code=0, **more):
        env = {**environment(tmp_path), **server.environment, **more}
        command = [sys.executable, "-m", *map(str, arguments)]
        begun = forks.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if begin:
            return begun
        out, error = begun.communicate(timeout=280)
        assert begun.returncode == code, error
        return error if code else out

    return run


@pytest.fixture
def files(server, monkeypatch):
    """The store, from this process."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def same_files(one, other):
    compared = filecmp.dircmp(one, other)
    names = [name for name in compared.common_files if name != "manifest.json"]
    assert not (compared.left_only or compared.right_only)
    assert filecmp.cmpfiles(one, other, names, shallow=False)[0] == names
    for name in compared.common_dirs:
        same_files(one / name, other / name)


def test_from_text_to_predictions(call, server, files, tmp_path):
    text = tmp_path / "text/train.txt"
    text.parent.mkdir()
    call("hostdev.data.preprocess", "synthetic", "--rows", 3000, "--tsv", text)
    server.put(text.parent, "s3://short/text")
    how = ["--threshold", 1, "--rows-per-shard", 700]
    call("hostdev.data.preprocess", "criteo", text, *how, "--out", "data")
    call("hostdev.data.preprocess", "criteo", "s3://short/text/train.txt", *how, "--out", "s3://short/data")
    files.get("short/data", str(tmp_path / "fetched"), recursive=True)
    same_files(tmp_path / "data", tmp_path / "fetched")
    call(*TRAIN, "--data", "data", "--run-dir", "local", *SAVING)
    there = ["--data", "s3://short/data", "--checkpoint-dir", "s3://short/saved", *SAVING]
    call(*TRAIN, *there, "--run-dir", "two", "--spawn", 2)
    assert digest_of(tmp_path / "two") == digest_of(tmp_path / "local")
    third = {"HOSTDEV_STORE_CACHE": str(tmp_path / "third")}
    predict = ["hostdev.predict", "--data", "s3://short/text/train.txt", "--out", "s3://short/p.parquet"]
    call(*predict, "--checkpoint", "s3://short/saved", **third)
    call("hostdev.predict", "--data", text, "--out", "p.parquet", "--checkpoint", "local")
    with files.open("short/p.parquet", "rb") as file:
        assert pq.read_table(file).equals(pq.read_table(tmp_path / "p.parquet"))


@pytest.mark.slow
def test_every_command(call, server, files, tmp_path):
    text = tmp_path / "text/train.txt"
    text.parent.mkdir()
    call("hostdev.data.preprocess", "synthetic", "--rows", 3000, "--tsv", text)
    server.put(text.parent, "s3://whole/text")
    how = ["--threshold", 1, "--rows-per-shard", 700]
    call("hostdev.data.preprocess", "criteo", text, *how, "--out", "data")
    out = call("hostdev.data.preprocess", "criteo", "s3://whole/text/train.txt", *how, "--out", "s3://whole/data")
    assert out.startswith("s3://whole/data: 2,"), out
    files.get("whole/data", str(tmp_path / "fetched"), recursive=True)
    same_files(tmp_path / "data", tmp_path / "fetched")
    again = ["hostdev.data.preprocess", "criteo", text, *how, "--out", "s3://whole/data"]
    assert "--out s3://whole/data exists already" in call(*again, code=2)
    assert not list(tmp_path.glob("cache/hostdev/stores/results/s3/whole/*"))

    call(*TRAIN, "--data", "data", "--run-dir", "local", *SAVING)
    there = ["--data", "s3://whole/data", "--checkpoint-dir", "s3://whole/saved", *SAVING]
    out = call(*TRAIN, *there, "--run-dir", "one", "--max-steps", 10)
    assert "every 7 steps to s3://whole/saved" in out
    elsewhere = {"HOSTDEV_STORE_CACHE": str(tmp_path / "elsewhere")}
    out = call(*TRAIN, *there, "--run-dir", "two", "--spawn", 2, "--resume", "s3://whole/saved", **elsewhere)
    assert "resume   s3://whole/saved/step-0000000010, after step 10" in out
    assert digest_of(tmp_path / "two") == digest_of(tmp_path / "local")
    assert json.loads((tmp_path / "two/config.json").read_text())["checkpoint_dir"] == "s3://whole/saved"
    assert json.loads((tmp_path / "two/summary.json").read_text())["checkpoints"]["path"] == "s3://whole/saved"

    third = {"HOSTDEV_STORE_CACHE": str(tmp_path / "third")}
    shown = call("hostdev.checkpoint", "verify", "s3://whole/saved", **third)
    assert digest_of(tmp_path / "local") in shown
    for data, model, to in (
        (text, "local", "p.parquet"),
        ("s3://whole/text/train.txt", "s3://whole/saved", "s3://whole/p.parquet"),
    ):
        call("hostdev.predict", "--checkpoint", model, "--data", data, "--out", to, **third)
    found = pq.read_table(tmp_path / "p.parquet")
    with files.open("whole/p.parquet", "rb") as file:
        assert pq.read_table(file).equals(found)
    call("hostdev.predict", "--checkpoint", "local", "--data", "s3://whole/data", "--out", "of-test.parquet", **third)
    call("hostdev.predict", "--checkpoint", "local", "--data", "data", "--out", "of-local.parquet")
    assert pq.read_table(tmp_path / "of-test.parquet").equals(pq.read_table(tmp_path / "of-local.parquet"))

    call("hostdev.checkpoint", "export", "local", "--out", "exported")
    out = call("hostdev.checkpoint", "export", "s3://whole/saved", "--out", "s3://whole/exported", **third)
    assert "s3://whole/exported/" in out and "third" not in out
    files.get("whole/exported", str(tmp_path / "export-there"), recursive=True)
    tables = sorted(each.name for each in (tmp_path / "exported").glob("*.parquet"))
    assert tables and all(
        pq.read_table(tmp_path / "exported" / name).equals(pq.read_table(tmp_path / "export-there" / name))
        for name in tables
    )
    out = call("hostdev.checkpoint", "merge", "s3://whole/saved", "--out", "s3://whole/merged", **third)
    assert "equal" in call("hostdev.checkpoint", "diff", "s3://whole/merged", "s3://whole/saved", **third)
    assert "compact changes a folder of this machine" in call(
        "hostdev.checkpoint", "compact", "s3://whole/saved", code=2
    )

    more = ["--data", "data", "--run-dir", "more", "--max-steps", 3]
    out = call(*TRAIN, *more, "--start-from", "s3://whole/saved", **third)
    assert "start    from s3://whole/saved/step-" in out
    secrets = [each for each in tmp_path.rglob("*") if each.is_file() and b"a-secret" in each.read_bytes()]
    assert secrets == []


@pytest.mark.slow
def test_tables_and_folders(call, server, files, tmp_path):
    rows = "label,user,item,price\n" + "".join(f"{n % 2},u{n % 7},i{n % 11},{n % 5}\n" for n in range(4000))
    folder = tmp_path / "tables"
    folder.mkdir()
    (folder / "a.csv").write_text(rows)
    (folder / "_SUCCESS").write_text("")
    roles = ["--label", "label", "--categorical", "user,item", "--numeric", "price"]
    forks.run(["gzip", "-k", folder / "a.csv"], check=True)
    (folder / "a.csv.gz").rename(folder / "b.csv.gz")
    server.put(folder, "s3://tables/in")
    call("hostdev.data.preprocess", "table", folder, *roles, "--out", "local")
    call("hostdev.data.preprocess", "table", "s3://tables/in", *roles, "--out", "there")
    same_files(tmp_path / "local", tmp_path / "there")
    pq.write_table(pq.read_table(_parquet(tmp_path, rows)), tmp_path / "c.parquet", row_group_size=300)
    files.put_file(str(tmp_path / "c.parquet"), "tables/c.parquet")
    call("hostdev.data.preprocess", "table", tmp_path / "c.parquet", *roles, "--out", "local2")
    call("hostdev.data.preprocess", "table", "s3://tables/c.parquet", *roles, "--out", "there2")
    same_files(tmp_path / "local2", tmp_path / "there2")
    error = call("hostdev.data.preprocess", "table", "s3://tables/nothing.csv", *roles, "--out", "x", code=2)
    assert error == "hostdev.data.preprocess: error: s3://tables/nothing.csv: no such file\n"
    error = call("hostdev.data.preprocess", "table", "s3://no-bucket/a.csv", *roles, "--out", "x", code=2)
    assert error.count("\n") == 1 and "s3://no-bucket/a.csv" in error


def _parquet(folder, rows):
    from pyarrow import csv

    (folder / "c.csv").write_text(rows)
    pq.write_table(csv.read_csv(folder / "c.csv"), folder / "once.parquet")
    return folder / "once.parquet"


@pytest.mark.slow
def test_preparation_that_is_killed_while_it_uploads(call, server, files, tmp_path):
    how = ["hostdev.data.preprocess", "synthetic", "--rows", 4000, "--threshold", 1, "--rows-per-shard", 300]
    call(*how, "--out", "local")
    files.mkdir("killed")
    for wait in (0.2, 1.0, 2.0):
        with call(*how, "--out", "s3://killed/data", begin=True) as begun:
            until = time.monotonic() + 60
            while not files.glob("killed/data/train/*") and begun.poll() is None and time.monotonic() < until:
                time.sleep(0.02)
            time.sleep(wait / 10)
            begun.send_signal(signal.SIGKILL)
    assert files.exists("killed/data/manifest.json") or call(*how, "--out", "s3://killed/data")
    files.get("killed/data", str(tmp_path / "fetched"), recursive=True)
    same_files(tmp_path / "local", tmp_path / "fetched")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_training_that_is_killed_while_it_uploads(call, server, files, tmp_path, small_data, seed):
    server.put(small_data, f"s3://killed-{seed}/data")
    call(*TRAIN, "--data", small_data, "--run-dir", "local")
    there = ["--data", f"s3://killed-{seed}/data", "--checkpoint-dir", f"s3://killed-{seed}/saved", *SAVING]
    for kill in range(3):
        with call(*TRAIN, *there, "--run-dir", "one", "--resume", begin=True) as begun:
            time.sleep(6 + 0.4 * seed + 1.3 * kill)
            begun.send_signal(signal.SIGKILL)
    more = {"HOSTDEV_STORE_CACHE": str(tmp_path / "elsewhere")} if seed % 2 else {}
    call(*TRAIN, *there, "--run-dir", "one", "--resume", **more)
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "local")


def test_without_a_bucket_or_rights(call, server, tmp_path, small_data):
    saves = [*TRAIN, "--data", small_data, "--run-dir", "one", *SAVING, "--checkpoint-dir"]
    error = call(*saves, "s3://no-bucket/saved", code=2)
    assert error.count("\n") == 1 and "s3://no-bucket/saved" in error and "no such file or bucket" in error
    assert not (tmp_path / "one").exists() or not list((tmp_path / "one").iterdir())
    error = call("hostdev.predict", "--checkpoint", "s3://no-bucket/x", "--data", small_data, "--out", "p.csv", code=2)
    assert error.count("\n") == 1 and "s3://no-bucket/x" in error
    error = call(*TRAIN, "--data", small_data, "--run-dir", "s3://bucket/run", code=2)
    assert "--run-dir: s3://bucket/run is an address; this must be a path of this machine" in error
    error = call("hostdev.data.preprocess", "synthetic", "--rows", 500, "--out", "s3://no-bucket/x", code=2)
    assert "s3://no-bucket/x" in error and "no such file or bucket" in error


@pytest.mark.slow
def test_preparation_on_workers(call, server, files, tmp_path):
    text = tmp_path / "text/train.txt"
    text.parent.mkdir()
    call("hostdev.data.preprocess", "synthetic", "--rows", 3000, "--tsv", text)
    server.put(text.parent, "s3://workers/text")
    how = ["--threshold", 1, "--rows-per-shard", 700]
    call("hostdev.data.preprocess", "criteo", text, *how, "--out", "data")
    there = ["s3://workers/text/train.txt", *how, "--out", "s3://workers/data", "--scheduler", "local:2"]
    call("hostdev.data.preprocess", "criteo", *there)
    files.get("workers/data", str(tmp_path / "fetched"), recursive=True)
    same_files(tmp_path / "data", tmp_path / "fetched")
