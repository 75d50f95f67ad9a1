"""Masks for dropout: their values, shares, and independence of threads."""

import numpy as np
import pytest
import torch

from hostdev.core.dropout import make_mask
from hostdev.kernels.counter import mix64
from hostdev.kernels.pool import host_threads, set_host_threads
from hostdev.models.layers import Dropout
from tests.naive import mix32


@pytest.mark.parametrize("rate", [0.001, 0.2, 0.5, 0.9])
def test_shares_and_values(rate):
    mask = make_mask((1000, 501), rate, 12345)
    kept = mask != 0
    assert set(np.unique(mask).tolist()) == {0.0, float(np.float32(1 / (1 - rate)))}
    error = 5 * np.sqrt(rate * (1 - rate) / mask.size)
    assert abs(1 - kept.mean() - rate) < error
    for one, other in ((kept[:, 1:], kept[:, :-1]), (kept[1:], kept[:-1])):  # neighbours are independent
        assert abs(np.mean(~one & ~other) - rate**2) < 3 * error
    assert (make_mask((1000, 501), rate, 12346) != mask).mean() > 1.5 * rate * (1 - rate)


def test_every_value_by_its_definition():
    mask = make_mask((3_000,), 0.3, 7)
    at = np.arange(3_000, dtype=np.uint64)
    words = mix64((at >> np.uint64(10)) ^ np.uint64(7))
    low, high = words.astype(np.uint32), (words >> np.uint64(32)).astype(np.uint32)
    counters = (at & np.uint64(1023)).astype(np.uint32) * np.uint32(0x9E3779B9)
    drawn = mix32(low ^ counters) ^ high
    np.testing.assert_array_equal(mask != 0, drawn < np.uint32(round(0.7 * 2**32)))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_no_matter_how_many_threads(threads):
    before = host_threads()
    set_host_threads(threads)
    try:
        np.testing.assert_array_equal(make_mask((77, 1021), 0.4, 3), make_mask((77 * 1021,), 0.4, 3).reshape(77, 1021))
    finally:
        set_host_threads(before)


def test_the_layer():
    layer, x = Dropout(0.25), torch.randn(64, 33, requires_grad=True)
    torch.manual_seed(3)
    first = layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first) and not torch.equal(layer(x), first)
    kept = first != 0
    assert torch.equal(first[kept], (x * np.float32(1 / 0.75))[kept])
    (grad,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(grad != 0, kept)
    layer.eval()
    assert layer(x) is x
    assert Dropout(0.0)(x) is x or torch.equal(Dropout(0.0)(x), x)
    half = Dropout(0.5)(torch.ones(1000, dtype=torch.bfloat16))
    assert half.dtype == torch.bfloat16 and set(half.unique().tolist()) == {0.0, 2.0}


@pytest.mark.filterwarnings("ignore:Guards may run slower on Python 3.13.0")
def test_a_compiled_or_traced_network_has_torchs_dropout():
    network = torch.nn.Sequential(torch.nn.Linear(8, 32), Dropout(0.3)).train()
    compiled = torch.compile(network, backend="eager")
    x = torch.ones(5, 8)
    assert compiled(x).shape == (5, 32) and not torch.equal(compiled(x), compiled(x))
    mapped = torch.func.vmap(Dropout(0.5), randomness="different")(torch.ones(3, 100))
    assert len(set(map(tuple, mapped.tolist()))) == 3
    with pytest.raises(RuntimeError):
        Dropout(0.5)(torch.ones(5, dtype=torch.int64))
