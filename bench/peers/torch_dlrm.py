"""The DLRM's training step in plain torch: `nn.EmbeddingBag(sparse=True)` and SparseAdam."""

import sys

from dlrm import DIM, NAMES, ROWS, run  # isort: skip  (finds workload.py)
import torch
from torch import nn

tables = nn.ModuleList(nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in NAMES)
adam = torch.optim.SparseAdam(tables.parameters(), lr=1e-3)


def look_up(ids):
    """Return a function of vectors [B, 26, D]."""
    return lambda: torch.stack([table(torch.from_numpy(each)) for table, each in zip(tables, ids, strict=True)], 1)


def loop(batches):
    """Yield a batch and its vectors; then update the tables."""
    for batch in batches:
        adam.zero_grad()
        yield batch, look_up(batch[0])
        adam.step()


assert sys.argv[2] == "adam"
run({}, loop)
