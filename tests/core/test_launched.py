"""A process that trains alone among several launched ones: refused unless declared."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import hostdev
from hostdev.core import launched
from hostdev.core.launched import started
from tests import forks
from tests.conftest import ROOT, environment

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "3"}
SLURM = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "8"}
GRADS = np.ones((2, 3), np.float32)


@pytest.fixture(autouse=True)
def _nothing_is_declared(monkeypatch):
    monkeypatch.setattr(launched, "_alone", False)


def table_of(**how):
    return hostdev.HostTable(10, 3, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0), **how)


def set_all(monkeypatch, env):
    for name, value in env.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("env", "count", "why"),
    [
        ({}, 1, ""),
        (TORCHRUN, 2, "WORLD_SIZE is 2"),
        (OPEN_MPI, 4, "OMPI_COMM_WORLD_SIZE is 4"),
        (MPICH, 3, "PMI_SIZE is 3"),
        (SLURM, 8, "SLURM_STEP_NUM_TASKS is 8"),
        (SLURM | {"RANK": "0", "WORLD_SIZE": "1"}, 1, ""),  # each is alone
        ({"SLURM_STEP_NUM_TASKS": "8"}, 1, ""),
        ({"WORLD_SIZE": "1"}, 1, ""),
        ({"WORLD_SIZE": "many"}, 1, ""),
        ({"PYTEST_XDIST_WORKER": "gw0", "PYTEST_XDIST_WORKER_COUNT": "4"}, 1, ""),
    ],
)
def test_what_launchers_say(env, count, why):
    assert started(env) == (count, why)


def test_a_rank_table(tmp_path):
    path = tmp_path / "table.json"
    env = {"RANK_TABLE_FILE": str(path), "RANK_ID": "0"}
    assert started(env) == (1, "")  # there is no table, which `join` reports
    path.write_text(json.dumps({"server_list": [{"device": [{"rank_id": "0"}, {"rank_id": "1"}]}] * 2}))
    assert started(env) == (4, "listed in RANK_TABLE_FILE")


@pytest.mark.parametrize("env", [TORCHRUN, OPEN_MPI, MPICH, SLURM], ids=lambda env: next(iter(env)))
def test_a_runtime_without_ranks(monkeypatch, env):
    table = table_of()
    set_all(monkeypatch, env)
    with pytest.raises(hostdev.UserError, match=r"a Runtime in one of \d processes .*hostdev.join\(\).*ranks=ranks"):
        hostdev.Runtime({"f": table}, device="cpu")


def test_a_table_that_is_trained(monkeypatch):
    """It may be created and read, as no copies diverge."""
    set_all(monkeypatch, TORCHRUN)
    table = table_of()
    assert not table.lookup(np.array([1])).any()
    server = hostdev.ops.ParameterServer()
    server.add(table)
    words = r"the training of table 't' in one of 2 processes \(WORLD_SIZE is 2\) has no ranks.*hostdev.join\(\)"
    for train in (
        lambda: table.apply(np.array([1, 2]), GRADS),
        lambda: table.update(np.array([1, 2]), GRADS),
        lambda: server.push("t", np.array([1, 2]), GRADS),
    ):
        with pytest.raises(hostdev.UserError, match=words):
            train()
    assert not table.lookup(np.arange(10)).any()
    assert table.step == 0
    part = table_of(part=(0, 2))
    part.apply(np.array([1, 2]), GRADS)
    assert part.step == 1


def test_a_network_without_ranks(monkeypatch):
    set_all(monkeypatch, TORCHRUN)
    with pytest.raises(hostdev.UserError, match=r"a Network in one of 2 processes .*hostdev.join\(\)"):
        hostdev.parallel.Network(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))


def test_it_is_meant(monkeypatch):
    set_all(monkeypatch, TORCHRUN)
    hostdev.alone()
    table = table_of()
    for batch, rows in hostdev.Runtime({"f": table}, device="cpu").train([{"f": np.array([1, 2])}]):
        assert list(batch) == ["f"]
        rows["f"].sum().backward()
    table.apply(np.array([1]), GRADS[:1])
    assert table.lookup(np.arange(4))[:, 0].tolist() == [0, -2, -1, 0]
    hostdev.parallel.Network(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))


DDP = """
import sys
import torch.distributed as dist
import hostdev
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
table = hostdev.HostTable(10, 3, hostdev.SGD(lr=1.0), name="t")
try:
    hostdev.Runtime({"f": table}, device="cpu")
except hostdev.UserError as error:
    print(error)
try:
    with hostdev.join():
        pass
except hostdev.UserError as error:
    print(error)
dist.barrier()
dist.destroy_process_group()
"""


def test_an_initialised_process_group(tmp_path):
    """DistributedDataParallel needs one, with any launcher."""
    started = [
        forks.Popen(
            [sys.executable, "-c", DDP, str(rank), str(tmp_path / "store")],
            cwd=ROOT,
            env=environment(tmp_path),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    for process in started:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        first, second = out.splitlines()
        assert first.startswith("a Runtime in one of 2 processes (torch.distributed is initialised) has no ranks")
        assert "hostdev.join()" in first
        assert second.startswith("torch.distributed is already initialised; leave out init_process_group()")


@pytest.mark.slow
def test_commands_that_work_alone(monkeypatch, in_process, small_data):
    """They do not concern several processes, with any launcher."""
    from hostdev.ext.verify import cli as verify

    set_all(monkeypatch, TORCHRUN | {"MASTER_ADDR": "127.0.0.1"})
    code, out, err = in_process(verify, "--data", small_data, "--device", "cpu", "--steps", 2, "--emb-dim", 2)
    assert code == 0, (out, err)
