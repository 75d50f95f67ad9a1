"""MindSpore's CPU kernels of a step's host side; FusedSparseLazyAdam and FusedSparseFtrl deduplicate ids."""

import sys
from importlib.metadata import version

from serve import serve  # isort: skip  (finds workload.py)
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.ops import operations as P
from workload import DIM, draw_gradients, draw_ids

ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")


def parameter(dim, value, name):
    return Parameter(Tensor(np.full((rows, dim), value, np.float32)), name=name)


class LazyAdam(nn.Cell):
    def __init__(self):
        super().__init__()
        self.op = P.FusedSparseLazyAdam()
        self.w, self.m, self.v = parameter(DIM, 0.01, "w"), parameter(DIM, 0, "m"), parameter(DIM, 0, "v")

    def construct(self, g, i):
        return self.op(self.w, self.m, self.v, 0.9, 0.999, 3.5e-4, 0.9, 0.999, 1e-8, g, i)


class Ftrl(nn.Cell):
    def __init__(self):
        super().__init__()
        self.op = P.FusedSparseFtrl(lr=5e-2, l1=1e-8, l2=1e-8, lr_power=-0.5)
        self.w, self.a, self.z = parameter(1, 0.01, "w"), parameter(1, 1, "a"), parameter(1, 0, "z")

    def construct(self, g, i):
        return self.op(self.w, self.a, self.z, g, i)


class Lookup(nn.Cell):
    def __init__(self, dim):
        super().__init__()
        self.op = P.EmbeddingLookup()
        self.w = parameter(dim, 0.01, "w")

    def construct(self, i):
        return self.op(self.w, i, 0)


def synced(cell, *args):
    def call():
        cell(*args)
        ms.runtime.synchronize()

    return call


rows = int(sys.argv[1])
ids = draw_ids(rows)
i, g, g1 = Tensor(ids.astype(np.int32)), Tensor(draw_gradients(len(ids), DIM)), Tensor(draw_gradients(len(ids), 1))
serve(
    {
        "lookup deep": synced(Lookup(DIM), i),
        "lookup wide": synced(Lookup(1), i),
        "lazy adam": synced(LazyAdam(), g, i),
        "ftrl": synced(Ftrl(), g1, i),
    },
    {"mindspore": version("mindspore")},
)
