"""Every optimizer through HostTable.apply: the NumPy twin to the bit, golden vectors, threads, convergence."""

import dataclasses
import functools
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core.optimizers import FTRL, SGD, Adagrad, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam
from hostdev.core.rounding import rounding_key
from hostdev.host.table import HostTable
from hostdev.kernels import segment
from hostdev.kernels.pool import set_host_threads
from hostdev.kernels.unique import unique
from tests import naive
from tests.combinations import choose_pairs, of_any_ids, pairs_first

OPTIMIZERS = {
    "adam": LazyAdam(),
    "adam-nesterov": LazyAdam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-6, nesterov=True),
    "ftrl": FTRL(),
    "ftrl-regularized": FTRL(lr=0.1, l1=0.5, l2=0.01, initial_accum=0.1),
    "ftrl-power": FTRL(lr_power=-0.3),
    "ftrl-no-decay": FTRL(lr_power=0.0, l2=0.1),
    "sgd": SGD(),
    "adagrad": Adagrad(initial_accum=0.1),
    "row-wise-adagrad": RowWiseAdagrad(),
    "row-wise-adam": RowWiseAdam(lr=0.01, beta1=0.8, beta2=0.99, eps=1e-6),
    "momentum": Momentum(),
    "momentum-nesterov": Momentum(lr=0.1, momentum=0.7, nesterov=True),
}
GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.npz"))


DTYPES = [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"), ("bf16", "8bit")]  # of weights and slots
ID_DTYPES = ["int32", "int64"]
PARAMETERS = [*OPTIMIZERS], DTYPES, [1, 3, 80, 128], [1, 2, 5], ID_DTYPES  # the last three: dim, threads, dtype of ids


def cost(name, dtypes, dim, threads, id_dtype):
    """The optimizer's kernel takes seconds to compile, unless other tests need it, too."""
    in_a_loop = dim < 16 and threads < 4
    is_shared = id_dtype == "int32" and (in_a_loop or dtypes[1] == "fp32" or name.startswith("adam"))
    is_float32 = "8bit" in dtypes and dim == 1
    return 9 if is_float32 else 1 if is_shared or dtypes == ("fp32", "fp32") else 5


CASES = choose_pairs(*PARAMETERS, cost=cost)


def name_of(value):
    return "-".join(value) if isinstance(value, tuple) else str(value)


def apply_to_both(optimizer, rows, dim, batches, threads, dtypes=("fp32", "fp32")):
    set_host_threads(threads)
    dtype, slots = dtypes
    table = HostTable(rows, dim, optimizer, name="t", seed=3, dtype=dtype, slots=slots)
    rounding = functools.partial(rounding_key, 3, "t") if dtypes != ("fp32", "fp32") else None
    twin = naive.Table(table.weights, optimizer, rounding, dtype, slots)
    for ids, grads in batches:
        table.apply(ids, grads)
        twin.apply(ids, grads)
    return table, twin


def assert_equal(table, twin):
    np.testing.assert_array_equal(table.weights, twin.weights)
    for name, values in twin.slots.items():
        np.testing.assert_array_equal(table.slots[name], values, err_msg=name)
    assert table.step == twin.step


@pairs_first("name, dtypes, dim, threads, id_dtype", *PARAMETERS, cost=cost, ids=name_of)
def test_matches_the_naive_twin_to_the_bit(name, dtypes, dim, threads, id_dtype, monkeypatch):
    monkeypatch.setattr(segment, "_PART", 190)
    rng = np.random.default_rng(dim)
    batches = []
    for n, ids in [(2000, 600), (0, 1), (1, 1), (700, 3), (1500, 600)]:
        grads = (rng.standard_normal((n, dim)) * 10.0 ** rng.integers(-8, 3, (n, 1))).astype(np.float32)
        batches.append((rng.integers(0, ids, n).astype(id_dtype), grads))
    assert_equal(*apply_to_both(OPTIMIZERS[name], 600, dim, batches, threads, dtypes))


@pytest.mark.parametrize(("slots", "slot_bytes"), [("bf16", 7 * 2), ("8bit", 8 + 4)])
@pytest.mark.parametrize("name", ["adam", "momentum", "ftrl-regularized"])
@of_any_ids
def test_float32_weights_with_smaller_slots(name, slots, slot_bytes, id_dtype):
    rng = np.random.default_rng(5)
    batches = [(rng.integers(0, 60, 500, id_dtype), rng.standard_normal((500, 7), dtype=np.float32)) for _ in range(4)]
    table, twin = apply_to_both(OPTIMIZERS[name], 60, 7, batches, 2, ("fp32", slots))
    assert_equal(table, twin)
    assert table.storage.nbytes == 60 * (7 * 4 + slot_bytes * len(OPTIMIZERS[name].slots))
    for values in table.slots.values() if slots == "bf16" else ():
        assert not (values.view(np.uint32) & np.uint32(0xFFFF)).any()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("dim", "rows", "n"), [(16, 30_000, 70_000), (20, 3, 65_537), (1, 500_000, 70_000)])
def test_batches_of_several_parts(dim, rows, n, threads):
    rng = np.random.default_rng(rows)
    grads = rng.standard_normal((n, dim), dtype=np.float32)
    for batch in (rng.integers(0, rows, n), (rng.zipf(1.2, n) - 1) % rows):
        assert_equal(*apply_to_both(LazyAdam(), rows, dim, [(batch, grads)], threads))


@pytest.mark.parametrize("at", ["sum_part", "_order", "_mark"])
def test_a_failure_inside_ends_the_call_and_the_pool_lives_on(at, monkeypatch):
    class FaultError(Exception):
        pass

    def fail(*args):
        raise FaultError

    set_host_threads(2)
    table = HostTable(100, 32, LazyAdam(), name="t")
    ids, grads = np.arange(1000) % 100, np.ones((1000, 32), np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(segment, "_PART", 100)
        patch.setattr(segment, at, fail)
        with pytest.raises(FaultError):
            table.apply(ids, grads)
    table.apply(ids, grads)


def check_random_batches(data, name, dtypes, dim, threads, id_dtypes):
    rows = data.draw(st.integers(1, 40))
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=60))
    seed = data.draw(st.integers(0, 2**32 - 1))
    grads = np.random.default_rng(seed).standard_normal((len(ids), dim), dtype=np.float32)
    batches = [(np.array(order, kind), grads) for order, kind in zip((ids, ids[::-1]), id_dtypes, strict=True)]
    assert_equal(*apply_to_both(OPTIMIZERS[name], rows, dim, batches, threads, dtypes))


@settings(deadline=None, max_examples=200)
@given(data=st.data(), case=st.sampled_from(CASES))
def test_random_batches(data, case):
    """With the kernels of the test above: which ones run depends on whether there are 16 columns or 4 threads."""
    name, dtypes, dim, threads, id_dtype = case
    dim = data.draw(st.integers(1, 15) if dim < 16 else st.integers(16, 70))
    threads = data.draw(st.integers(1, 3) if threads < 4 else st.integers(4, 5))
    check_random_batches(data, name, dtypes, dim, threads, [id_dtype] * 2)


@pytest.mark.slow
@settings(deadline=None, max_examples=2000)
@given(
    data=st.data(),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    dtypes=st.sampled_from(DTYPES),
    dim=st.integers(1, 70),
    threads=st.integers(1, 4),
)
def test_random_batches_of_all_kernels(data, name, dtypes, dim, threads):
    check_random_batches(data, name, dtypes, dim, threads, data.draw(st.permutations(ID_DTYPES)))


@pytest.mark.parametrize("dtypes", DTYPES, ids="-".join)
def test_a_table_takes_ids_of_both_dtypes(dtypes):
    rng = np.random.default_rng(4)
    batches = [
        (rng.integers(0, 40, 60).astype(dtype), rng.standard_normal((60, 6), dtype=np.float32))
        for dtype in (*ID_DTYPES, *ID_DTYPES)
    ]
    assert_equal(*apply_to_both(LazyAdam(), 40, 6, batches, 2, dtypes))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_update_is_apply_without_the_sum(name):
    rng = np.random.default_rng(0)
    ids, grads = rng.integers(0, 50, 300), rng.standard_normal((300, 6), dtype=np.float32)
    whole, halves = (HostTable(50, 6, OPTIMIZERS[name], name="t") for _ in range(2))
    whole.apply(ids, grads)
    rows, inverse = unique(ids)
    halves.update(rows, naive.segment_sum(grads, inverse, len(rows)))
    np.testing.assert_array_equal(whole.block, halves.block)
    np.testing.assert_array_equal(whole.row_slots, halves.row_slots)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rows_outside_the_batch_do_not_change(name):
    table = HostTable(100, 8, OPTIMIZERS[name], name="t")
    before = table.block.copy()
    table.apply([3, 97, 3], np.ones((3, 8), np.float32))
    changed = np.flatnonzero((table.block != before).any(axis=(1, 2)))
    assert changed.tolist() == [3, 97]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_vectors(path):
    golden = np.load(path)
    names = (
        ("lr", "l1", "l2", "lr_power", "initial_accum") if golden["kind"] == "ftrl" else ("lr", "beta1", "beta2", "eps")
    )
    kind = FTRL if golden["kind"] == "ftrl" else LazyAdam
    hyper = {name: float(golden[name]) for name in names}
    if kind is LazyAdam:
        hyper["nesterov"] = bool(golden["nesterov"])
    blocks = []
    for threads in (1, 2):
        set_host_threads(threads)
        table = HostTable(*golden["w0"].shape, kind(**hyper), name="t")
        with table.writing() as w:
            w.weights[:] = golden["w0"]
        for ids, grads, expected in zip(golden["ids"], golden["grads"], golden["w"], strict=True):
            table.apply(ids, grads)
            np.testing.assert_allclose(table.weights, expected, rtol=1e-5, atol=1e-6)
        for name, values in table.slots.items():
            np.testing.assert_allclose(values, golden[name], rtol=1e-5, atol=1e-6, err_msg=name)
        blocks.append(table.block)
    np.testing.assert_array_equal(*blocks)


def test_there_are_golden_vectors():
    assert len(GOLDEN) == 8


@pytest.mark.parametrize("lr", [0.1, 0.003])
@pytest.mark.parametrize(
    ("optimizer", "dense", "dim"),
    [
        (Momentum(momentum=0.8), functools.partial(torch.optim.SGD, momentum=0.8), 5),
        (Momentum(nesterov=True), functools.partial(torch.optim.SGD, momentum=0.9, nesterov=True), 5),
        (RowWiseAdam(eps=1e-12), functools.partial(torch.optim.Adam, eps=1e-12), 1),  # a row of one column
        (LazyAdam(eps=1e-12), functools.partial(torch.optim.Adam, eps=1e-12), 5),
    ],
    ids=["momentum", "nesterov", "row-wise-adam", "adam"],
)
def test_if_each_row_has_a_gradient_it_is_torchs_dense_optimizer(optimizer, dense, dim, lr):
    """Up to rounding; torch adds eps to the corrected root, so eps is small here."""
    table = HostTable(30, dim, dataclasses.replace(optimizer, lr=lr), name="t")
    weights = torch.from_numpy(table.weights.copy()).double().requires_grad_()
    steps = dense([weights], lr=lr)
    rng = np.random.default_rng(1)
    for _ in range(40):
        grads = rng.standard_normal((30, dim), dtype=np.float32)
        table.apply(np.arange(30), grads)
        weights.grad = torch.from_numpy(grads).double()
        steps.step()
    np.testing.assert_allclose(table.weights, weights.detach().numpy(), rtol=2e-5, atol=1e-4 * lr)


def test_a_row_wise_second_moment_is_the_mean_of_the_columns():
    """Columns with equal squares have the second moment of Adam: the updates are equal up to rounding."""
    rng = np.random.default_rng(2)
    tables = [HostTable(20, 24, make(lr=0.01), name="t") for make in (RowWiseAdam, LazyAdam)]
    for _ in range(30):
        sizes = rng.random((20, 1), dtype=np.float32)
        grads = sizes * rng.choice(np.array([-1, 1], np.float32), (20, 24))
        for table in tables:
            table.apply(np.arange(20), grads)
    np.testing.assert_allclose(tables[0].weights, tables[1].weights, rtol=1e-5, atol=1e-7)
    assert tables[0].slots["v"].shape == (20, 1)


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        (LazyAdam(lr=0.05), 400),
        (FTRL(lr=0.5), 400),
        (SGD(lr=0.1), 100),
        (Adagrad(lr=0.5), 400),
        (RowWiseAdagrad(lr=0.5), 400),
        (RowWiseAdam(lr=0.05), 400),
        (Momentum(lr=0.05), 400),
    ],
)
def test_converges_on_a_quadratic(optimizer, steps):
    target = np.random.default_rng(0).standard_normal((20, 4), dtype=np.float32)
    table = HostTable(20, 4, optimizer, name="t")
    for _ in range(steps):
        table.apply(np.arange(20), table.weights - target)
    assert np.abs(table.weights - target).max() < 0.02


@pytest.mark.parametrize(
    "make",
    [
        lambda: LazyAdam(lr=-1),
        lambda: LazyAdam(beta1=1),
        lambda: LazyAdam(beta2=-0.1),
        lambda: LazyAdam(eps=0),
        lambda: FTRL(lr=-1),
        lambda: FTRL(l1=-1),
        lambda: FTRL(l2=-1),
        lambda: FTRL(lr_power=0.5),
        lambda: FTRL(initial_accum=-1),
        lambda: SGD(lr=-1),
        lambda: Adagrad(lr=-1),
        lambda: Adagrad(eps=0),
        lambda: RowWiseAdagrad(initial_accum=-1),
        lambda: RowWiseAdam(beta2=1),
        lambda: Momentum(momentum=1),
    ],
)
def test_a_wrong_hyperparameter_is_named(make):
    with pytest.raises(
        ValueError, match=r"^(lr|beta1|beta2|eps|l1|l2|lr_power|initial_accum|momentum) must be .*, not -?[\d.]+"
    ):
        make()


@pytest.mark.drawn
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_nothing(name, dtype):
    """The same holds for a gradient whose square, or whose sum over a row's occurrences, overflows float32."""
    table = HostTable(3, 2, OPTIMIZERS[name], name="t", dtype=dtype)
    before = {name: column[:].copy() for name, column in table.columns().items()}
    too_large = np.float32(1.01 * OPTIMIZERS[name].largest_gradient)
    for value, message in (
        (np.nan, "nan, which is not finite"),
        (-np.inf, "-inf, which is not finite"),
        (too_large, "more than .*, its optimizer's limit"),
    ):
        grads = np.array([[1, 1], [1, value]], np.float32)
        for act in (table.apply, table.update):
            with pytest.raises(
                ValueError, match=f"table 't': a gradient of row 1 is .*{message}.*; no row was updated"
            ):
                act([0, 1], grads)
    half = np.full((4, 2), 0.3 * too_large, np.float32)
    with pytest.raises(ValueError, match="table 't': a gradient of row 2 is .*, more than"):
        table.apply([2, 2, 2, 2], half)
    assert table.step == 0
    assert all(np.array_equal(before[name], column[:]) for name, column in table.columns().items())
    table.apply([0, 1, 2, 0], half)
    assert all(np.isfinite(column[:]).all() for column in table.columns().values())


@pytest.mark.parametrize(
    ("optimizer", "wrong", "there"),
    [
        (LazyAdam, {"beta2": 1 - 1e-8}, "1.0"),
        (LazyAdam, {"beta1": 1 - 1e-9}, "1.0"),
        (LazyAdam, {"eps": 1e-46}, "0.0"),
        (LazyAdam, {"lr": 1e-46}, "0.0"),
        (LazyAdam, {"lr": 3e38, "beta1": 0.999}, "inf"),
        (FTRL, {"lr": 1e39}, "inf"),
        (FTRL, {"l2": 3e38}, "inf"),
        (FTRL, {"initial_accum": 1e39}, "inf"),
        (SGD, {"lr": 1e-50}, "0.0"),
        (Adagrad, {"eps": 1e-46}, "0.0"),
        (RowWiseAdagrad, {"lr": 1e40}, "inf"),
        (RowWiseAdam, {"beta2": 1 - 1e-8}, "1.0"),
        (Momentum, {"momentum": 1 - 1e-9}, "1.0"),
    ],
)
def test_hyperparameters_that_float32_changes(optimizer, wrong, there):
    """Kernels get float32 scalars: a valid float64 may be 1, 0 or infinite there."""
    with pytest.raises(ValueError, match=rf"must be .* float32.*; .* becomes {there}$"):
        optimizer(**wrong)


@pytest.mark.parametrize("optimizer", [LazyAdam, FTRL, SGD, Adagrad, RowWiseAdagrad, RowWiseAdam, Momentum])
def test_an_infinite_learning_rate(optimizer):
    with pytest.raises(ValueError, match="lr must be (positive|at least 0), not inf"):
        optimizer(lr=float("inf"))
