"""Whole trainings of several processes, started in any way, have the bits of one process."""

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from hostdev.core import cli
from hostdev.data.preprocess import cli as preprocess
from tests.conftest import ROOT
from tests.distributed.conftest import Trained, flags_of
from tests.ports import free_port

TRAIN = ("-m", "hostdev.train")
SMALL = ("--emb-dim", 4)
CACHED = ("--cache-rows", "10%")
SERIAL = ("--pipeline-depth", 0)


def spawned(processes, flags):
    processes.start(sys.executable, *TRAIN, *flags, "--spawn", 2)


def example(processes, name, flags, **more):
    """Run a script of examples/launch, which finds this Python's commands."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    processes.start("bash", ROOT / "examples" / "launch" / name, *flags, MASTER_PORT=free_port(), PATH=path, **more)


def by_torchrun(processes, flags):
    example(processes, "torchrun.sh", flags)


def by_launch_of_torch(processes, flags):
    options = ("--nproc-per-node", 2, "--master-port", free_port())
    processes.start(sys.executable, "-m", "torch.distributed.launch", *options, *TRAIN, *flags)


def by_mpirun(processes, flags):
    if shutil.which("mpirun") is None:
        pytest.skip("Open MPI is not installed")
    example(processes, "mpirun.sh", flags, MPIRUN_OPTIONS="--oversubscribe --allow-run-as-root")


def in_a_loop(processes, flags):
    example(processes, "loop.sh", flags)


def by_rank_table(processes, flags):
    example(processes, "rank_table.sh", flags)


def trained(processes, start, data, *more, M=6):
    """Train on several processes, which must succeed; return the results of rank 0 and rank 1."""
    folder = processes.folder / "run"
    start(processes, flags_of(data, folder, *more, M=M))
    for process in processes.ended():
        assert process.code == 0, process
        if start is not by_launch_of_torch:  # which warns of itself
            assert "Warning" not in process.err, process
    return Trained(folder), Trained(folder / "rank1")


@pytest.mark.parametrize("more", [CACHED, SERIAL, CACHED + SERIAL], ids=lambda more: " ".join(map(str, more)))
def test_one_process_with_and_without_a_cache_and_overlap(alone, small_data, more):
    reference = alone(small_data, *SMALL)
    assert (reference.status, reference.steps) == ("finished", 8)
    assert len(reference.losses.splitlines()) == 8
    assert alone(small_data, *SMALL, *more) == reference
    assert alone(small_data, *SMALL, M=2).sha256 != reference.sha256  # the number of micro-batches is part of the sum


# Of each way to start processes another choice of what must not matter.
@pytest.mark.parametrize(
    ("start", "more"),
    [
        (spawned, CACHED),
        pytest.param(by_torchrun, SERIAL, marks=pytest.mark.slow),
        pytest.param(by_launch_of_torch, CACHED + SERIAL, marks=pytest.mark.slow),
        (by_mpirun, ()),
        pytest.param(in_a_loop, (*CACHED, "--cache-policy", "lru"), marks=pytest.mark.slow),
        pytest.param(by_rank_table, ("--pipeline-depth", 4), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.__name__ if callable(value) else " ".join(map(str, value)) or "defaults",
)
def test_two_processes_come_to_the_bits_of_one(alone, processes, small_data, start, more):
    first, second = trained(processes, start, small_data, *SMALL, *more)
    assert first == alone(small_data, *SMALL)
    assert second.losses == first.losses
    if start is by_rank_table:
        [launcher] = processes.ended()
        assert launcher.out.endswith("training succeeded\n")
        [logs] = processes.folder.glob("launch-*")
        told = (logs / "rank0" / "output.log").read_text()
        assert first.sha256 in told
        assert told in launcher.out


@pytest.mark.slow
@pytest.mark.parametrize(
    "stored",
    [
        ("--table-dtype", "bf16"),
        ("--table-slots", "8bit"),
        ("--table-optimizer", "adam", "--table-weight-decay", "0.5"),
    ],
)
def test_two_processes_round_rows_as_one(alone, processes, small_data, stored):
    own = (*SMALL, *stored)
    first, _ = trained(processes, spawned, small_data, *own, *CACHED)
    assert first == alone(small_data, *own)
    assert first.sha256 != alone(small_data, *SMALL).sha256


def test_two_processes_with_several_labels(alone, processes, tmp_path):
    """A binary label, a number and weights; the evaluations of both processes' rows are collected."""
    rng = np.random.default_rng(1)
    user, x = rng.integers(0, 30, 1500), rng.random(1500).round(3)
    lines = (f"u{u},{v},{int(v + u / 30 > 1)},{v * u:.3f},{1 + u % 3}" for u, v in zip(user, x, strict=True))
    (tmp_path / "t.csv").write_text("\n".join(["user,x,click,stars,w", *lines]) + "\n")
    (tmp_path / "f.toml").write_text(
        'weight = "w"\n[labels]\nclick = {}\nstars = {task = "regression"}\n'
        '[features]\nuser = {kind = "categorical"}\nx = {kind = "numeric"}\n'
    )
    data = tmp_path / "data"
    given = ["table", str(tmp_path / "t.csv"), "--features", str(tmp_path / "f.toml"), "--out", str(data)]
    assert cli.run(preprocess.PROG, preprocess.main, given) == 0
    own = ("--model", "mmoe", *SMALL, "--max-steps", 7)
    first, _ = trained(processes, spawned, data, *own)
    assert first == alone(data, *own)
    assert b"rmse is" in first.evaluations


@pytest.mark.slow
def test_groups_of_tables_and_bags(alone, processes, films):
    own = ("--model", "tests.own_models:ThreeTables", "--emb-dim", 3)
    first, _ = trained(processes, in_a_loop, films, *own, *CACHED)
    assert first == alone(films, *own)
    assert "Warning" not in processes.ended()[0].err


@pytest.mark.slow
@pytest.mark.parametrize(("M", "worlds"), [(4, [2, 4]), (6, [2, 3, 6]), (8, [4])])
def test_more_processes(alone, processes, small_data, M, worlds):
    """Also where the last step's batch has fewer rows, and with M that is no power of two."""
    more = (*SMALL, "--batch-size", 500, "--max-steps", 10)
    for world in worlds:
        folder = processes.folder / f"run{world}"
        processes.start_ranks(world, *TRAIN, *flags_of(small_data, folder, *more, M=M))
        assert [process.code for process in processes.ended()] == [0] * len(processes.started)
        assert Trained(folder) == alone(small_data, *more, M=M)


MODELS = {
    "l2": ("--l2", "batch"),
    "sums": ("--gradients", "sum"),
    "bf16": ("--precision", "bf16"),
    "deepfm": ("--model", "deepfm"),
    "dlrm": ("--model", "dlrm"),
    "dcn": ("--model", "dcn", "--table-optimizer", "row_wise_adagrad"),
}


@pytest.mark.slow
@pytest.mark.parametrize("more", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("cache", [(), CACHED], ids=["", "cached"])
def test_other_models_and_losses(alone, processes, small_data, more, cache):
    own = (*SMALL, *more)
    first, _ = trained(processes, in_a_loop, small_data, *own, *cache)
    assert first == alone(small_data, *own)
    assert first.sha256 != alone(small_data, *SMALL).sha256


@pytest.mark.slow
def test_groups_of_tables_and_bags_on_three(alone, processes, films):
    own = ("--model", "tests.own_models:ThreeTables", "--emb-dim", 3)
    folder = processes.folder / "run"
    processes.start_ranks(3, *TRAIN, *flags_of(films, folder, *own, *SERIAL, M=6))
    assert [process.code for process in processes.ended()] == [0, 0, 0]
    assert Trained(folder) == alone(films, *own, M=6)
