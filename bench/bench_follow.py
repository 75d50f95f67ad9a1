"""Claim: a run that follows a folder lags at most two files and 10 seconds behind, in memory that does not grow.

A thread renames a file into the folder every few seconds, from a stream whose click rates drift (tests/data/drift.py)
and whose best possible AUC is known. Measured are the lag, from a file's last change to the line that is written after
it was scored, which includes the training on the files before; the resident memory over the run's time; and the AUC
before training, over the best possible one.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet

from bench.record import get_versions, make_parser, record
from hostdev.data.preprocess import cli as preprocess
from tests.data import drift

_COLUMNS = ["--label", "clicked", "--categorical", "user,item"]
_MODEL = ["--model", "deepfm", "--emb-dim", "8", "--capacity", "64MiB", "--device", "cpu", "--table-lr", "0.01"]
_WARM = 0.25  # share of the files before the steady state
_GROWTH = 1.05  # of the median memory of the last quarter, over that of the second


def feed(folder: Path, files: int, rows: int, seconds: float, best: list[float]) -> None:
    """Rename a file into the folder every `seconds`."""
    for number, (table, auc) in enumerate(drift.make(files, rows)):
        begun = time.monotonic()
        partial = folder / f"{number:06d}.parquet.tmp"
        pyarrow.parquet.write_table(table, partial)
        best.append(auc)
        partial.rename(folder / f"{number:06d}.parquet")
        time.sleep(max(0.0, seconds - (time.monotonic() - begun)))


def follow(folder: Path, arguments: argparse.Namespace) -> tuple[list[tuple[float, int]], list[float]]:
    """Follow a folder in a process; return its resident memory, as pairs of seconds and bytes, and the best AUCs."""
    best: list[float] = []
    (folder / "in").mkdir()
    [(table, _)] = drift.make(1, arguments.rows)
    pyarrow.parquet.write_table(table, folder / "example.parquet")
    make = ["table", folder / "example.parquet", "--out", folder / "example", *_COLUMNS, "--ids", "raw"]
    preprocess.main(list(map(str, make)))
    names = folder / "in", arguments.files, arguments.rows, arguments.seconds, best
    feeder = threading.Thread(target=feed, args=names, daemon=True)
    until = ["--follow-until", f"{arguments.files - 1:06d}.parquet", "--follow-poll", str(arguments.poll)]
    command = [sys.executable, "-m", "hostdev.train", "--follow", folder / "in", "--data", folder / "example", *_MODEL]
    command += ["--batch-size", "1000", "--run-dir", folder / "run", "--checkpoint-minutes", "0.2", *until]
    memory = []
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL) as process:
        while not (folder / "run" / "loss.log").exists() and process.poll() is None:
            time.sleep(0.1)
        feeder.start()
        begun, watched = time.monotonic(), psutil.Process(process.pid)
        while process.poll() is None:
            try:
                memory.append((time.monotonic() - begun, watched.memory_info().rss))
            except psutil.NoSuchProcess:
                break
            time.sleep(0.5)
    if process.returncode:
        raise SystemExit(f"the run failed with code {process.returncode}")
    feeder.join()
    return memory, best


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return lags in seconds, memory in bytes, and AUCs."""
    with tempfile.TemporaryDirectory() as name:
        memory, best = follow(Path(name), arguments)
        lines = [json.loads(line) for line in (Path(name) / "run" / "files.jsonl").read_text().splitlines()]
        checkpoints = json.loads((Path(name) / "run" / "summary.json").read_text())["checkpoints"]
    begin = int(len(lines) * _WARM)
    seconds = [datetime.fromisoformat(line["at"]).timestamp() for line in lines]
    changed = [datetime.fromisoformat(line["modified"]).timestamp() for line in lines]
    lags = np.subtract(seconds, changed)[begin:]
    rss = np.array([nbytes for _, nbytes in memory])
    quarters = [float(np.median(part)) for part in np.array_split(rss, 4)]
    return {
        "files": len(lines),
        "rows_per_second": arguments.rows / arguments.seconds,
        "lag_seconds": {
            "median": float(np.median(lags)),
            "p99": float(np.quantile(lags, 0.99)),
            "max": float(lags.max()),
        },
        "rss_bytes_by_quarter": quarters,
        "rss_growth": quarters[3] / quarters[1],
        "auc": float(np.mean([line["auc"] for line in lines[begin:]])),
        "best_auc": float(np.mean(best[begin:])),
        "checkpoints": {"saved": checkpoints["saved"], "stall_us": checkpoints["stall_us"]},
    }


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--files", type=int, default=300, help="files that arrive (default 300)")
    parser.add_argument("--rows", type=int, default=20_000, help="rows in a file (default 20000)")
    parser.add_argument("--seconds", type=float, default=2.0, help="between two files (default 2)")
    parser.add_argument("--poll", type=float, default=1.0, help="--follow-poll of the run (default 1)")
    arguments = parser.parse_args()
    found = measure(arguments)
    limit = 2 * arguments.seconds + 10
    for name, value in found.items():
        print(f"{name:<22}{value}")
    print(f"lag at most {limit:g} s: {'yes' if found['lag_seconds']['max'] <= limit else 'NO'}")
    print(f"memory at most {_GROWTH:g} times: {'yes' if found['rss_growth'] <= _GROWTH else 'NO'}")
    versions = get_versions("torch", "numba", "pyarrow")
    record("follow", {"versions": versions, **found}, arguments.out)


if __name__ == "__main__":
    main()
