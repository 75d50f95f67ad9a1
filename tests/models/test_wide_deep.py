import itertools

import numpy as np
import pytest
import torch
from torch import nn

from hostdev.core.initializers import Normal, initial_array
from hostdev.kernels.counter import key64
from hostdev.models.wide_deep import WideDeep, deep_l2, wide_loss
from tests import naive
from tests.models.samples import schema_of


class Before(nn.Module):
    """The network at the time of the published digests."""

    def __init__(self, fields, dim, *, seed, layers):
        super().__init__()
        widths = [fields * dim, *layers, 1]
        modules = []
        for inputs, outputs in itertools.pairwise(widths):
            modules += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.deep = nn.Sequential(*modules[:-1])
        self.bias = nn.Parameter(torch.zeros(1))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                values = initial_array(tuple(parameter.shape), Normal(0.01), seed, f"dense/{name}")
                parameter.copy_(torch.from_numpy(values))

    def forward(self, linear, deep):
        *hidden, last = self.deep
        for layer in hidden:
            deep = layer(deep)
        with torch.autocast(deep.device.type, enabled=False):
            return linear + self.bias + last(deep.float()).squeeze(1)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_bits_are_those_of_before(bf16):
    """Every digest depends on logits and on gradients of parameters and rows."""
    schema, B, D, layers = schema_of(dense=13, ids=26, bags=0), 64, 16, (128, 64, 32)
    before, model = Before(39, D, seed=3, layers=layers), WideDeep(schema, D, seed=3, layers=layers)
    assert list(before.state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.state_dict().items())
    torch.manual_seed(0)
    weights, vectors = torch.randn(B, 39), torch.randn(B, 39, D).to(torch.bfloat16 if bf16 else torch.float32)
    label = torch.rand(B).round()
    found = []
    for network in (before, model):
        wide, deep = weights.clone().requires_grad_(), vectors.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            if network is before:
                logits = network(wide.sum(1), deep.view(B, -1))
            else:
                logits = network(torch.rand(B, 13), {"fields": (wide.unsqueeze(2), deep)})
        wide_loss(logits, label).backward()
        found.append([logits, wide.grad, deep.grad, *(parameter.grad for parameter in network.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_initial_values_are_the_naive_twins():
    state = WideDeep(schema_of(), 3, seed=1).state_dict()
    twin = naive.normal(np.zeros(1, np.int64), 256 * 128, key64(1, "dense/deep.6.weight"), 0.01)
    np.testing.assert_array_equal(state["deep.6.weight"].ravel(), twin[0])
    assert sorted(state) == sorted(
        [f"deep.{i}.{kind}" for i in (0, 2, 4, 6, 8) for kind in ("bias", "weight")] + ["bias"]
    )


def test_wide_loss():
    logits, label = torch.tensor([0.0, 2.0, -3.0]), torch.tensor([1.0, 0.0, 0.0])
    expected = np.mean([np.log(2), np.log1p(np.exp(2)), np.log1p(np.exp(-3))])
    assert float(wide_loss(logits, label)) == pytest.approx(expected, rel=1e-6)


def test_l2_counts_uses():
    rows, uses = torch.tensor([[1.0, 2.0], [3.0, 0.0]], requires_grad=True), torch.tensor([4.0, 1.0])
    loss = deep_l2(rows, uses)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(8e-5 / 2 * (4 * 5 + 9))
    torch.testing.assert_close(rows.grad, 8e-5 * uses[:, None] * rows.detach())
    assert float(deep_l2(rows, None).detach()) == pytest.approx(8e-5 / 2 * 14)
