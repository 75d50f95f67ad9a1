"""Batches of bags with hostdev on the CPU: deduplication, lookup, pooling, gradients, row-wise Adagrad."""

import sys

from serve import serve  # isort: skip  (finds workload.py)
import hostdev.core.environment  # isort: skip  (as in a training process)
import itertools

import torch
from workload import draw_bags

import hostdev

rows, *cases = int(sys.argv[1]), *sys.argv[2:]


def make(dim):
    return hostdev.HostTable(rows, dim, hostdev.RowWiseAdagrad(lr=1e-3), name=f"t{dim}")


class Steps:
    """The steps of one case; a table has one loop at a time, which is left open."""

    def __init__(self, case):
        ids, grads = draw_bags(rows, case)
        self.case, self.dim = case, grads.shape[1]
        self.batch, self.grads = torch.from_numpy(ids), torch.from_numpy(grads)
        self.runtime = hostdev.Runtime({"bag": hostdev.Feature(tables[self.dim], pooling="sum")}, device="cpu", depth=0)

    def step(self):
        """Finish the previous batch; look up and pool the next one; apply its gradients."""
        case, loop = open_loops.get(self.dim, (None, None))
        if case != self.case:
            if loop is not None:
                loop.close()
            loop = self.runtime.train(itertools.repeat(self.batch), ids=lambda ids: {"bag": ids}, read_ahead=True)
            open_loops[self.dim] = self.case, loop
        _, found = next(loop)
        found["bag"].backward(self.grads)


open_loops = {}  # by D: a case, and its loop
tables = {dim: make(dim) for dim in {int(case.split()[0]) for case in cases}}
serve({case: Steps(case).step for case in cases}, {"hostdev": hostdev.__version__})
