"""A training step in plain torch, with `nn.Embedding(sparse=True)` and SparseAdam; Adam for the dense part."""

import sys
from itertools import pairwise

from serve import serve  # isort: skip  (finds workload.py)
import torch
from torch import nn
from workload import DIM, draw_batch

rows = int(sys.argv[1])


def make(batch):
    ids_np, label_np = draw_batch(rows, batch)
    ids, y, mask = torch.from_numpy(ids_np).long(), torch.from_numpy(label_np), torch.ones(batch, 39, 1)
    E, W = nn.Embedding(rows, DIM, sparse=True), nn.Embedding(rows, 1, sparse=True)
    widths, layers = [39 * DIM, 1024, 512, 256, 128], []
    for a, b in pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(128, 1))
    sparse = torch.optim.SparseAdam([*E.parameters(), *W.parameters()], lr=3.5e-4)
    dense = torch.optim.Adam(net.parameters(), lr=3.5e-4)

    def step():
        logits = net((E(ids) * mask).flatten(1)).squeeze(1) + (W(ids) * mask).sum((1, 2))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        return loss.item()

    return step


serve({f"step {batch}": make(batch) for batch in (4000, 16000)}, {"torch": torch.__version__})
