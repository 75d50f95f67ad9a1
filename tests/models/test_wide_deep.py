import numpy as np
import pytest
import torch
from hostdev.models.wide_deep import WideDeep, deep_l2, wide_loss

from hostdev.kernels.counter import key64
from tests import naive


def test_forward_is_what_the_formula_says():
    network = WideDeep(4, 3, seed=1, layers=(5, 2))
    rng = np.random.default_rng(0)
    wide, weights = rng.standard_normal((2, 6, 4), dtype=np.float32)
    deep = rng.standard_normal((6, 4, 3), dtype=np.float32)
    hidden = (deep * weights[:, :, None]).reshape(6, 12)
    parameters = {name: value.detach().numpy() for name, value in network.named_parameters()}
    for layer in (0, 2):
        hidden = np.maximum(hidden @ parameters[f"deep.{layer}.weight"].T + parameters[f"deep.{layer}.bias"], 0)
    out = hidden @ parameters["deep.4.weight"].T + parameters["deep.4.bias"]
    expected = (wide * weights).sum(1) + parameters["bias"] + out[:, 0]
    linear, deep_input = (wide * weights).sum(1), (deep * weights[:, :, None]).reshape(6, 12)
    logits = network(torch.from_numpy(linear), torch.from_numpy(deep_input))
    np.testing.assert_allclose(logits.detach(), expected, rtol=1e-5, atol=1e-6)


def test_the_last_layer_is_float32_under_autocast():
    """One logit a row in bfloat16 would have 8 bits."""
    network = WideDeep(4, 3, seed=1)
    deep = torch.randn(64, 12, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        logits = network(torch.zeros(64), deep)
        hidden = network.deep[:-1](deep)
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())
    expected = torch.nn.functional.linear(hidden.float(), network.deep[-1].weight, network.deep[-1].bias).squeeze(1)
    assert torch.equal(logits, network.bias + expected)


def test_initial_values_depend_on_seed_and_name():
    first, again, other = (WideDeep(4, 3, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    twin = naive.normal(np.zeros(1, np.int64), 256 * 128, key64(1, "dense/deep.6.weight"), 0.01)
    np.testing.assert_array_equal(first["deep.6.weight"].ravel(), twin[0])
    assert sorted(first) == sorted(
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
