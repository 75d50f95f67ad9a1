"""Claim: a table that fills the host's memory needs what its formula says, and runs at half its limits' rates or more.

The limits are measured in the same run: memory, the disk, and for the digest one stream of SHA-256. Ops on rows by id,
in training and prediction, are compared with copies of memory. The cost of a unique row is compared with the time that
the memory alone needs for it.

A HostTable of --rows x 8 with LazyAdam: initial values, --steps steps at depth 2 with a cache of 1%, predictions,
digest, a whole checkpoint, one that adds to it, and loading by a new table, as a program that goes on does. Zipf ids,
26 a sample, other ones in each batch; the dense side is one layer. Then what a unique row costs (lookup and LazyAdam)
for tables of half a million rows up to --rows. Memory: the process's own (not the page cache's), sampled, beside what
is announced before the table is allocated.
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
from hostdev.runtime.room import GroupSize, in_words, kept

DIM, FIELDS, BATCH = 8, 26, 8000
SMALLEST = 500_000  # rows
WARMING, PREDICTED, ADDED = 3, 100, 20  # batches


class Memory:
    """The process's peak memory, sampled."""

    def __init__(self) -> None:
        self.most = 0
        threading.Thread(target=self._watch, daemon=True).start()

    def now(self) -> int:
        """Bytes, without what is mapped from files."""
        with Path("/proc/self/status").open() as status:
            return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

    def _watch(self) -> None:
        while True:
            self.most = max(self.most, self.now())
            time.sleep(0.02)


class Phases:
    """Measure phases, and print each one's rate beside its limit."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self.found = memory, {}

    @contextmanager
    def phase(self, name: str, nbytes: int = 0, limit: float | None = None) -> Iterator[None]:
        """Time what is within; it moves so many bytes, at most `limit` GB/s."""
        self._memory.most = 0
        start = time.perf_counter()
        yield
        self._add(name, time.perf_counter() - start, nbytes, limit)

    def ops(self, log: OpLog, limit: float, before: dict[str, Any]) -> dict[str, Any]:
        """Take down the ops that moved bytes since the log was as `before`, beside the limit; return what it has."""
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
    """Return the ids int32 [B, F] of n batches."""
    made = [draw_ids(rows, BATCH * FIELDS, seed).astype(np.int32).reshape(BATCH, FIELDS) for seed in range(n)]
    return map(torch.from_numpy, made)


def compute_digest(table: hostdev.HostTable) -> str:
    """Return the digest of a table's state."""
    digest = StateDigest()
    add_table(digest, table)
    return digest.hexdigest()


def row_cost(table: hostdev.HostTable) -> tuple[float, float]:
    """Nanoseconds of a unique row's lookup and update, over batches in turn: a step's rows are seldom those before.

    returns  them, and what the memory takes for it
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
        others = batches[(n + 4) % len(batches)]  # as seldom those before
        costs.append((own / len(rows) * 1e9, reach(table.storage.block, others) / len(others) * 1e9))
    own, least = np.median(costs[len(batches) :], axis=0)
    return float(own), float(least)


def train(runtime: hostdev.Runtime, layer: torch.nn.Module, batches: Iterator[torch.Tensor], steps: int) -> list[float]:
    """Take steps; return the seconds of each."""
    times, one = [], torch.optim.SGD(layer.parameters(), lr=1e-3)
    last = time.perf_counter()
    for _, found in runtime.train(itertools.islice(batches, steps), ids=lambda ids: {"t": ids}):
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
    parser.add_argument("--dir", type=Path, default=None, help="a folder on the measured disk (default: the system's)")
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
    brought, filled = fill_rate(size), fill_rate(size)  # at last: what is free for seconds may go back to a host
    print(
        f"{rows:,} rows; copies {copied:.1f} GB/s, new memory {filled:.1f} ({brought:.1f} before); "
        f"disk {written:.2f} and {read:.2f}; SHA-256 {hashed:.2f}"
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
        train(runtime, layer, batches, WARMING)  # which compiles what is not
        ops = log.summary()
        with phases.phase("train"):
            times = train(runtime, layer, batches, arguments.steps)
        print(f"{'':>16}  {np.median(times) * 1e3:.1f} ms a step")
        ops = phases.ops(log, copied, ops)
        with phases.phase("predict"):
            for _ in runtime.predict(itertools.islice(batches, PREDICTED), ids=lambda ids: {"t": ids}):
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
        gc.collect()  # before there is another one
        table = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(), name="t")
        drop_page_cache([file for file in folder.rglob("*") if file.is_file()])
        with phases.phase("load", size + added, read):
            hostdev.Runtime({"t": table}, device="cpu", depth=2, cache="1%").load(folder / "c")
        same = compute_digest(table) == after != digest
        print(f"the state that was saved is the one that was loaded: {same}")
        sizes = sorted({SMALLEST, rows // 20} - set(range(SMALLEST)))
        tables = [hostdev.HostTable(n, DIM, hostdev.LazyAdam(), name=f"{n} rows") for n in sizes]
        for one in tables:  # as of the large one, whose checkpoints there are
            one.note_changes()
        for _ in range(3):  # in turn, as the memory is others', too
            for one in (*tables, table):
                costs.setdefault(one.rows, []).append(row_cost(one))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    each = {n: np.median(costs[n], axis=0) for n in sorted(costs)}
    for n, (own, least) in each.items():
        print(
            f"a unique row costs {own:.0f} ns at {n:,} rows, of which the memory takes {least:.0f}: {own / least:.2f}x"
        )
    own, least = each[rows] / each[min(each)]
    print(f"{own:.2f}x the smallest table's cost; {least:.2f}x for the memory alone")
    most = max(found["memory"] for found in phases.found.values())
    print(
        f"memory {format_bytes(most)}, of which {format_bytes(at_first)} before the table; announced "
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
