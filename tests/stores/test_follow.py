"""A folder in a store is followed as one on this machine."""

import shutil
import sys

import fsspec
import numpy as np
import pytest

from hostdev.core import stores
from hostdev.core.addresses import source_path
from hostdev.core.errors import StoreError
from hostdev.ext.streams.folder import open_folder
from tests import forks
from tests.conftest import digest_of, environment

NAMES = ["a.csv", "b10.csv", "b9.parquet", ".hidden", "_SUCCESS", "c.csv.part", "day1/x.csv", "day1/_SUCCESS"]
NAMES += ["day1/deep/z.csv", "day2/y.csv", "day2/_log/w.csv", "day3/in/_SUCCESS", "day3/in/v.csv", "day3/u.tmp"]
NAMES += [".tmp/_SUCCESS", ".tmp/t.csv", "day1/deep/_SUCCESS"]


@pytest.fixture
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    monkeypatch.setattr(stores, "_PAUSES", (0.001, 0.01))


@pytest.mark.parametrize("mark", [None, "_SUCCESS"])
def test_the_names_are_those_of_a_local_folder(here, tmp_path, mark):
    memory = fsspec.filesystem("memory")
    for seed in range(10):
        draw = np.random.default_rng(seed)
        some = [name for name in NAMES if seed == 0 or draw.random() < 0.6]
        local = tmp_path / f"in{seed}"
        local.mkdir()
        for name in some:
            (local / name).parent.mkdir(parents=True, exist_ok=True)
            (local / name).write_bytes(name.encode())
            memory.pipe(f"/in{seed}/{name}", name.encode())
        there = open_folder(source_path(f"memory://in{seed}"), mark)
        one = open_folder(local, mark)
        assert there.names() == one.names()
        assert there.has_folders() == (mark is None and any("/" in name for name in some))
        for name in there.names():
            assert there.state(name).size == one.state(name).size == len(name)
            assert there.state(name) == there.state(name)
        assert there.state("nothing.csv") is None
        memory.rm(f"/in{seed}", recursive=True) if some else None


def test_a_store_that_is_away_is_an_error_of_the_system(here, monkeypatch):
    folder = open_folder(source_path("memory://in"))
    monkeypatch.setattr(stores.Store, "list", lambda self, name="": (_ for _ in ()).throw(StoreError("away")))
    with pytest.raises(OSError, match="away"):
        folder.names()


@pytest.mark.slow
def test_following_a_bucket(server, tmp_path):
    env = {**environment(tmp_path), **server.environment}

    def call(*arguments):
        command = [sys.executable, "-m", "hostdev", *map(str, arguments)]
        done = forks.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    draw = np.random.default_rng(0)
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        rows = "".join(f"{draw.integers(2)},u{draw.integers(50)},{draw.integers(9)}\n" for _ in range(700))
        (folder / f"day{number}.csv").write_text("label,user,hour\n" + rows)
    (folder / "day3.csv").write_text("no,table\n1,2\n")
    how = ["--label", "label", "--categorical", "user", "--numeric", "hour", "--ids", "raw", "--out", "example"]
    call("preprocess", "table", folder / "day0.csv", *how)
    train = ["train", "--data", "example", "--capacity", "20MiB", "--model", "deepfm", "--emb-dim", 4, "--batch-size"]
    train += [200, "--device", "cpu", "--follow-poll", 0.1, "--follow-until", "end", "--checkpoint-every", 3]
    call(*train, "--follow", folder, "--run-dir", "local")
    server.put(folder, "s3://stream/in")
    out = call(*train, "--follow", "s3://stream/in", "--run-dir", "there", "--checkpoint-dir", "s3://stream/saved")
    assert "s3://stream/in/day3.csv has no column" in out
    assert digest_of(tmp_path / "there") == digest_of(tmp_path / "local")
    shutil.copy(folder / "day0.csv", folder / "day4.csv")
    (folder / "day4.csv").write_text((folder / "day4.csv").read_text() + "1,u1,3\n")
    call(*train, "--follow", folder, "--run-dir", "local", "--resume")
    server.put(f"{folder}/", "s3://stream/in/")
    there = ["--run-dir", "there", "--checkpoint-dir", "s3://stream/saved"]
    assert "day4.csv: AUC" in call(*train, "--follow", "s3://stream/in", *there, "--resume")
    assert digest_of(tmp_path / "there") == digest_of(tmp_path / "local")
