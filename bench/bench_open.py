"""Claim: a saved table of 5 million rows opens within 0.2 s, and a request takes at most 3 x `nn.Embedding`'s time.

The benchmark saves a table, opens it, and looks up 100 rows, in turn with an `nn.Embedding` of the same shape and the
same ids. It also compares `Runtime.lookup` of six features with six such modules of 100,000 rows.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

import hostdev
from bench.record import make_parser, record

IDS, CALLS, ROUNDS = 100, 200, 7


def measure_call(call: Callable[[int], Any]) -> float:
    """Return the median seconds of calls, which get the numbers from 0 on."""
    times = []
    for number in range(CALLS):
        start = time.perf_counter()
        call(number)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--dim", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measure(options.rows, options.dim, Path(folder))
    record("open", {"rows": options.rows, "dim": options.dim, "ids": IDS, **result}, options.out)


def measure(rows: int, dim: int, folder: Path) -> dict[str, Any]:
    """Return the times of all rounds, and their medians."""
    runtime = hostdev.Runtime({"ids": hostdev.HostTable(rows, dim, hostdev.SGD(lr=0.1), name="t")}, device="cpu")
    runtime.save(folder / "saved")
    runtime.close()
    ids = np.random.default_rng(0).integers(0, rows, (CALLS, IDS))
    asked = [torch.from_numpy(one) for one in ids]
    embedding = torch.nn.Embedding(rows, dim)
    small = [hostdev.HostTable(100_000, dim, hostdev.SGD(lr=0.1), name=f"t{i}") for i in range(6)]
    features = hostdev.Runtime({f"f{i}": table for i, table in enumerate(small)}, device="cpu")
    requests = [{f"f{i}": one % 100_000 for i in range(6)} for one in ids]
    modules = [torch.nn.Embedding(100_000, dim) for _ in range(6)]
    found: list[dict[str, float]] = []
    for _ in range(ROUNDS):
        before, start = psutil.Process().memory_info().rss, time.perf_counter()
        table = hostdev.open(folder / "saved")["t"]
        opened = time.perf_counter() - start
        with torch.no_grad():
            found.append(
                {
                    "open_s": opened,
                    "request_s": measure_call(lambda number: table.lookup(ids[number])),  # noqa: B023
                    "embedding_s": measure_call(lambda number: embedding(asked[number])),
                    "touched_bytes": float(psutil.Process().memory_info().rss - before),
                    "look_up_s": measure_call(lambda number: features.lookup(requests[number])),
                    "embeddings_s": measure_call(lambda number: [each(asked[number] % 100_000) for each in modules]),
                }
            )
    features.close()
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    print(
        f"{rows:,} x {dim}: open {medians['open_s'] * 1e3:.1f} ms; {IDS} rows {medians['request_s'] * 1e6:.1f} us, "
        f"nn.Embedding {medians['embedding_s'] * 1e6:.1f} us: "
        f"{medians['request_s'] / medians['embedding_s']:.2f}x\n"
        f"Runtime.lookup of six features {medians['look_up_s'] * 1e6:.1f} us, six nn.Embedding "
        f"{medians['embeddings_s'] * 1e6:.1f} us: {medians['look_up_s'] / medians['embeddings_s']:.2f}x"
    )
    return {"medians": medians, "rounds": found}
