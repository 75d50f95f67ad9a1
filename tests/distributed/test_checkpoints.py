"""Checkpoints of several processes: resumed by any number of them, merged, resharded, and read by one."""

import pickle
import random
import shutil
import time
from functools import partial

import pytest
import torch

from hostdev.checkpoint.remote import newest
from hostdev.core import cli
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.predict import cli as predict
from hostdev.ext.training import cli as train
from tests.distributed import own_loop, saved_loop
from tests.distributed.conftest import Trained, flags_of
from tests.distributed.processes import wait_until
from tests.distributed.same import assert_same

TRAIN = ("-m", "hostdev.train")
SMALL = ("--emb-dim", 4)
SAVED = ("--checkpoint-every", 2, "--resume")


def command(capsys, *arguments):
    """Run hostdev.checkpoint, which must succeed; what it printed."""
    assert cli.run(checkpoint.PROG, checkpoint.main, list(map(str, arguments))) == 0
    return capsys.readouterr().out


def go_on(processes, data, folder, world, steps, *more, M=6):
    flags = flags_of(data, folder, *SMALL, *SAVED, "--max-steps", steps, *more, M=M)
    if world == 1:
        assert cli.run(train.PROG, train.main, flags) == 0
        return
    processes.start_ranks(world, *TRAIN, *flags)
    for process in processes.ended()[-world:]:
        assert process.code == 0, process


def test_saved_by_one_and_gone_on_with_by_two(alone, processes, small_data, tmp_path, capsys):
    folder = tmp_path / "run"
    for world, steps, more in ((1, 3, ()), (2, 8, ("--cache-rows", "10%"))):
        go_on(processes, small_data, folder, world, steps, *more)
    reference = alone(small_data, *SMALL)
    assert (Trained(folder).sha256, Trained(folder).losses) == (reference.sha256, reference.losses)

    saved = newest(folder / "checkpoints").chain
    assert {table.order for table in saved[-1].manifest.tables} == {"spread"}
    told = command(capsys, "verify", folder)
    assert f"state_sha256 {reference.sha256}" in told
    command(capsys, "merge", folder, "--out", tmp_path / "merged")
    assert {table.order for table in newest(tmp_path / "merged").chain[-1].manifest.tables} == {"ids"}
    command(capsys, "reshard", tmp_path / "merged", "--ranks", 5, "--out", tmp_path / "cut")
    cut = newest(tmp_path / "cut").chain[-1].manifest
    assert [len(table.files) for table in cut.tables] == [5] * len(cut.tables)
    for other in ("merged", "cut"):
        assert command(capsys, "diff", folder, tmp_path / other) == "equal\n"
    shutil.copytree(folder / "checkpoints", tmp_path / "compact")
    told = command(capsys, "compact", tmp_path / "compact", "--keep", 1)
    assert "checkpoints merged into one" in told
    assert command(capsys, "diff", folder, tmp_path / "compact") == "equal\n"
    exported = {}
    for name, path in (("spread", folder), ("ids", tmp_path / "merged")):
        command(capsys, "export", path, "--out", tmp_path / f"{name}-out", "--format", "npy", "--slots")
        exported[name] = {file.name: file.read_bytes() for file in (tmp_path / f"{name}-out").glob("*.npy")}
        predicted = ["--checkpoint", path, "--data", small_data, "--out", tmp_path / f"{name}.parquet"]
        assert cli.run(predict.PROG, predict.main, list(map(str, predicted))) == 0
    assert exported["spread"] == exported["ids"] != {}
    assert (tmp_path / "spread.parquet").read_bytes() == (tmp_path / "ids.parquet").read_bytes()
    dense = [torch.load(tmp_path / f"{name}-out" / "dense.pt", weights_only=True) for name in ("spread", "ids")]
    assert all(torch.equal(value, dense[1][key]) for key, value in dense[0].items())


@pytest.mark.slow
def test_saved_by_any_number_and_gone_on_with_by_any_other(alone, processes, small_data, tmp_path):
    reference, predicted = alone(small_data, *SMALL, M=12), {}
    more = {1: (), 2: ("--cache-rows", "10%"), 3: ("--pipeline-depth", 0), 4: ("--cache-rows", "10%")}
    for by in (1, 2, 3):
        folder = tmp_path / f"by{by}"
        go_on(processes, small_data, folder, by, 5, M=12)
        flags = ["--checkpoint", folder, "--data", small_data, "--out", tmp_path / f"{by}.parquet"]
        assert cli.run(predict.PROG, predict.main, list(map(str, flags))) == 0
        predicted[by] = (tmp_path / f"{by}.parquet").read_bytes()
        for world, own in more.items():
            copy = tmp_path / f"by{by}-then{world}"
            shutil.copytree(folder, copy)
            go_on(processes, small_data, copy, world, 8, *own, M=12)
            found = Trained(copy)
            assert (found.sha256, found.losses) == (reference.sha256, reference.losses), (by, world)
    assert predicted[1] == predicted[2] == predicted[3]


@pytest.mark.slow
def test_saved_after_minutes(alone, processes, small_data, tmp_path):
    """Rank 0 decides when; all save the same step."""
    folder = tmp_path / "run"
    minutes = ("--checkpoint-minutes", 0.0005, "--keep-checkpoints", 20)
    processes.start_ranks(3, *TRAIN, *flags_of(small_data, folder, *SMALL, *minutes, "--max-steps", 14))
    assert [process.code for process in processes.ended()] == [0, 0, 0]
    saved = sorted((folder / "checkpoints").glob("step-*"))
    assert len(saved) >= 2  # that of the end among them
    reference = alone(small_data, *SMALL, "--max-steps", 14)
    assert Trained(folder).sha256 == reference.sha256
    for world in (2, 1):
        copy = tmp_path / f"then{world}"
        go_on(processes, small_data, copy, world, 14, "--resume", saved[0])
        assert Trained(copy).sha256 == reference.sha256


@pytest.mark.slow
def test_saved_in_a_loop_of_ones_own(processes, tmp_path):
    """Saved by two processes and by one, in the middle of their loops; resumed by two and by one."""
    options = {"depth": 2}
    wanted = own_loop.train(None, options, saved=saved_loop.Saves(tmp_path / "alone"))
    assert_same([wanted], own_loop.train(None, options))
    processes.start_ranks(2, "-m", "tests.distributed.saved_loop", tmp_path)
    for process in processes.ended():
        assert process.code == 0, process
    parts = [pickle.loads((tmp_path / f"rank{rank}.pickle").read_bytes()) for rank in range(2)]
    since = {"first": saved_loop.FIRST, "last": saved_loop.LAST}
    assert_same([part["saved"] for part in parts], wanted)
    for by in ("together", "alone"):
        for which, path in saved_loop.checkpoints(tmp_path / by).items():
            assert_same([part[by, which] for part in parts], wanted, since=since[which])
            assert_same([own_loop.train(None, options, saved=saved_loop.Loads(path))], wanted, since=since[which])


class Advance:
    """Tell whether a restarted run is several steps past its newest checkpoint, or has ended."""

    def __init__(self, folder, steps):
        self.log = folder / "loss.log"
        saved = max((folder / "checkpoints").glob("step-*"), default=None)
        self.wanted = steps if saved is None else int(saved.name.split("-")[1]) + steps
        self.before = self.written()

    def written(self):
        return self.log.stat().st_mtime_ns if self.log.exists() else 0

    def is_done(self, started):
        if any(process.poll() is not None for process in started):
            return True
        return self.written() != self.before and self.steps() >= self.wanted

    def steps(self):
        return self.log.read_bytes().count(b"\n") if self.log.exists() else 0


@pytest.mark.slow
def test_each_is_killed_at_ten_moments(alone, processes, small_data, tmp_path):
    """Killed during start, rendezvous, a step and a save; then the run finishes."""
    folder, seed = tmp_path / "run", random.randrange(10**6)
    print("seed", seed)
    noise = random.Random(seed)
    more = (*SMALL, "--epochs", 30, "--max-steps", 400)
    flags = flags_of(small_data, folder, *more, *SAVED, "--checkpoint-every", 3, "--cache-rows", "10%")
    kills = [0, 1] * 10
    noise.shuffle(kills)
    for number, rank in enumerate(kills):
        before, advance = len(processes.started), Advance(folder, noise.randint(1, 16))
        started = processes.start_ranks(2, *TRAIN, *flags)
        if number % 4 == 3:
            time.sleep(noise.uniform(0.5, 6))  # they start, or meet
        else:
            wait_until(partial(advance.is_done, started))
            time.sleep(noise.uniform(0, 0.2))
        started[rank].kill()
        codes = [process.code for process in processes.ended()[before:]]
        print("killed", rank, "codes", codes, "steps", advance.steps())
        assert 0 not in codes, f"the run ended before the kill {number}"
    go_on(processes, small_data, folder, 2, 400, *more[2:], "--checkpoint-every", 3, "--cache-rows", "10%")
    reference = alone(small_data, *more)
    assert (Trained(folder).sha256, Trained(folder).losses) == (reference.sha256, reference.losses)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_killed_at_random_moments_and_started_again(alone, processes, small_data, tmp_path, world):
    """Killed five times, also during start, rendezvous and saves; then the run finishes."""
    folder, noise = tmp_path / "run", random.Random(world)
    flags = flags_of(small_data, folder, *SMALL, *SAVED, "--cache-rows", "10%")
    for _ in range(5):
        before = len(processes.started)
        processes.start_ranks(world, *TRAIN, *flags)
        time.sleep(noise.uniform(1, 12))  # a random moment
        processes.started[before + noise.randrange(world)].kill()
        codes = [process.code for process in processes.ended()[before:]]
        assert not any(code == 0 for code in codes) or (folder / "summary.json").exists()
    go_on(processes, small_data, folder, world, 8, "--cache-rows", "10%")
    reference = alone(small_data, *SMALL)
    assert (Trained(folder).sha256, Trained(folder).losses) == (reference.sha256, reference.losses)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("reshard", ".", "--ranks", 0, "--out", "y"), "--ranks must be at least 1, not 0"),
        (("merge", "nowhere", "--out", "y"), "nowhere does not exist"),
    ],
)
def test_refused(arguments, words, capsys):
    assert cli.run(checkpoint.PROG, checkpoint.main, list(map(str, arguments))) == 2
    assert words in capsys.readouterr().err
