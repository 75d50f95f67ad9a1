"""Fewer rows than processes, of tables, batches, bags and shards: the bits of one process."""

import pytest

from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from tests.data import movies
from tests.distributed.conftest import Trained, flags_of
from tests.own_models import FewRows

TRAIN = ("-m", "hostdev.train")
BATCH, M, WORLD = 27, 12, 3
OWN = ("--model", "tests.own_models:FewRows", "--batch-size", BATCH, "--epochs", 3, "--max-steps", 100)


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Two shards of different sizes, whose last batch has two rows."""
    folder = tmp_path_factory.mktemp("few")
    made = movies.make(rows=160, users=30, items=20).write_csv(folder / "films.csv")
    table = ["table", made, "--out", folder / "data", "--label", "liked", "--numeric", "age"]
    preprocess.main(list(map(str, [*table, "--categorical", "user,item", "--rows-per-shard", 100])))
    data = manifest.read(folder / "data")
    assert [shard.rows for shard in data.train] == [100, 37]
    assert len(data.train) < WORLD
    assert data.rows("train") % BATCH == 2 < WORLD < M
    assert data.rows("test") < BATCH
    return folder / "data"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "more"),
    [(3, ("--pipeline-depth", 0, "--cache-rows", "50%")), (3, ("--cache-rows", "10%")), (4, ())],
    ids=str,
)
def test_fewer_than_processes(alone, processes, few, world, more):
    folder = processes.folder / "run"
    processes.start_ranks(world, *TRAIN, *flags_of(few, folder, *OWN, *more, M=M))
    for process in processes.ended():
        assert process.code == 0, process
    found = Trained(folder)
    assert found == alone(few, *OWN, M=M)
    assert found.steps == 18
    for rank in range(1, world):
        assert Trained(folder / f"rank{rank}").losses == found.losses


def test_few_samples_have_ids_of_the_bag():
    """So that some micro-batches, and all of some rank, have none."""
    assert FewRows.rare > BATCH // WORLD
