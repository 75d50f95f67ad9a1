"""Processes with different data or options: all name the difference in one line, and exit with 2."""

import shutil

import pyarrow as pa
import pytest

from hostdev.distributed.agreement import UnlikeError, compare, shown
from hostdev.train.options import TrainConfig
from hostdev.train.processes import get_shared_values
from tests.distributed.conftest import flags_of
from tests.distributed.test_rendezvous import TRAIN, refused, start
from tests.ports import free_port
from tests.test_shards import rewrite


def words(each, where=""):
    with pytest.raises(UnlikeError) as caught:
        compare(each, where)
    return str(caught.value)


def test_what_differs_is_named_with_its_values_and_the_ranks():
    compare([{"a": 1, "b": None}] * 3)
    compare([{"a": shown(1, "one")}, {"a": shown(1, "eins")}])
    assert words([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}]) == (
        "b differs between processes: 2 on ranks 0, 2; 3 on rank 1; give every process the same value"
    )
    assert words([{"a": 1, "b": 2}, {"a": 5, "b": 3}], "here").startswith("here: a differs between processes: 1 on")
    assert "; b also differs; give" in words([{"a": 1, "b": 2}, {"a": 5, "b": 3}])
    assert "not given on rank 0; 7 on rank 1" in words([{}, {"a": 7}])
    assert "one on rank 0; two on rank 1" in words([{"a": shown(1, "one")}, {"a": shown(2, "two")}])
    assert len(words([{"a": "x" * 10**5}, {"a": "\x1b[31m" * 10**5}])) <= 500


def options(**given):
    return get_shared_values(TrainConfig(host_device_mix=True, micro_batches=4, **given), 2)


def test_what_may_differ(tmp_path):
    """Folders, and what concerns one process alone, or is said in another way."""
    compare(
        [
            options(),
            options(
                emb_dim=80,
                batch_per_rank=500,
                epochs=2,
                pipeline_depth=4,
                host_threads=1,
                ops_log="0",
                run_dir=tmp_path,
                dist_timeout=9.0,
                trace=tmp_path / "t",
            ),
        ]
    )
    compare([options(cache_rows="10%"), options(cache_rows="50%", cache_policy="lru")])
    compare([options(resume="here"), options(resume="there")])


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("--seed", {"seed": 1}, {"seed": 2}),
        ("--lr", {}, {"lr": 0.5}),
        ("--table-lr", {"table_lr": 0.1}, {"table_lr": 0.2}),
        ("--emb-dim", {"emb_dim": 4}, {"emb_dim": 8}),
        ("--model", {"model": "dlrm", "emb_dim": 4}, {"model": "dcn", "emb_dim": 4}),
        ("--max-steps", {"max_steps": 4}, {}),
        ("--batch-size", {"batch_size": 400}, {"batch_size": 200}),
        ("--cache-rows", {"cache_rows": "10%"}, {}),
        ("--pipeline-depth", {"pipeline_depth": 0}, {}),
        ("--checkpoint-every", {"checkpoint_every": 3}, {}),
        ("--resume", {"resume": "x"}, {}),
        ("--parallel", {"parallel": "auto"}, {}),
        ("--precision", {"precision": "bf16"}, {}),
    ],
)
def test_options_that_are_compared(name, one, other):
    assert words([options(**one), options(**other)]).startswith(f"{name} differs between processes: ")


def test_every_option_is_compared_or_known_to_be_of_one_process():
    differing = {
        "data",
        "run_dir",
        "checkpoint_dir",
        "trace",
        "host_threads",
        "ops_log",
        "dist_timeout",
        "dist_url",
        "dist_backend",
        "batch_per_rank",
        "cache_policy",
        "cache_window",
        "device",
    }
    names = {f"--{name.replace('_', '-')}" for name in vars(TrainConfig()) if name not in differing}
    assert set(options()) == names | {"the data set"}


def test_data_that_is_not_there(tmp_path):
    """A broken data set is compared, too: rank 0 reports the problem after the rendezvous."""
    [value, text] = options(data=tmp_path / "none")["the data set"]
    assert value is None
    assert "is not a data set" in text


def flip(table):
    labels = pa.array([1 - one for one in table["label"].to_pylist()], pa.float32())
    return table.set_column(table.schema.get_field_index("label"), table.schema.field("label"), labels)


def test_flipped_labels_and_another_rate(processes, own_data):
    port = free_port()
    shutil.copytree(own_data, processes.folder / "other")
    rewrite(own_data, flip)
    for rank, data in enumerate([processes.folder / "other", own_data]):
        flags = flags_of(data, processes.folder / "run", "--emb-dim", 4, "--table-lr", 0.1 * (1 + rank))
        start(processes, *TRAIN, *flags, RANK=rank, WORLD_SIZE=2, port=port)
    first, second = refused(processes)
    assert first == second
    assert first.startswith("the data set differs between processes: ")
    assert first.count("checksum ") == 2
    assert f"({processes.folder / 'other'}) on rank 0; checksum" in first
    assert first.endswith(" on rank 1; --table-lr also differs; give every process the same value")
    assert not (processes.folder / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("option", [("--seed", 1, 2), ("--lr", 0.1, 0.2), ("--emb-dim", 4, 8)], ids=lambda one: one[0])
def test_options_of_processes(processes, small_data, option):
    port, (name, *values) = free_port(), option
    for rank, value in enumerate(values):
        flags = flags_of(small_data, processes.folder / "run", name, value)
        start(processes, *TRAIN, *flags, RANK=rank, WORLD_SIZE=2, port=port)
    told = f"{name} differs between processes: {values[0]} on rank 0; {values[1]} on rank 1"
    told += "; give every process the same value"
    assert refused(processes) == [told] * 2


VERSIONS = """
import os, sys, torch
torch.__version__ = "2.9.9+other" if os.environ["RANK"] == "1" else torch.__version__
import hostdev
from hostdev.core import cli
def main(_):
    with hostdev.join():
        pass
cli._leave(cli.run("program", main, []))
"""


@pytest.mark.slow
def test_another_version_of_torch(processes):
    processes.start_ranks(2, "-c", VERSIONS)
    for line in refused(processes):
        assert line.startswith("the version of torch differs between processes: ")
        assert "2.9.9+other on rank 1" in line
