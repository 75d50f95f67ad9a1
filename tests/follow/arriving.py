"""Files for tests of `hostdev train --follow`, and programs that follow them."""

import gzip
import json
import shutil
import subprocess
import sys
import threading
import time

import numpy as np
import pyarrow.csv
import pyarrow.parquet

from hostdev.checkpoint.folder import names_in
from tests import forks
from tests.conftest import environment

MODEL = ["--capacity", "20MiB", "--model", "deepfm", "--emb-dim", 4, "--device", "cpu"]
RULES = ["--admit-count", 2, "--evict-unused", 12, "--batch-size", 300]
QUICK = ["--follow-poll", 0.05, "--follow-quiet", 0.4]
END = ["--follow-until", "end", *QUICK]
DAYS, ROWS = 6, 500
COLUMNS = ["--label", "clicked", "--numeric", "hour", "--categorical", "user,item,device"]
SUFFIXES = (".csv", ".parquet", ".arrow", ".csv.gz", ".parquet", ".csv")
NAMES = [f"day{number + 1}{suffix}" for number, suffix in enumerate(SUFFIXES)]


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


def lines(run_dir, name="files.jsonl"):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


def without_times(run_dir):
    return [{**line, "at": None, "modified": None} for line in lines(run_dir)]


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


def drop_newest(run_dir, count):
    """Remove the newest checkpoints, as if the process had been killed before it saved them."""
    for name in sorted(names_in(run_dir / "checkpoints"))[-count:]:
        shutil.rmtree(run_dir / "checkpoints" / name)


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
    return forks.Popen(
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


def killed(tmp_path, options, rng, times, most):
    """Kill a run at random moments, and let it end at last."""
    for _ in range(times):
        with start(tmp_path, *options) as process:
            try:
                process.communicate(timeout=rng.uniform(0, most))
            except subprocess.TimeoutExpired:
                process.kill()
    with start(tmp_path, *options) as process:
        out, error = process.communicate(timeout=1500)
    assert process.returncode == 0, (out, error)


def await_file(path):
    while not path.exists():
        time.sleep(0.01)
