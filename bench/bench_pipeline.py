"""Claim: with a cache of 10% a step takes at most 1.1 x max(host, device); at depth 0 the pipeline adds under 3%.

The accelerator is simulated: a dense step only waits, so that the host is as free as with a real one. The wait is 0.5,
1 and 2 times the host's time, which is measured serially in the same round. Ids are uniform, or Zipf without and with
a cache of 10% of the rows. Without a cache, rows that two successive batches share are looked up late, as on a CPU, or
forwarded on the device. The device's work for rows counts as the device's time. The claim is about this simulation.
In a second simulation, the step also takes a real device's launches and copies from the host (`simulated.Load`), as a
part of its time. With a real accelerator, the benchmark also times whole training steps: host tables with and without a
cache against device tables. Runs are in their steady state and take turns; the results are medians, of the ratios too.
"""

import itertools
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial

import numpy as np
import torch

import hostdev
from bench.record import get_versions, make_parser, record
from bench.simulated import LAUNCH_US, LAUNCHES, FreeSlots, Load, Simulated, forward_free
from bench.wide_deep import FIELDS, FieldsBatch, make_trainer
from bench.workload import DIM, draw_ids
from hostdev.cache.cache import EmbeddingCache
from hostdev.core.optimizers import FTRL, LazyAdam
from hostdev.core.primitive import Primitive
from hostdev.device import backend
from hostdev.device.staging import Staging
from hostdev.host.table import HostTable
from hostdev.kernels.pool import host_threads
from hostdev.pipeline.batch_ids import Embedding, Group, Request
from hostdev.pipeline.context import PipelineHooks
from hostdev.pipeline.pipeline import Pipeline
from hostdev.train.trainer import Trainer

FACTORS = (0.5, 1.0, 2.0)
BATCHES = 100  # number of batches, through which a run cycles
SETTLE = 6  # steps before a measurement
LIMIT = 1.10  # times the longer of host and device, with a cache, at the default depth
DEPTH = 2  # the default
MOST_PLANES = 3  # weights, and two slots of optimizer state


def make_batches(kind: str, rows: int, size: int, count: int) -> list[np.ndarray]:
    """Return the ids [size, 39] of batches, uniform or Zipf."""
    rng = np.random.default_rng(0)
    made = []
    for seed in range(count):
        n = size * FIELDS
        ids = rng.integers(0, rows, n) if kind == "uniform" else draw_ids(rows, n, seed)
        made.append(ids.astype(np.int32).reshape(size, FIELDS))
    return made


def do_nothing(stage: str, number: int) -> None:
    """A hook: with one, a pipeline on a CPU always overlaps, as it would with the device that is simulated."""


def make_tables(rows: int) -> list[HostTable]:
    """Return the wide and the deep table."""
    return [HostTable(rows, 1, FTRL(), name="wide"), HostTable(rows, DIM, LazyAdam(), name="deep")]


def plain_loop(tables: list[Embedding], device: Simulated, ids: np.ndarray) -> float:
    """Do the work of a step without a pipeline; return its seconds."""
    start = time.perf_counter()
    found, _ = hostdev.ops.unique(ids.ravel())
    rows = [torch.empty((len(found), part.table.dim)) for part in tables]
    for part, out in zip(tables, rows, strict=True):
        part.lookup(part.table, found, out.numpy(), None)
    device.step(rows)
    for part, grad in zip(tables, device.gradients(len(found)), strict=True):
        part.update(part.table, found, grad.numpy())
    return time.perf_counter() - start


class Running:
    """A pipeline that cycles through the batches, on a simulated device."""

    def __init__(self, pipeline: Pipeline, batches: list[np.ndarray], device: Simulated) -> None:
        self.pipeline, self._device = pipeline, device
        self.stalled = 0.0  # seconds per step in the last measurement
        requests = [Request(None, len(ids), [[ids.ravel()]]) for ids in batches]
        self._open = ExitStack()
        self._pass = self._open.enter_context(pipeline.train(itertools.cycle(requests)))

    def step(self) -> None:
        """Take the next step."""
        flight = self._pass.take()
        self._pass.finish(flight, self._device.step_of(flight))

    def per_step(self, steps: int) -> float:
        """Return the seconds of a step in the steady state."""
        for _ in range(SETTLE):
            self.step()
        stalls = self.pipeline.timeline.stall_ns
        start, stalled = time.perf_counter(), stalls["step"]
        for _ in range(steps):
            self.step()
        self.stalled = (stalls["step"] - stalled) / 1e9 / steps
        return (time.perf_counter() - start) / steps

    def one_step(self) -> float:
        """Return the seconds of the next step."""
        start = time.perf_counter()
        self.step()
        return time.perf_counter() - start

    def close(self) -> None:
        self._open.close()


def simulated(
    kind: str,
    cache_rows: str,
    forward: bool,
    rows: int,
    size: int,
    depths: list[int],
    steps: int,
    rounds: int,
    *,
    loaded: bool,
) -> list[dict]:
    """Measure one kind of ids; print and return a row per setting.

    `forward` lets rows go from one step to the next on the device. `loaded` also runs the second simulation.
    """
    batches = make_batches(kind, rows, size, BATCHES)
    unique = [len(hostdev.ops.unique(ids.ravel())[0]) for ids in batches]
    tables, device = make_tables(rows), Simulated(max(unique), (1, DIM))
    load = Load(max(unique) * DIM * MOST_PLANES) if loaded else None

    def run(depth: int, *, cached: bool = True) -> Running:
        cache = None
        if cache_rows != "0" and cached:
            cache = EmbeddingCache(tables, cache_rows)
            cache.slots = [FreeSlots(slots, max(unique), device) for slots in cache.slots]
        staging = Staging(torch.device("cpu"))
        group = Group(tables, cache)
        for embedding in group.embeddings:
            embedding.forward_update = Primitive("ForwardUpdate", partial(forward_free, device))
        hooks = PipelineHooks(forward=forward, before_stage=do_nothing)
        return Running(Pipeline([group], staging, depth=depth, hooks=hooks), batches, device)

    runs = {depth: run(depth) for depth in (0, *depths)}
    conflicts = statistics.mean(len(np.intersect1d(first, second)) for first, second in itertools.pairwise(batches[:5]))
    for made in runs.values():  # fills the caches
        made.per_step(BATCHES)
    mean = statistics.mean(unique)
    print(
        f"\n{kind} ids, V = {rows:,}, batch {size:,}, cache {cache_rows}: {mean:,.0f} rows a step, of which "
        f"the next step uses {conflicts / mean:.1%}" + (", forwarded on the device" if forward else "")
    )
    what = {"ids": kind, "cache": cache_rows, "forwarded": forward}
    if cache_rows == "0":
        results = [{**what, **measure_overhead(runs[0], tables, device, batches, steps * rounds)}]
    else:
        results = [{**what, **planning_cost(runs[0], run(0, cached=False), steps, rounds)}]
    print(
        f"{'device/host':>14}{'depth':>7}{'step ms':>10}{'serial ms':>11}{'over the larger':>17}{'stall':>9}"
        + (f"{'| loaded: step ms':>20}{'device ms':>11}{'over the larger':>17}" if loaded else "")
    )
    for factor in FACTORS:
        turns = [turn(runs, device, load, factor, depths, steps) for _ in range(rounds)]
        for depth in depths:
            found = {key: statistics.median(one[depth][key] for one in turns) for key in turns[0][depth]}
            print(format_line(factor, depth, found))
            rounded = {key: round(value * 1e3 if key.endswith("_ms") else value, 3) for key, value in found.items()}
            results.append({**what, "device_over_host": factor, "depth": depth, **rounded})
    if cache_rows != "0" and DEPTH in depths:
        ratios = [row["over_max"] for row in results if row.get("depth") == DEPTH]
        met = "met" if max(ratios) <= LIMIT else "not met"
        print(f"depth {DEPTH}: {', '.join(map(str, ratios))} times the larger, at most {LIMIT:.2f}: {met}")
    for made in runs.values():
        made.close()
    return results


def turn(
    runs: dict[int, Running], simulated: Simulated, load: Load | None, factor: float, depths: list[int], steps: int
) -> dict[int, dict[str, float]]:
    """Measure every depth and the host's current time; return seconds (named _ms) and ratios by depth."""
    simulated.seconds = 0.0
    host = runs[0].per_step(steps)
    simulated.seconds = device = host * factor
    found = {}
    for depth in depths:
        step = runs[depth].per_step(steps)
        found[depth] = {
            "step_ms": step,
            "serial_ms": host + device,
            "over_max": step / max(host, device),
            "stall": runs[depth].stalled / step,
        }
    if load is None:
        return found
    simulated.load, simulated.seconds, load.seconds = load, 0.0, 0.0
    runs[0].per_step(steps)
    least = load.seconds / (steps + SETTLE)  # launches and copies alone
    simulated.seconds, loaded_device = device, max(device, least)
    for depth in depths:
        step = runs[depth].per_step(steps)
        found[depth] |= {
            "loaded_step_ms": step,
            "loaded_device_ms": loaded_device,
            "launches_and_copies_ms": least,
            "loaded_over_max": step / max(host, loaded_device),
        }
    simulated.load = None
    return found


def format_line(factor: float, depth: int, found: dict[str, float]) -> str:
    """Return a line of the table."""
    line = (
        f"{factor:>14}{depth:>7}{found['step_ms'] * 1e3:>10.2f}{found['serial_ms'] * 1e3:>11.2f}"
        f"{found['over_max']:>17.2f}{found['stall']:>9.0%}"
    )
    if "loaded_over_max" in found:
        line += (
            f"{'|':>3}{found['loaded_step_ms'] * 1e3:>17.2f}{found['loaded_device_ms'] * 1e3:>11.2f}"
            f"{found['loaded_over_max']:>17.2f}"
        )
    return line


def measure_overhead(
    run: Running, tables: list[HostTable], device: Simulated, batches: list[np.ndarray], count: int
) -> dict:
    """Measure the pipeline's own cost at depth 0; it and a plain loop take turns, step by step."""
    turns = itertools.islice(itertools.cycle(batches), count)
    plain = [Embedding(table) for table in tables]
    pairs = [(run.one_step(), plain_loop(plain, device, ids)) for ids in turns]
    host, least = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(f"host {host * 1e3:.2f} ms a step; depth 0 against a plain loop {host / least - 1:+.1%}\n")
    return {"host_ms": round(host * 1e3, 3), "depth_0_overhead": round(host / least - 1, 4)}


def planning_cost(cached: Running, uncached: Running, steps: int, rounds: int) -> dict:
    """Measure the host time that the cache saves at depth 0, and the share of it that planning takes."""
    rates = []
    for _ in range(rounds):
        ours, planning = cached.per_step(steps), planning_seconds(cached, steps)
        rates.append((ours, uncached.per_step(steps), planning))
    uncached.close()
    ours, theirs, planning = (statistics.median(column) for column in zip(*rates, strict=True))
    share = statistics.median(plan / (without - (all_of_it - plan)) for all_of_it, without, plan in rates)
    hits = cached.pipeline.groups[0].cache.planner.statistics
    print(
        f"host {ours * 1e3:.2f} ms a step with the cache, {theirs * 1e3:.2f} without; {hits.hit_rate:.1%} of uses "
        f"and {hits.unique_hit_rate:.1%} of rows hit"
    )
    print(f"planning {planning * 1e3:.2f} ms, {share:.0%} of what the cache saves\n")
    return {
        "host_ms": round(ours * 1e3, 3),
        "host_without_ms": round(theirs * 1e3, 3),
        "planning_ms": round(planning * 1e3, 3),
        "planning_over_saved": round(share, 3),
    }


def planning_seconds(run: Running, steps: int) -> float:
    """Return the seconds of planning per step in the last steps: counting uses, announcing and planning."""
    cache = run.pipeline.groups[0].cache
    times = [list(op.times.durations().latest)[-steps:] for op in (cache.counting, cache.announcing, cache.planning)]
    return sum(map(sum, times)) / 1e9 / steps


class Training:
    """A trainer that cycles through the batches."""

    def __init__(self, trainer: Trainer, batches: list[FieldsBatch]) -> None:
        self._results = trainer.train(itertools.cycle(batches))

    def per_step(self, steps: int) -> float:
        """Return the seconds of a step in the steady state."""
        for _ in range(SETTLE):
            next(self._results)
        start = time.perf_counter()
        for _ in range(steps):
            next(self._results)
        return (time.perf_counter() - start) / steps

    def close(self) -> None:
        self._results.close()


def on_accelerator(device: torch.device, depths: list[int], steps: int) -> list[dict]:
    """Measure whole training steps at the default sizes: host tables, cached or not, against device tables."""
    rows, size = (184_965, 16_000) if backend.is_accelerator(device) else (2000, 200)
    backend.make_deterministic(device)
    label, weights = np.zeros(size, np.float32), np.ones((size, FIELDS), np.float32)
    batches = [FieldsBatch(label, ids, weights) for ids in make_batches("Zipf", rows, size, BATCHES)]
    results = []
    print(f"\n{backend.describe(device)}, V = {rows:,}, batch {size:,}, D = {DIM}\n")
    for precision in ("fp32", "bf16"):
        modes = [(False, 0, None), (False, 2, None), (True, 0, None), *((True, depth, None) for depth in depths)]
        on_device = 0.0
        for mix, depth, cache in [*modes, *((True, depth, "10%") for depth in depths)]:
            options = {"precision": precision, "depth": depth, "cache": cache}
            run = Training(make_trainer(rows, DIM, device=device, mix=mix, **options), batches)
            step = min(run.per_step(steps) for _ in range(3))
            run.close()
            on_device = step if not mix and (not on_device or step < on_device) else on_device
            name = (
                f"{precision} {'host' if mix else 'device'} tables, depth {depth}{f', cache {cache}' if cache else ''}"
            )
            print(f"{name:<44}{step * 1e3:>9.2f} ms{size / step:>13,.0f} samples/s{on_device / step:>7.2f}")
            results.append(
                {
                    "run": name,
                    "step_ms": round(step * 1e3, 3),
                    "samples_per_s": round(size / step),
                    "of_device_tables": round(on_device / step, 3),
                }
            )
    return results


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000, help="rows of the tables (D = 80)")
    parser.add_argument(
        "--batch-sizes", type=int, nargs=2, default=[4000, 16_000], help="without a cache, and with one"
    )
    parser.add_argument("--depths", type=int, nargs="*", default=[1, 2, 4])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--loaded",
        choices=("none", "cached", "all"),
        default="cached",
        help="runs that are repeated in the second simulation, which doubles their time",
    )
    parser.add_argument("--only", choices=("simulated", "accelerator"), help="one part instead of both")
    parser.add_argument("--device", default="auto", help="the accelerator; cpu: a small trial")
    arguments = parser.parse_args()
    device = backend.select(arguments.device)
    trial = arguments.device == "cpu"
    if arguments.only == "accelerator" and not (backend.is_accelerator(device) or trial):
        sys.exit("bench pipeline: --only accelerator needs an accelerator that torch sees; --device cpu is a trial")
    results: list[dict] = []
    if arguments.only != "accelerator":
        small, large = arguments.batch_sizes
        how = (arguments.depths, arguments.steps, arguments.rounds)
        for kind, cache, forward, size in (
            ("uniform", "0", False, small),
            ("uniform", "0", True, small),
            ("Zipf", "0", False, small),
            ("Zipf", "0", True, small),
            ("Zipf", "10%", False, large),
        ):
            loaded = arguments.loaded == "all" or (arguments.loaded == "cached" and cache != "0")
            results += simulated(kind, cache, forward, arguments.rows, size, *how, loaded=loaded)
    real: list[dict] = []
    if arguments.only != "simulated" and (backend.is_accelerator(device) or trial):
        real = on_accelerator(device, arguments.depths, arguments.steps)
    elif arguments.only is None:
        print("\ntorch sees no accelerator: whole training steps were not measured")
    versions = get_versions("numba", "torch")
    content = {
        "threads": host_threads(),
        "versions": versions,
        "device": backend.describe(device),
        "launches": LAUNCHES,
        "launch_us": LAUNCH_US,
        "simulated": results,
        "accelerator": real,
    }
    record("pipeline", content, arguments.out)
