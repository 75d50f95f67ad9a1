"""Claim: a step with a table on disk takes at most 1.25 times the larger of a step in memory and its least reads.

LazyAdam, D = 64, batches of 100,000 Zipf ids (exponent 1.05) at depth 2; all rows have been written before. Measured in
one run, on the disk of --folder:

- random reads of 4 KiB by the table's reader threads, and by fio (32 at once: threads with pread, and io_uring), with
  the CPU time of a read;
- a step in memory, if the table fits in it, and a step on disk with --memory, after --warm steps; the rows read, over
  the least that any cache of the same rows could read (Belady, with the whole stream known); bytes written over those
  of changed rows;
- checkpoints that hold the table's segments, and one that copies its rows; opening, lookups and loading;
- the rows a second of the same through a cold np.memmap, and through RocksDB (get, change, put by batch), where its
  library and a compiler are installed.
"""

import gc
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import hostdev
from bench.bench_large import Memory
from bench.bench_unbounded import draw
from bench.record import make_parser, record
from hostdev.cache.bound import optimal
from hostdev.core.memory import available_bytes
from hostdev.host.disk.readers import Planes
from hostdev.kernels.unique import unique
from tests.host.disk_tables import on_disk

DIM = 64
ROW_BYTES = 4 * DIM * 3
WANTED = {
    "reads / fio": 0.8,
    "CPU of a read / fio's": 2.0,
    "step / the larger of memory and reads": 1.25,
    "rows read / the least": 1.10,
    "written / changed": 2.5,
    "peak memory / announced": 1.05,
    "rows a second / RocksDB's": 5.0,
    "rows a second / memmap's": 3.0,
}
_AT_ONCE = 1 << 16
_FIO_FILES = 64
_PEER = Path(__file__).parent / "peers" / "rocksdb_rows.cc"


def scatter(batches: list[np.ndarray], rows: int) -> list[np.ndarray]:
    """Return batches in which the ranks of a Zipf distribution are rows anywhere in the table."""
    places = np.random.default_rng(99).permutation(rows)
    return [places[batch] for batch in batches]


def make(rows: int, disk: hostdev.Disk | None) -> hostdev.HostTable:
    """Return a table whose rows have all been written."""
    table = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(lr=1e-3), name="t", storage=disk)
    block, row_slots = np.zeros((_AT_ONCE, 3, DIM), np.float32), np.zeros((_AT_ONCE, 0), np.float32)
    for start in range(0, rows, _AT_ONCE):
        stop = min(rows, start + _AT_ONCE)
        table.write_rows(np.arange(start, stop), block[: stop - start], row_slots[: stop - start])
    return table


def run_steps(
    runtime: hostdev.Runtime,
    batches: list[np.ndarray],
    first: int = 0,
    last: int | None = None,
    at_first: Callable[[], object] = lambda: None,
) -> tuple[float, float]:
    """Train on batches until step `last`; return the seconds of a step from `first` on, and of its CPU time."""
    last, began = len(batches) if last is None else last, (0.0, 0.0)
    grads = torch.full((len(batches[0]), DIM), 1e-3)
    for step, (_, rows) in enumerate(runtime.train(batches, ids=lambda batch: {"t": batch})):
        if step == first:
            at_first()
            began = time.perf_counter(), time.process_time()
        if step == last:
            break
        rows["t"].backward(grads)
    steps = last - first
    return (time.perf_counter() - began[0]) / steps, (time.process_time() - began[1]) / steps


def measure_reads(table: Any, count: int = 100_000) -> dict[str, float]:
    """Return the rate of random reads of rows by the table's threads, and the CPU microseconds of one."""
    tier = table.storage.tier
    where = tier.where
    with tier._changed:
        rows = np.random.default_rng(5).permutation(on_disk(table))[:count]
    target = np.empty((len(rows), 3, DIM), np.float32)
    planes = Planes.of([target])
    with tier._changed:
        number = tier.store.begin_read()
    keys, positions = rows.astype(np.int64), where[rows].astype(np.int64) - 1
    order = np.random.default_rng(6).permutation(len(rows))
    begin, used = time.perf_counter(), time.process_time()
    for part in np.array_split(order, 10):
        read = tier.store.read(
            positions[part], keys[part], np.arange(len(part), dtype=np.int32), planes, lambda read: None
        )
        read.wait()
        tier.store.require_read(read)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - used
    with tier._changed:
        tier.store.end_read(number)
    return {"reads a second": len(rows) / seconds, "CPU us of a read": cpu / len(rows) * 1e6}


def measure_fio(folder: Path) -> dict[str, float]:
    """Return the rates and CPU times of fio's reads of the files in a folder; empty if fio is not installed."""
    files = [each.name for each in sorted(folder.glob("segment-*"))[:_FIO_FILES]]
    if shutil.which("fio") is None or not files:
        return {}
    common = ["fio", "--name=r", "--rw=randread", "--bs=4k", "--direct=1", "--time_based", "--runtime=6", "--readonly"]
    common += ["--filename=" + ":".join(files), "--output-format=json", "--group_reporting"]
    found = {}
    for name, options in {
        "psync": ["--ioengine=psync", "--thread", "--numjobs=32"],
        "io_uring": ["--ioengine=io_uring", "--iodepth=32"],
    }.items():
        done = subprocess.run([*common, *options], capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            print(f"fio {name} failed: {done.stderr.strip()[-300:]}")
            continue
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        rate = job["read"]["iops"]
        share = (job["usr_cpu"] + job["sys_cpu"]) / 100 * (32 if name == "psync" else 1)
        found |= {f"fio {name}, reads a second": rate, f"fio {name}, CPU us of a read": share / rate * 1e6}
    return found


def measure_memmap(folder: Path, rows: int, batches: list[np.ndarray], seconds: float = 8) -> float:
    """Return how many rows a second are read, changed and written through a map of a file that is not in memory."""
    path = folder / "memmap"
    with path.open("wb") as file:
        chunk = bytes(1 << 24)
        for start in range(0, rows * ROW_BYTES, len(chunk)):
            file.write(chunk[: min(len(chunk), rows * ROW_BYTES - start)])
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    table = np.memmap(path, np.float32, "r+", shape=(rows, ROW_BYTES // 4))
    begin, trained = time.perf_counter(), 0
    for batch in batches:
        ids = np.unique(batch)
        for part in np.array_split(ids, max(1, len(ids) // 1_000)):
            table[part] += np.float32(1e-3)
            trained += len(part)
            if time.perf_counter() - begin > seconds:
                break
        if time.perf_counter() - begin > seconds:
            break
    rate = trained / (time.perf_counter() - begin)
    del table
    path.unlink()
    return rate


def measure_rocksdb(folder: Path, rows: int, batches: list[np.ndarray], memory: int) -> dict[str, float]:
    """Return RocksDB's rows a second and CPU time; empty if it cannot be built here."""
    program = folder / "rocksdb_rows"
    build = ["g++", "-O3", "-march=native", "-std=c++17", str(_PEER), "-o", str(program), "-lrocksdb"]
    if shutil.which("g++") is None or subprocess.run(build, capture_output=True, check=False).returncode:
        return {}
    with (folder / "batches.bin").open("wb") as file:
        for batch in batches:
            ids = np.unique(batch)
            file.write(np.int64(len(ids)).tobytes() + ids.astype(np.int64).tobytes())
    arguments = [folder / "rocksdb", rows, ROW_BYTES, folder / "batches.bin", 20, memory >> 20]
    done = subprocess.run([str(program), *map(str, arguments)], capture_output=True, text=True, check=True)
    shutil.rmtree(folder / "rocksdb")
    words = done.stdout.splitlines()[-1].split()
    return {"RocksDB, rows a second": float(words[1]), "RocksDB, CPU us of a row": float(words[3])}


def measure_checkpoints(
    runtime: hostdev.Runtime, table: Any, folder: Path, batches: list[np.ndarray]
) -> dict[str, float]:
    """Return the seconds of checkpoints that hold segments, of one that copies all rows, and of reading the former."""
    found, saved = {}, folder / "saved"

    def take(name: str, work: Any) -> Any:
        begin = time.perf_counter()
        result = work()
        found[name] = time.perf_counter() - begin
        return result

    take("first checkpoint, s", lambda: runtime.save(saved / "held"))
    run_steps(runtime, batches[:10])
    last = take("checkpoint 10 steps later, s", lambda: runtime.save(saved / "held")).path
    rows = np.random.default_rng(3).integers(0, table.rows, 10_000)
    expected = table.lookup(rows)
    model = take("opening of it, s", lambda: hostdev.open(last))
    assert np.array_equal(take("lookup of 10,000 rows in it, s", lambda: model["t"].lookup(rows)), expected)
    again = hostdev.HostTable(table.rows, DIM, hostdev.LazyAdam(lr=1e-3), name="t", storage=table.disk)
    with hostdev.Runtime({"t": again}, device="cpu") as other:
        take("loading of it, s", lambda: other.load(last))
        assert np.array_equal(again.lookup(rows), expected)
    again.close()
    del again
    with mock.patch("hostdev.checkpoint.manager.can_locate", lambda table: False):
        take("checkpoint that copies, s", lambda: runtime.save(saved / "copied"))
    shutil.rmtree(saved)
    return found | {"copying / holding": found["checkpoint that copies, s"] / found["checkpoint 10 steps later, s"]}


def measure(rows: int, disk: hostdev.Disk, folder: Path, warm: int, steps: int, *, peers: bool) -> dict[str, float]:
    """Return all figures."""
    end = warm + steps
    batches = scatter(draw(rows, end + disk.window), rows)  # those after the steps are only known
    distinct: list[Any] = [unique(batch)[0] for batch in batches]
    each = statistics.fmean(map(len, distinct[warm:end]))
    found = {"unique rows of a batch": each}
    if rows * ROW_BYTES < available_bytes() - (2 << 30):
        table = make(rows, None)
        runtime = hostdev.Runtime({"t": table}, device="cpu")
        run_steps(runtime, batches[:5])
        found["step in memory, ms"] = run_steps(runtime, batches[warm:end])[0] * 1e3
        runtime.close()
        del table, runtime
        gc.collect()
    seen = Memory()
    before = seen.now()
    begin = time.perf_counter()
    on_disk: Any = make(rows, disk)
    found["fill, s"] = time.perf_counter() - begin
    tier = on_disk.storage.tier
    found["frames / rows"] = tier.count / rows
    runtime = hostdev.Runtime({"t": on_disk}, device="cpu")
    seen.most = seen.now()
    counted: list[Any] = []

    def note() -> None:
        counted.append((tier.store.read_records, dict(tier.store.written_bytes)))

    seconds, cpu = run_steps(runtime, batches, warm, end, note)
    note()
    (reads, written), (reads_at_end, written_at_end) = counted
    found["peak memory / announced"] = (seen.most - before) / on_disk.storage.nbytes
    found |= {"step on disk, ms": seconds * 1e3, "CPU of the process in it, ms": cpu * 1e3}
    found["rows read a step"] = (reads_at_end - reads) / steps
    uses = [(ids, np.ones(len(ids), np.int32)) for ids in distinct]
    least = [optimal(uses, rows, tier.count, since=since) for since in (warm, end)]
    misses = [best.unique - best.unique_hits for best in least]
    found["least rows that any cache reads a step"] = (misses[0] - misses[1]) / steps
    changed = sum(map(len, distinct[warm:end])) * ROW_BYTES
    wrote = {name: written_at_end[name] - written[name] for name in written}
    found["written / changed"] = sum(wrote.values()) / changed
    found["written / rows that left"] = sum(wrote.values()) / max(wrote["rows"], 1)
    found |= measure_reads(on_disk) | measure_fio(tier._folder.path)
    found["rows a second"] = each / seconds
    needed = found["rows read a step"] / found["reads a second"] * 1e3
    found["step / the larger of memory and reads"] = found["step on disk, ms"] / max(
        found.get("step in memory, ms", 0.0), needed
    )
    found["rows read / the least"] = found["rows read a step"] / found["least rows that any cache reads a step"]
    best = max((found[name] for name in found if name.startswith("fio") and name.endswith("a second")), default=0.0)
    if best:
        found["reads / fio"] = found["reads a second"] / best
        found["CPU of a read / fio's"] = found["CPU us of a read"] / found.get("fio psync, CPU us of a read", np.nan)
    found |= measure_checkpoints(runtime, on_disk, folder, batches[warm:end])
    runtime.close()
    on_disk.close()
    if peers:
        found["memmap, rows a second"] = measure_memmap(folder, rows, batches[warm:end])
        found["rows a second / memmap's"] = found["rows a second"] / found["memmap, rows a second"]
        found |= measure_rocksdb(folder, rows, batches[warm:end], disk.nbytes)
        if "RocksDB, rows a second" in found:
            found["rows a second / RocksDB's"] = found["rows a second"] / found["RocksDB, rows a second"]
    return found


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=20_000_000, help="rows of 768 bytes")
    parser.add_argument("--memory", type=int, default=2 << 30, help="bytes for rows in memory")
    parser.add_argument("--warm", type=int, default=150, help="steps before those that are measured")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--window", type=int, default=hostdev.Disk.window, help="batches that are read ahead")
    parser.add_argument("--folder", type=Path, help="a folder on the disk (default: the system's for temporary files)")
    parser.add_argument("--no-peers", action="store_true", help="without memmap and RocksDB")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="hostdev-bench-", dir=given.folder))
    try:
        disk = hostdev.Disk(folder / "tables", given.memory, given.window)
        found = measure(given.rows, disk, folder, given.warm, given.steps, peers=not given.no_peers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(*(f"  {name:<52}{value:>12.2f}" for name, value in found.items()), sep="\n")
    rounded = {name: round(value, 4) for name, value in found.items()}
    record("disk", {"wanted": WANTED, "window": given.window, "results": rounded}, given.out)


if __name__ == "__main__":
    main()
