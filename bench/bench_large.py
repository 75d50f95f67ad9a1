"""Claim: a table that fills host memory takes the announced memory, and its ops reach half their limits' rates.

The limits are measured in the same run: memory, the disk, and for the digest one stream of SHA-256. Ops on rows by id,
in training and prediction, are compared with copies in memory. The cost of a unique row is compared with the time that
the memory alone needs for it.

The benchmark takes a HostTable of --rows x 8 with LazyAdam through its initial values, --steps steps at depth 2 with a
cache of 1%, predictions, a digest, a full and an incremental checkpoint, and the load into a new table, as on resume.
Ids are Zipf ids, 26 a sample and different in each batch; the dense side is one layer. Then it measures the cost of a
unique row (lookup and LazyAdam) for tables of half a million rows up to --rows. It samples the process's own memory
(without the page cache), and compares the peak with the memory that is announced before the table is allocated.
"""

import gc
import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hostdev
from bench.bench_checkpoint import disk_rates, drop_page_cache
from bench.limits import copy_rate, fill_rate, hash_rate, reach
from bench.record import make_parser, record
from bench.workload import draw_ids
from hostdev.checkpoint.manager import SAVING_BYTES
from hostdev.core.digest import StateDigest
from hostdev.core.memory import TableShape, format_bytes
from hostdev.core.primitive import OpLog
from hostdev.kernels.pool import host_threads
from hostdev.runtime.digest import add_table
from hostdev.runtime.placement import GroupSize, in_words, kept

DIM, FIELDS, BATCH = 8, 26, 8000
SMALLEST = 500_000  # rows
WARMING, PREDICTED, ADDED = 3, 100, 20  # batches to warm up, to predict, and between the checkpoints


class Memory:
    """Samples the process's peak memory."""

    def __init__(self) -> None:
        self.most = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """Return the process's bytes, without memory mapped from files."""
        with Path("/proc/self/status").open() as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            time.sleep(0.02)


class Phases:
    """Measures phases, and prints the rate of each with its limit."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.found = memory, {}

    @contextmanager
    def phase(self, name: str, nbytes: int = 0, limit: float | None = None) -> Iterator[None]:
        """Time the block, which moves `nbytes` bytes; `limit` is its limit in GB/s."""
        self._memory.most = 0
        start = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - start, nbytes, limit)

    def ops(self, log: OpLog, limit: float, before: dict[str, Any]) -> dict[str, Any]:
        """Add the ops that moved bytes since the summary `before`, with the limit; return the log's new summary."""
        found = log.summary()
        for name, op in found.items():
            earlier = before.get(name, {"bytes": 0, "total_us": 0.0})
            if nbytes := op["bytes"] - earlier["bytes"]:
                self._add(name, (op["total_us"] - earlier["total_us"]) / 1e6, nbytes, limit)
        return found

    def _add(self, name: str, seconds: float, nbytes: int, limit: float | None) -> None:
        rate = nbytes / seconds / 1e9
        share = None if limit is None else round(rate / limit, 3)
        self.found[name] = {
            "seconds": round(seconds, 2),
            "GB/s": round(rate, 3),
            "of_limit": share,
            "memory": self._memory.most,
        }
        of = f", {share:.0%} of {limit:.1f}" if share is not None and limit is not None else ""
        moved = f", {rate:6.2f} GB/s{of}" if nbytes else ""
        print(f"{name:>16}: {seconds:7.1f} s{moved}, memory {format_bytes(self._memory.most)}", flush=True)


def make_batches(rows: int, n: int) -> Iterator[torch.Tensor]:
    """Return an iterator of the ids int32 [B, F] of n batches."""
    made = [draw_ids(rows, BATCH * FIELDS, seed).astype(np.int32).reshape(BATCH, FIELDS) for seed in range(n)]
    return map(torch.from_numpy, made)


def compute_digest(table: hostdev.HostTable) -> str:
    """Return the digest of a table's state."""
    digest = StateDigest()
    add_table(digest, table)
    return digest.hexdigest()


def row_cost(table: hostdev.HostTable) -> tuple[float, float]:
    """Return the nanoseconds of a unique row's lookup and update, and the memory's part of them.

    Batches alternate, because a step's rows are seldom those of the step before.
    """
    batches = [hostdev.ops.unique(draw_ids(table.rows, seed=seed).astype(np.int32))[0] for seed in range(8)]
    most = max(map(len, batches))
    out, grads = np.empty((most, DIM), np.float32), np.full((most, DIM), 1e-3, np.float32)
    costs: list[tuple[float, float]] = []
    for n, rows in enumerate(batches * 4):
        start = time.perf_counter()
        table.lookup(rows, out=out[: len(rows)])
        table.update(rows, grads[: len(rows)])
        own = time.perf_counter() - start
        others = batches[(n + 4) % len(batches)]  # again, seldom the rows of the call before
        costs.append((own / len(rows) * 1e9, reach(table.storage.block, others) / len(others) * 1e9))
    own, least = np.median(costs[len(batches) :], axis=0)
    return float(own), float(least)


def train(runtime: hostdev.Runtime, layer: torch.nn.Module, batches: Iterator[torch.Tensor], steps: int) -> list[float]:
    """Take steps; return the seconds of each step."""
    times, one = [], torch.optim.SGD(layer.parameters(), lr=1e-3)
    last = time.perf_counter()
    for _, found in runtime.train(itertools.islice(batches, steps), ids=lambda ids: {"t": ids}, read_ahead=True):
        layer(found["t"].reshape(BATCH, -1)).square().mean().backward()
        one.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    return times


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=200_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the disk to measure (default: system's)")
    arguments = parser.parse_args()
    rows, memory = arguments.rows, Memory()
    shape = GroupSize(rows, [TableShape(DIM, hostdev.LazyAdam())], True, hostdev.CacheSpec("1%"))
    announced = kept([shape], depth=2, slots_on_host=True, uses=BATCH * FIELDS, copies=SAVING_BYTES)
    size = announced["tables"]
    batches = make_batches(rows, WARMING + arguments.steps + PREDICTED + ADDED)
    at_first = memory.now()
    folder = Path(tempfile.mkdtemp(dir=arguments.dir))
    written, read = disk_rates(folder, 1 << 32)
    copied, hashed = copy_rate(), hash_rate()
    brought, filled = fill_rate(size), fill_rate(size)  # last: free memory may return to a host
    print(
        f"{rows:,} rows; GB/s: copies {copied:.1f}, new memory {filled:.1f} (first {brought:.1f}), disk writes "
        f"{written:.2f}, disk reads {read:.2f}, SHA-256 {hashed:.2f}"
    )
    print(f"announced: {format_bytes(sum(announced.values()))}: {in_words(announced)}")
    phases = Phases(memory)
    costs: dict[int, list[tuple[float, float]]] = {}
    try:
        with phases.phase("initial values", size, filled):
            table = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(), name="t")
        log = OpLog()
        runtime = hostdev.Runtime({"t": table}, device="cpu", depth=2, cache="1%", log=log)
        layer = torch.nn.Linear(FIELDS * DIM, 1)
        train(runtime, layer, batches, WARMING)  # compiles the kernels
        ops = log.summary()
        with phases.phase("train"):
            times = train(runtime, layer, batches, arguments.steps)
        print(f"{'':>16}  {np.median(times) * 1e3:.1f} ms a step")
        ops = phases.ops(log, copied, ops)
        with phases.phase("predict"):
            for _ in runtime.predict(itertools.islice(batches, PREDICTED), ids=lambda ids: {"t": ids}, read_ahead=True):
                pass
        ops = phases.ops(log, copied, ops)
        with phases.phase("digest", size, hashed):
            digest = compute_digest(table)
        with phases.phase("save, whole", size, written):
            runtime.save(folder / "c")
        train(runtime, layer, batches, ADDED)
        before = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        start = time.perf_counter()
        runtime.save(folder / "c")
        seconds = time.perf_counter() - start
        added = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) - before
        print(f"{'save, added':>16}: {seconds:7.1f} s, {format_bytes(added)}")
        after = compute_digest(table)
        del table, runtime
        gc.collect()  # frees the table before another one is made
        table = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(), name="t")
        drop_page_cache([file for file in folder.rglob("*") if file.is_file()])
        with phases.phase("load", size + added, read):
            hostdev.Runtime({"t": table}, device="cpu", depth=2, cache="1%").load(folder / "c")
        same = compute_digest(table) == after != digest
        print(f"the loaded state equals the saved one: {same}")
        sizes = sorted({SMALLEST, rows // 20} - set(range(SMALLEST)))
        tables = [hostdev.HostTable(n, DIM, hostdev.LazyAdam(), name=f"{n} rows") for n in sizes]
        for one in tables:  # as in the large table, which has checkpoints
            one.stored.note_changes()
        for _ in range(3):  # in turn, because other programs share the memory
            for one in (*tables, table):
                costs.setdefault(one.rows, []).append(row_cost(one))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    each = {n: np.median(costs[n], axis=0) for n in sorted(costs)}
    for n, (own, least) in each.items():
        print(
            f"a unique row costs {own:.0f} ns at {n:,} rows, {own / least:.2f}x the {least:.0f} ns of the memory alone"
        )
    own, least = each[rows] / each[min(each)]
    print(f"the largest table has {own:.2f}x the smallest one's cost; the memory alone {least:.2f}x")
    most = max(found["memory"] for found in phases.found.values())
    print(
        f"peak memory {format_bytes(most)}, {format_bytes(at_first)} before the table was made; announced "
        f"{format_bytes(sum(announced.values()))}"
    )
    content: dict[str, Any] = {
        "rows": rows,
        "dim": DIM,
        "threads": host_threads(),
        "copy": copied,
        "fill": [brought, filled],
        "hash": hashed,
        "disk": [written, read],
        "announced": announced,
        "memory_before": at_first,
        "most_memory": most,
        "phases": phases.found,
        "ops": ops,
        "ms_a_step": float(np.median(times) * 1e3),
        "added_bytes": added,
        "added_seconds": seconds,
        "loaded_is_saved": same,
        "ns_a_row": costs,
    }
    record("large", content, arguments.out)
