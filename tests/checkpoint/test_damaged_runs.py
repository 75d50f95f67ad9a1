"""Resuming from damaged checkpoints: an older one is loaded, or a line gives the reason."""

import re
import shutil

import pytest

from hostdev.checkpoint.manifest import BrokenCheckpointError
from tests.checkpoint.runs import MIX, logs, names, small


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "damaged",
    [
        {-1: "dense.safetensors"},
        {-1: "tables/0/000000.arrow"},  # which is found while it is loaded
        {-1: "tables/1/000000.arrow", -2: "dense.safetensors", -3: "tables/0/000000.arrow"},
    ],
)
def test_the_newest_that_is_whole(trained, small_data, tmp_path, damaged):
    options = [*small(small_data, "run", *MIX), "--checkpoint-every", 4, "--resume"]
    assert trained(*small(small_data, "plain", *MIX))[0] == 0
    assert trained(*options, "--keep-checkpoints", 9, "--max-steps", 15)[0] == 0
    found = tmp_path / "run/checkpoints"
    whole = names(found)
    for number, name in damaged.items():
        content = bytearray((found / whole[number] / name).read_bytes())
        content[-1 if name.endswith("tensors") else len(content) // 2] ^= 1
        (found / whole[number] / name).write_bytes(content)
    code, printed, _ = trained(*options)
    assert code == 0
    older = whole[min(damaged) - 1]
    for number, name in damaged.items():
        line = rf"{whole[number]}/{name} is broken \(its checksum is wrong\); using an older one: .*/{older}\n"
        assert re.search(line, printed)
    assert f"{older}, after step {int(older[5:])}\n" in printed
    assert logs(tmp_path / "run") == logs(tmp_path / "plain")


def test_they_are_gone_while_one_is_loaded(trained, small_data, tmp_path, monkeypatch):
    """It is an error, and no run starts from scratch with partially loaded rows."""
    options = [*small(small_data, "run", *MIX), "--checkpoint-every", 4]
    assert trained(*options, "--max-steps", 9)[0] == 0
    (tmp_path / "run/summary.json").unlink()  # as after a kill

    def gone(*arguments, **named):
        shutil.rmtree(tmp_path / "run/checkpoints", ignore_errors=True)
        raise BrokenCheckpointError("its rows are gone")

    monkeypatch.setattr("hostdev.train.trainer.load_tables", gone)
    code, _, error = trained(*options, "--resume")
    told = "no checkpoint in run/checkpoints is valid; the newest: its rows are gone"
    assert (code, error) == (2, f"hostdev.train: error: {told}\n")


def test_none_is_whole(trained, small_data, tmp_path):
    """The error is one line; the run's files stay, and a run that did not start leaves none."""
    options = [*small(small_data, "run", *MIX), "--checkpoint-every", 4]
    assert trained(*options, "--max-steps", 9)[0] == 0
    for file in (tmp_path / "run/checkpoints").rglob("tables/1/*.arrow"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    (tmp_path / "run/ops.log.1").write_text("x" * 70_000)  # of a higher --ops-log
    (tmp_path / "other").mkdir()
    there = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for more in ([*options, "--ops-log", "64KiB", "--resume"], [*small(small_data, "other", *MIX), "--resume", "run"]):
        code, printed, error = trained(*more)
        assert (code, error.count("\n")) == (2, 1)
        assert re.search(
            r"no checkpoint in run(/checkpoints)? is valid; the newest: .* is broken \(its checksum is wrong\)", error
        )
        assert "epoch" not in printed
        assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == there
    assert list((tmp_path / "other").iterdir()) == []
