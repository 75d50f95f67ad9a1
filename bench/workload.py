"""The workload that all benchmarks share: a step's ids and gradients. It needs only numpy, because peers import it."""

import numpy as np

IDS = 624_000  # ids of a batch of 16,000 samples with 39 fields
DIM = 80
ZIPF = 1.1
BAG_DIM, BAG, BAGS = 64, 10, 16_000


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


def draw_bags(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids int64 [BAGS, BAG], and gradients float32 [BAGS, BAG_DIM] of the pooled rows."""
    return draw_ids(rows, BAGS * BAG).reshape(BAGS, BAG), draw_gradients(BAGS, BAG_DIM)
