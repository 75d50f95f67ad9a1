"""The digest of a training by the number of its micro-batches alone: real rows, and a model of three groups."""

import json

import pytest

from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from tests.distributed.conftest import Trained, flags_of

TRAIN = ("-m", "hostdev.train")
SMALL = ("--emb-dim", 4, "--batch-size", 240, "--max-steps", 50)
GROUPS = ("--model", "tests.own_models:ThreeTables", "--emb-dim", 3, "--batch-size", 200, "--max-steps", 16)
WORLDS = [(4, 2), (4, 4), (6, 3), (8, 2), (8, 4)]
CACHED = ("--cache-rows", "10%")
# Of what must not matter each world has two of the four.
CHOICES = [
    [("--pipeline-depth", 0), ("--pipeline-depth", 2, *CACHED)],
    [("--pipeline-depth", 0, *CACHED), ("--pipeline-depth", 2)],
]


@pytest.fixture(scope="module")
def real(criteo_sample, tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "data"
    build(CriteoText([criteo_sample]), folder, Options(threshold=10, dense="log"))
    return folder


def check(processes, alone, data, M, world, own, choices):
    for number, more in enumerate(choices):
        folder, before = processes.folder / f"run{number}", len(processes.started)
        processes.start_ranks(world, *TRAIN, *flags_of(data, folder, *own, *more, M=M))
        assert [process.code for process in processes.ended()[before:]] == [0] * world
        assert Trained(folder) == alone(data, *own, M=M), more


@pytest.mark.slow
@pytest.mark.parametrize(("M", "world"), WORLDS)
def test_real_rows(processes, alone, real, M, world):
    check(processes, alone, real, M, world, SMALL, CHOICES[world // 2 % 2])


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_hardly_more_bytes_cross_than_must(processes, real, depth):
    folder = processes.folder / "run"
    own = ("--emb-dim", 16, "--batch-size", 1000, "--max-steps", 12, "--pipeline-depth", depth)
    processes.start_ranks(2, *TRAIN, *flags_of(real, folder, *own, M=4))
    assert [process.code for process in processes.ended()] == [0, 0]
    sent = json.loads((folder / "summary.json").read_text())["ranks"]["sent_bytes"]
    assert 0 < sent["least"] <= sent["rows"] <= 1.05 * sent["least"]


@pytest.mark.slow
def test_each_number_of_micro_batches_has_bits_of_its_own(alone, real):
    assert len({alone(real, *SMALL, M=M).sha256 for M in (4, 6, 8)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("M", "world"), WORLDS)
def test_groups_of_tables_and_bags(processes, alone, films, M, world):
    check(processes, alone, films, M, world, GROUPS, CHOICES[world // 2 % 2][1:])
