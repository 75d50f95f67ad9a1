"""The contract of `hostdev.device.triton.ops`, to the bit.

It holds for the kernels on CUDA where there is one, for the host's twins that stand in for them in tests, and, in a
process of its own with TRITON_INTERPRET=1 (test_triton.py starts it), for the kernels in Triton's interpreter.
"""

import os

import numpy as np
import pytest
import torch

from hostdev import FTRL, SGD, Adagrad, HostTable, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam
from hostdev.device.triton import ops
from hostdev.kernels.apply import apply_rows
from hostdev.kernels.unique import unique
from tests import naive
from tests.conftest import devices
from tests.device import twins

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    _library = twins.register_on_cpu({name: ops.launching(name) for name in ops.SCHEMAS})

OPTIMIZERS = [
    LazyAdam(),
    LazyAdam(nesterov=True, lr=0.01),
    LazyAdam(lr=1.0, beta1=0.0, beta2=0.0, eps=1.0),
    FTRL(),
    FTRL(l1=0.5, l2=0.01),
    FTRL(lr=1.0, l1=0.0, l2=0.0),
    SGD(),
    SGD(lr=1.0),
    Adagrad(),
    RowWiseAdagrad(),
    RowWiseAdagrad(lr=1.0),
    RowWiseAdam(),
    RowWiseAdam(lr=1.0, beta1=0.0, beta2=0.0, eps=1.0),
    Momentum(),
    Momentum(lr=1.0, nesterov=True),
]
DIMS = [1, 3, 20, 80, 128]


def later(*case):
    """A case that is slow in the interpreter; `make test` skips it there."""
    return pytest.param(*case, marks=pytest.mark.slow if INTERPRETED else ())


# The interpreter takes every other size for an optimizer, and the other ones for the next.
UPDATES = [
    later(optimizer, dim) if at else (optimizer, dim)
    for number, optimizer in enumerate(OPTIMIZERS)
    for at, dim in enumerate(DIMS[number % 2 :: 2] if INTERPRETED else DIMS)
]
EXTREMES = np.array([0.0, -0.0, 1e-42, -1e-45, 1e-38, 1e38, -3.4e38, np.inf, -np.inf, np.nan, 1.0], np.float32)


def ways():
    """The implementation that runs here."""
    if INTERPRETED:
        return ["kernels"]
    return ["twins", "cuda"] if devices()[-1] == "cuda" else devices() if devices() == ["standin"] else ["twins"]


@pytest.fixture(params=ways())
def device(request):
    if request.param == "twins":
        twins.register()
    elif request.param == "standin":  # as a CUDA device, whose kernels are the twins
        twins.register()
        return torch.device("standin")
    return torch.device("cuda" if request.param == "cuda" else "cpu")


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):  # the interpreter calculates with NumPy, which warns of overflows
        yield


def same(got, wanted):
    """Compare bits, so that -0 is not 0; NaNs are equal, as devices differ in the payload."""
    got, wanted = (torch.tensor(x) if isinstance(x, np.ndarray) else x for x in (got, wanted))
    got, wanted = (x.detach().cpu().float().numpy() for x in (got, wanted))
    assert got.shape == wanted.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(wanted))
    known = ~np.isnan(wanted)
    np.testing.assert_array_equal(got[known].view(np.int32), wanted[known].view(np.int32))


def rows_of(rng, optimizer, rows, dim, extreme=False):
    """Random rows with optimizer state; sums of squares are not negative."""
    block = rng.standard_normal((rows, 1 + len(optimizer.slots), dim), dtype=np.float32)
    row_slots = rng.random((rows, len(optimizer.row_slots)), dtype=np.float32)
    if extreme:
        some = rng.random(block.shape) < 0.3
        block[some] = rng.choice(EXTREMES, some.sum())
        row_slots[: rows // 2] = np.abs(rng.choice(EXTREMES, row_slots[: rows // 2].shape))
    for k, name in enumerate(optimizer.slots, 1):
        if name in ("v", "accum"):
            block[:, k] = np.abs(block[:, k])
    return block, row_slots


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("extreme", [False, True], ids=["usual", "extreme"])
@pytest.mark.parametrize(("optimizer", "dim"), UPDATES, ids=str)
def test_update(device, optimizer, dim, extreme):
    rng = np.random.default_rng(dim)
    block, row_slots = rows_of(rng, optimizer, 90, dim, extreme)
    table = [torch.from_numpy(x.copy()).to(device) for x in (block, row_slots)]
    cases = [(50, 20, None), (0, 7, 0.0), (33, 0, 0.0), (0, 0, None), (20, 20, 1.0), (20, 20, np.nan), (89, 1, 0.0)]
    for step, (H, A, skip) in enumerate(cases, 1):
        ids = rng.permutation(90)[:H].astype(np.int64 if step % 2 else np.int32)
        grads = rng.standard_normal((H + A + step, dim), dtype=np.float32)
        if extreme:
            some = rng.random(grads.shape) < 0.3
            grads[some] = rng.choice(EXTREMES, some.sum())
        admitted = rows_of(rng, optimizer, A, dim, extreme)
        here = [torch.from_numpy(x.copy()).to(device) for x in admitted]
        scalars = optimizer.scalars(step, dim)
        assert ops.supports(optimizer.primitive, scalars)
        arguments = [torch.from_numpy(x).to(device) for x in (ids, grads)]
        found_inf = None if skip is None else torch.tensor(skip, device=device)
        ops.update(optimizer.primitive, *table, *arguments, scalars, found_inf, *(here if A else ()))
        if not skip:
            positions = np.arange(A, dtype=np.int32)
            apply_rows(optimizer.primitive, block, row_slots, ids, grads, scalars)
            apply_rows(optimizer.primitive, *admitted, positions, grads[H:], scalars)
        for got, wanted in zip((*table, *here), (block, row_slots, *admitted), strict=True):
            same(got, wanted)


@pytest.mark.parametrize("optimizer", [LazyAdam(), RowWiseAdagrad()], ids=str)
def test_update_without_a_row(device, optimizer):
    table = HostTable(3, 8, optimizer, name="t")
    values = [torch.from_numpy(x.copy()).to(device) for x in (table.block, table.row_slots)]
    no_ids, no_grads = torch.zeros(0, dtype=torch.int32, device=device), torch.zeros(0, 8, device=device)
    ops.update(optimizer.primitive, *values, no_ids, no_grads, optimizer.scalars(1, 8), None)
    same(values[0], table.block)


@pytest.mark.parametrize("optimizer", [LazyAdam(), RowWiseAdagrad()], ids=str)
def test_a_table_beyond_2_31_values(device, optimizer):
    planes = 1 + len(optimizer.slots)
    rows = 2**31 // (128 * planes) + 9
    try:
        block = torch.empty((rows, planes, 128), device=device)  # on a host only the pages that are used take memory
        row_slots = torch.empty((rows, len(optimizer.row_slots)), device=device)
    except RuntimeError as error:
        pytest.skip(f"9 GB cannot be reserved: {error}")
    last = torch.tensor([rows - 1, 5, rows - 3], device=device)
    block[last], row_slots[last] = (x := torch.rand(3, planes, 128, device=device)), (y := row_slots[:3] * 0)
    small = x.clone(), y.clone()
    for table, ids in (((block, row_slots), last), (small, torch.arange(3, device=device))):
        grads = torch.full((3, 128), 0.5, device=device)
        ops.update(optimizer.primitive, *table, ids, grads, optimizer.scalars(1, 128), None)
    same(block[last], small[0])
    same(row_slots[last], small[1])
    same(ops.lookup(block, last), small[0][:, 0])
    admitted = x.clone(), y.clone()
    ops.exchange(block, row_slots, last, 3, *admitted)
    same(admitted[0], small[0])
    same(block[last], x)


def test_other_powers_are_not_supported():
    assert not ops.supports("FusedSparseFtrl", FTRL(lr_power=-0.3).scalars(1, 8))


@pytest.mark.slow_on_standin
@pytest.mark.parametrize(("H", "A", "M"), [(50, 7, 30), (0, 3, 2), (4, 0, 0), (0, 0, 5), (0, 0, 0)])
@pytest.mark.parametrize("dim", [*DIMS, 1500])
def test_assemble_and_lookup(device, dim, H, A, M):
    rng = np.random.default_rng(H)
    block = torch.randn(60, 3, dim, device=device)
    slots = torch.from_numpy(rng.permutation(60)[:H].astype(np.int32)).to(device)
    admitted, passed = torch.randn(A, 3, dim, device=device), torch.randn(M, dim, device=device)
    hits = block[slots.long(), 0]
    same(ops.assemble(block, slots, admitted, passed), torch.cat([hits, admitted[:, 0], passed]))
    same(ops.lookup(block, slots.long()), hits)


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("scaled", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", DIMS[1::2] if INTERPRETED else DIMS)
def test_gather_scaled(device, dim, dtype, scaled):
    rng = np.random.default_rng(dim)
    values = (rng.standard_normal((60, dim)) * 10.0 ** rng.integers(-42, 38, (60, dim))).astype(np.float32)
    values.flat[:40:3] = rng.choice(EXTREMES, len(values.flat[:40:3]))
    halfway = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x00008000, 0x7F7FFFFF], np.uint32)  # ties of bfloat16
    values.flat[1:11:2] = halfway.view(np.float32)
    inverse = rng.integers(0, 60, 500).astype(np.int32)
    weights = rng.choice([1.0, 0.37, 0.0, 1e-3], 500).astype(np.float32)
    arguments = [torch.from_numpy(x).to(device) for x in (values, inverse, weights)]
    out = ops.gather_scaled(*arguments[:2], arguments[2] if scaled else None, dtype)
    expected = values[inverse] * (weights[:, None] if scaled else np.float32(1))
    assert out.dtype == dtype
    same(out, torch.from_numpy(expected).to(dtype))
    if dtype == torch.bfloat16:
        assert set(out.cpu().view(torch.int16)[out.cpu().isnan()].tolist()) <= {0x7FC0}


COUNTS = [
    [1],
    [64],
    [65],
    [1, 63, 64, 65, 128, 129, 2, 192, 193, 1],
    [63, 65, 1, 127, 129, 64, 64],
    [16_000],
    [0, 70, 0, 1, 0],
    [1] * 300,
    [],
]


def check_sums(device, rng, counts, dim, dtype, scaled):
    inverse = np.repeat(np.arange(len(counts)), counts).astype(np.int32)
    rng.shuffle(inverse)
    N = len(inverse)
    grads = torch.from_numpy(rng.standard_normal((N, dim), dtype=np.float32)).to(dtype)
    if N:
        grads[0] = -0.0
    weights = torch.from_numpy(rng.choice([1.0, 0.37, 0.0, -1.7], N).astype(np.float32))
    uses = ops.sort_uses(torch.from_numpy(inverse).to(device), len(counts))
    out = ops.sum_uses(grads.to(device), uses, None, weights.to(device) if scaled else None)
    terms = (grads.float() * weights[:, None] if scaled else grads.float()).numpy()
    same(out, naive.sum_uses(terms, inverse, len(counts)))
    if max(counts, default=0) <= 64 and 0 not in counts:  # the host's order
        _, order = unique(inverse)  # numbered in order of first occurrence
        first = np.unique(inverse, return_index=True)[1]
        same(naive.segment_sum(terms, order, len(counts)), out.cpu().numpy()[inverse[np.sort(first)]])


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [3, later(80)] if INTERPRETED else [1, 3, 80])
@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{counts[:6]}")
def test_sum_uses(device, counts, dim, dtype):
    if dim == 80 and sum(counts) > 1000:
        counts = [count // 8 for count in counts]  # 32 segments will do: the interpreter is slow
    check_sums(device, np.random.default_rng(len(counts)), counts, dim, dtype, scaled=dtype == torch.bfloat16)


def test_sum_uses_of_random_counts(device):
    rng = np.random.default_rng(7)
    for _ in range(6 if INTERPRETED else 12):
        counts = rng.choice([1, 2, 5, 62, 63, 64, 65, 66, 127, 128, 129, 191, 192, 193, 300], rng.integers(1, 12))
        check_sums(device, rng, counts.tolist(), 2, torch.float32, scaled=True)


def bags_of(rng, lengths, rows):
    """A bag starts where the last one ends; its ids may repeat."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    N = int(offsets[-1])
    return rng.integers(0, rows, N).astype(np.int32), offsets, rng.choice([1.0, 0.37, 0.0, -1.7], N).astype(np.float32)


LENGTHS = [[], [0], [3], [1, 0, 4, 5, 8, 0, 70], [0, 0], [300], [2] * 90]


POOLED = [
    (dim, mean, scaled)
    for dim in ((1, 80) if INTERPRETED else (1, 3, 80, 300))
    for mean in (True, False)
    for scaled in (True, False)
    if mean == scaled or not INTERPRETED
]


@pytest.mark.parametrize(("dim", "mean", "scaled"), POOLED)
def test_pool(device, dim, mean, scaled):
    rng = np.random.default_rng(dim)
    values = (rng.standard_normal((40, dim)) * 10.0 ** rng.integers(-30, 30, (40, 1))).astype(np.float32)
    values[3:9] = rng.choice(EXTREMES, (6, dim))
    for number, lengths in enumerate(LENGTHS):
        inverse, offsets, weights = bags_of(rng, lengths, 40)
        weights = weights if scaled else None
        rows, *others = (
            None if x is None else torch.from_numpy(x).to(device) for x in (values, inverse, offsets, weights)
        )
        expected = naive.pool(values, inverse, offsets, weights, mean)
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        out = ops.pool(rows, *others, mean, dtype)
        assert out.dtype == dtype
        same(out, torch.from_numpy(expected).to(dtype))


@pytest.mark.parametrize(
    ("dim", "dtype"), [(1, torch.float32), (3, torch.bfloat16), later(20, torch.float32), later(20, torch.bfloat16)]
)
def test_sum_of_uses_that_share_gradients(device, dim, dtype):
    """Occurrences of a bag share a gradient; beyond 64 occurrences, a row's sum uses segments."""
    rng = np.random.default_rng(dim)
    for lengths in LENGTHS:
        for rows in (1, 7, 60):
            inverse, offsets, weights = bags_of(rng, lengths, rows)
            bag = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
            grads = torch.from_numpy(rng.standard_normal((len(lengths), dim), dtype=np.float32)).to(dtype)
            uses = ops.sort_uses(torch.from_numpy(inverse).to(device), rows)
            source, scales = (torch.from_numpy(x).to(device) for x in (bag, weights))
            out = ops.sum_uses(grads.to(device), uses, source, scales if rows > 1 else None)
            terms = naive.terms_of(grads.float().numpy(), offsets, weights if rows > 1 else None, mean=False)
            same(out, naive.sum_uses(terms, inverse, rows))


@pytest.mark.slow_on_standin
@pytest.mark.parametrize(("A", "E"), [(20, 7), (20, 0), (20, 20), (0, 0), (1, 1)])
@pytest.mark.parametrize(("dim", "S", "R"), [(1, 0, 0), (1, 2, 0), (3, 1, 1), (80, 2, 0), (128, 0, 1), (80, 1, 3)])
def test_exchange(device, dim, S, R, A, E):
    rng = np.random.default_rng(dim)
    slots = torch.from_numpy(rng.permutation(50)[:A].astype(np.int32)).to(device)
    blocks, row_slots = [torch.randn(n, 1 + S, dim) for n in (50, A)], [torch.randn(n, R) for n in (50, A)]
    got = [x.clone().to(device) for x in (blocks[0], row_slots[0], blocks[1], row_slots[1])]
    ops.exchange(got[0], got[1], slots, E, got[2], got[3])
    at = slots.cpu().long()
    for (there, here), (wanted, leaving) in zip((blocks, row_slots), ((got[0], got[2]), (got[1], got[3])), strict=True):
        gone = there[at[A - E :]].clone()
        there[at] = here
        here[A - E :] = gone
        same(wanted, there)
        same(leaving, here)


def test_the_schemas_say_what_is_written(device):
    """Checks mutations, aliases and shapes with torch's opcheck."""
    o = torch.ops.hostdev
    ids = torch.tensor([2, 0], dtype=torch.int32, device=device)
    block, row_slots, rows = (torch.rand(shape, device=device) for shape in ((5, 3, 8), (5, 0), (2, 8)))
    admitted, none = torch.rand(2, 3, 8, device=device), torch.rand(2, 0, device=device)
    scalars = [float(x) for x in LazyAdam().scalars(1, 8)]
    uses = ops.sort_uses(ids, 3)
    for op, arguments in (
        (o.assemble, (block, ids, admitted, rows)),
        (o.lookup, (block, ids)),
        (o.gather_scaled, (rows, ids % 2, rows[:, 0].contiguous(), torch.bfloat16)),
        (o.sum_uses, (rows.bfloat16(), *uses, None, None)),
        (o.sum_uses, (rows[:1].clone(), *uses, ids * 0, rows[:, 0].contiguous())),
        (
            o.pool,
            (rows, ids % 2, torch.tensor([0, 0, 2], dtype=torch.int32, device=device), None, True, torch.bfloat16),
        ),
        (o.exchange, (block, row_slots, ids, 1, admitted, none)),
        (o.update, ("FusedSparseLazyAdam", block, row_slots, ids[:1], rows, scalars, None, admitted[:1], none[:1])),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))
