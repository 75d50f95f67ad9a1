"""Claim: a step with a table by key takes at most 1.10 times that of a table by row, and finding keys 15% of it.

LazyAdam, D = 16, batches of 100,000 Zipf ids (exponent 1.05) at depths 0 and 2; the body gives fixed gradients to the
rows. The table by key has all keys before, and a policy that evicts none of them; the table by row has the same ids as
row numbers. They take turns. Also measured: a tenth of new keys in each batch; the memory of a key beside its row. With
--large, a table of this many keys with D = 8 and SGD is built, trained, saved, read, loaded again, and predicts.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hostdev
from bench.bench_large import Memory
from bench.record import make_parser, record
from bench.workload import make_keys
from hostdev.core.memory import available_bytes, format_bytes
from hostdev.host.key_options import KEY_BYTES
from hostdev.kernels.unique import count_occurrences, unique

DIM, IDS, STEPS = 16, 100_000, 12
WANTED = {"by key / by row": 1.10, "find / step": 0.15}
_SAVED_BYTES = 30  # of a key while a checkpoint is saved, and in the page cache
_AT_ONCE = 1 << 20  # keys inserted at a time


def draw(rows: int, batches: int, seed: int = 7) -> list[np.ndarray]:
    """Return batches of Zipf-distributed row numbers (exponent 1.05), int64 [IDS]."""
    rng, power = np.random.default_rng(seed), -0.05
    found = []
    for _ in range(batches):
        ranks = ((rows**power - 1) * rng.random(IDS) + 1) ** (1 / power)
        found.append((ranks.astype(np.int64) - 1).clip(0, rows - 1))
    return found


class Steps:
    """Steps of one table, with fixed gradients.

    Args:
        table: The table.
        batches: The batches' ids.
    """

    def __init__(self, table: hostdev.HostTable, batches: list[np.ndarray], **options: Any) -> None:
        self.table, self._batches = table, batches
        self._runtime = hostdev.Runtime({"t": table}, device="cpu", **{"depth": 0, **options})
        self._grads = torch.full((IDS, table.dim), 1e-3)

    def run(self, batches: list[np.ndarray] | None = None) -> float:
        """Return the milliseconds of a step."""
        batches = self._batches if batches is None else batches
        begin = time.perf_counter()
        for _, rows in self._runtime.train(batches, ids=lambda batch: {"t": batch}):
            rows["t"].backward(self._grads)
        return (time.perf_counter() - begin) * 1e3 / len(batches)


def make_keyed(rows: int, keys: np.ndarray, **options: Any) -> hostdev.HostTable:
    """Return a table by key that has all keys."""
    table = hostdev.HostTable(
        None, DIM, hostdev.LazyAdam(lr=1e-3), name="t", capacity=rows + rows // 5 + IDS * STEPS, **options
    )
    fill(table, keys)
    return table


def fill(table: hostdev.HostTable, keys: np.ndarray) -> None:
    """Give all keys rows."""
    zeros = np.zeros((_AT_ONCE, table.dim), np.float32)
    for start in range(0, len(keys), _AT_ONCE):
        part = keys[start : start + _AT_ONCE]
        table.apply(part, zeros[: len(part)])


def median_ms(run: Callable[[], object], rounds: int = 15) -> float:
    """Return the median time of a call in milliseconds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times[1:])


def measure(rows: int, rounds: int) -> dict[str, float]:
    """Return the figures for tables of this many rows."""
    keys, batches = make_keys(rows + rows // 5 + IDS), draw(rows, STEPS)
    by_row = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(lr=1e-3), name="t")
    table: Any = make_keyed(rows, keys[:rows], evict=hostdev.Unused(steps=10**6))
    keyed = [keys[batch] for batch in batches]
    systems = {"by row": Steps(by_row, batches), "by key": Steps(table, keyed)}
    systems |= {f"{name}, depth 2": Steps(one.table, one._batches, depth=2) for name, one in systems.items()}
    times: dict[str, list[float]] = {}
    for turn in range(rounds + 1):
        for name, steps in systems.items():
            ms = steps.run()
            if turn:
                times.setdefault(name, []).append(ms)
    found = {f"{name}, ms": statistics.median(each) for name, each in times.items()}
    for more in ("", ", depth 2"):
        pairs = zip(times[f"by key{more}"], times[f"by row{more}"], strict=True)
        found[f"by key / by row{more}"] = statistics.median(one / other for one, other in pairs)
    distinct, inverse = unique(keyed[0])
    uses = count_occurrences(inverse, len(distinct))

    def plan() -> None:
        table.key_rows.index.plan(distinct, uses)
        table.key_rows.index.release(table.key_rows.index.commit()[0])

    found["unique keys of a batch"] = float(len(distinct))
    found["find, ms"] = median_ms(lambda: table.key_rows.index.find(distinct))
    found["plan of a step, ms"] = median_ms(plan)
    found["find / step"] = found["find, ms"] / found["by key, ms"]
    found["bytes of a key beside its row"] = table.key_rows.index.nbytes / len(table)
    fresh = iter(np.split(keys[rows : rows + 5 * (IDS // 10)], 5))
    new = [np.concatenate([batch[: -IDS // 10], next(fresh)]) for batch in keyed[:5]]
    found["a tenth of new keys, ms"] = systems["by key"].run(new)
    return found


@contextmanager
def timed(found: dict[str, float], name: str) -> Iterator[None]:
    """Add the seconds of a block."""
    begin = time.perf_counter()
    yield
    found[f"{name}, s"] = time.perf_counter() - begin
    print(f"  {name:<52}{found[f'{name}, s']:>10.1f} s", flush=True)


def measure_large(rows: int, folder: Path) -> dict[str, float]:
    """Build, train, save, load and read a table by key that fills the memory; `rows` may be too many."""
    dim, found, memory = 8, dict[str, float](), Memory()
    most = int(0.85 * available_bytes()) // (4 * dim + KEY_BYTES + 10 + _SAVED_BYTES)
    rows = min(rows, most)
    keys = make_keys(rows)
    print(f"\n{rows:,} keys x {dim}, SGD", flush=True)

    def make(depth: int) -> Any:
        table = hostdev.HostTable(None, dim, hostdev.SGD(lr=0.1), name="t", capacity=rows + 1000)
        return table, hostdev.Runtime({"t": table}, device="cpu", depth=depth, cache=rows // 100)

    table, runtime = make(2)
    with timed(found, "build"):
        fill(table, keys)
    grads = torch.full((IDS, dim), 1e-3)

    def train(steps: int) -> None:
        for _, out in runtime.train([keys[batch] for batch in draw(rows, steps, steps)], ids=lambda b: {"t": b}):
            out["t"].backward(grads)

    with timed(found, "200 steps with a cache of 1%"):
        train(200)
    found["peak of the process, bytes a key"] = (memory.most - keys.nbytes) / rows
    with timed(found, "save"):
        runtime.save(folder)
    seen = keys[:: rows // 1000]
    expected = table.lookup(seen)
    runtime.close()
    del table, runtime
    with timed(found, "open and look up 1,000 keys"):
        np.testing.assert_array_equal(hostdev.open(folder)["t"].lookup(seen), expected)
    saved = hostdev.open(folder)["t"]
    batch = keys[draw(rows, 1, 3)[0]]
    saved.lookup(batch)
    found["100,000 lookups in the files, ms"] = median_ms(lambda: saved.lookup(batch))
    table, runtime = make(2)
    with timed(found, "load"):
        runtime.load(folder)
    np.testing.assert_array_equal(table.lookup(seen), expected)
    with timed(found, "prediction of 10 batches of 100,000 keys"):
        batches = [keys[batch] for batch in draw(rows, 10, 5)]
        for batch, out in runtime.predict(batches, ids=lambda b: {"t": b}):
            np.testing.assert_array_equal(out["t"][:100].numpy(), saved.lookup(batch[:100]))
    with timed(found, "20 more steps"):
        train(20)
    found["keys"] = float(rows)
    found["bytes of the checkpoint a key"] = sum(file.stat().st_size for file in folder.rglob("*")) / rows
    runtime.close()
    return found


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000_000, 20_000_000], help="numbers of keys")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--large", type=int, metavar="KEYS", help="also a table of this many keys, or what fits")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for size in arguments.sizes:
        found = measure(size, arguments.rounds)
        print(f"\n{size:,} keys\n", *(f"  {name:<52}{value:>10.2f}" for name, value in found.items()), sep="\n")
        results[f"{size}"] = {name: round(value, 4) for name, value in found.items()}
    if arguments.large:
        folder = Path(tempfile.mkdtemp(prefix="hostdev-bench-"))
        try:
            found = measure_large(arguments.large, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        print(*(f"  {name:<52}{value:>12.2f}" for name, value in found.items()), sep="\n")
        print(f"  free memory {format_bytes(available_bytes())}")
        results["large"] = {name: round(value, 4) for name, value in found.items()}
    record("unbounded", {"wanted": WANTED, "results": results}, arguments.out)


if __name__ == "__main__":
    main()
