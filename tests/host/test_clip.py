"""Clipping by a row's norm: the formula, the same bits everywhere, and what is refused."""

import numpy as np
import pytest
import torch

import hostdev
from hostdev import FTRL, SGD, HostTable, LazyAdam, Momentum, RowWiseAdagrad
from hostdev.core.optimizers import OPTIMIZERS, hyperparameters
from hostdev.device.ops import host_kernels, torch_operations
from hostdev.device.table import DeviceTable
from hostdev.kernels.pool import set_host_threads
from tests.combinations import of_any_ids

CPU = torch.device("cpu")


def by_hand(grads, norm):
    """Return clipped gradients in float32, in the order of additions that `RowWiseAdagrad` documents."""
    rows, dim = grads.shape
    lanes = np.zeros((rows, 16), np.float32)
    for column in range(dim):
        lanes[:, column % 16] += grads[:, column] * grads[:, column]
    total = np.zeros(rows, np.float32)
    for lane in range(16):
        total += lanes[:, lane]
    mean, limit = total / np.float32(dim), np.float32(norm * norm / dim)
    with np.errstate(divide="ignore"):
        factor = np.where(mean > limit, np.sqrt(limit / mean), np.float32(1))
    return grads * factor[:, None].astype(np.float32)


def made(dim, rows=300):
    rng = np.random.default_rng(dim)
    grads = rng.standard_normal((rows, dim)).astype(np.float32) * np.exp(rng.standard_normal((rows, 1)) * 2)
    grads[3] = 0
    grads[4] = 1e-30
    return grads.astype(np.float32)


@pytest.mark.parametrize("dim", [1, 3, 16, 17, 80])
def test_the_formula(dim):
    grads, norm = made(dim), 1.5
    clipped = by_hand(grads, norm)
    before = np.linalg.norm(grads.astype(np.float64), axis=1)
    after = np.linalg.norm(clipped.astype(np.float64), axis=1)
    np.testing.assert_allclose(after, np.minimum(before, norm), rtol=1e-6)
    np.testing.assert_array_equal(clipped[before < norm * 0.999], grads[before < norm * 0.999])
    limit = SGD(clip_norm=norm).clip_limit(dim)
    for ops in (torch_operations, host_kernels):
        np.testing.assert_array_equal(ops.clip_rows(torch.from_numpy(grads), limit).numpy(), clipped)
    table = HostTable(300, dim, SGD(lr=1.0, clip_norm=norm), name="t", init=np.zeros((300, dim), np.float32))
    table.update(np.arange(300), grads)
    np.testing.assert_array_equal(table.weights, -clipped)


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
@of_any_ids
def test_every_optimizer_steps_with_the_clipped_gradient(name, dtype, id_dtype):
    """By `update` and `apply` on the host and on a device, with any number of threads."""
    dim, rows = 24, 5000
    ids = np.random.default_rng(1).permutation(rows)[:3000].astype(id_dtype)
    grads = made(dim, 3000)
    expected = HostTable(rows, dim, OPTIMIZERS[name](), name="t", seed=1, dtype=dtype)
    expected.update(ids, by_hand(grads, 0.7))
    for threads in (1, 3):
        set_host_threads(threads)
        for kind in ("update", "apply", "positions"):
            table = HostTable(rows, dim, OPTIMIZERS[name](clip_norm=0.7), name="t", seed=1, dtype=dtype)
            if kind == "positions":
                order = np.random.default_rng(2).permutation(3000).astype(np.int32)
                placed = np.empty_like(grads)
                placed[order] = grads
                table.update(ids, placed, positions=order)
            else:
                getattr(table, kind)(ids, grads)
            for one, other in zip(table.columns().values(), expected.columns().values(), strict=True):
                np.testing.assert_array_equal(one[:], other[:])
    on_device = DeviceTable(rows, dim, OPTIMIZERS[name](clip_norm=0.7), CPU, name="t", seed=1, dtype=dtype)
    on_device.update(torch.from_numpy(ids), torch.from_numpy(grads))
    np.testing.assert_array_equal(on_device.weights.numpy(), expected.weights)


def test_the_sum_of_an_ids_gradients_is_clipped():
    table = HostTable(5, 2, SGD(lr=1.0, clip_norm=1.0), name="t", init=np.zeros((5, 2), np.float32))
    table.apply([1, 2, 1], np.array([[3, 0], [0.5, 0], [0, 4]], np.float32))
    np.testing.assert_allclose(table.weights[[1, 2]], [[-0.6, -0.8], [-0.5, 0]], rtol=1e-6)


@pytest.mark.drawn
@pytest.mark.parametrize("cache", [None, "40%"])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("optimizer", [LazyAdam, RowWiseAdagrad, FTRL])
def test_training_has_the_same_bits_in_every_mode(depth, cache, optimizer):
    def trained(**options):
        table = HostTable(90, 6, optimizer(clip_norm=0.01), name="t", seed=2)
        runtime = hostdev.Runtime({"t": table}, device="cpu", **options)
        rng = np.random.default_rng(0)
        for ids, rows in runtime.train([rng.integers(0, 90, 40) for _ in range(15)], ids=lambda ids: {"t": ids}):
            (rows["t"] * torch.arange(len(ids))[:, None]).square().sum().backward()
        runtime.close()
        return table.weights.copy()

    np.testing.assert_array_equal(trained(depth=depth, cache=cache), trained(depth=0))


@pytest.mark.parametrize("norm", [0, -1.0, float("nan"), float("inf"), 1e-13, 1e13])
def test_wrong_norms(norm):
    with pytest.raises(ValueError, match=r"clip_norm must be in 1e-12\.\.1e\+12, or None, not"):
        LazyAdam(clip_norm=norm)


def test_what_else_it_changes(tmp_path):
    assert repr(SGD(lr=0.5)) == "SGD(lr=0.5)"
    assert repr(SGD(lr=0.5, clip_norm=2)) == "SGD(lr=0.5, clip_norm=2)"
    assert hyperparameters(SGD(lr=0.5)) == {"lr": 0.5}
    assert hyperparameters(SGD(lr=0.5, clip_norm=2)) == {"lr": 0.5, "clip_norm": 2}
    assert SGD(clip_norm=1).largest_gradient == Momentum(clip_norm=1).largest_gradient == 2.0**46
    table = HostTable(5, 2, LazyAdam(clip_norm=3.0), name="t")
    hostdev.Runtime({"t": table}, device="cpu").save(tmp_path / "c")
    again = HostTable(5, 2, LazyAdam(clip_norm=3.0), name="t", seed=9)
    hostdev.Runtime({"t": again}, device="cpu").load(tmp_path / "c")
    np.testing.assert_array_equal(again.weights, table.weights)
    with pytest.raises(hostdev.UserError, match="clip_norm"):
        hostdev.Runtime({"t": HostTable(5, 2, LazyAdam(), name="t")}, device="cpu").load(tmp_path / "c")


def test_a_dense_optimizer_with_torchs_clipping_learns_the_same():
    """Each row is a parameter of its own for `torch.nn.utils.clip_grad_norm_`; the reference is in float64."""
    rng = np.random.default_rng(4)
    first = rng.standard_normal((6, 5)).astype(np.float32)
    table = HostTable(6, 5, SGD(lr=0.1, clip_norm=0.5), name="t", init=first)
    rows = [torch.nn.Parameter(torch.from_numpy(row.astype(np.float64))) for row in first]
    sgd = torch.optim.SGD(rows, lr=0.1)
    for _ in range(40):
        grads = rng.standard_normal((6, 5)).astype(np.float32) * rng.random((6, 1), np.float32)
        table.update(np.arange(6), grads)
        for row, grad in zip(rows, grads, strict=True):
            row.grad = torch.from_numpy(grad.astype(np.float64))
            torch.nn.utils.clip_grad_norm_([row], 0.5)
        sgd.step()
    np.testing.assert_allclose(table.weights, torch.stack(rows).detach().numpy(), atol=2e-5)
