"""`hostdev train --follow`: files that arrive, in any tempo and between kills, train the same bits as all at once."""

import json
import shutil
import threading
import time

import numpy as np
import pytest

from hostdev.commands import train
from hostdev.data.preprocess import cli as preprocess
from tests.conftest import digest_of
from tests.data import movies
from tests.follow.arriving import (
    COLUMNS,
    DAYS,
    END,
    MODEL,
    NAMES,
    QUICK,
    RULES,
    Feeder,
    drop_newest,
    killed,
    lines,
    without_times,
    write,
)


def test_a_replay_equals_preparing_and_training(run, example, arrived, whole, tmp_path):
    run(preprocess, "table", arrived, "--out", "all", *COLUMNS, "--vocabulary", example, "--test-fraction", 0)
    stored = ["--tables", "dynamic", "--host-device-mix", "--order", "stored", "--epochs", 1]
    run(train, "--data", "all", *MODEL, *RULES, *stored, "--run-dir", "stored")
    assert digest_of(whole) == digest_of(tmp_path / "stored")
    assert (whole / "loss.log").read_text() == (tmp_path / "stored" / "loss.log").read_text()
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["files"]["taken"] == DAYS and summary["files"]["waiting_rows"] == 0
    assert [line["file"] for line in lines(whole)] == NAMES
    assert [line["step"] for line in lines(whole)] == [500 * number // 300 for number in range(DAYS)]


def test_bags_weights_and_several_labels(run, tmp_path):
    """Whatever a data set has, a file that arrives has."""
    made = movies.make(rows=900, users=80, items=60).write_csv(tmp_path / "films.csv")
    header, *rows = made.read_text().splitlines()
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.csv").write_text(
            "\n".join([header, *rows[300 * number : 300 * number + 300]]) + "\n"
        )
    flags = ["--label", "liked", "--numeric", "age", "--categorical", "user,item", "--bag", "genres=|"]
    flags += ["--bag", "history= ", "--share", "history=item", "--last", "history=5"]
    run(preprocess, "table", "in/0.csv", "--out", "example", *flags, "--ids", "raw", "--dense", "log")
    run(preprocess, "table", "in", "--out", "all", "--vocabulary", "example", "--test-fraction", 0)
    options = [*MODEL, "--batch-size", 128, "--micro-batches", 2]
    run(train, "--follow", "in", "--data", "example", *options, *END, "--run-dir", "follow")
    stored = ["--tables", "dynamic", "--host-device-mix", "--order", "stored", "--epochs", 1]
    run(train, "--data", "all", *options, *stored, "--run-dir", "stored")
    assert digest_of(tmp_path / "follow") == digest_of(tmp_path / "stored")


def test_criteo_text(run, tmp_path):
    (tmp_path / "in").mkdir()
    run(preprocess, "synthetic", "--rows", 1500, "--tsv", "all.tsv")
    rows = (tmp_path / "all.tsv").read_text().splitlines(keepends=True)
    for number in range(3):
        (tmp_path / "in" / f"part-{number}").write_text("".join(rows[500 * number : 500 * number + 500]))
    run(preprocess, "criteo", "in/part-0", "--out", "example", "--ids", "raw")
    run(preprocess, "criteo", "all.tsv", "--out", "all", "--vocabulary", "example", "--test-fraction", 0)
    options = ["--capacity", "20MiB", "--emb-dim", 4, "--device", "cpu", "--batch-size", 400]
    run(train, "--follow", "in", "--data", "example", *options, *END, "--run-dir", "follow")
    stored = ["--tables", "dynamic", "--host-device-mix", "--order", "stored", "--epochs", 1]
    run(train, "--data", "all", *options, *stored, "--run-dir", "stored")
    assert digest_of(tmp_path / "follow") == digest_of(tmp_path / "stored")


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(["--pipeline-depth", 0], marks=pytest.mark.slow),
        pytest.param(["--pipeline-depth", 4, "--cache-rows", "2%", "--host-threads", 2], marks=pytest.mark.slow),
        ["--cache-rows", 500, "--cache-policy", "lookahead", "--cache-window", 3, "--follow-poll", 0.02],
    ],
)
def test_arrivals_in_any_tempo(run, example, arrived, whole, tmp_path, how):
    feeder = Feeder(arrived, tmp_path / "in", 0.15)
    feeder.start()
    until = ["--follow-until", NAMES[-1], *(QUICK if "--follow-poll" not in how else [])]
    run(train, "--follow", "in", "--data", example, *MODEL, *RULES, *until, *how, "--run-dir", "run")
    feeder.join()
    assert digest_of(tmp_path / "run") == digest_of(whole)
    assert without_times(tmp_path / "run") == without_times(whole)


@pytest.mark.slow
def test_tables_on_disk(run, example, arrived, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--emb-dim", 16]
    run(train, *every, "--run-dir", "memory")
    (tmp_path / "rows").mkdir()
    disk = ["--table-dir", "rows", "--table-memory", "5MB", "--capacity", 100_000]
    run(train, *every, *disk, "--run-dir", "disk", "--checkpoint-every", 2, "--max-steps", 5)
    run(train, *every, *disk, "--run-dir", "disk", "--checkpoint-every", 2, "--resume")
    assert digest_of(tmp_path / "disk") == digest_of(tmp_path / "memory")
    assert without_times(tmp_path / "disk") == without_times(tmp_path / "memory")


@pytest.mark.parametrize("steps", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 6, 8))])
def test_killed_and_resumed(run, example, arrived, whole, tmp_path, steps):
    """The logs have lines of steps and files after the checkpoint, and end as without a kill."""
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, "--run-dir", "run", "--checkpoint-every", 1]
    run(train, *every, "--max-steps", steps + 1, *END, "--keep-checkpoints", 9)
    drop_newest(tmp_path / "run", 2)  # that of the last step, and the same with the digest
    out = run(train, *every, *END, "--resume")
    assert f"after step {steps:,}\n" in out
    assert digest_of(tmp_path / "run") == digest_of(whole)
    assert without_times(tmp_path / "run") == without_times(whole)
    for name in ("loss.log", "keys.log"):
        assert (tmp_path / "run" / name).read_text() == (whole / name).read_text(), name


def test_a_resumed_run_ends_at_once_and_later_goes_on(run, example, arrived, whole, tmp_path):
    """With idle:0, the rest of the last file waits for the next run, so that runs in turn equal one."""
    every = ["--data", example, *MODEL, *RULES, "--run-dir", "run", "--checkpoint-every", 1000, "--resume", *QUICK]
    (tmp_path / "in").mkdir()
    for name in NAMES[:-1]:
        shutil.copy(arrived / name, tmp_path / "in" / name)
        run(train, "--follow", "in", *every, "--follow-until", "idle:0")
    again = run(train, "--follow", "in", *every, "--follow-until", "idle:0")
    assert "5 files taken, 0 set aside; 100 rows of them wait" in again
    shutil.copy(arrived / NAMES[-1], tmp_path / "in" / NAMES[-1])
    run(train, "--follow", "in", *every, "--follow-until", "end")
    assert digest_of(tmp_path / "run") == digest_of(whole)


def test_killed_at_random_moments(example, arrived, whole, tmp_path):
    options = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--run-dir", "run", "--resume"]
    killed(tmp_path, [*options, "--checkpoint-every", 2], np.random.default_rng(0), 3, 12)
    assert digest_of(tmp_path / "run") == digest_of(whole)
    assert without_times(tmp_path / "run") == without_times(whole)


def test_the_order_of_a_killed_run_is_kept(run, example, arrived, tmp_path):
    """A file that a killed process set aside as late is not taken after the kill, before the files taken then."""
    every = ["--data", example, *MODEL, *RULES, "--checkpoint-every", 1, "--run-dir", "run"]
    (tmp_path / "in").mkdir()
    for name in (NAMES[0], NAMES[2]):
        shutil.copy(arrived / name, tmp_path / "in" / name)
    run(train, "--follow", "in", *every, *QUICK, "--follow-until", "idle:0", "--keep-checkpoints", 9)
    before = without_times(tmp_path / "run")
    drop_newest(tmp_path / "run", 2)  # the third and the second step: only the first file had been taken
    shutil.copy(arrived / NAMES[1], tmp_path / "in" / NAMES[1])
    run(train, "--follow", "in", *every, *END, "--resume")
    assert without_times(tmp_path / "run") == before
    assert [line["why"] for line in lines(tmp_path / "run", "set_aside.jsonl")] == ["late"]


@pytest.mark.slow
def test_many_kills_and_many_files(run, example, table, tmp_path):
    """20 kills while 500 small files arrive: one digest with a run without kills, and with a replay."""
    rng = np.random.default_rng(1)
    source, folder = tmp_path / "source", tmp_path / "in"
    source.mkdir()
    folder.mkdir()
    edges = np.sort(rng.choice(np.arange(1, table.num_rows), 499, replace=False))
    for number, (begin, end) in enumerate(zip([0, *edges], [*edges, table.num_rows], strict=True)):
        write(source / f"{number:04d}.csv", table.slice(begin, end - begin))

    def feed():
        for path in sorted(source.iterdir()):
            shutil.copy(path, folder / f".{path.name}")
            (folder / f".{path.name}").rename(folder / path.name)
            time.sleep(0.2)

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    rules = [*MODEL, "--admit-count", 2, "--evict-unused", 12, "--batch-size", 32, "--data", example]
    options = ["--follow", folder, *rules, *QUICK, "--run-dir", "run", "--resume", "--checkpoint-every", 3]
    killed(tmp_path, [*options, "--follow-until", "0499.csv"], rng, 20, 14)
    feeder.join()
    run(train, "--follow", source, *rules, *END, "--run-dir", "replay")
    run(preprocess, "table", source, "--out", "all", *COLUMNS, "--vocabulary", example, "--test-fraction", 0)
    rules[-1] = "all"
    stored = ["--tables", "dynamic", "--host-device-mix", "--order", "stored", "--epochs", 1]
    run(train, *rules, *stored, "--run-dir", "stored")
    assert digest_of(tmp_path / "run") == digest_of(tmp_path / "replay") == digest_of(tmp_path / "stored")
    assert without_times(tmp_path / "run") == without_times(tmp_path / "replay")
