"""The workload that all benchmarks share: a step's ids and gradients. It needs only numpy, because peers import it."""

import numpy as np

IDS = 624_000  # ids of a batch of 16,000 samples with 39 fields
DIM = 80
ZIPF = 1.1
BAG_IDS = 160_000  # ids of a batch of bags
BAG_CASES = [f"{dim} {bag} {kind}" for dim in (16, 64, 128) for bag in (1, 10, 100) for kind in ("uniform", "Zipf")]


def draw_ids(rows: int, n: int = IDS, seed: int = 0) -> np.ndarray:
    """Return Zipf-distributed ids int64 [n], scattered over a table of `rows` rows."""
    drawn = np.random.default_rng(seed).zipf(ZIPF, n * 3)
    drawn = drawn[drawn < rows][:n]
    return (drawn * 2654435761) % rows


def training_ids(rows: int, batch: int) -> np.ndarray:
    """Return ids int32 [batch, 39] like Criteo's: 13 ids of dense columns, equal in all samples, and 26 Zipf ids."""
    dense = np.broadcast_to(np.arange(rows - 13, rows, dtype=np.int32), (batch, 13))
    return np.hstack([dense, draw_ids(rows - 13, batch * 26).astype(np.int32).reshape(batch, 26)])


def draw_gradients(n: int, dim: int) -> np.ndarray:
    """Return gradients float32 [n, dim]."""
    return np.random.default_rng(1).standard_normal((n, dim), dtype=np.float32) * np.float32(1e-3)


def draw_batch(rows: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int32 [batch, 39] and labels float32 [batch]."""
    label = (np.random.default_rng(2).random(batch) < 0.25).astype(np.float32)
    return draw_ids(rows, batch * 39).astype(np.int32).reshape(batch, 39), label


def draw_bags(rows: int, case: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int64 [B, bag], and gradients float32 [B, dim] of the pooled rows, for one of `BAG_CASES`."""
    dim, bag, kind = case.split()
    size = int(bag)
    ids = draw_ids(rows, BAG_IDS) if kind == "Zipf" else np.random.default_rng(3).integers(0, rows, BAG_IDS)
    return ids.reshape(-1, size), draw_gradients(BAG_IDS // size, int(dim))


def make_keys(n: int) -> np.ndarray:
    """Return n distinct 64-bit keys that are not negative, int64 [n]: the ranks 0, 1, ..., scrambled (SplitMix64)."""
    z = np.arange(n, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)


def draw_keys(n: int, batches: int = 20, ids: int = 100_000) -> list[np.ndarray]:
    """Return the unique keys of batches of Zipf-distributed ids (exponent 1.05), in order of first occurrence."""
    shares = np.cumsum(np.arange(1, n + 1, dtype=np.float64) ** -1.05)
    keys, rng, found = make_keys(n), np.random.default_rng(7), []
    for _ in range(batches):
        ranks = np.searchsorted(shares, rng.random(ids) * shares[-1])
        _, first = np.unique(ranks, return_index=True)
        found.append(keys[ranks[np.sort(first)]])
    return found
