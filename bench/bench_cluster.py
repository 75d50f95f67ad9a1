"""Claim: two Dask workers prepare Criteo text in at most 0.6 of one worker's time, in memory that does not grow.

All workers have one thread. The text is synthetic, repeated to each of --sizes; the last size is also prepared by the
command without a scheduler, on as many threads as there are workers, which should take at most 1.5 times less. Memory
is the peak of the scheduler's and of the client's process. Whole commands are timed in turn, with workers that run
already and have loaded the kernels, and the text in the page cache. Folders are on one disk, which stands for the
share: the network of a real one is not measured.
"""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.bench_preprocess import repeated
from bench.record import get_versions, make_parser, record
from hostdev.core.memory import format_bytes, parse_bytes
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from tests.data.preprocess.clusters import read_address, scheduler_flags

_POLLED = 0.02  # seconds
_START_SECONDS = 60


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process so far; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


@contextmanager
def started(*arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process of Dask's, with its output dropped."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dask", *map(str, arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[tuple[str, int]]:
    """Run a scheduler and workers with one thread each; yield the address, and the scheduler's process number."""
    file = folder / "scheduler.json"
    file.unlink(missing_ok=True)
    with ExitStack() as stack:
        scheduler = stack.enter_context(started("scheduler", *scheduler_flags(file)))
        deadline = time.monotonic() + _START_SECONDS
        while (address := read_address(file)) is None:
            if time.monotonic() > deadline or scheduler.poll() is not None:
                raise SystemExit("bench cluster: the scheduler did not start; is hostdev[dask] installed?")
            time.sleep(_POLLED)
        for number in range(workers):
            scratch = folder / f"worker-{number}"
            own = ["--nthreads", "1", "--no-nanny", "--no-dashboard", "--host", "127.0.0.1"]
            stack.enter_context(started("worker", address, *own, "--local-directory", scratch))
        yield address, scheduler.pid


def prepare(text: Path, out: Path, *flags: str) -> tuple[float, int]:
    """Run the command, and remove its data set; return the seconds, and the peak memory of its process."""
    command = [
        sys.executable,
        "-m",
        "hostdev.data.preprocess",
        "criteo",
        text,
        "--out",
        out,
        "--threshold",
        "10",
        *flags,
    ]
    start, peak = time.perf_counter(), 0
    process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
    while process.poll() is None:
        peak = max(peak, peak_bytes(process.pid))
        time.sleep(_POLLED)
    seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"bench cluster: the command failed with code {process.returncode}")
    shutil.rmtree(out)
    return seconds, peak


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["500MB", "1GB", "2GB"], help="sizes of the text, ascending")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        text, out, sample = folder / "text", folder / "out", folder / "sample"
        write_text(Synthetic(100_000, 0), sample)
        for size in map(parse_bytes, arguments.sizes):
            repeated(sample, text, size)
            for workers in (1, 2):
                with cluster(folder, workers) as (address, scheduler):
                    prepare(sample, out, "--scheduler", address)  # loads the kernels
                    for _ in range(arguments.rounds):
                        seconds, client = prepare(text, out, "--scheduler", address)
                        found = {"bytes": text.stat().st_size, "workers": workers, "seconds": seconds}
                        rows.append({**found, "client_bytes": client, "scheduler_bytes": peak_bytes(scheduler)})
                        memory = ", ".join(format_bytes(rows[-1][f"{of}_bytes"]) for of in ("client", "scheduler"))
                        print(f"{size / 1e6:8,.0f} MB, {workers} workers: {seconds:6.1f} s; {memory}", flush=True)
        alone = []
        for threads in (1, 2):
            for _ in range(arguments.rounds):
                seconds, _ = prepare(text, out, "--threads", str(threads))
                alone.append({"bytes": text.stat().st_size, "threads": threads, "seconds": seconds})
                print(f"{size / 1e6:8,.0f} MB, {threads} threads, no scheduler: {seconds:6.1f} s", flush=True)
    largest = max(row["bytes"] for row in rows)

    def median(of: list[dict[str, Any]], name: str, number: int) -> float:
        return statistics.median(row["seconds"] for row in of if row[name] == number and row["bytes"] == largest)

    one, two = (median(rows, "workers", workers) for workers in (1, 2))
    ratios = {"two_over_one": two / one, "workers_over_threads": two / median(alone, "threads", 2)}
    for of in ("client", "scheduler"):
        by_size = {row["bytes"]: row[f"{of}_bytes"] for row in rows}
        ratios[f"{of}_memory_growth"] = by_size[largest] / by_size[min(by_size)]
    print(f"two workers take {ratios['two_over_one']:.2f} of one worker's time (at most 0.6)")
    print(
        f"two workers take {ratios['workers_over_threads']:.2f} of two threads' time without a scheduler (at most 1.5)"
    )
    print(f"memory, largest text over smallest: client {ratios['client_memory_growth']:.2f}, scheduler "
          f"{ratios['scheduler_memory_growth']:.2f} (at most 1.1)")  # fmt: skip
    versions = get_versions("pyarrow", "distributed")
    record("cluster", {"cluster": rows, "alone": alone, "ratios": ratios, "versions": versions}, arguments.out)


if __name__ == "__main__":
    main()
