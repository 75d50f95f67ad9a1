"""A DLRM, its batches and its training step, the same for all systems: 26 tables, D = 64.

The network is that of Naumov et al. 2019, "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", with dot products between all pairs of the 27 vectors of a sample.
"""

import sys

from serve import serve  # isort: skip  (finds workload.py)
import numpy as np
import torch
from torch import nn

TABLES, DIM = 26, 64
ROWS = int(sys.argv[1])
NAMES = [f"f{table}" for table in range(TABLES)]
CASES = [(2_048, 1, 20), (2_048, 10, 20), (16_000, 1, 5), (16_000, 10, 5)]  # batch, ids per feature, steps of a call


class Dense(nn.Module):
    """The network without its tables."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bottom = nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, DIM), nn.ReLU())
        pairs = (TABLES + 1) * TABLES // 2
        self.top = nn.Sequential(nn.Linear(DIM + pairs, 128), nn.ReLU(), nn.Linear(128, 1))
        self.i, self.j = torch.tril_indices(TABLES + 1, TABLES + 1, -1)

    def forward(self, numbers, vectors):
        """Return logits [B] of numbers [B, 13] and the tables' vectors [B, 26, D]."""
        bottom = self.bottom(numbers)
        both = torch.cat([bottom[:, None], vectors], 1)
        products = both @ both.transpose(1, 2)
        return self.top(torch.cat([bottom, products[:, self.i, self.j]], 1)).squeeze(1)


def draw_batches(batch, count, steps):
    """Return batches: ids int64 [tables, B, count], Zipf 1.05; numbers float32 [B, 13]; labels float32 [B]."""
    random = np.random.default_rng(count)
    shares = np.cumsum(np.arange(1, ROWS + 1, dtype=np.float64) ** -1.05)
    made = []
    for _ in range(steps):
        ranks = np.searchsorted(shares, random.random((TABLES, batch, count)) * shares[-1])
        ids = np.stack([np.random.default_rng(table).permutation(ROWS)[ranks[table]] for table in range(TABLES)])
        numbers = torch.from_numpy(random.random((batch, 13), np.float32))
        made.append((ids, numbers, torch.from_numpy((random.random(batch) < 0.3).astype(np.float32))))
    return made


def run(versions, open_loop):
    """Answer calls: one is an epoch over a case's batches. `open_loop(batches)` yields a batch and its vectors."""
    dense = Dense()
    adam = torch.optim.Adam(dense.parameters(), 1e-3)

    def make(batches):
        def epoch():
            for (_, numbers, label), vectors in open_loop(batches):
                loss = nn.functional.binary_cross_entropy_with_logits(dense(numbers, vectors()), label)
                adam.zero_grad()
                loss.backward()
                adam.step()
            return loss.item()

        return epoch

    ops = {f"{batch} {count}": make(draw_batches(batch, count, steps)) for batch, count, steps in CASES}
    serve(ops, {"torch": torch.__version__, **versions})
