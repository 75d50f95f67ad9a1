"""Rows to a batch's features and gradients back, for every module of `device.ops`, against twins and torch."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hostdev.device import rows as rows_module
from hostdev.device.ops import host_kernels, torch_operations, triton_kernels
from hostdev.device.rows import FeatureUses, GroupUses, Lookup, pull
from hostdev.kernels.groups import drop_padding, offsets_of, unique_groups
from hostdev.kernels.pool import set_host_threads
from tests import naive
from tests.conftest import devices
from tests.device import twins

THREADS = {"1 thread": 1, "2 threads": 2, "4 threads": 4}
WAYS = [*([] if devices() == ["standin"] else THREADS), "torch operations", "kernels"]


@pytest.fixture(params=WAYS)
def way(request, device, monkeypatch):
    """An implementation: host kernels on some threads, torch operations, Triton kernels or twins."""
    if request.param in THREADS:
        if device.type != "cpu":
            pytest.skip("the host's kernels do not reach it")
        set_host_threads(THREADS[request.param])
        module = host_kernels
    else:
        torch.use_deterministic_algorithms(True)  # the fixture `device` takes it back
        module = torch_operations if request.param == "torch operations" else triton_kernels
        if module is triton_kernels and device.type != "cuda":
            twins.register()
    monkeypatch.setattr(rows_module, "get_ops", lambda device: module)
    return module


def same(got, wanted):
    """Equal bits: -0 is not 0."""
    got, wanted = (torch.as_tensor(x).detach().cpu().float().numpy() for x in (got, wanted))
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(got.view(np.int32), wanted.view(np.int32))


class Case(NamedTuple):
    """Features in numpy, as `naive` takes them, and on the device."""

    rows: np.ndarray
    features: list
    dtypes: list
    uses: GroupUses

    def outputs(self):
        """Return each feature's output, float32 before rounding."""
        return [naive.pool(self.rows, *feature) for feature in self.features]

    def gradient(self, grads, way):
        """Return the rows' gradients from those of the features; None stands for zeros."""
        inverse, terms = [], []
        for feature, grad in zip(self.features, grads, strict=True):
            if grad is not None:
                inverse.append(feature[0])
                terms.append(naive.terms_of(grad.float().numpy(), *feature[1:]))
        add = naive.sum_uses if way is triton_kernels else naive.segment_sum
        sums = add(np.concatenate(terms), np.concatenate(inverse), len(self.rows))
        return sums if len(terms) == len(grads) else sums + np.float32(0)


def case(rng, device, dim, lengths, span, *, in_order=True):
    """Make features with bags of these lengths; kinds alternate, and every row occurs."""
    ids = [rng.integers(0, span, int(np.sum(of))) for of in lengths]
    [(found, inverse)] = unique_groups([ids])
    if not in_order:
        inverse = rng.permutation(len(found)).astype(np.int32)[inverse]
    values = (rng.standard_normal((len(found), dim)) * 10.0 ** rng.integers(-5, 5, (len(found), 1))).astype(np.float32)
    features, there, dtypes, begin = [], [], [], 0
    for number, of in enumerate(lengths):
        own = inverse[begin : begin + len(ids[number])].copy()
        begin += len(own)
        offsets = offsets_of(np.array(of, np.int64)) if number % 4 != 1 else None
        weights = rng.choice([1.0, 0.37, -0.0, -1.7], len(own)).astype(np.float32) if number % 3 else None
        features.append((own, offsets, weights, number % 2 == 0))
        dtypes.append(torch.bfloat16 if number % 5 == 3 else torch.float32)
        tensors = [None if x is None else torch.from_numpy(x).to(device) for x in features[-1][:3]]
        there.append(FeatureUses(*tensors, number % 2 == 0, dtypes[-1]))
    return Case(values, features, dtypes, GroupUses(there, len(found), in_order=in_order))


def pull_one(rows, uses):
    return pull([Lookup(rows, uses, [feature.dtype for feature in uses.features])]).features[0]


def random_grads(rng, outputs):
    return [torch.from_numpy(rng.standard_normal(out.shape, dtype=np.float32)).to(out.dtype) for out in outputs]


def apart(grad):
    """Return a gradient as torch.stack or torch.cat has it for some sizes: a part of each row of another tensor."""
    if len(grad) % 3 == 0:
        return grad
    wide = torch.full((len(grad), 3 * grad.shape[1] + len(grad) % 2), 77, dtype=grad.dtype, device=grad.device)
    part = wide[:, grad.shape[1] : 2 * grad.shape[1]]
    part.copy_(grad)
    return part


def check(made, device, way, rng, present=None):
    rows = torch.from_numpy(made.rows).to(device).requires_grad_()
    outputs = pull_one(rows, made.uses)
    for out, expected, dtype in zip(outputs, made.outputs(), made.dtypes, strict=True):
        assert out.dtype == dtype
        same(out, torch.from_numpy(expected).to(dtype))
    grads = [
        grad if present is None or number in present else None for number, grad in enumerate(random_grads(rng, outputs))
    ]
    pairs = [(out, apart(grad.to(device))) for out, grad in zip(outputs, grads, strict=True) if grad is not None]
    torch.autograd.backward(*zip(*pairs, strict=True))
    expected = made.gradient(grads, way)
    if device.type == "cuda" and way is torch_operations and rows.shape[1] == 1:  # a fixed order, but torch's
        np.testing.assert_allclose(rows.grad.cpu(), expected, rtol=1e-4, atol=1e-3)
    else:
        same(rows.grad, expected)


LENGTHS = [
    [[3, 0, 2, 7]],
    [[1] * 50, [2] * 30],
    [[0, 5, 1], [4] * 9, [0, 0], [], [1, 70, 3], [6] * 20],
    [[200, 0, 1], [90], [1] * 200],
]


@pytest.mark.drawn
@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize("dim", [1, 3, 80])
@pytest.mark.parametrize("lengths", LENGTHS, ids=len)
def test_features_that_share_rows(device, way, lengths, dim, in_order):
    rng = np.random.default_rng(dim)
    for span in (2, 500):
        made = case(rng, device, dim, lengths, span, in_order=in_order)
        check(made, device, way, rng)
        check(made, device, way, rng)  # another table's, with the same uses


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_shapes(device, way, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    lengths = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=9), min_size=1, max_size=6))
    made = case(rng, device, data.draw(st.integers(1, 9)), lengths, data.draw(st.integers(1, 40)))
    present = data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))
    check(made, device, way, rng, present)


def test_features_without_a_gradient_count_as_zeros(device, way):
    rng = np.random.default_rng(0)
    made = case(rng, device, 4, [[3, 2], [4] * 5, [1, 1, 1], [2, 2]], 300)  # so most rows have one use
    for present in ({0}, {2, 3}, {1}, {0, 1, 2, 3}):
        check(made, device, way, rng, present)


def test_several_losses_after_each_other(device, way):
    """Several backward passes without retain_graph each add their gradients."""
    rng = np.random.default_rng(1)
    made = case(rng, device, 8, [[3, 2, 0], [4] * 5, [5, 0]], 30)
    rows = torch.from_numpy(made.rows).to(device).requires_grad_()
    outputs = pull_one(rows, made.uses)
    expected = np.zeros_like(made.rows)
    for chosen in ({0}, {1, 2}, {0}):
        scale = float(rng.standard_normal())
        sum((outputs[number] * scale).sum() for number in sorted(chosen)).backward()
        grads = [torch.full(out.shape, scale) if n in chosen else None for n, out in enumerate(outputs)]
        expected = expected + made.gradient(grads, way)
        same(rows.grad, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_several_tables_at_once(device, way, threads):
    """Each has the bits that it has alone; a frozen one, and one that no loss uses, get no gradient."""
    set_host_threads(threads)
    rng = np.random.default_rng(threads)
    cases = [
        case(rng, device, dim, lengths, span, in_order=order)
        for dim, lengths, span, order in zip(
            (8, 1, 80, 3, 8), [*LENGTHS, LENGTHS[0]], (9, 90, 9, 50, 5), (1, 0, 1, 1, 0), strict=True
        )
    ]
    rows = [torch.from_numpy(made.rows).to(device).requires_grad_(number != 1) for number, made in enumerate(cases)]
    found = pull([Lookup(one, made.uses, made.dtypes) for one, made in zip(rows, cases, strict=True)]).features
    for outputs, made in zip(found, cases, strict=True):
        for out, expected, dtype in zip(outputs, made.outputs(), made.dtypes, strict=True):
            same(out, torch.from_numpy(expected).to(dtype))
    assert not any(out.requires_grad for out in found[1])
    grads = [random_grads(rng, outputs) for outputs in found]
    grads[2][0] = None
    used = [(number, at) for number in (0, 2, 4) for at in range(len(found[number])) if grads[number][at] is not None]
    torch.autograd.backward(
        [found[number][at] for number, at in used], [grads[number][at].to(device) for number, at in used]
    )
    for number in (0, 2, 4):
        same(rows[number].grad, cases[number].gradient(grads[number], way))
    assert rows[1].grad is None and rows[3].grad is None


def test_it_is_one_node_and_has_no_second_derivative(device, way):
    made = case(np.random.default_rng(2), device, 3, [[3, 1], [2, 2]], 9)
    rows = torch.from_numpy(made.rows).to(device)
    assert all(out.grad_fn is None for out in pull_one(rows, made.uses))
    rows.requires_grad_()
    with torch.no_grad():
        assert not any(out.requires_grad for out in pull_one(rows, made.uses))
    first, second = pull_one(rows, made.uses)
    assert first.grad_fn is second.grad_fn
    assert not first.grad_fn.saved_tensors
    [grad] = torch.autograd.grad((first * first).sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_gradients_that_are_not_contiguous(device, way):
    rng = np.random.default_rng(3)
    made = case(rng, device, 5, [[3, 2, 4], [6] * 4], 30)
    rows = torch.from_numpy(made.rows).to(device).requires_grad_()
    outputs = pull_one(rows, made.uses)
    grads = [torch.from_numpy(rng.standard_normal(tuple(out.shape)[::-1], dtype=np.float32)).T for out in outputs]
    torch.autograd.backward(outputs, [grad.to(device) for grad in grads])
    same(rows.grad, made.gradient(grads, way))


@pytest.mark.parametrize("padding", [None, 4])
@pytest.mark.parametrize(("mode", "weighted"), [("sum", False), ("mean", False), ("sum", True)])
def test_bags_are_those_of_torch(device, way, mode, weighted, padding):
    """torch.nn.functional.embedding_bag: empty bags, ids that are in a bag twice, and an id that stands for none."""
    rng = np.random.default_rng(4)
    table = torch.from_numpy(rng.standard_normal((60, 7), dtype=np.float32)).requires_grad_()
    lengths = rng.integers(0, 12, 100).astype(np.int32)
    lengths[[0, 50, 99]] = 0
    ids = rng.integers(0, 20, lengths.sum())
    weights = rng.standard_normal(len(ids), dtype=np.float32) if weighted else None
    expected = torch.nn.functional.embedding_bag(
        torch.from_numpy(ids),
        table,
        torch.from_numpy(offsets_of(lengths)[:-1]).long(),
        mode=mode,
        padding_idx=padding,
        per_sample_weights=None if weights is None else torch.from_numpy(weights),
    )
    grad = torch.from_numpy(rng.standard_normal(expected.shape, dtype=np.float32))
    expected.backward(grad)

    if padding is not None:
        ids, lengths, weights = drop_padding(ids, lengths, padding, weights)
    [(found, inverse)] = unique_groups([[ids]])
    tensors = [None if x is None else torch.from_numpy(x).to(device) for x in (inverse, offsets_of(lengths), weights)]
    uses = GroupUses([FeatureUses(*tensors, mode == "mean", torch.float32)], len(found), in_order=True)
    rows = table.detach()[found].to(device).requires_grad_()
    [out] = pull_one(rows, uses)
    np.testing.assert_allclose(out.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    out.backward(grad.to(device))
    wanted = table.grad[found]
    np.testing.assert_allclose(rows.grad.cpu(), wanted, rtol=1e-5, atol=1e-5)
    assert not np.delete(table.grad.numpy(), found, 0).any()


def test_gradients_at_equal_distances_are_read_in_place(monkeypatch):
    """Those of torch.stack, torch.cat and sum()."""
    copied = []
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda tensor: copied.append(tensor.shape) or tensor.clone())
    wide, whole = torch.randn(5, 3, 4), torch.randn(5, 4)
    for grad in (whole, wide[:, 0], wide[:, 2], wide.view(5, 12)[:, 4:8], whole[:1].expand(5, 4), whole[1:], whole[:0]):
        values, first, step = host_kernels._strided(grad)
        np.testing.assert_array_equal(values[first :: step or 1][: len(grad)] if step else values[[first] * 5], grad)
    assert not copied
    for grad in (wide.view(5, 12)[:, 3:7], torch.randn(4, 5).T, torch.ones(()).expand(5, 4)):
        values, first, step = host_kernels._strided(grad)
        np.testing.assert_array_equal(values[first::step], grad)
    assert copied == [(5, 4)] * 3
