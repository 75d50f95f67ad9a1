"""Training, advice and checks on data in a store have the results of the same data on this machine."""

import json
import subprocess
import sys

import pytest

from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import Synthetic
from tests import forks
from tests.conftest import digest_of, environment

TRAIN = ["hostdev.train", "--host-device-mix", "--device", "cpu", "--emb-dim", 8, "--batch-size", 200]
TRAIN += ["--epochs", 2, "--micro-batches", 2]


@pytest.fixture(scope="module")
def there(small_data, server):
    server.put(small_data, "s3://bucket/some/set")
    return "s3://bucket/some/set"


@pytest.fixture
def call(tmp_path, server):
    """Run a module in a process of its own, or begin to."""

    def run(*arguments, begin=False, **more):
        env = {**environment(tmp_path), **server.environment, **more}
        command = [sys.executable, "-m", *map(str, arguments)]
        begun = forks.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if begin:
            return begun
        out, error = begun.communicate(timeout=280)
        return begun.returncode, out, error

    return run


def test_the_digest_is_that_of_local_data(call, small_data, there, tmp_path):
    assert call(*TRAIN, "--data", small_data, "--run-dir", "local")[0] == 0
    code, out, error = call(*TRAIN, "--data", there, "--run-dir", "one")
    assert code == 0, error
    assert f"data     {there} (copies in {tmp_path / 'cache/hostdev/stores/files'}, at most" in out
    code, _, error = call(*TRAIN, "--data", there, "--run-dir", "two", "--spawn", 2, HOSTDEV_STORE_CACHE_SIZE="50KB")
    assert code == 0, error
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "two") == digest_of(tmp_path / "local")
    assert json.loads((tmp_path / "one/config.json").read_text())["data"] == there
    secrets = [each for each in tmp_path.rglob("*") if each.is_file() and b"a-secret" in each.read_bytes()]
    assert secrets == [] and "a-secret" not in out


def test_a_store_that_goes_away_for_a_moment(call, small_data, there, server, tmp_path):
    with server.away():
        begun = call(*TRAIN, "--data", there, "--run-dir", "one", begin=True)
        line = begun.stderr.readline()
        assert "trying again" in line, line
    with begun:
        _, error = begun.communicate(timeout=280)
        assert begun.returncode == 0, error
    assert call(*TRAIN, "--data", small_data, "--run-dir", "local")[0] == 0
    assert digest_of(tmp_path / "one") == digest_of(tmp_path / "local")


def test_what_ends_in_one_line(call, there, server):
    code, _, error = call(*TRAIN, "--data", "s3://nothing/set")
    assert code == 2 and "s3://nothing/set/manifest.json: there is no such file or bucket" in error, error
    assert error.count("\n") == 1
    with server.away():
        code, _, error = call(*TRAIN, "--data", there, HOSTDEV_STORE_PATIENCE="0.1")
    assert code == 2 and "repeat the command when the store can be reached" in error
    with server.away("denied"):
        code, _, error = call(*TRAIN, "--data", there)
    assert code == 2 and f"{there}/manifest.json: no permission" in error and error.count("\n") == 1, error
    code, _, error = call(*TRAIN, "--data", "s3://me:a-secret@bucket/set")
    assert code == 2 and "leave out passwords" in error and "a-secret" not in error and error.count("\n") == 1


@pytest.mark.slow
def test_all_modes(call, there):
    verify = ["hostdev.verify", "--data", there, "--emb-dim", 8, "--batch-size", 200, "--steps", 4]
    code, out, error = call(*verify, "--processes", 2)
    assert code == 0 and "all modes agree" in out, error


def test_advice(call, there):
    code, out, error = call("hostdev", "advise", "--data", there, "--emb-dim", 8, "--batch-size", 200, "--out", "a.png")
    assert code == 0 and f"data     {there}" in out, error


@pytest.mark.slow
def test_the_manifest_is_read_anew(call, server, tmp_path):
    """Data that was prepared again has the same address."""
    for seed in (3, 4):
        build(Synthetic(1_000, seed), tmp_path / f"{seed}", Options(threshold=1, rows_per_shard=400))
        server.put(f"{tmp_path / str(seed)}/", "s3://changing/set/")
        for data, name in ((tmp_path / f"{seed}", "local"), ("s3://changing/set", "there")):
            code, _, error = call(*TRAIN, "--data", data, "--run-dir", f"{name}-{seed}")
            assert code == 0, error
        assert digest_of(tmp_path / f"local-{seed}") == digest_of(tmp_path / f"there-{seed}")
