"""Claim: a state's digest takes at most 1.25 times a core's time over the number of cores; then only changes are read.

One core's rate is measured in the same rounds, on the same rows in memory. So is what all cores hash of blocks of 1 MiB
in the cache, which is more than the memory delivers to them. The benchmark digests a table with its optimizer state in
memory, the files of a checkpoint (in the page cache), and the table again after 1% of its ranges were written.
"""

import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

import hostdev
from bench.record import make_parser, record
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.state import state_digest
from hostdev.core.digest import RANGE_BYTES, StateDigest, rows_per_range
from hostdev.core.machine import available_cpus
from hostdev.runtime.digest import add_table

_BLOCKS = 200  # that a core hashes in a round
_CHANGED = 100  # one of this many ranges is written
WANTED = 0.8


def seconds(call: Callable[[], Any]) -> float:
    """Return the time that a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def hash_blocks() -> None:
    """Hash blocks in the cache on every core."""
    block = np.zeros(RANGE_BYTES, np.uint8).data

    def run() -> None:
        for _ in range(_BLOCKS):
            sha256(block).digest()

    threads = [threading.Thread(target=run) for _ in range(available_cpus())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def digest_of(table: hostdev.HostTable, threads: int | None = None) -> str:
    """Return the digest of one table."""
    digest = StateDigest(threads)
    add_table(digest, table)
    return digest.hexdigest()


def measure(rows: int, dim: int, rounds: int, path: Path) -> dict[str, Any]:
    """Return the rates of all rounds, in bytes per second, and the time of a digest after few changes."""
    table = hostdev.HostTable(rows, dim, hostdev.LazyAdam(), name="t")
    runtime = hostdev.Runtime({"t": table}, device="cpu")
    saved = runtime.save(path).wait()
    known = table.stored.changes
    assert known is not None
    expected, kept = digest_of(table), known.digests
    nbytes = table.storage.nbytes
    chosen = np.arange(0, rows, rows_per_range(dim) * _CHANGED)
    found: list[dict[str, float]] = []
    for _ in range(rounds):
        known.digests = None
        each = {
            "all_cores": available_cpus() * _BLOCKS * RANGE_BYTES / seconds(hash_blocks),
            "one_core": nbytes / seconds(lambda: digest_of(table, 1)),
            "rows": nbytes / seconds(lambda: digest_of(table)),
            "files": nbytes / seconds(lambda: state_digest(Layers([saved]), [], {})),
        }
        known.digests = kept
        found.append(each)
    assert state_digest(Layers([saved]), [], {}) == expected
    table.update(chosen, np.full((len(chosen), dim), 0.5, np.float32))
    again = seconds(lambda: digest_of(table))
    known.digests = None
    whole = seconds(lambda: digest_of(table))
    runtime.close()
    medians = {name: statistics.median(one[name] for one in found) for name in found[0]}
    for name in ("rows", "files"):
        share = medians[name] / (available_cpus() * medians["one_core"])
        cached = medians[name] / medians["all_cores"]
        met = "met" if share >= WANTED else "not met"
        print(
            f"{name}: {medians[name] / 1e9:.2f} GB/s, {share:.2f} of cores x one core, at least {WANTED}: {met}; "
            f"{cached:.2f} of what they hash in the cache"
        )
    print(
        f"one core: {medians['one_core'] / 1e9:.2f} GB/s from memory; {available_cpus()} cores from the cache: "
        f"{medians['all_cores'] / 1e9:.2f} GB/s\n"
        f"after {len(chosen)} of {-(-rows // rows_per_range(dim))} ranges were written: {again * 1e3:.0f} ms, all of "
        f"them {whole * 1e3:.0f} ms"
    )
    return {"bytes": nbytes, "medians": medians, "rounds": found, "changed_s": again, "whole_s": whole}


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=80)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(options.rows, options.dim, options.rounds, Path(name) / "c")
    record("digest", {"rows": options.rows, "dim": options.dim, **result}, options.out)


if __name__ == "__main__":
    main()
