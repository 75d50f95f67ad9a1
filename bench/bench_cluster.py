"""Claim: two Dask workers prepare Criteo text 1.7 times as fast as one, and in at most 1.15 of the time of two threads.

All workers have one thread. The text is synthetic, repeated to each of --sizes; the last size is also prepared by the
command without a scheduler, by one thread and by two. How much two processes can gain on this machine at all is
measured in the same rounds: two commands of one thread each, side by side, on the same text. Memory is the
peak of the scheduler's and of the client's process; a text of --memory-size is prepared once, by two workers, for it.
Whole commands are timed in turn, with workers that run already and have loaded the kernels, and the text in the page
cache. Folders are on one disk, which stands for the share: the network of a real one is not measured.
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
_FIRST_BYTES = 300_000_000  # of a text that gives each worker several tasks of each kind


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


def command(text: Path, out: Path, *flags: str) -> list[str]:
    """Return the command that prepares a text."""
    given = [sys.executable, "-m", "hostdev.data.preprocess", "criteo", text, "--out", out, "--threshold", "10"]
    return [*map(str, given), *flags]


def prepare(text: Path, out: Path, *flags: str, copies: int = 1) -> tuple[float, int]:
    """Run the command, or several side by side, and remove what they made; return the seconds, and the peak memory."""
    outs = [out.with_name(f"{out.name}-{number}") for number in range(copies)]
    start, peak = time.perf_counter(), 0
    processes = [subprocess.Popen(command(text, each, *flags), stdout=subprocess.DEVNULL) for each in outs]
    while any(process.poll() is None for process in processes):
        peak = max(peak, *(peak_bytes(process.pid) for process in processes))
        time.sleep(_POLLED)
    seconds = time.perf_counter() - start
    if any(process.returncode for process in processes):
        raise SystemExit("bench cluster: the command failed")
    for each in outs:
        shutil.rmtree(each)
    return seconds, peak


def on_cluster(folder: Path, text: Path, workers: int) -> dict[str, Any]:
    """Prepare the text once by workers that have prepared another one."""
    out = folder / "out"
    with cluster(folder, workers) as (address, scheduler):
        prepare(folder / "first", out, "--scheduler", address)  # every worker loads the kernels
        seconds, client = prepare(text, out, "--scheduler", address)
        found = {"bytes": text.stat().st_size, "workers": workers, "seconds": seconds}
        found |= {"client_bytes": client, "scheduler_bytes": peak_bytes(scheduler)}
    memory = f"client {format_bytes(client)}, scheduler {format_bytes(found['scheduler_bytes'])}"
    print(f"{found['bytes'] / 1e6:8,.0f} MB, {workers} workers: {seconds:6.1f} s; {memory}", flush=True)
    return found


def alone(folder: Path, text: Path, threads: int, copies: int = 1) -> dict[str, Any]:
    """Prepare the text by the command without a scheduler."""
    seconds, _ = prepare(text, folder / "out", "--threads", str(threads), copies=copies)
    how = f"{threads} threads, no scheduler" + (f", {copies} commands" if copies > 1 else "")
    print(f"{text.stat().st_size / 1e6:8,.0f} MB, {how}: {seconds:6.1f} s", flush=True)
    return {"bytes": text.stat().st_size, "threads": threads, "copies": copies, "seconds": seconds}


def get_ratios(on_workers: list[dict[str, Any]], others: list[dict[str, Any]]) -> dict[str, float]:
    """Return the gain by a second worker and by a second process, the cost of the scheduler, and the growth of memory.

    Args:
        on_workers: Results of `on_cluster`, of several sizes.
        others: Results of `alone`, of one of these sizes.
    """
    size = others[0]["bytes"]

    def median(of: list[dict[str, Any]], **like: int) -> float:
        like["bytes"] = size
        return statistics.median(row["seconds"] for row in of if all(row[key] == like[key] for key in like))

    two, single = median(on_workers, workers=2), median(others, threads=1, copies=1)
    ratios = {
        "gain_of_two_workers": median(on_workers, workers=1) / two,
        "gain_of_two_processes": 2 * single / median(others, threads=1, copies=2),
        "gain_of_two_threads": single / median(others, threads=2, copies=1),
        "workers_over_threads": two / median(others, threads=2, copies=1),
    }
    sizes = sorted({row["bytes"] for row in on_workers})
    for of in ("client", "scheduler"):
        first, last = (max(row[f"{of}_bytes"] for row in on_workers if row["bytes"] == sizes[at]) for at in (0, -1))
        ratios[f"{of}_memory_growth"] = last / first
    return ratios


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", nargs="+", default=["500MB", "1GB", "2GB"], help="sizes of the text, ascending")
    parser.add_argument("--memory-size", help="size of a text that is prepared once, for the memory, such as 20GB")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    on_workers: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        text, sample = folder / "text", folder / "sample"
        write_text(Synthetic(100_000, 0), sample)
        repeated(sample, folder / "first", _FIRST_BYTES)
        for number, size in enumerate(arguments.sizes, 1):
            repeated(sample, text, parse_bytes(size))
            for _ in range(arguments.rounds):
                on_workers += [on_cluster(folder, text, workers) for workers in (1, 2)]
                if number == len(arguments.sizes):
                    others += [alone(folder, text, 1), alone(folder, text, 2), alone(folder, text, 1, copies=2)]
        if arguments.memory_size:
            repeated(sample, text, parse_bytes(arguments.memory_size))
            on_workers.append(on_cluster(folder, text, 2))
    ratios = get_ratios(on_workers, others)
    print(
        f"two workers are {ratios['gain_of_two_workers']:.2f} times as fast as one (at least 1.7); on this machine two "
        f"processes side by side do {ratios['gain_of_two_processes']:.2f} of one's work, two threads "
        f"{ratios['gain_of_two_threads']:.2f}"
    )
    print(f"two workers take {ratios['workers_over_threads']:.2f} of two threads' time (at most 1.15)")
    print(
        f"memory, largest text over smallest: client {ratios['client_memory_growth']:.2f}, scheduler "
        f"{ratios['scheduler_memory_growth']:.2f} (at most 1.1)"
    )
    found = {
        "cluster": on_workers,
        "alone": others,
        "ratios": ratios,
        "versions": get_versions("pyarrow", "distributed"),
    }
    record("cluster", found, arguments.out)


if __name__ == "__main__":
    main()
