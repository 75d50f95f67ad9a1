"""A batch of bags with hostdev on the CPU: deduplication, lookup, pooling, gradients, row-wise Adagrad."""

import sys

from serve import serve  # isort: skip  (finds workload.py)
import hostdev.core.environment  # isort: skip  (as in a training process)
import itertools

import torch
from workload import BAG_DIM, draw_bags

import hostdev

rows = int(sys.argv[1])
ids, grads = draw_bags(rows)
values, g = torch.from_numpy(ids), torch.from_numpy(grads)
table = hostdev.HostTable(rows, BAG_DIM, hostdev.RowWiseAdagrad(lr=1e-3), name="t")
runtime = hostdev.Runtime({"bag": hostdev.Feature(table, pooling="sum")}, device="cpu", depth=0)
loop = runtime.train(itertools.repeat(values), ids=lambda ids: {"bag": ids})


def step():
    """Finish the previous batch; look up and pool the next one; apply its gradients."""
    _, found = next(loop)
    found["bag"].backward(g)


step()
serve({"lookup, pooling, update": step}, {"hostdev": hostdev.__version__})
