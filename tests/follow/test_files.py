"""What `hostdev train --follow` does with files: which it takes, sets aside, waits for, and misses."""

import errno
import json
import os
import shutil
import tempfile
import threading
import time

import numpy as np
import pyarrow.csv
import pyarrow.parquet

from hostdev.ext.training import cli as train
from tests.conftest import digest_of
from tests.follow.arriving import (
    DAYS,
    END,
    MODEL,
    NAMES,
    QUICK,
    ROWS,
    RULES,
    await_file,
    day,
    lines,
    start,
    write,
)


def test_files_that_are_set_aside(in_process, example, arrived, table, tmp_path):
    folder = tmp_path / "in"
    shutil.copytree(arrived, folder)
    (folder / "day2.empty.csv").touch()
    (folder / "day2.header.csv").write_bytes((arrived / "day1.csv").read_bytes().split(b"\n")[0] + b"\n")
    (folder / "day3.cut.parquet").write_bytes((arrived / "day2.parquet").read_bytes()[:-500])
    (folder / "day3.again.csv").write_bytes((arrived / "day1.csv").read_bytes())
    write(folder / "day4.columns.csv", day(table, 0).drop_columns(["item"]))
    labels = pyarrow.array(["perhaps"] * ROWS)
    write(folder / "day4.labels.csv", day(table, 0).set_column(5, "clicked", labels))
    dates = pyarrow.array(np.arange(ROWS).astype("datetime64[D]"))
    write(folder / "day4.types.parquet", day(table, 0).set_column(2, "user", dates))
    (folder / "zzz.md").write_text("no table\n")  # it sorts last, which makes no later file late
    (folder / "_hidden.csv").write_text("x")
    (folder / "day9.csv.partial").write_text("x")
    (folder / "sub").mkdir()
    every = ["--follow", "in", "--data", example, *MODEL, *RULES, *QUICK, "--run-dir", "run", "--checkpoint-every", 3]
    code, _, error = in_process(train, *every, "--follow-until", "day5.parquet")
    assert code == 0, error
    assert "has sub-folders, which are not followed" in error
    shutil.copy(arrived / "day1.csv", folder / "day0.csv")
    code, _, error = in_process(train, *every, "--follow-until", "end", "--resume")
    assert code == 0, error
    found = {line["file"]: line["why"] for line in lines(tmp_path / "run", "set_aside.jsonl")}
    assert found == {
        "day0.csv": "late",
        "day2.empty.csv": "empty",
        "day2.header.csv": "empty",
        "day3.again.csv": "repeated",
        "day3.cut.parquet": "refused",
        "day4.columns.csv": "refused",
        "day4.labels.csv": "refused",
        "day4.types.parquet": "refused",
        "zzz.md": "refused",
    }
    reasons = {line["file"]: line["reason"] for line in lines(tmp_path / "run", "set_aside.jsonl")}
    assert "day1.csv" in reasons["day3.again.csv"] and "day5.parquet" in reasons["day0.csv"]
    assert "no column 'item'" in reasons["day4.columns.csv"] and "'clicked'" in reasons["day4.labels.csv"]
    assert "'user'" in reasons["day4.types.parquet"]
    assert [line["file"] for line in lines(tmp_path / "run")] == NAMES
    assert sorted(folder.iterdir()) == sorted({*folder.iterdir()} | {folder / name for name in found})  # not moved


def test_a_growing_file_is_not_taken(run, example, arrived, whole, tmp_path):
    """Files that are written in place, and not renamed, have to be left alone until they do not change any more."""
    folder = tmp_path / "in"
    shutil.copytree(arrived, folder)
    content = (folder / NAMES[0]).read_bytes()
    (folder / NAMES[0]).write_bytes(content[:2000])

    def grow():
        for at in range(2000, len(content), 2000):
            time.sleep(0.08)
            with (folder / NAMES[0]).open("ab") as file:
                file.write(content[at : at + 2000])

    writer = threading.Thread(target=grow)
    writer.start()
    every = ["--data", example, *MODEL, *RULES, "--follow-until", "end", "--follow-poll", 0.3]
    run(train, "--follow", "in", *every, "--run-dir", "run")
    writer.join()
    assert digest_of(tmp_path / "run") == digest_of(whole)


def test_marked_folders(run, example, arrived, whole, tmp_path):
    """Sub-folders count once they have their mark, at any depth, and their files in order."""
    for number, name in enumerate(NAMES):
        sub = tmp_path / "in" / "2026" / f"hour={number // 2}"
        sub.mkdir(parents=True, exist_ok=True)
        shutil.copy(arrived / name, sub / name)
        (sub / "_SUCCESS").touch()
    unmarked = tmp_path / "in" / "2026" / "hour=9"
    unmarked.mkdir()
    shutil.copy(arrived / NAMES[0], unmarked / "x.csv")
    shutil.copy(arrived / NAMES[0], tmp_path / "in" / "x.csv")
    every = ["--data", example, *MODEL, *RULES, *END, "--follow-mark", "_SUCCESS"]
    run(train, "--follow", "in", *every, "--run-dir", "run")
    assert digest_of(tmp_path / "run") == digest_of(whole)
    assert [line["file"] for line in lines(tmp_path / "run")][-1] == f"2026/hour=2/{NAMES[-1]}"


def test_a_file_that_is_needed_again_is_gone(in_process, example, arrived, tmp_path):
    every = ["--data", example, *MODEL, *RULES, "--checkpoint-every", 1, "--run-dir", "run"]
    shutil.copytree(arrived, tmp_path / "in")
    assert in_process(train, "--follow", "in", *every, "--max-steps", 2, *END)[0] == 0
    (tmp_path / "in" / NAMES[0]).unlink()  # trained on in whole: not needed any more
    (tmp_path / "in" / NAMES[1]).rename(tmp_path / "kept")
    code, _, error = in_process(train, "--follow", "in", *every, *END, "--resume")
    assert code == 2 and len(error.splitlines()) == 1
    assert NAMES[1] in error and "is gone" in error and "--start-from" in error
    write(tmp_path / "in" / NAMES[1], pyarrow.parquet.read_table(tmp_path / "kept").slice(1))
    code, _, error = in_process(train, "--follow", "in", *every, *END, "--resume")
    assert code == 2 and "has changed" in error
    (tmp_path / "kept").rename(tmp_path / "in" / NAMES[1])
    assert in_process(train, "--follow", "in", *every, *END, "--resume")[0] == 0
    assert [line["file"] for line in lines(tmp_path / "run")] == NAMES


def test_a_full_disk(in_process, run, example, arrived, whole, tmp_path, monkeypatch):
    """The run ends with a line, and goes on from its last checkpoint once there is room."""
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--run-dir", "run", "--checkpoint-every", 2]
    room = iter([True] * 3 + [False] * 99)
    make = tempfile.TemporaryFile

    def make_file(**options):
        if not next(room):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", make_file)
    code, _, error = in_process(train, *every)
    assert code == 2 and len(error.splitlines()) == 1
    assert "No space left" in error and "--resume" in error
    assert lines(tmp_path / "run", "set_aside.jsonl") == []
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    run(train, *every, "--resume")
    assert digest_of(tmp_path / "run") == digest_of(whole)
    needed = json.loads((tmp_path / "run" / "needed.json").read_text())
    assert needed == {"step": 10, "needed": [], "last": NAMES[-1], "taken": DAYS}


def test_a_name_that_is_no_text(example, arrived, whole, tmp_path):
    """Names may be any bytes, in the logs, in messages and in checkpoints."""
    (tmp_path / "in").mkdir()
    for name in NAMES:
        shutil.copy(arrived / name, tmp_path / "in" / os.fsdecode(name.encode().replace(b".", b"\xff.", 1)))
    shutil.copy(arrived / NAMES[0], tmp_path / "in" / os.fsdecode(b"day9\xfe.csv"))
    every = ["--follow", "in", "--data", example, *MODEL, *RULES, *END, "--run-dir", "run", "--checkpoint-every", 1]
    for more in (["--max-steps", 4], ["--resume"]):
        with start(tmp_path, *every, *more) as process:
            _, error = process.communicate(timeout=200)
        assert process.returncode == 0, error
    assert digest_of(tmp_path / "run") == digest_of(whole)
    [line] = lines(tmp_path / "run", "set_aside.jsonl")
    assert os.fsencode(line["file"]) == b"day9\xfe.csv" and line["why"] == "repeated"


def test_a_folder_that_cannot_be_listed_for_a_while(run, example, arrived, whole, tmp_path):
    shutil.copytree(arrived, tmp_path / "in")

    def hide():
        await_file(tmp_path / "run" / "files.jsonl")
        (tmp_path / "in").rename(tmp_path / "away")
        time.sleep(1)
        (tmp_path / "away").rename(tmp_path / "in")

    mover = threading.Thread(target=hide)
    mover.start()
    until = ["--follow-until", NAMES[-1], *QUICK]
    run(train, "--follow", "in", "--data", example, *MODEL, *RULES, *until, "--run-dir", "run")
    mover.join()
    assert digest_of(tmp_path / "run") == digest_of(whole)
