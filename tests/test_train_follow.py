"""`hostdev train --follow`: files that arrive, in any tempo and between kills, train the same bits as all at once."""

import errno
import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import numpy as np
import pyarrow.csv
import pyarrow.parquet
import pytest

import hostdev
from hostdev.checkpoint.folder import names_in
from hostdev.commands import predict, preprocess, train
from hostdev.train import metrics
from tests.conftest import digest_of, environment
from tests.data import events, movies

MODEL = ["--capacity", "20MiB", "--model", "deepfm", "--emb-dim", 4, "--device", "cpu"]
RULES = ["--admit-count", 2, "--evict-unused", 12, "--batch-size", 300]
QUICK = ["--follow-poll", 0.05]
END = ["--follow-until", "end", *QUICK]
DAYS, ROWS = 6, 500
COLUMNS = ["--label", "clicked", "--numeric", "hour", "--categorical", "user,item,device"]


@pytest.fixture(scope="module")
def table():
    return events.make(days=DAYS, rows=ROWS)


@pytest.fixture(scope="module")
def example(tmp_path_factory, table):
    """A data set with raw ids of the first rows; its test rows are not those of the files."""
    folder = tmp_path_factory.mktemp("example")
    pyarrow.csv.write_csv(table.slice(0, ROWS), folder / "first.csv")
    make = [
        "table",
        folder / "first.csv",
        "--out",
        folder / "data",
        *COLUMNS,
        "--ids",
        "raw",
        "--test-after",
        "hour=20",
    ]
    preprocess.main(list(map(str, make)))
    return folder / "data"


def write(path, part):
    """Write a file under a temporary name first, as what follows a folder expects."""
    partial = path.with_name(f".{path.name}")
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(part, partial, row_group_size=150)
    elif path.name.endswith(".arrow"):
        with pyarrow.ipc.new_file(partial, part.schema) as file:
            file.write_table(part, max_chunksize=200)
    else:
        pyarrow.csv.write_csv(part, partial)
        if path.name.endswith(".gz"):
            partial.write_bytes(gzip.compress(partial.read_bytes()))
    partial.replace(path)


def day(table, number, rows=ROWS):
    return table.slice(rows * number, rows)


SUFFIXES = (".csv", ".parquet", ".arrow", ".csv.gz", ".parquet", ".csv")
NAMES = [f"day{number + 1}{suffix}" for number, suffix in enumerate(SUFFIXES)]


@pytest.fixture(scope="module")
def arrived(tmp_path_factory, table):
    """A folder in which all files have arrived. Tests must not change it."""
    folder = tmp_path_factory.mktemp("arrived") / "in"
    folder.mkdir()
    for number, name in enumerate(NAMES):
        write(folder / name, day(table, number))
    return folder


def lines(run_dir, name="files.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def without_times(run_dir):
    return [{**line, "at": None, "modified": None} for line in lines(run_dir)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory, example, arrived):
    """The run directory of a replay."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--run-dir", folder]
    train.main(list(map(str, every)))
    return folder


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


class Feeder(threading.Thread):
    """Renames files into a folder, one after the other, while a run follows it."""

    def __init__(self, source, folder, seconds):
        super().__init__(daemon=True)
        folder.mkdir(exist_ok=True)
        self._source, self._folder, self._seconds = source, folder, seconds

    def run(self):
        for name in NAMES:
            partial = self._folder / f"{name}.tmp"
            with (self._source / name).open("rb") as source, partial.open("wb") as target:
                target.write(source.read(1000))  # a partial name is no arrival
                target.flush()
                time.sleep(self._seconds)
                shutil.copyfileobj(source, target)
            partial.rename(self._folder / name)


@pytest.mark.parametrize(
    "how",
    [
        ["--pipeline-depth", 0],
        ["--pipeline-depth", 4, "--cache-rows", "2%", "--host-threads", 2],
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


def test_tables_on_disk(run, example, arrived, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--emb-dim", 16]
    run(train, *every, "--run-dir", "memory")
    (tmp_path / "rows").mkdir()
    disk = ["--table-dir", "rows", "--table-memory", "5MB", "--capacity", 100_000]
    run(train, *every, *disk, "--run-dir", "disk", "--checkpoint-every", 2, "--max-steps", 5)
    run(train, *every, *disk, "--run-dir", "disk", "--checkpoint-every", 2, "--resume")
    assert digest_of(tmp_path / "disk") == digest_of(tmp_path / "memory")
    assert without_times(tmp_path / "disk") == without_times(tmp_path / "memory")


def drop_newest(run_dir, count):
    """Remove the newest checkpoints, as if the process had been killed before it saved them."""
    for name in sorted(names_in(run_dir / "checkpoints"))[-count:]:
        shutil.rmtree(run_dir / "checkpoints" / name)


@pytest.mark.parametrize("steps", [1, 3, 6, 8])
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
        for start in range(2000, len(content), 2000):
            time.sleep(0.08)
            with (folder / NAMES[0]).open("ab") as file:
                file.write(content[start : start + 2000])

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


def test_scores_are_those_of_the_model_before(run, example, arrived, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, "--batch-size", 250, *END, "--follow-window", 2]
    run(train, *every, "--run-dir", "run", "--checkpoint-every", 2, "--keep-checkpoints", 99)
    found = lines(tmp_path / "run")
    scores, labels = [], []
    for number in range(1, DAYS):
        assert found[number]["step"] == 2 * number
        checkpoint = next(
            tmp_path / "run" / "checkpoints" / name
            for name in names_in(tmp_path / "run" / "checkpoints")
            if hostdev.open(tmp_path / "run" / "checkpoints" / name).step == 2 * number
        )
        run(predict, "--checkpoint", checkpoint, "--data", arrived / NAMES[number], "--out", f"{number}.parquet")
        predicted = pyarrow.parquet.read_table(tmp_path / f"{number}.parquet")
        probability = predicted.column("probability").to_numpy().astype(np.float64)
        scores.append(np.log(probability / (1 - probability)).astype(np.float32))
        labels.append(read_labels(arrived / NAMES[number]))
        line = found[number]
        assert line["auc"] == pytest.approx(metrics.auc(scores[-1], labels[-1]), abs=1e-4)  # float32 probabilities
        assert line["logloss"] == pytest.approx(metrics.log_loss(scores[-1], labels[-1]), abs=1e-6)
        assert line["calibration"] == pytest.approx(probability.mean() / labels[-1].mean(), abs=1e-6)
        if number > 1:
            both = np.concatenate(scores[-2:]), np.concatenate(labels[-2:])
            assert line["window"]["files"] == 2 and line["window"]["rows"] == 2 * ROWS
            assert line["window"]["auc"] == pytest.approx(metrics.auc(*both), abs=1e-4)
            assert line["window"]["logloss"] == pytest.approx(metrics.log_loss(*both), abs=1e-6)


def read_labels(path):
    if path.suffix == ".parquet":
        found = pyarrow.parquet.read_table(path)
    elif path.suffix == ".arrow":
        found = pyarrow.ipc.open_file(path).read_all()
    else:
        found = pyarrow.csv.read_csv(path)
    return found.column("clicked").to_numpy().astype(np.float32)


def start(tmp_path, *arguments):
    command = [sys.executable, "-m", "hostdev.train", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )


def await_lines(run_dir, count, process):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "files.jsonl").exists() and len(lines(run_dir)) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate(timeout=10))


def test_a_second_follower_and_the_end_by_a_signal(in_process, example, arrived, whole, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *QUICK, "--checkpoint-every", 4]
    with start(tmp_path, *every, "--checkpoint-dir", "c", "--run-dir", "one") as process:
        try:
            await_lines(tmp_path / "one", DAYS, process)
            more = ["--checkpoint-dir", "c", "--run-dir", "two", "--follow-until", "end"]
            code, _, error = in_process(train, *every, *more)
            assert code == 2 and len(error.splitlines()) == 1 and "c" in error
            process.send_signal(signal.SIGTERM)
            out, error = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0 and "10 steps are saved; continue with --resume" in error, (out, error)
    code, out, _ = in_process(train, *every, "--checkpoint-dir", "c", "--run-dir", "one", "--resume", *END[:2])
    assert code == 0 and "after step 10" in out
    assert digest_of(tmp_path / "one") == digest_of(whole)


def killed(tmp_path, options, rng, times, most):
    """Kill a run at random moments, and let it end at last."""
    for _ in range(times):
        with start(tmp_path, *options) as process:
            try:
                process.communicate(timeout=rng.uniform(0, most))
            except subprocess.TimeoutExpired:
                process.kill()
    with start(tmp_path, *options) as process:
        out, error = process.communicate(timeout=300)
    assert process.returncode == 0, (out, error)


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


def test_a_new_run_begins_with_the_tables_of_another(run, example, arrived, tmp_path):
    every = ["--follow", arrived, "--data", example, *MODEL, *RULES, *END, "--checkpoint-every", 100]
    run(train, *every, "--run-dir", "one")
    assert "steps of this run count from 0" in run(train, *every, "--run-dir", "two", "--start-from", "one/checkpoints")
    one, two = lines(tmp_path / "one"), lines(tmp_path / "two")
    assert two[0]["auc"] > one[0]["auc"] + 0.01  # the rows are known
    assert [line["step"] for line in two] == [line["step"] for line in one]


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


def await_file(path):
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--epochs", 2], "--epochs"),
        (["--order", "stored"], "--order"),
        (["--early-stop", 1], "--early-stop"),
        (["--shuffle-window", 2], "--shuffle-window"),
        (["--spawn", 2], "--spawn"),
        (["--cache-rows", "auto"], "--cache-rows"),
        (["--follow-until", "idle:x"], "--follow-until"),
        (["--follow-poll", 0], "--follow-poll"),
        (["--follow-window", 0], "--follow-window"),
        (["--follow-mark", "a/b"], "--follow-mark"),
        (["--follow", "missing"], "missing"),
    ],
)
def test_refused_options(in_process, example, tmp_path, options, named):
    (tmp_path / "in").mkdir()
    code, _, error = in_process(train, "--follow", "in", "--data", example, *MODEL, *options)
    assert code == 2 and named in error and len(error.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_refused_data(in_process, small_data, example, arrived, tmp_path):
    (tmp_path / "in").mkdir()
    assert "--data" in in_process(train, "--follow", "in")[2]
    code, _, error = in_process(train, "--follow", "in", "--data", small_data)
    assert code == 2 and "--ids raw" in error
    for flag in ("--follow-until", "--follow-mark", "--follow-poll", "--follow-window"):
        code, _, error = in_process(train, "--data", example, flag, "1")
        assert code == 2 and flag in error and "--follow" in error
    every = ["--data", example, *MODEL, *RULES, "--checkpoint-every", 1, "--run-dir", "run"]
    assert in_process(train, "--follow", arrived, *every, "--max-steps", 1, *END)[0] == 0
    more = ["--tables", "dynamic", "--host-device-mix", "--epochs", 1, "--resume"]
    code, _, error = in_process(train, *every, *more)
    assert code == 2 and "was trained with --follow" in error


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
