"""Trainings of one process, to which those of several are compared; and processes of several."""

import hashlib
import json

import pytest
import torch

from hostdev.commands import train
from hostdev.core import cli
from tests.conftest import made_once
from tests.distributed.hosts import Hosts
from tests.distributed.processes import Processes


class Trained:
    """The result of a training: the digest of its state, the bytes of its logs."""

    def __init__(self, folder):
        summary = json.loads((folder / "summary.json").read_text())
        self.status, self.steps, self.sha256 = summary["status"], summary["steps"], summary["state_sha256"]
        self.losses, self.evaluations = ((folder / f"{name}.log").read_bytes() for name in ("loss", "eval"))

    def __eq__(self, other):
        return vars(self) == vars(other)

    def __repr__(self):
        return f"{vars(self)}"


def flags_of(data, run_dir, *more, M=6):
    """The flags of a small training: 8 steps of M micro-batches, of which two ranks have two nodes each."""
    fixed = ["--device", "cpu", "--host-device-mix", "--batch-size", 200, "--epochs", 1, "--max-steps", 8]
    return list(map(str, ["--data", data, *fixed, "--micro-batches", M, "--run-dir", run_dir, *more]))


@pytest.fixture(autouse=True)
def _restore_torch():
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """Train in this process, once with each choice of flags."""
    done = {}

    def train_alone(data, *more, M=6):
        key = (data, *more, M)
        if key not in done:

            def make(folder):
                assert cli.run(train.PROG, train.main, flags_of(data, folder / "run", *more, M=M)) == 0

            name = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
            done[key] = Trained(made_once(tmp_path_factory, f"alone-{name}", make) / "run")
        return done[key]

    return train_alone


@pytest.fixture(scope="session")
def cache_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def processes(tmp_path, cache_folder):
    with Processes(tmp_path, cache_folder) as made:
        yield made


@pytest.fixture
def hosts(tmp_path):
    """Two hosts with addresses of their own."""
    with Hosts(tmp_path) as made:
        yield made
