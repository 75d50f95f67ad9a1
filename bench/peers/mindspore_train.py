"""MindSpore's Wide & Deep step on the CPU: lookups, FTRL (wide), LazyAdam (deep), Adam (dense), float32."""

import sys
from importlib.metadata import version

from serve import serve  # isort: skip  (finds workload.py)
import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.ops import operations as P
from workload import DIM, draw_batch

rows = int(sys.argv[1])
FIELDS = 39
ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
rng = np.random.default_rng(0)


def normal(*shape):
    return Tensor((rng.standard_normal(shape) * 0.01).astype(np.float32))


class Net(nn.Cell):
    def __init__(self, batch):
        super().__init__()
        self.batch = batch
        layers, width = [], FIELDS * DIM
        for h in (1024, 512, 256, 128):
            layers += [nn.Dense(width, h, weight_init=normal(h, width), bias_init=normal(h)), nn.ReLU()]
            width = h
        layers.append(nn.Dense(width, 1, weight_init=normal(1, width), bias_init=normal(1)))
        self.mlp, self.b = nn.SequentialCell(layers), Parameter(normal(1), name="bias")

    def construct(self, e, w, mask, y):
        out = self.mlp((e * mask).reshape(self.batch, FIELDS * DIM)) + (w * mask).sum(1) + self.b
        return ops.binary_cross_entropy_with_logits(out, y, ops.ones_like(out), ops.ones_like(out))


class Step(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.dense = ParameterTuple([*net.mlp.trainable_params(), net.b])
        self.adam = nn.Adam(self.dense, learning_rate=3.5e-4, eps=1e-8)
        self.grad = ops.GradOperation(get_all=True, get_by_list=True)
        self.lazy = P.FusedSparseLazyAdam()
        self.ftrl = P.FusedSparseFtrl(lr=5e-2, l1=1e-8, l2=1e-8, lr_power=-0.5)
        self.deep_lookup, self.wide_lookup = P.EmbeddingLookup(), P.EmbeddingLookup()
        self.E, self.W = Parameter(normal(rows, DIM), name="E"), Parameter(normal(rows, 1), name="W")
        self.m = Parameter(Tensor(np.zeros((rows, DIM), np.float32)), name="m")
        self.v = Parameter(Tensor(np.zeros((rows, DIM), np.float32)), name="v")
        self.n = Parameter(Tensor(np.ones((rows, 1), np.float32)), name="n")
        self.z = Parameter(Tensor(np.zeros((rows, 1), np.float32)), name="z")

    def construct(self, ids, mask, y, b1, b2):
        e, w = self.deep_lookup(self.E, ids, 0), self.wide_lookup(self.W, ids, 0)
        loss = self.net(e, w, mask, y)
        (ge, gw, _, _), gd = self.grad(self.net, self.dense)(e, w, mask, y)
        flat = ids.reshape(-1)
        lazy = self.lazy(self.E, self.m, self.v, b1, b2, 3.5e-4, 0.9, 0.999, 1e-8, ge.reshape(-1, DIM), flat)
        loss = ops.depend(loss, lazy)
        loss = ops.depend(loss, self.ftrl(self.W, self.n, self.z, gw.reshape(-1, 1), flat))
        return ops.depend(loss, self.adam(gd))


def make(batch):
    ids_np, label = draw_batch(rows, batch)
    ids, mask, y = Tensor(ids_np), Tensor(np.ones((batch, FIELDS, 1), np.float32)), Tensor(label[:, None])
    step, count = Step(Net(batch)), 0

    def run():
        nonlocal count
        count += 1
        step(ids, mask, y, Tensor(np.float32(0.9**count)), Tensor(np.float32(0.999**count))).asnumpy()

    return run


serve({f"step {batch}": make(batch) for batch in (4000, 16000)}, {"mindspore": version("mindspore")})
