"""Stages of a network on several ranks have the bits of one process, in every schedule."""

import json
import sys
from pathlib import Path

import pytest

from tests.distributed.conftest import Trained, flags_of
from tests.distributed.processes import wait_until

LOOP = Path(__file__).with_name("staged_loop.py")
TRAIN = ("-m", "hostdev.train")
PIPE = ("--mesh", "pipe=2")
INTERLEAVED = (*PIPE, "--schedule", "interleaved")
CACHED = ("--cache-rows", "10%")


@pytest.mark.slow
def test_two_ranks_without_tables(processes):
    processes.start_ranks(2, LOOP, "1f1b", "gpipe", "interleaved")
    for process in processes.ended():
        assert (process.code, process.out) == (0, "the same\n"), process


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "schedules"), [(3, ("1f1b", "gpipe", "interleaved")), (4, ("1f1b", "gpipe"))])
def test_more_ranks_without_tables(processes, ranks, schedules):
    """One has no parameters."""
    processes.start_ranks(ranks, LOOP, *schedules)
    for process in processes.ended():
        assert (process.code, process.out) == (0, "the same\n"), process


def check(processes, alone, data, world, own, more, M=6):
    folder = processes.folder / "run"
    processes.start_ranks(world, *TRAIN, *flags_of(data, folder, *own, *more, M=M))
    for process in processes.ended():
        assert process.code == 0, process
        assert "Warning" not in process.err, process
    assert Trained(folder) == alone(data, *own, M=M)


@pytest.mark.parametrize(
    ("own", "more"),
    [
        (("--l2", "batch"), (*INTERLEAVED, *CACHED)),
        pytest.param(("--l2", "batch"), PIPE, marks=pytest.mark.slow),
        pytest.param(("--precision", "bf16"), (*INTERLEAVED, *CACHED, "--pipeline-depth", 0), marks=pytest.mark.slow),
    ],
)
def test_two_stages(processes, alone, small_data, own, more):
    check(processes, alone, small_data, 2, ("--emb-dim", 4, *own), more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "more"),
    [
        ((), (*PIPE, "--schedule", "gpipe", "--pipeline-depth", 0)),
        ((), (*PIPE, "--stage-cut", "output", *CACHED)),
        (("--batch-size", 3), (*PIPE, *CACHED)),
        (("--batch-size", 5), INTERLEAVED),
        (("--model", "dlrm"), PIPE),
        (("--model", "dcn"), INTERLEAVED),
        (("--model", "dcn"), (*PIPE, "--stage-cut", "cross.0")),
        (("--model", "tests.own_models:Unused"), (*PIPE, "--stage-cut", "deep.2")),
        (("--batch-size", 396, "--epochs", 2, "--max-steps", 20), PIPE),
        (("--model", "deepfm", "--gradients", "sum"), PIPE),
        (("--model", "tests.own_models:Dropout"), INTERLEAVED),
        (("--model", "tests.own_models:Tied"), (*PIPE, "--stage-cut", "deep.4")),
        (("--model", "tests.own_models:Tied"), (*INTERLEAVED, "--stage-cut", "deep.2,deep.4,deep.6")),
    ],
)
def test_two_stages_of_all_models(processes, alone, small_data, own, more):
    check(processes, alone, small_data, 2, ("--emb-dim", 4, *own), more)


@pytest.mark.slow
@pytest.mark.parametrize("more", [PIPE, (*INTERLEAVED, *CACHED)])
def test_two_stages_of_groups_of_tables_and_bags(processes, alone, films, more):
    check(processes, alone, films, 2, ("--model", "tests.own_models:ThreeTables", "--emb-dim", 3), more)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "more", "M"),
    [
        ((), ("--mesh", "data=2,pipe=2", *CACHED), 8),
        # Shares whose micro-batches make up two nodes of the tree; epochs that end with two samples.
        (
            ("--model", "tests.own_models:Tied", "--batch-size", 396, "--epochs", 2, "--max-steps", 20),
            ("--mesh", "data=2,pipe=2", "--stage-cut", "deep.4"),
            6,
        ),
        (("--l2", "batch", "--batch-size", 1), ("--mesh", "data=2,pipe=2"), 12),
        (("--model", "tests.own_models:Dropout"), ("--mesh", "data=2,pipe=2", "--schedule", "interleaved"), 4),
        ((), ("--mesh", "pipe=4", "--pipeline-depth", 0), 8),
        (("--model", "dcn"), ("--mesh", "pipe=4", "--schedule", "interleaved"), 4),
    ],
)
def test_four_processes(processes, alone, small_data, own, more, M):
    check(processes, alone, small_data, 4, ("--emb-dim", 4, *own), more, M=M)


@pytest.mark.slow
def test_a_stage_that_is_killed_ends_all(processes, small_data):
    more = ("--emb-dim", 4, *PIPE, "--epochs", 2000, "--max-steps", 100000)
    started = processes.start_ranks(2, *TRAIN, *flags_of(small_data, processes.folder / "run", *more))
    losses = processes.folder / "run" / "loss.log"
    wait_until(lambda: losses.exists() and losses.read_text().count("\n") > 3)
    started[1].kill()
    first, _ = processes.ended(60)
    assert first.code == 2
    assert first.err.count("error:") == 1
    assert "rank 1 of 2" in first.err


def gone_on(processes, data, world, own, mesh, steps):
    """Train some steps more, from the newest checkpoint if there is one; the last one to have done so."""
    before = len(processes.started)
    flags = flags_of(data, processes.folder / "run", *own, "--max-steps", steps, "--checkpoint-every", 3, "--resume")
    processes.start_ranks(world, *TRAIN, *flags, *mesh)
    assert [process.code for process in processes.ended()[before:]] == [0] * world
    return Trained(processes.folder / "run")


@pytest.mark.slow
def test_one_process_goes_on_from_two_stages_and_the_other_way_round(processes, alone, small_data):
    own = ("--emb-dim", 4, "--model", "tests.own_models:Tied")
    four = ("--mesh", "pipe=4", "--stage-cut", "deep.2,deep.3,deep.4")  # one has no parameters
    for world, mesh, steps in [(2, (*PIPE, "--stage-cut", "deep.4"), 2), (1, (), 4), (4, four, 6), (2, PIPE, 8)]:
        found = gone_on(processes, small_data, world, own, mesh, steps)
    assert found == alone(small_data, *own)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_stage_changes_nothing(processes, small_data):
    """Non-finite gradients of the last layer's weights, which only the last stage sees."""
    more = ("--emb-dim", 4, *PIPE, "--model", "tests.own_models:Overflowing")
    processes.start_ranks(2, *TRAIN, *flags_of(small_data, processes.folder / "run", *more))
    first, second = processes.ended()
    assert (first.code, second.code) == (2, 2)
    assert "step 1: " in first.err
    assert "not finite" in first.err
    assert first.err.count("error:") == 1


@pytest.mark.slow
def test_each_rank_has_a_trace_with_its_micro_batches(processes, small_data):
    flags = flags_of(small_data, processes.folder / "run", "--emb-dim", 4, *PIPE, "--max-steps", 2, "--trace", "t.json")
    processes.start_ranks(2, *TRAIN, *flags)
    assert [process.code for process in processes.ended()] == [0, 0]
    for rank, name in enumerate(["t.json", "t.rank1.json"]):
        events = json.loads((processes.folder / name).read_text())
        assert {event["pid"] for event in events} == {1 + rank}
        for part in ("forward", "backward"):
            found = [event["args"] for event in events if event["name"] == part and event["ph"] == "X"]
            trained = found[: 2 * 6]  # what follows is the evaluation's
            assert [each["micro_batch"] for each in trained] == [*range(6)] * 2
            assert {each["at"] for each in trained} == {rank}


def test_a_stage_that_fails_ends_all(processes, small_data):
    more = ("--emb-dim", 4, *PIPE, "--model", "tests.own_models:FailsInTheEnd")
    flags = flags_of(small_data, processes.folder / "run", *more)
    processes.start(sys.executable, *TRAIN, *flags, "--spawn", 2)
    [process] = processes.ended()
    assert process.code not in (0, None)
    assert process.err.count("error:") == 1
    assert "rank 1 of 2: the end of the network fails" in process.err
