"""Claim: two cores read at least 5 million samples of Criteo's shape a second, with a warm page cache.

The benchmark writes a data set of Criteo's shape (160 bytes a row) with random ids to a temporary folder. It times
passes over it in batches of 16,000, in a seeded order: a reader's first pass, which computes checksums, later passes,
and passes with windows of 16 shards. Each is timed with a warm and a cold page cache; before a cold pass the files are
dropped from it (fadvise).

It prints samples per second, and bytes per second relative to a copy by all threads and to a sequential read of the
same files, both measured in the same run. It also prints CPU seconds per million samples, which are more reliable on a
shared machine. A cold pass may still read from a cache of the disk.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.bench_checkpoint import drop_page_cache
from bench.record import make_parser, record
from hostdev.data.batch import ShardPiece
from hostdev.data.manifest import Manifest, Shard
from hostdev.data.preprocess.second_pass import write_shard
from hostdev.data.schema import Column, Schema, Space
from hostdev.data.shards import ShardReader
from hostdev.kernels.arrays import aligned_empty
from hostdev.kernels.pool import host_threads, parallel_for

DENSE, IDS, VALUES = 13, 26, 1_000_000  # numeric columns, columns of ids, and ids of each column
BATCH, SHARD, WINDOW = 16_000, 262_144, 16
ROW_BYTES = 4 * (1 + DENSE + IDS)
LIMIT = 5e6  # samples a second


def write(root: Path, rows: int) -> Manifest:
    """Write a data set, shard by shard."""
    names = [f"C{i + 1}" for i in range(IDS)]
    first = DENSE + IDS
    spaces = tuple(Space(name, DENSE + i, first + i * VALUES, VALUES) for i, name in enumerate(names))
    columns = tuple(Column(name, "id", name) for name in names)
    dense = tuple(f"I{i + 1}" for i in range(DENSE))
    schema = Schema("label", dense, columns, spaces, first + IDS * VALUES)
    shards, rng = [], np.random.default_rng(0)
    (root / "train").mkdir(parents=True)
    begins = first + VALUES * np.arange(IDS)
    for start in range(0, rows, SHARD):
        n = min(SHARD, rows - start)
        label = (rng.random(n, np.float32) < 0.25).astype(np.float32)
        ids = (begins + rng.integers(0, VALUES, (n, IDS))).astype(np.int32)
        made = ShardPiece(label, rng.random((n, DENSE), np.float32), ids, {})
        file = f"train/part-{len(shards):05d}.arrow"
        shards.append(Shard(file=file, rows=n, sha256=write_shard(root / file, made, schema)))
    return Manifest(
        schema=schema,
        id_type="int32",
        train=shards,
        test=[],
        vocabulary=None,
        vocabulary_sha256=None,
        rejected_sha256=None,
        options={},
        statistics={},
        sources=[],
    )


def copy_rate() -> float:
    """Return the bytes per second that a copy by all threads reads."""
    source, target = aligned_empty((50_000_000,)), aligned_empty((50_000_000,))
    source[:] = target[:] = 1

    def copy_range(start: int, stop: int) -> None:
        target[start:stop] = source[start:stop]

    times = []
    for _ in range(7):
        start = time.perf_counter()
        parallel_for(copy_range, len(source), grain=1 << 20)
        times.append(time.perf_counter() - start)
    return source.nbytes / statistics.median(times)


def file_rate(files: list[Path]) -> float:
    """Return the bytes per second of reading files in order."""
    buffer, size, start = memoryview(bytearray(1 << 22)), 0, time.perf_counter()
    for path in files:
        with path.open("rb", buffering=0) as file:
            while n := file.readinto(buffer):
                size += n
    return size / (time.perf_counter() - start)


def one_pass(reader: ShardReader, epoch: int) -> tuple[float, float]:
    """Return an epoch's samples per second, and its CPU seconds per million samples."""
    start, busy = time.perf_counter(), time.process_time()
    rows = sum(len(batch) for batch in reader.batches(BATCH, seed=2020, epoch=epoch))
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    assert rows == reader.rows
    return rows / seconds, busy / rows * 1e6


def measure(root: Path, found: Manifest, rounds: int) -> dict[str, dict[str, float]]:
    """Measure each kind of pass in turn, for some rounds; print and return medians."""
    files = [root / shard.file for shard in found.train]
    passes: dict[str, list[tuple[float, float]]] = {}
    limits: dict[str, list[float]] = {"copy": [], "disk": []}

    def note(name: str, reader: ShardReader, epoch: int, *, cold: bool = False) -> None:
        if cold:
            drop_page_cache(files)
        passes.setdefault(f"{name}, {'cold' if cold else 'warm'}", []).append(one_pass(reader, epoch))

    for _ in range(rounds):
        limits["copy"].append(copy_rate())
        drop_page_cache(files)
        limits["disk"].append(file_rate(files))
        reader = ShardReader(root, found, "train")
        mixing = ShardReader(root, found, "train", shuffle_window=WINDOW)
        note("first pass", reader, 1)
        note("later pass", reader, 2)
        one_pass(mixing, 1)  # computes the checksums
        note(f"window of {WINDOW}", mixing, 2)
        note("later pass", reader, 3, cold=True)
        note(f"window of {WINDOW}", mixing, 3, cold=True)
        note("first pass", ShardReader(root, found, "train"), 1, cold=True)
    copy, disk = (statistics.median(values) for values in limits.values())
    print(f"copy {copy / 1e9:.2f} GB/s read, disk {disk / 1e9:.2f} GB/s")
    print(f"{'':<24}{'M samples/s':>12}{'core s / M':>12}{'of copy':>9}{'of disk':>9}")
    result = {"limits": {"copy GB/s": copy / 1e9, "disk GB/s": disk / 1e9}}
    for name, values in passes.items():
        rate, busy = (statistics.median(each) for each in zip(*values, strict=True))
        of_copy, of_disk = rate * ROW_BYTES / copy, rate * ROW_BYTES / disk
        print(f"{name:<24}{rate / 1e6:>12.2f}{busy:>12.3f}{of_copy:>9.0%}{of_disk:>9.0%}")
        result[name] = {"samples/s": rate, "core s / M samples": busy, "of copy": of_copy, "of disk": of_disk}
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=8_000_000, help="rows of 160 bytes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    arguments = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="bench-reader-", dir=arguments.dir))
    try:
        found = write(root, arguments.rows)
        os.sync()
        one_pass(ShardReader(root, found, "train"), 0)  # compiles the kernels
        result = measure(root, found, arguments.rounds)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    rate = result["later pass, warm"]["samples/s"]
    print(f"{rate / 1e6:.2f} million samples/s, at least {LIMIT / 1e6:.0f}: {'met' if rate >= LIMIT else 'not met'}")
    record("reader", {"rows": arguments.rows, "threads": host_threads(), **result}, arguments.out)
