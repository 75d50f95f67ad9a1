"""`python -m hostdev.train --checkpoint-every N --resume`: one command that is repeated after any end, and its bits."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch

from hostdev.checkpoint import folder
from hostdev.checkpoint.ranges import HashedFile
from hostdev.core import cli, outputs
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.checkpoints import cli as checkpoint
from hostdev.ext.training import cli as train
from hostdev.train import checkpointing
from tests import forks
from tests.checkpoint.runs import MIX, leftovers, logs, names, small
from tests.conftest import environment

CACHE = [*MIX, "--cache-rows", "10%"]
OWN = ["--model", "tests.own_models:ThreeTables"]


@pytest.fixture(scope="module")
def plain(small_data, tmp_path_factory):
    """Return the logs of a run on a device from start to end, without checkpoints. It is trained once."""
    done = {}

    def train_plain(name="cpu"):
        if name not in done:
            run = tmp_path_factory.mktemp("plain") / "run"
            options = small(small_data, run, *MIX)
            options[options.index("--device") + 1] = name
            assert cli.run(train.PROG, train.main, list(map(str, options))) == 0
            done[name] = logs(run)
        return done[name]

    return train_plain


@pytest.mark.drawn
@pytest.mark.parametrize(
    ("steps", "then"),
    [
        (3, MIX),
        pytest.param(
            8,
            [*MIX, "--pipeline-depth", 0, "--host-threads", 1],  # the end of the first epoch
            marks=pytest.mark.slow_on_standin,
        ),
        (11, CACHE),
        (16, []),  # all on the device; nothing is left to train
    ],
)
def test_a_run_goes_on_in_any_mode(device, trained, plain, small_data, tmp_path, steps, then):
    expected = plain(device.type)
    code, printed, _ = trained(
        *small(small_data, "run", *CACHE, "--checkpoint-every", 2, "--resume", "--max-steps", steps, device=device)
    )
    assert code == 0
    assert "there is no checkpoint in run/checkpoints yet: the run begins at step 0" in printed
    assert f"the last after step {steps}" in printed
    code, printed, error = trained(*small(small_data, "run", *then, "--resume", device=device))
    assert (code, error) == (0, "")
    assert f"resume   run/checkpoints/{names(tmp_path / 'run/checkpoints')[-1]}, after step {steps}" in printed
    assert logs(tmp_path / "run") == expected


@pytest.mark.slow_on_standin
@pytest.mark.parametrize(
    ("slots", "name"), [pytest.param("bfloat16", "bf16", marks=pytest.mark.slow), ("8bit", "8bit")]
)
def test_rounded_weights_and_slots_go_on_in_any_mode(device, trained, small_data, tmp_path, capsys, slots, name):
    """Checkpoints are exact and name their settings; those of host and of device tables are equal."""
    stored = "--table-dtype", "bf16", "--table-slots", slots
    options = lambda name, *more: small(small_data, name, *stored, *more, device=device)  # noqa: E731
    code, printed, _ = trained(*options("plain", *MIX, "--checkpoint-every", 5))
    assert code == 0
    assert f"4 (LazyAdam, bf16, {name} slots)" in printed
    assert trained(*options("run", *CACHE, "--checkpoint-every", 2, "--max-steps", 9))[0] == 0
    assert trained(*options("run", "--checkpoint-every", 2, "--max-steps", 13, "--resume"))[0] == 0  # on the device
    assert trained(*options("run", *MIX, "--pipeline-depth", 0, "--checkpoint-every", 3, "--resume"))[0] == 0
    assert logs(tmp_path / "run") == logs(tmp_path / "plain")
    for command, told in (
        (["diff", "run/checkpoints", "plain/checkpoints"], "equal\n"),
        (["verify", "run/checkpoints"], ": intact"),
        (["info", "run/checkpoints"], f"weights bf16, slots {name}"),
        (["compact", "run/checkpoints"], ""),
    ):
        assert cli.run(checkpoint.PROG, checkpoint.main, command) == 0
        assert told in capsys.readouterr().out
    assert trained(*options("run", *MIX, "--resume"))[0] == 0  # from the compacted one
    assert logs(tmp_path / "run") == logs(tmp_path / "plain")


def test_three_groups_with_bags_and_early_stop(trained, films, tmp_path):
    model = [*OWN, "--early-stop", 1]
    options = ["--data", films, "--batch-size", 200, "--epochs", 6, "--device", "cpu", *model]
    assert trained(*options, *MIX, "--run-dir", "plain")[0] == 0
    assert trained(*options, *CACHE, "--run-dir", "run", "--checkpoint-every", 4, "--max-steps", 7)[0] == 0
    assert trained(*options, *CACHE, "--run-dir", "run", "--checkpoint-every", 4, "--max-steps", 9, "--resume")[0] == 0
    assert trained(*options, *MIX, "--run-dir", "run", "--resume")[0] == 0
    assert logs(tmp_path / "run") == logs(tmp_path / "plain")


@pytest.mark.slow_on_standin
def test_dropout_is_seeded_and_goes_on(device, trained, small_data, tmp_path, capsys):
    """Two fresh runs equal one that was killed within an epoch, and their checkpoints agree."""
    options = lambda name: [*small(small_data, name, *CACHE, "--model", "tests.own_models:Dropout", device=device)]  # noqa: E731
    save = ["--checkpoint-every", 5]
    for name in ("plain", "again"):
        torch.rand(7)  # somebody else's draws
        assert trained(*options(name), *save)[0] == 0
    assert logs(tmp_path / "again") == logs(tmp_path / "plain")
    assert trained(*options("run"), *save, "--max-steps", 13)[0] == 0
    torch.rand(7)
    assert trained(*options("run"), *save, "--resume")[0] == 0
    assert logs(tmp_path / "run") == logs(tmp_path / "plain")
    assert trained(*options("other"), "--seed", 1)[0] == 0
    assert logs(tmp_path / "other") != logs(tmp_path / "plain")
    for name in ("again", "run"):
        diff = ["diff", f"{name}/checkpoints", "plain/checkpoints"]
        assert cli.run(checkpoint.PROG, checkpoint.main, diff) == 0
        assert capsys.readouterr().out == "equal\n"


def test_rows_mixed_over_shards_go_on(trained, plain, small_data, tmp_path):
    window = [*MIX, "--shuffle-window", 2]
    assert trained(*small(small_data, "plain", *window))[0] == 0
    assert trained(*small(small_data, "run", *window), "--checkpoint-every", 6, "--max-steps", 6)[0] == 0
    assert trained(*small(small_data, "run", *window), "--resume")[0] == 0
    assert logs(tmp_path / "run") == logs(tmp_path / "plain")
    assert plain() != logs(tmp_path / "plain")


def test_a_named_checkpoint_and_a_folder_of_its_own(trained, small_data, tmp_path):
    options = small(small_data, "plain", *MIX)
    assert trained(*options, "--checkpoint-every", 5, "--checkpoint-dir", "all", "--keep-checkpoints", 9)[0] == 0
    assert names(tmp_path / "all") == [f"step-00000000{n}" for n in ("05", "10", "15", "16")]
    expected = logs(tmp_path / "plain")
    for name in ("step-0000000005", "step-0000000015"):
        assert trained(*small(small_data, name, *MIX), "--resume", f"all/{name}")[0] == 0
        assert logs(tmp_path / name) == expected
    assert trained(*small(small_data, "longer", *MIX, "--epochs", 3), "--resume", "all")[0] == 0
    assert trained(*small(small_data, "plain3", *MIX, "--epochs", 3))[0] == 0
    assert logs(tmp_path / "longer") == logs(tmp_path / "plain3")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume without a folder looks for checkpoints in --checkpoint-dir or --run-dir"),
        (["--resume", "nowhere"], "--resume nowhere: there is no such checkpoint"),
        (["--keep-checkpoints", 2], "--keep-checkpoints has no effect without --checkpoint-every"),
        (["--checkpoint-dir", "x"], "--checkpoint-dir has no effect without --checkpoint-every"),
        (["--checkpoint-every", 0], "--checkpoint-every must be at least 1, not 0"),
        (["--checkpoint-minutes", "nan"], "--checkpoint-minutes must be a number above 0, not nan"),
        (["--checkpoint-every", 1, "--keep-checkpoints", 0], "--keep-checkpoints must be at least 1, not 0"),
    ],
)
def test_wrong_options(trained, small_data, options, message):
    code, _, error = trained("--data", small_data, "--batch-size", 500, *options)
    assert (code, error.count("\n")) == (2, 1)
    assert message in error


def test_a_run_directory_stands_for_its_checkpoints(trained, small_data, tmp_path):
    options = [*small(small_data, "run", *MIX), "--checkpoint-every", 5, "--max-steps"]
    assert trained(*options, 5)[0] == 0
    code, printed, _ = trained(*small(small_data, "other", *MIX, "--resume", "run", "--max-steps", 7))
    assert code == 0
    assert "resume   run/checkpoints/step-0000000005.2, after step 5\n" in printed
    code, _, error = trained(*options, 7)
    assert code == 2
    assert error.endswith(
        "run already holds a run (loss.log); choose another --run-dir, or resume that run with --resume\n"
    )
    code, _, error = trained(*small(small_data, "other", *MIX))
    assert error.endswith("other already holds a run (loss.log); choose another --run-dir\n")


def test_options_are_compared_by_what_they_come_to(trained, small_data, tmp_path):
    """The model's own sizes and rates may be given explicitly, or no longer."""
    options = ["--data", small_data, "--device", "cpu", "--batch-size", 500, "--model", "deepfm", *MIX]
    options += ["--run-dir", "run", "--checkpoint-every", 9, "--resume", "--max-steps"]
    assert trained(*options, 1)[0] == 0
    named = ["--emb-dim", 10, "--lr", "1e-3", "--table-lr", "1e-3", "--table-optimizer", "lazy_adam"]
    assert trained(*options, 2, *named)[0] == 0
    assert trained(*options, 3)[0] == 0
    for name, value in (("--emb-dim", 9), ("--lr", 0.1), ("--table-lr", 0.2), ("--table-optimizer", "sgd")):
        code, _, error = trained(*options, 4, name, value)
        assert (code, error.count("\n")) == (2, 1)
        assert f"was trained with no {name}, not {name} {value};" in error


def test_a_finished_run_that_is_gone_on_with_saves_nothing(trained, small_data, tmp_path):
    options = [*small(small_data, "run", *MIX), "--checkpoint-every", 5, "--resume"]
    _, first, _ = trained(*options)
    before = names(tmp_path / "run/checkpoints")
    assert before[-1] == "step-0000000016"
    for more in ([], ["--checkpoint-minutes", 60]):
        (tmp_path / "run/checkpoints/.partial-step-0000000016.2").mkdir()  # of a merging that was killed
        code, printed, error = trained(*options, *more)
        assert (code, error) == (0, "")
        assert leftovers(tmp_path / "run/checkpoints") == []
        assert names(tmp_path / "run/checkpoints") == before
        assert "0 saved in run/checkpoints, the last after step 16;" in printed
        assert "calls     mean us" in first
        assert "calls     mean us" not in printed
        assert [line for line in printed.splitlines() if line.startswith(("best", "state_sha256"))] == [
            line for line in first.splitlines() if line.startswith(("best", "state_sha256"))
        ]
    assert trained(*small(small_data, "third", *MIX), "--checkpoint-every", 5, "--resume", "run")[0] == 0
    assert names(tmp_path / "third/checkpoints") == ["step-0000000016"]  # of another folder, so it is saved


def test_another_model_or_data_set_is_refused(trained, small_data, own_data, tmp_path):
    options = small(small_data, "run", *MIX)
    assert trained(*options, "--checkpoint-every", 5, "--max-steps", 5)[0] == 0
    before = (tmp_path / "run/loss.log").read_text()
    for more, message in (
        (["--emb-dim", 8], "was trained with --emb-dim 4, not --emb-dim 8"),
        (["--table-dtype", "bf16"], "was trained with --table-dtype fp32, not --table-dtype bf16"),
        (["--table-slots", "bf16"], "was trained with --table-slots fp32, not --table-slots bf16"),
        (["--seed", 1], "was trained with --seed 2020, not --seed 1"),
        (["--shuffle-window", 2], "was trained with --shuffle-window 1, not --shuffle-window 2"),
        (["--table-lr", 0.5], "was trained with no --table-lr, not --table-lr 0.5"),
        (["--model", "deepfm"], "was trained with --model wide_deep, not --model deepfm"),
        (["--data", own_data], "was trained on a data set other than"),
        (["--max-steps", 4], "was saved after step 5, and this run ends after step 4"),
    ):
        code, _, error = trained(*options, "--resume", *more)
        assert (code, error.count("\n")) == (2, 1)
        assert message in error
    assert (tmp_path / "run/loss.log").read_text() == before


def test_a_run_without_checkpoints_is_not_overwritten(trained, small_data, tmp_path):
    options = small(small_data, "run", *MIX)
    assert trained(*options)[0] == 0
    before = (tmp_path / "run/loss.log").read_text()
    code, _, error = trained(*options, "--resume")
    assert (code, error.count("\n")) == (2, 1)
    assert "--run-dir run holds a finished run, but no checkpoint to resume from" in error
    (tmp_path / "run/summary.json").unlink()
    code, _, error = trained(*options, "--resume", "--seed", 1)
    assert code == 2
    assert "--run-dir run holds another run" in error
    assert (tmp_path / "run/loss.log").read_text() == before
    code, printed, _ = trained(*options, "--resume")  # it was killed before its first checkpoint
    assert code == 0
    assert "the run begins at step 0" in printed
    assert (tmp_path / "run/loss.log").read_text() == before


@pytest.mark.parametrize("name", ["eval.log", "ops.log", "config.json", "summary.json"])
def test_a_full_disk_under_the_run_directory_is_named(trained, small_data, tmp_path, monkeypatch, name):
    (tmp_path / "run").mkdir()
    if name.endswith(".log"):
        (tmp_path / "run" / name).symlink_to("/dev/full")
    else:  # written to a hidden file with random digits first

        def beside(path, digits=outputs._add_digits):
            if path.name.startswith(f".{name}."):
                path.symlink_to("/dev/full")
                return path
            return digits(path)

        monkeypatch.setattr(outputs, "_add_digits", beside)
    code, _, error = trained(*small(small_data, "run", *MIX, "--max-steps", 2))
    assert (code, error) == (2, "hostdev.train: error: run: No space left on device\n")


def test_a_run_directory_that_is_removed_meanwhile(trained, small_data, tmp_path, monkeypatch):
    look = checkpointing.CheckpointSchedule.is_due

    def is_due(self, step):
        if step == 7:
            shutil.rmtree("run")
        return look(self, step)

    monkeypatch.setattr(checkpointing.CheckpointSchedule, "is_due", is_due)
    save = ["--checkpoint-every", 100, "--checkpoint-dir", "saved"]
    code, printed, error = trained(*small(small_data, "run", *MIX, *save))
    assert (code, error) == (0, "")
    assert printed.endswith(
        "files          run/: summary.json, curve.png\n"
        "               removed during the run: loss.log, eval.log, ops.log, config.json\n"
    )


class FullDisk:
    """Limits the bytes that can be written from now on."""

    def __init__(self, monkeypatch):
        self.left = 1 << 40
        write = HashedFile.write

        def limited(file, data):
            self.left -= len(memoryview(data).cast("B"))
            if self.left < 0:
                raise OSError(28, "No space left on device")
            return write(file, data)

        monkeypatch.setattr(HashedFile, "write", limited)


def test_a_full_disk_does_not_end_the_training(trained, plain, small_data, tmp_path, monkeypatch):
    expected = plain()
    disk = FullDisk(monkeypatch)
    look = checkpointing.CheckpointSchedule.is_due

    def is_due(self, step):
        self.manager.join()
        disk.left = 1 << 40 if step <= 4 or step >= 14 else 1000
        return look(self, step)

    monkeypatch.setattr(checkpointing.CheckpointSchedule, "is_due", is_due)
    code, printed, error = trained(*small(small_data, "run", *MIX), "--checkpoint-every", 2)
    assert code == 0
    assert error.count("warning: the checkpoint of step 6 was not saved: run/checkpoints: No space left on device") == 1
    assert error.count("warning") == 1
    assert "the checkpoint of step 14 was saved" in error
    assert "; 4 not saved" in printed
    assert logs(tmp_path / "run") == expected
    assert leftovers(tmp_path / "run/checkpoints") == []


def test_the_exit_code_where_the_last_one_was_not_saved(trained, small_data, tmp_path, monkeypatch):
    disk = FullDisk(monkeypatch)
    disk.left = 1000
    code, printed, error = trained(*small(small_data, "run", *MIX), "--checkpoint-every", 6)
    assert code == 3
    assert error.splitlines()[-1].startswith("hostdev.train: error: the last checkpoint was not saved: run/checkpoints")
    assert error.splitlines()[-1].endswith("; there is no earlier checkpoint")
    assert "state_sha256" in printed
    assert names(tmp_path / "run/checkpoints") == []


def test_a_folder_that_is_removed_or_a_file(trained, small_data, tmp_path, monkeypatch):
    look = checkpointing.CheckpointSchedule.is_due

    def is_due(self, step):
        if step == 7:
            self.manager.join()
            shutil.rmtree("run/checkpoints")
        return look(self, step)

    monkeypatch.setattr(checkpointing.CheckpointSchedule, "is_due", is_due)
    code, _, error = trained(*small(small_data, "run", *MIX), "--checkpoint-every", 5)
    assert code == 0
    assert error.count("warning") == 1
    assert "step-0000000005 was removed, so the checkpoint of step 10 is saved with all rows" in error
    assert folder.read_chain(tmp_path / "run/checkpoints/step-0000000010")
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    code, _, error = trained(*small(small_data, "other", *MIX), "--checkpoint-every", 5, "--checkpoint-dir", "file")
    assert code == 3
    assert error.startswith("warning: checkpoints cannot be saved: file cannot be created: File exists; training")


def started(tmp_path, *options, module="hostdev.train"):
    return forks.Popen(
        [sys.executable, "-m", module, *map(str, options)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def await_steps(process, log, count):
    deadline = time.monotonic() + 120
    while not (log.exists() and log.read_text().count("\n") >= count):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow), (signal.SIGINT, 130)]
)
def test_a_signal_saves_what_was_trained(tmp_path, number, code):
    make = ["synthetic", "--rows", "18000", "--out", str(tmp_path / "data")]
    assert cli.run(preprocess.PROG, preprocess.main, make) == 0
    options = small("data", "run", *CACHE, "--checkpoint-every", 1000, "--resume", "--epochs", 1000)
    process = started(tmp_path, *options)
    await_steps(process, tmp_path / "run/loss.log", 3)
    process.send_signal(number)
    _, error = process.communicate(timeout=30)
    assert process.returncode == code
    (line,) = error.splitlines()
    [name] = names(tmp_path / "run/checkpoints")
    steps = int(name.removeprefix("step-"))
    assert line == f"hostdev.train: interrupted; {steps} steps are saved; continue with --resume run/checkpoints/{name}"
    assert (tmp_path / "run/loss.log").read_text().count("\n") == steps
    assert cli.run(checkpoint.PROG, checkpoint.main, ["verify", str(tmp_path / "run/checkpoints")]) == 0


@pytest.mark.slow
def test_a_second_signal_ends_at_once_and_leaves_what_was_whole(tmp_path, command):
    """The first signal requests a checkpoint that takes long."""
    command("hostdev.data.preprocess", "synthetic", "--rows", 18_000, "--out", "data")
    (tmp_path / "slow.py").write_text(
        "import sys, time\n"
        "from hostdev.checkpoint.ranges import HashedFile\n"
        "from hostdev.checkpoint import manager\n"
        "from hostdev.core import cli\n"
        "from hostdev.ext.training import cli as train\n"
        "write, begun = HashedFile.write, []\n"
        "def slow(self, data):\n"
        "    if manager.CheckpointManager.slow: print('writing', flush=True); time.sleep(60)\n"
        "    return write(self, data)\n"
        "HashedFile.write = slow\n"
        "save = manager.CheckpointManager.save\n"
        "def noted(self, tables, step, *rest, **more):\n"
        "    manager.CheckpointManager.slow = step > 2\n"
        "    return save(self, tables, step, *rest, **more)\n"
        "manager.CheckpointManager.save, manager.CheckpointManager.slow = noted, False\n"
        "raise SystemExit(cli.run(train.PROG, train.main))\n"
    )
    options = small("data", "run", *MIX, "--checkpoint-every", 2, "--epochs", 1000)
    process = forks.Popen(
        [sys.executable, "slow.py", *map(str, options)],
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "writing" not in process.stdout.readline():  # two threads print
        assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=10)
    assert process.returncode == 130
    (line,) = error.splitlines()
    assert line.startswith("interrupted in the middle of a step; ")
    assert line.endswith(" in the logs in run; continue with --resume run/checkpoints/step-0000000002")
    assert names(tmp_path / "run/checkpoints") == ["step-0000000002"]
    assert command("hostdev.checkpoint", "verify", "run/checkpoints").returncode == 0
    assert json.loads((tmp_path / "run/summary.json").read_text())["status"] == "interrupted"


def kill_and_go_on(tmp_path, kills, seed, *options):
    """Kill the command, and a merge of its checkpoints, with SIGKILL at random moments; repeat it until it ends."""
    rng = random.Random(seed)
    start = time.monotonic()
    process = started(tmp_path, *options, "--run-dir", "whole")
    process.communicate(timeout=300)
    assert process.returncode == 0
    whole = time.monotonic() - start
    for _ in range(kills):
        process = started(tmp_path, *options, "--run-dir", "killed", "--checkpoint-every", 1, "--resume")
        try:
            process.communicate(timeout=rng.uniform(0.3, 1.0) * whole)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        if rng.random() < 0.5 and names(tmp_path / "killed/checkpoints"):
            process = started(tmp_path, "compact", "killed/checkpoints", module="hostdev.checkpoint")
            try:
                process.communicate(timeout=rng.uniform(0.5, 3))
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
    process = started(tmp_path, *options, "--run-dir", "killed", "--checkpoint-every", 1, "--resume")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert logs(tmp_path / "killed") == logs(tmp_path / "whole")
    assert leftovers(tmp_path / "killed/checkpoints") == []


def test_killed_and_gone_on(tmp_path, small_data):
    options = ["--data", small_data, "--device", "cpu", "--batch-size", 500, "--emb-dim", 4, "--epochs", 2, *CACHE]
    kill_and_go_on(tmp_path, 1, 1, *options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_at_30_random_moments(tmp_path, small_data, films, seed):
    data, model = (small_data, []) if seed == 0 else (films, OWN)
    options = ["--data", data, "--device", "cpu", "--batch-size", 100, "--emb-dim", 4, "--epochs", 3, *CACHE, *model]
    kill_and_go_on(tmp_path, 15, seed, *options)
