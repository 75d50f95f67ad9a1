"""Each optimizer beside its namesake in torch or, where there is none, beside its source in float64.

Both take all steps of all rows. A table may differ from torch in float32 by at most four times what torch itself
differs between float32 and float64, for gradients of any scale and rows that wait for any number of steps.
"""

from functools import partial

import numpy as np
import pytest
import torch

from hostdev import FTRL, SGD, Adagrad, Adam, Constant, HostTable, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam

D, EVERY, SELDOM = 8, 8, 16  # columns; rows that each batch uses, and rows that batches use once in a gap
ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
SCALES = [10.0**-power for power in range(1, 10)]


class Adams:
    """LazyAdam and RowWiseAdam in one precision: 1 - beta is that of beta as float32, as in MindSpore's kernel."""

    def __init__(self, weights, dtype, *, row_wise):
        self.w, self.row_wise, self.t = torch.from_numpy(weights.copy()).to(dtype), row_wise, 0
        self.m, self.v = torch.zeros_like(self.w), torch.zeros_like(self.w)
        self.betas = [float(np.float32(beta)) for beta in ADAM["betas"]]

    def step(self, rows, g, lr):
        self.t += 1
        b1, b2 = self.betas
        squares = (g * g).mean(1, keepdim=True).expand_as(g) if self.row_wise else g * g
        self.m[rows] = b1 * self.m[rows] + (1 - b1) * g
        self.v[rows] = b2 * self.v[rows] + (1 - b2) * squares
        lr_t = lr * (1 - ADAM["betas"][1] ** self.t) ** 0.5 / (1 - ADAM["betas"][0] ** self.t)
        self.w[rows] -= lr_t * self.m[rows] / (self.v[rows].sqrt() + ADAM["eps"])


class Ftrl:
    """FTRL-Proximal in one precision, with l2 twice, as in TensorFlow."""

    def __init__(self, weights, dtype):
        self.w = torch.from_numpy(weights.copy()).to(dtype)
        self.n, self.z = torch.ones_like(self.w), torch.zeros_like(self.w)

    def step(self, rows, g, lr):
        n1 = self.n[rows] + g * g
        z = self.z[rows] + g - (n1.sqrt() - self.n[rows].sqrt()) / lr * self.w[rows]
        w = (z.sign() * 1e-3 - z) / (n1.sqrt() / lr + 2 * 1e-3)
        self.w[rows], self.n[rows], self.z[rows] = torch.where(z.abs() > 1e-3, w, 0.0), n1, z


class RowWiseAdagrads:
    """Row-wise Adagrad in one precision."""

    def __init__(self, weights, dtype):
        self.w = torch.from_numpy(weights.copy()).to(dtype)
        self.accum = torch.zeros_like(self.w[:, :1])

    def step(self, rows, g, lr):
        self.accum[rows] += (g * g).mean(1, keepdim=True)
        self.w[rows] -= lr * g / (self.accum[rows].sqrt() + 1e-10)


class Momentums:
    """Momentum in one precision; rows without a gradient keep theirs."""

    def __init__(self, weights, dtype, *, nesterov):
        self.w, self.nesterov = torch.from_numpy(weights.copy()).to(dtype), nesterov
        self.b = torch.zeros_like(self.w)

    def step(self, rows, g, lr):
        self.b[rows] = 0.9 * self.b[rows] + g
        self.w[rows] -= lr * (g + 0.9 * self.b[rows] if self.nesterov else self.b[rows])


class Decayed:
    """Another twin with the decoupled decay of AdamW: in each step, all rows lose a part of lr * 0.1."""

    def __init__(self, twin):
        self.twin, self.w = twin, twin.w

    def step(self, rows, g, lr):
        with torch.no_grad():
            self.w.mul_(1 - lr * 0.1)
        self.twin.step(rows, g, lr)


class Torchs:
    """One of torch's optimizers in one precision: rows without a gradient get a gradient of zeros."""

    def __init__(self, weights, dtype, make):
        self.w = torch.nn.Parameter(torch.from_numpy(weights.copy()).to(dtype))
        self.optimizer = make([self.w])

    def step(self, rows, g, lr):
        self.w.grad = torch.zeros_like(self.w)
        self.w.grad[rows] = g
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()


def beside_torch(name, **given):
    return lambda weights, dtype: Torchs(weights, dtype, lambda made: getattr(torch.optim, name)(made, **given))


def adam(*, beta1=0.9, beta2=0.999, decay=0.0, **given):
    """Return a table optimizer and its twin."""
    name, options = ("AdamW", {"weight_decay": decay}) if decay else ("Adam", {})
    twin = beside_torch(name, **{**ADAM, "betas": (beta1, beta2)}, **options)
    return Adam(lr=1e-3, beta1=beta1, beta2=beta2, weight_decay=decay, **given), twin


def with_decay(make, twin):
    return lambda: make(weight_decay=0.1), lambda weights, dtype: Decayed(twin(weights, dtype))


OTHERS = {
    "sgd": (partial(SGD, lr=1e-3), beside_torch("SGD", lr=1e-3)),
    "adagrad": (partial(Adagrad, lr=1e-3), beside_torch("Adagrad", lr=1e-3)),
    "lazy adam": (partial(LazyAdam, lr=1e-3), partial(Adams, row_wise=False)),
    "row-wise adam": (partial(RowWiseAdam, lr=1e-3), partial(Adams, row_wise=True)),
    "row-wise adagrad": (partial(RowWiseAdagrad, lr=1e-3), RowWiseAdagrads),
    "momentum": (partial(Momentum, lr=1e-3), partial(Momentums, nesterov=False)),
    "nesterov": (partial(Momentum, lr=1e-3, nesterov=True), partial(Momentums, nesterov=True)),
}
OTHERS |= {f"{name} with decay": with_decay(*made) for name, made in OTHERS.items()}
OTHERS["ftrl"] = (partial(FTRL, lr=1e-3, l1=1e-3, l2=1e-3), Ftrl)
DENSE = {  # torch's momentum also moves rows without a gradient
    "momentum": beside_torch("SGD", lr=1e-3, momentum=0.9),
    "nesterov": beside_torch("SGD", lr=1e-3, momentum=0.9, nesterov=True),
}


def compare(optimizer, twin, scale, gap, *, spread=1.0, steps=None, seed=0, lrs=None):
    """Return the largest difference of a table to its twin in float32, and of the twin to itself in float64."""
    rng = np.random.default_rng(seed)
    rows = EVERY + (SELDOM if gap > 1 else 0)
    steps = steps or max(60, 2 * gap + 30)
    weights = (rng.normal(size=(rows, D)) * spread).astype(np.float32)
    table = HostTable(rows, D, optimizer, name="t")
    with table.writing() as writer:
        writer.weights[...] = weights
    twins = [twin(weights, dtype) for dtype in (torch.float32, torch.float64)]
    offsets = np.where(np.arange(rows) < EVERY, 0, rng.integers(0, max(gap, 1), rows))
    gaps = np.where(np.arange(rows) < EVERY, 1, gap)
    shown = {0, 1, 2, 5, 9, 29, 59, steps - 1, *range(0, steps, 997)}
    ours = own = 0.0
    for step in range(steps):
        used = np.flatnonzero((step >= offsets) & ((step - offsets) % gaps == 0)).astype(np.int32)
        grads = (rng.normal(size=(len(used), D)) * scale).astype(np.float32)
        lr = 1e-3 if lrs is None else lrs(step)
        table.optimizer.lr = lr
        table.update(used, grads)
        for each in twins:
            each.step(torch.from_numpy(used).long(), torch.from_numpy(grads).to(each.w.dtype), lr)
        if step in shown:
            single, double = (each.w.detach().numpy() for each in twins)
            ours = max(ours, np.abs(table.lookup(np.arange(rows)) - single.astype(np.float64)).max())
            own = max(own, np.abs(single - double).max())
    largest = np.float32(max(np.abs(single).max(), 1e-30))  # FTRL's weights may all be 0
    return ours, max(own, np.spacing(largest) / 4)


@pytest.mark.parametrize(
    ("scale", "gap", "decay", "spread"),
    [
        (1e-1, 1, 0.0, 1.0),
        (1e-3, 1, 0.0, 1.0),
        (1e-5, 7, 0.1, 0.01),
        (1e-7, 100, 0.0, 0.0),
        (1e-9, 30, 0.1, 0.0),
        (1e-7, 2, 0.0, 1.0),
    ],
)
def test_adam_is_torchs(scale, gap, decay, spread):
    ours, own = compare(*adam(decay=decay), scale, gap, spread=spread)
    assert ours <= 4 * own


@pytest.mark.slow
@pytest.mark.parametrize("gap", [1, 2, 7, 30, 100, 1000, 10_000])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_is_torchs_at_all_scales_and_gaps(gap, decay):
    ratios = {}
    for scale in SCALES:
        for spread in (1.0, 0.01, 0.0):
            ours, own = compare(*adam(decay=decay), scale, gap, spread=spread, seed=gap)
            ratios[scale, spread] = ours / own
    assert max(ratios.values()) <= 4, ratios


@pytest.mark.parametrize(("beta1", "beta2"), [(0.9, 0.99), (0.5, 0.95), (0.0, 0.999), (0.95, 0.999), (0.99, 0.9999)])
def test_other_betas_and_rates_that_change(beta1, beta2):
    for scale in (1e-2, 1e-8):
        made = adam(beta1=beta1, beta2=beta2, decay=0.1)
        ours, own = compare(*made, scale, 30, spread=0.01, lrs=lambda step: 1e-3 * (1 + 0.5 * np.cos(step / 20)))
        assert ours <= 4 * own


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("scale", "gap"), [(1e-1, 7), (1e-5, 30), (1e-9, 100)])
def test_the_others_are_their_sources(name, scale, gap):
    make, twin = OTHERS[name]
    for spread in (1.0, 0.0):
        ours, own = compare(make(), twin, scale, gap, spread=spread)
        assert ours <= 4 * own


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_the_others_at_all_scales_and_gaps(name):
    make, twin = OTHERS[name]
    ratios = {}
    for scale in SCALES:
        for gap in (1, 7, 100, 1000, 10_000):
            ours, own = compare(make(), twin, scale, gap, spread=0.1, seed=gap)
            ratios[scale, gap] = ours / own
    assert max(ratios.values()) <= 4, ratios


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("scale", [1e-1, 1e-5, 1e-9])
def test_momentum_is_torchs_where_every_row_is_used(name, scale):
    ours, own = compare(OTHERS[name][0](), DENSE[name], scale, 1, spread=0.1)
    assert ours <= 4 * own


def test_adam_with_epsilon_hat_takes_smaller_first_steps():
    """Of which its docstring warns; and without it, a gradient of any scale moves a weight by lr in the first step."""
    moved = {}
    for hat in (False, True):
        table = HostTable(1, 1, Adam(lr=1e-3, epsilon_hat=hat), name="t", init=Constant(0))
        table.update(np.zeros(1, np.int32), np.full((1, 1), 1e-6, np.float32))
        moved[hat] = abs(table.lookup(np.zeros(1, np.int32)).item())
    assert moved[False] == pytest.approx(1e-3, rel=0.02)
    assert moved[True] == pytest.approx(1e-3 / (1 + 0.01 * 1000**0.5), rel=0.02)
