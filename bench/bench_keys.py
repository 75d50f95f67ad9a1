"""Claim: a directory of 64-bit keys finds at least 4 times as many keys a second as FBGEMM's zero_collision_hash.

Unique keys of batches of 100,000 Zipf-distributed ids (exponent 1.05), on one thread; each system runs in a process of
its own, and they take turns. FBGEMM's table has a load of 0.75. Also measured, for hostdev alone: two threads; filling
a directory from nothing in batches of 10,000 keys, with the longest batch; erasing a tenth of all keys; bytes a key;
and the plan of a step (`KeyIndex`), without new keys and with a tenth new ones.
"""

import statistics
import time
from typing import Any

import numpy as np

import hostdev
from bench.bench_peers import Peer
from bench.record import make_parser, record
from bench.workload import draw_keys, make_keys
from hostdev.core.key_rules import LeastRecent
from hostdev.host.key_index import KeyIndex
from hostdev.kernels.key_directory import KeyDirectory

WANTED = 4.0
_FILLED = 10_000  # keys inserted at a time


def measure_directory(size: int) -> dict[str, float]:
    """Return how fast a directory is filled and emptied by one thread, and its size."""
    hostdev.ops.set_host_threads(1)
    keys, directory, longest = make_keys(size), KeyDirectory(), 0.0
    warm = KeyDirectory()  # its calls compile
    warm.insert(keys[:9], np.arange(9, dtype=np.int32))
    warm.erase(keys[:9])
    begin = time.perf_counter()
    for start in range(0, size, _FILLED):
        part, now = keys[start : start + _FILLED], time.perf_counter()
        directory.insert(part, np.arange(start, start + len(part), dtype=np.int32))
        longest = max(longest, time.perf_counter() - now)
    filled = time.perf_counter() - begin
    nbytes = directory.nbytes
    gone = keys[np.random.default_rng(0).permutation(size)[: size // 10]]
    begin = time.perf_counter()
    directory.erase(gone)
    return {
        "inserted a second, millions": size / filled / 1e6,
        "longest insert of 10,000 keys, ms": longest * 1e3,
        "erased a second, millions": len(gone) / (time.perf_counter() - begin) / 1e6,
        "bytes a key": nbytes / size,
    }


def measure_index(size: int) -> dict[str, float]:
    """Return the times of a step's plan, in milliseconds for each batch, and of an eviction of a tenth of the keys."""
    index = KeyIndex("t", size, None, LeastRecent(keep=0.9, every=1_000_000))
    keys = make_keys(size + size // 50)

    def finish() -> None:
        index.release(index.commit()[0])

    for start in range(0, size, 1_000_000):
        part = keys[start : min(size, start + 1_000_000)]
        index.plan(part, np.ones(len(part), np.int32))
        finish()
    ms: dict[str, list[float]] = {"known": [], "new": []}
    full = index.nbytes / len(index)
    fresh = keys[size:]
    for number, batch in enumerate(draw_keys(size, 10)):
        for name in ms:
            some = batch
            if name == "new":
                some = np.concatenate([batch, fresh[number * len(batch) // 10 :][: len(batch) // 10]])
                if number == 0:
                    begin = time.perf_counter()
                    index.plan(some, np.ones(len(some), np.int32))
                    evicted = time.perf_counter() - begin
                    finish()
                    continue
            uses = np.ones(len(some), np.int32)
            begin = time.perf_counter()
            index.plan(some, uses)
            ms[name].append((time.perf_counter() - begin) * 1e3)
            finish()
    return {
        "plan of a batch, ms": statistics.median(ms["known"]),
        "plan of a batch with a tenth more, new keys, ms": statistics.median(ms["new"]),
        "unique keys of a batch": float(np.mean([len(batch) for batch in draw_keys(size, 3)])),
        "eviction of a tenth of all keys, s": evicted,
        "bytes a key, all in all": full,
    }


def main() -> None:
    """Measure, print and record."""
    parser = make_parser(__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1_000_000, 20_000_000], help="numbers of keys")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true", help="measure hostdev alone")
    arguments = parser.parse_args()
    scripts = {"hostdev": ("hostdev", "hostdev_keys.py"), "FBGEMM": ("torch", "fbgemm_keys.py")}
    results: dict[str, Any] = {}
    for size in arguments.sizes:
        names = ["hostdev"] if arguments.no_peers else list(scripts)
        peers = {name: Peer(*scripts[name], size) for name in names}
        count = sum(map(len, draw_keys(size)))
        times: dict[str, list[float]] = {}
        try:
            for turn in range(arguments.rounds + 1):
                for name, op in (("hostdev", f"{size}"), ("FBGEMM", f"{size}"), ("hostdev", f"{size} two threads")):
                    if name in peers:
                        ms = peers[name].run(op)
                        if turn:
                            times.setdefault(f"{name}{op.removeprefix(str(size))}", []).append(ms)
        finally:
            for peer in peers.values():
                peer.close()
        found = {f"found a second, millions: {name}": count / 1e3 / statistics.median(ms) for name, ms in times.items()}
        if "FBGEMM" in times:
            pairs = zip(times["FBGEMM"], times["hostdev"], strict=True)
            found["found a second / FBGEMM's"] = statistics.median(theirs / ours for theirs, ours in pairs)
        pairs = zip(times["hostdev"], times["hostdev two threads"], strict=True)
        found["two threads / one"] = statistics.median(one / two for one, two in pairs)
        found |= measure_directory(size) | measure_index(size)
        print(f"\n{size:,} keys\n", *(f"  {name:<52}{value:>10.2f}" for name, value in found.items()), sep="\n")
        results[f"{size}"] = {name: round(value, 3) for name, value in found.items()}
    record("keys", {"wanted": WANTED, "results": results}, arguments.out)


if __name__ == "__main__":
    main()
