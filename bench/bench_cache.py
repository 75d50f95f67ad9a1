"""Claim: lookahead hits at least 0.99 of what the offline optimum hits, more than lru, lfu and static, and planning a
batch of 624,000 ids takes at most 3 ms on two cores.

Hit rates by uses, over Zipf(1.05) ids and over data sets given by --data, cold caches of 1%, 5% and 10% of the rows.
Planning: counting uses, announcing and planning, with other memory read in between, as a step does; Zipf(1.1) ids.
"""

import argparse
import statistics
import time
from pathlib import Path

import numba
import numpy as np
from hostdev.data import manifest
from hostdev.data.shards import ShardReader
from record import record
from wide_deep import fields_of
from workload import IDS, ids_of

import hostdev
from hostdev.cache.optimum import optimal
from hostdev.cache.options import POLICIES, WINDOW, rows_of
from hostdev.cache.planner import Planner
from hostdev.kernels.pool import host_threads
from hostdev.kernels.unique import count_uses

Batches = list[tuple[np.ndarray, np.ndarray]]


def zipf(rows: int, count: int, size: int) -> Batches:
    """Batches of `size` Zipf(1.05) ids over `rows` rows."""
    rng = np.random.default_rng(0)
    edges = np.cumsum(1 / np.arange(1, rows + 1) ** 1.05)
    scattered = rng.permutation(rows).astype(np.int32)
    drawn = (scattered[np.searchsorted(edges, rng.random(size) * edges[-1])] for _ in range(count))
    return [counted(ids) for ids in drawn]


def counted(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Unique ids and their uses."""
    found, inverse = hostdev.unique(ids)
    return found, count_uses(inverse, len(found))


def real(folder: Path, size: int) -> tuple[Batches, int]:
    """Batches of a data set's training rows, and its rows."""
    found = manifest.read(folder)
    reader = ShardReader(folder, found, "train")
    batches = [counted(batch.ids.ravel()) for batch in fields_of(reader, size, seed=2020, epoch=1)]
    return batches, found.vocabulary_size


def run(batches: Batches, planner: Planner) -> float:
    """Plan all batches, and return the hit rate."""
    for ids, uses in batches:
        planner.announce(ids, uses)
        if len(planner) > planner.window:
            planner.plan()
    while len(planner):
        planner.plan()
    return planner.statistics.hit_rate


def hit_rates(name: str, batches: Batches, rows: int) -> list[dict]:
    """Print and return the hit rates of all policies and of the optimum."""
    counts = np.zeros(rows, np.int64)
    for ids, uses in batches:
        counts[ids] += uses
    print(f"\n{name}: {len(batches)} batches, V = {rows:,}")
    print(
        f"{'cache':>8}" + "".join(f"{policy:>11}" for policy in (*POLICIES, "optimum")) + f"{'lookahead/optimum':>20}"
    )
    results = []
    for share in ("1%", "5%", "10%"):
        capacity = rows_of(share, rows)
        rates = {policy: run(batches, Planner(rows, capacity, policy, counts=counts)) for policy in POLICIES}
        rates["optimum"] = optimal(batches, rows, capacity).hit_rate
        ratio = rates["lookahead"] / rates["optimum"]
        print(f"{share:>8}" + "".join(f"{rate:>11.4f}" for rate in rates.values()) + f"{ratio:>20.4f}")
        results.append({"ids": name, "rows": rows, "cache": share, **{k: round(v, 5) for k, v in rates.items()}})
    return results


def planning(rows: int, share: str, steps: int) -> dict:
    """Print and return the milliseconds of planning a batch, step by step."""
    batches = [hostdev.unique(ids_of(rows, IDS, seed).astype(np.int32)) for seed in range(WINDOW + steps)]
    planner, other = Planner(rows, rows_of(share, rows)), np.ones(4_000_000, np.float32)
    times = []
    for ids, inverse in batches:
        other += 1
        start = time.perf_counter()
        planner.announce(ids, count_uses(inverse, len(ids)))
        if len(planner) > WINDOW:
            planner.plan()
            times.append(time.perf_counter() - start)
    unique = statistics.mean(len(ids) for ids, _ in batches)
    median = statistics.median(times[steps // 2 :]) * 1e3
    print(f"V = {rows:>9,}, cache {share:>4}: {median:6.2f} ms for {IDS:,} ids, {unique:,.0f} of them unique; "
          f"{planner.statistics.hit_rate:.1%} of uses hit")  # fmt: skip
    return {"rows": rows, "cache": share, "unique": round(unique), "planning_ms": round(median, 3)}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="data sets of hostdev.data.preprocess")
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    rates = []
    for rows in (20_000, 200_000):
        rates += hit_rates("Zipf(1.05)", zipf(rows, 90, arguments.batch_size * 39), rows)
    for number, folder in enumerate(arguments.data, 1):
        rates += hit_rates(f"data set {number}", *real(folder, arguments.batch_size))
    print()
    times = [planning(rows, share, arguments.steps) for rows in (184_965, 5_000_000) for share in ("1%", "10%")]
    versions = {"hostdev": hostdev.__version__, "numba": numba.__version__, "numpy": np.__version__}
    content = {"threads": host_threads(), "versions": versions, "hit_rates": rates, "planning": times}
    print(f"\nwritten to {record('cache', content)}")


if __name__ == "__main__":
    main()
