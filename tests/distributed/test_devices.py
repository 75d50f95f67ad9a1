"""Ranks with dense layers on simulated accelerators: the bits of one process on the CPU."""

import json

import pytest

from tests.distributed import on_device
from tests.distributed.conftest import Trained, flags_of

SMALL = ("--emb-dim", 4)


def trained(processes, schedule, data, *more, count=2):
    """Train with a device for each rank; return rank 0's result, and the summary's part about ranks."""
    folder = processes.folder / "run"
    flags = flags_of(data, folder, "--device", "standin", *SMALL, *more)
    processes.start_ranks(count, "-m", "tests.distributed.on_device", schedule, *flags)
    for rank, process in enumerate(processes.ended()):
        if process.code == on_device.UNAVAILABLE:
            pytest.skip(process.err)
        assert process.code == 0, process
        if not rank:
            assert "standin:0 (a simulated accelerator)" in process.out
    summary = json.loads((folder / "summary.json").read_text())
    return Trained(folder), summary["ranks"]


@pytest.mark.parametrize(
    ("schedule", "more", "backend"),
    [
        ("lazy", ("--cache-rows", "10%"), "standin"),
        pytest.param("delayed", (), "standin", marks=pytest.mark.slow),
        pytest.param("random", ("--pipeline-depth", 0), "standin", marks=pytest.mark.slow),
        pytest.param("lazy", ("--dist-backend", "gloo"), "gloo", marks=pytest.mark.slow),
        pytest.param("delayed-", (), "gloo", marks=pytest.mark.slow),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else value,
)
def test_two_devices_come_to_the_bits_of_one_process_on_the_cpu(alone, processes, small_data, schedule, more, backend):
    found, ranks = trained(processes, schedule, small_data, *more)
    assert found == alone(small_data, *SMALL)
    assert ranks["backend"] == backend


@pytest.mark.slow
def test_more_processes_than_devices(alone, processes, small_data):
    found, ranks = trained(processes, "lazy", small_data, count=3)
    assert found == alone(small_data, *SMALL)
    assert ranks["backend"] == "gloo"


@pytest.mark.slow
def test_in_an_order_that_depends_on_the_ranks(alone, processes, small_data):
    found, ranks = trained(processes, "lazy", small_data, "--dense-exchange", "all-reduce")
    assert not ranks["exact"]
    assert ranks["backend"] == "standin"
    assert len(found.losses.splitlines()) == len(alone(small_data, *SMALL).losses.splitlines())


@pytest.mark.slow
def test_a_backend_that_is_not_the_devices(processes, small_data):
    flags = flags_of(small_data, processes.folder / "run", "--device", "standin", *SMALL, "--dist-backend", "nccl")
    processes.start_ranks(2, "-m", "tests.distributed.on_device", "lazy", *flags)
    first, second = processes.ended()
    if first.code == on_device.UNAVAILABLE:
        pytest.skip(first.err)
    assert (first.code, second.code) == (2, 2)
    [line] = (first.err + second.err).splitlines()
    assert line.startswith("hostdev.train: error: --dist-backend nccl: rank 0's dense layers are on standin 0 of ")
