"""Batches of bags with hostdev on the CPU: deduplication, lookup, pooling, gradients, row-wise Adagrad."""

import sys

from serve import serve  # isort: skip  (finds workload.py)
import hostdev.core.environment  # isort: skip  (as in a training process)
import itertools
from functools import partial

import torch
from workload import draw_bags

import hostdev

rows, *cases = int(sys.argv[1]), *sys.argv[2:]


def make(dim):
    return hostdev.HostTable(rows, dim, hostdev.RowWiseAdagrad(lr=1e-3), name=f"t{dim}")


def step(loop, g):
    """Finish the previous batch; look up and pool the next one; apply its gradients."""
    _, found = next(loop)
    found["bag"].backward(g)


tables = {dim: make(dim) for dim in {int(case.split()[0]) for case in cases}}
ops = {}
for case in cases:
    ids, grads = draw_bags(rows, case)
    runtime = hostdev.Runtime({"bag": hostdev.Feature(tables[grads.shape[1]], pooling="sum")}, device="cpu", depth=0)
    loop = runtime.train(itertools.repeat(torch.from_numpy(ids)), ids=lambda ids: {"bag": ids})
    ops[case] = partial(step, loop, torch.from_numpy(grads))
serve(ops, {"hostdev": hostdev.__version__})
