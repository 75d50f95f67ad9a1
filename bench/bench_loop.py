"""Claim: a loop over host tables is 2x as fast as nn.EmbeddingBag; bags match FBGEMM's; ten groups cost at most 10%.

(a) The same model and loop on the CPU, with 26 tables of 100,000 rows, bags of 10 and D = 64: `hostdev.Runtime` has at
    least 2x the samples per second of `nn.EmbeddingBag(sparse=True)` with `torch.optim.SparseAdam`.
(b) Lookup, pooling and update of bags have at least 1x the rate of FBGEMM's CPU kernels with row-wise Adagrad, on the
    same ids in one table. Each system has a process, and they take turns.
(c) Ten groups of tables take at most 10% more host time than one group, at batch size 16,000, without caches and with
    caches of 10%. The one table has the rows of the ten tables end to end, and the same uses.
(d) Ten groups on a simulated device, whose step only waits, as long as the host works: a step at depth 2 takes at most
    1.15 x max(host, device), with caches of 10% and without. The caches' device work counts as the device's time.
(e) A small step, which shows the cost of a step itself: (a) with 256 samples, bags of one id and D = 16 has at least
    torch's samples per second. "outside" is the time of hostdev's step at depth 0 that is neither in its kernels
    nor in a step of torch on rows that are already there.

The parts of a comparison take turns; the results are medians, of the ratios too.
"""

import argparse
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

import hostdev
from bench.bench_peers import Peer
from bench.record import get_versions, make_parser, record
from bench.simulated import FreeSlots, Simulated
from bench.workload import draw_ids
from hostdev.kernels.loops import COMPILED
from hostdev.kernels.pool import host_threads
from hostdev.runtime.reading import ReadAhead, Reading
from hostdev.runtime.requests import Reader

TABLES, ROWS, BAG, DIM = 26, 100_000, 10, 64
GROUPS, GROUP_ROWS, USES = 10, 2_000_000, 40  # groups, rows of all their tables, and ids per sample over all groups
LARGE = 16_000  # samples of a batch
BATCHES = 12  # number of batches, through which a run cycles
CACHED_ROWS, CACHED_BATCHES = 5_000_000, 100
SETTLE = 4
CACHE = "10%"
BAG_CASE = "64 10 Zipf"  # of the benchmark `bags`
SMALL, SMALL_DIM, SMALL_STEPS = 256, 16, 50  # samples, D, and steps of a turn
LIMITS = {"embedding_bag": 2.0, "fbgemm": 1.0, "groups": 1.10, "simulated": 1.15, "small": 1.0}


def zipf(rng: np.random.Generator, rows: int, n: int) -> np.ndarray:
    """Return Zipf ids int64 [n], scattered over a table of `rows` rows."""
    return (rng.zipf(1.1, n) % rows * 2_654_435_761 % rows).astype(np.int64)


def bags(tables: int, rows: int, size: int, bag: int) -> list[list[torch.Tensor]]:
    """Return the ids [size, bag] of each table, for each batch."""
    rng = np.random.default_rng(0)
    return [
        [torch.from_numpy(zipf(rng, rows, size * bag).reshape(size, bag)) for _ in range(tables)]
        for _ in range(BATCHES)
    ]


class Top(nn.Module):
    """A small network over the pooled rows of all tables."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, pooled: list[torch.Tensor]) -> torch.Tensor:
        return self.layers(torch.cat(pooled, 1)).squeeze(1)


def torch_steps(batches: list[list[torch.Tensor]], labels: torch.Tensor, dim: int) -> Iterator[None]:
    """Train the model with torch's embeddings, step by step."""
    torch.manual_seed(0)
    tables = nn.ModuleList(nn.EmbeddingBag(ROWS, dim, mode="sum", sparse=True) for _ in range(TABLES))
    top = Top(TABLES * dim)
    sparse = torch.optim.SparseAdam(list(tables.parameters()), lr=1e-3)
    dense = torch.optim.Adam(top.parameters(), lr=1e-3)
    for ids in itertools.cycle(batches):
        loss = nn.functional.binary_cross_entropy_with_logits(
            top([t(i) for t, i in zip(tables, ids, strict=True)]), labels
        )
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        yield


def hostdev_steps(batches: list[list[torch.Tensor]], labels: torch.Tensor, dim: int, depth: int) -> Iterator[None]:
    """Train the same model with the tables in a runtime."""
    torch.manual_seed(0)
    tables = [hostdev.HostTable(ROWS, dim, hostdev.LazyAdam(lr=1e-3), name=f"t{i}") for i in range(TABLES)]
    names = [f"f{i}" for i in range(TABLES)]
    runtime = hostdev.Runtime(
        {name: hostdev.Feature(table, pooling="sum") for name, table in zip(names, tables, strict=True)},
        device="cpu",
        depth=depth,
    )
    top = Top(TABLES * dim)
    dense = torch.optim.Adam(top.parameters(), lr=1e-3)
    for _, rows in runtime.train(
        itertools.cycle(batches), ids=lambda ids: dict(zip(names, ids, strict=True)), read_ahead=True
    ):
        loss = nn.functional.binary_cross_entropy_with_logits(top([rows[name] for name in names]), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        yield


def dense_steps(labels: torch.Tensor, dim: int) -> Iterator[None]:
    """Train the dense layers alone, on rows [B, dim] of each table that get a gradient."""
    torch.manual_seed(0)
    rows = [torch.randn(len(labels), dim) for _ in range(TABLES)]
    top = Top(TABLES * dim)
    dense = torch.optim.Adam(top.parameters(), lr=1e-3)
    while True:
        leaves = [one.detach().requires_grad_() for one in rows]
        loss = nn.functional.binary_cross_entropy_with_logits(top(leaves), labels)
        dense.zero_grad()
        loss.backward()
        dense.step()
        yield


def seconds(steps: Iterator[None], count: int) -> float:
    """Return the seconds of a step, over `count` steps."""
    start = time.perf_counter()
    for _ in range(count):
        next(steps)
    return (time.perf_counter() - start) / count


def in_turn(runs: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Call all functions in turn, for some rounds; return their results by name."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(run())
    return times


def draw_labels(size: int) -> torch.Tensor:
    """Return labels, float32 [size]."""
    return torch.from_numpy((np.random.default_rng(1).random(size) < 0.3).astype(np.float32))


def against_embedding_bag(size: int, bag: int, dim: int, steps: int, rounds: int) -> dict[str, float]:
    """Measure (a)."""
    batches, labels = bags(TABLES, ROWS, size, bag), draw_labels(size)
    made = {
        "torch": torch_steps(batches, labels, dim),
        "hostdev depth 0": hostdev_steps(batches, labels, dim, 0),
        "hostdev depth 2": hostdev_steps(batches, labels, dim, 2),
    }
    for one in made.values():
        seconds(one, SETTLE)
    times = in_turn({name: lambda one=one: seconds(one, steps) for name, one in made.items()}, rounds)
    for one in made.values():
        one.close()  # type: ignore[attr-defined]
    found = {f"{name}: samples/s": round(size / statistics.median(values)) for name, values in times.items()}
    best = min(statistics.median(times[name]) for name in made if name != "torch")
    found["ratio"] = round(statistics.median(times["torch"]) / best, 3)
    return found


def small(rounds: int) -> dict[str, float]:
    """Measure (e)."""
    found = against_embedding_bag(SMALL, 1, SMALL_DIM, SMALL_STEPS, rounds)
    labels = draw_labels(SMALL)
    ours, dense = hostdev_steps(bags(TABLES, ROWS, SMALL, 1), labels, SMALL_DIM, 0), dense_steps(labels, SMALL_DIM)
    for one in (ours, dense):
        seconds(one, SMALL_STEPS)
    times = in_turn({"step": lambda: seconds(ours, SMALL_STEPS), "dense": lambda: seconds(dense, SMALL_STEPS)}, rounds)
    with kernel_times() as spent:
        seconds(ours, SMALL_STEPS)
    ours.close()
    parts = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    parts["kernels"] = sum(spent) / SMALL_STEPS / 1e3
    parts["outside"] = parts["step"] - parts["dense"] - parts["kernels"]
    return {f"{name} us": round(value) for name, value in parts.items()} | found


@contextmanager
def kernel_times() -> Iterator[list[int]]:
    """Yield a list to which each call of a kernel from this thread adds its nanoseconds."""
    thread, call, spent = threading.get_ident(), COMPILED.__call__, []

    def timed(self: Any, *given: Any, **named: Any) -> Any:
        if threading.get_ident() != thread:
            return call(self, *given, **named)
        begin = time.perf_counter_ns()
        try:
            return call(self, *given, **named)
        finally:
            spent.append(time.perf_counter_ns() - begin)

    COMPILED.__call__ = timed
    try:
        yield spent
    finally:
        COMPILED.__call__ = call


def against_fbgemm(rows: int, rounds: int) -> dict[str, float]:
    """Measure (b)."""
    scripts = {"hostdev": ("hostdev", "hostdev_bags.py"), "FBGEMM": ("torch", "fbgemm_bags.py")}
    peers = {name: Peer(*script, rows, BAG_CASE) for name, script in scripts.items()}
    times: dict[str, list[float]] = {}
    try:
        for turn in range(rounds + 2):  # the first two warm up
            for name, peer in peers.items():
                for op in peer.ops:
                    ms = peer.run(op)
                    if turn >= 2:
                        times.setdefault(f"{name}: {op} ms", []).append(ms)
    finally:
        for peer in peers.values():
            peer.close()
    found = {name: round(statistics.median(values), 3) for name, values in times.items()}
    ours, theirs = (times[f"{name}: {BAG_CASE} ms"] for name in ("hostdev", "FBGEMM"))
    found["ratio"] = round(statistics.median(b / a for a, b in zip(ours, theirs, strict=True)), 3)
    return found


def group_ids(groups: int, rows: int, size: int, uses: int) -> list[list[np.ndarray]]:
    """Return the ids [size, uses / groups] of each group, for each batch; a group's table has rows / groups rows."""
    rng = np.random.default_rng(0)
    each, most = uses // groups, rows // groups
    return [[zipf(rng, most, size * each).reshape(size, each) for _ in range(groups)] for _ in range(BATCHES)]


def as_one_group(batches: list[list[np.ndarray]], rows: int) -> list[list[np.ndarray]]:
    """Return the same uses of the same rows for one table, which has the groups' tables end to end."""
    return [[np.hstack([ids + rows // len(batch) * g for g, ids in enumerate(batch)])] for batch in batches]


class Endless:
    """A loader that repeats some batches forever."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        return itertools.cycle(self._batches)


class Waiting:
    """The pipeline of a runtime, from reading ids to updating rows, with a device whose step only waits.

    Args:
        batches: For each batch, the ids [size, any] of each group's table.
        rows: Number of rows of all tables together.
        depth: Depth of the pipeline.
        cache: Size of each group's cache; its device work counts as the device's time. None: no caches.
    """

    def __init__(self, batches: list[list[np.ndarray]], rows: int, depth: int, cache: str | None = None) -> None:
        names = [f"f{i}" for i in range(len(batches[0]))]
        tables = {name: hostdev.HostTable(rows // len(names), DIM, hostdev.LazyAdam(), name=name) for name in names}
        features = {name: hostdev.Feature(table, pooling="sum") for name, table in tables.items()}
        runtime = hostdev.Runtime(features, device="cpu", depth=depth, cache=cache)
        most = max(ids.size for ids in batches[0])
        self.device = Simulated(most, [DIM])
        for group in runtime.pipeline.groups:
            if group.is_cached:
                group.cache.slots = [FreeSlots(slots, most, self.device) for slots in group.cache.slots]
                for embedding, slots in zip(group.embeddings, group.cache.slots, strict=True):
                    embedding.use_cache(slots)
        given = [dict(zip(names, map(torch.from_numpy, batch), strict=True)) for batch in batches]
        reading = Reading(Endless(given), keep=ReadAhead)
        requests = Reader(runtime.bindings, runtime.group_specs, None, None).requests(reading)
        self._open = ExitStack()
        self._pass = self._open.enter_context(runtime.pipeline.train(requests))

    def per_step(self, steps: int) -> float:
        """Return the seconds of a step."""
        start = time.perf_counter()
        for _ in range(steps):
            flight = self._pass.take()
            self._pass.finish(flight, self.device.step_of(flight))
        return (time.perf_counter() - start) / steps

    def close(self) -> None:
        """End the pass."""
        self._open.close()


def groups(steps: int, rounds: int, cache: str | None) -> dict[str, float]:
    """Measure (c)."""
    batches = group_ids(GROUPS, GROUP_ROWS, LARGE, USES)
    made = {
        GROUPS: Waiting(batches, GROUP_ROWS, 0, cache),
        1: Waiting(as_one_group(batches, GROUP_ROWS), GROUP_ROWS, 0, cache),
    }
    for one in made.values():
        one.per_step(3 * BATCHES if cache else SETTLE)
    times = in_turn({str(count): lambda one=one: one.per_step(steps) for count, one in made.items()}, rounds)
    for one in made.values():
        one.close()
    found = {f"groups: {name}, host ms": round(statistics.median(values) * 1e3, 3) for name, values in times.items()}
    ratios = [many / one for many, one in zip(times[str(GROUPS)], times["1"], strict=True)]
    return found | {"ratio": round(statistics.median(ratios), 3)}


def simulated(steps: int, rounds: int, cache: str | None) -> dict[str, float]:
    """Measure (d)."""
    each, most = USES // GROUPS, CACHED_ROWS // GROUPS
    batches = [
        [draw_ids(most, LARGE * each, number * GROUPS + g).reshape(LARGE, each) for g in range(GROUPS)]
        for number in range(CACHED_BATCHES if cache else BATCHES)
    ]
    serial, overlapped = (Waiting(batches, CACHED_ROWS, depth, cache) for depth in (0, 2))
    for one in (serial, overlapped):
        one.per_step(len(batches) + SETTLE)  # caches fill
    rows = []
    for _ in range(rounds):
        host = serial.per_step(steps)
        overlapped.device.seconds = host
        rows.append((host, overlapped.per_step(steps)))
    for one in (serial, overlapped):
        one.close()
    return {
        "host and device ms": round(statistics.median(host for host, _ in rows) * 1e3, 3),
        "step ms": round(statistics.median(step for _, step in rows) * 1e3, 3),
        "ratio": round(statistics.median(step / host for host, step in rows), 3),
    }


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--batch-size", type=int, default=2048, help="batch size of (a)")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--peers", action=argparse.BooleanOptionalAction, default=True, help="run (b), which installs FBGEMM"
    )
    arguments = parser.parse_args()
    parts: dict[str, Callable[[], dict[str, float]]] = {
        "embedding_bag": lambda: against_embedding_bag(
            arguments.batch_size, BAG, DIM, arguments.steps, arguments.rounds
        ),
        "small": lambda: small(arguments.rounds),
        "fbgemm": lambda: against_fbgemm(1_000_000, arguments.rounds),
        "groups": lambda: groups(arguments.steps, arguments.rounds, None),
        "groups, cached": lambda: groups(arguments.steps, arguments.rounds, CACHE),
        "simulated, cached": lambda: simulated(arguments.steps, arguments.rounds, CACHE),
        "simulated": lambda: simulated(arguments.steps, arguments.rounds, None),
    }
    results = {}
    for name, run in parts.items():
        if name == "fbgemm" and not arguments.peers:
            continue
        results[name] = found = run()
        limit, least = LIMITS[name.split(",")[0]], name in ("embedding_bag", "fbgemm", "small")
        met = found["ratio"] >= limit if least else found["ratio"] <= limit
        print(f"\n{name}")
        for what, value in found.items():
            print(f"  {what:<44}{value:>12,}")
        print(f"  at {'least' if least else 'most'} {limit}: {'met' if met else 'NOT MET'}", flush=True)
    versions = get_versions("numba", "torch")
    content = {
        "threads": host_threads(),
        "torch_threads": torch.get_num_threads(),
        "versions": versions,
        "limits": LIMITS,
        "results": results,
    }
    record("loop", content, arguments.out)
