"""Checkpoints of several processes: gone on with by any number of them, merged, cut anew, and read by one."""

import random
import time

import pytest
import torch

from hostdev.checkpoint import __main__ as checkpoint
from hostdev.checkpoint.folder import newest
from hostdev.core import cli
from hostdev.predict import __main__ as predict
from tests.parallel.conftest import Trained, flags_of

TRAIN = ("-m", "hostdev.train")
SMALL = ("--emb-dim", 4)
SAVED = ("--checkpoint-every", 2, "--resume")


def command(capsys, *arguments):
    """Run hostdev.checkpoint, which must succeed; what it printed."""
    assert cli.run(checkpoint.PROG, checkpoint.main, list(map(str, arguments))) == 0
    return capsys.readouterr().out


def go_on(processes, data, folder, world, steps, *more):
    processes.start_ranks(world, *TRAIN, *flags_of(data, folder, *SMALL, *SAVED, "--max-steps", steps, *more))
    for process in processes.ended()[-world:]:
        assert process.code == 0, process


def test_saved_by_two_and_gone_on_with_by_one_and_by_three(alone, processes, small_data, tmp_path, capsys):
    folder = tmp_path / "run"
    for world, steps, more in ((2, 3, ()), (1, 5, ()), (3, 8, ("--cache-rows", "10%"))):
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
@pytest.mark.parametrize("world", [2, 3])
def test_killed_at_random_moments_and_started_again(alone, processes, small_data, tmp_path, world):
    """Five times one is killed, also while it starts, meets the others, or saves; then the run comes to its end."""
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
        (("reshard", "x", "--ranks", 0, "--out", "y"), "--ranks must be at least 1, not 0"),
        (("merge", "nowhere", "--out", "y"), "there is no nowhere"),
    ],
)
def test_refused(arguments, words, capsys):
    assert cli.run(checkpoint.PROG, checkpoint.main, list(map(str, arguments))) == 2
    assert words in capsys.readouterr().err
