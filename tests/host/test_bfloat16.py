"""Host tables that store weights or optimizer state as bfloat16."""

import numpy as np
import pytest
import torch

from hostdev import FTRL, SGD, Adagrad, HostTable, LazyAdam, Momentum, RowWiseAdagrad, UserError
from hostdev.core import memory
from tests.combinations import pairs_first


@pytest.mark.parametrize("dtype", ["bfloat16", "bf16"])
def test_bfloat16_weights_are_what_can_be_read_and_written(dtype):
    """A weight takes two bytes and is read as float32; only exact values are written; a view of weights is a copy."""
    table = HostTable(50, 6, LazyAdam(), name="t", seed=2, dtype=dtype)
    assert table.dtype == "bf16"
    assert table.storage.nbytes == memory.table_bytes(50, 6, 2, dtype=dtype) == 50 * 6 * (2 + 2 * 4)
    plain = HostTable(50, 6, LazyAdam(), name="t", seed=2)
    table.apply(np.arange(50, dtype=np.int32), np.ones((50, 6), np.float32))
    weights = table.weights
    assert not (weights.view(np.uint32) & np.uint32(0xFFFF)).any()
    np.testing.assert_array_equal(table.lookup(np.arange(50)), weights)
    with pytest.raises(ValueError, match="read-only"):
        weights[3] = 1
    with pytest.raises(TypeError, match="table 't' stores weights or slots in fewer than 32 bits.*use read_rows"):
        table.block  # noqa: B018
    with table.writing([4]) as w:
        w.slots["m"][:] = 1.2345678
    ids = np.array([4, 9, 0])
    block, none = np.empty((3, 3, 6), np.float32), np.empty((3, 0), np.float32)
    table.read_rows(ids, block, none)
    np.testing.assert_array_equal(block[:, 0], weights[ids])
    assert (block[0, 1] == np.float32(1.2345678)).all()
    table.write_rows(np.array([1, 2, 3]), block, none)
    np.testing.assert_array_equal(table.lookup([1, 2, 3]), weights[ids])
    before = table.storage.stored.copy()
    with pytest.raises(ValueError, match="table .t. stores weights as bfloat16"):
        table.write_rows(ids, plain.block[:3], none)
    np.testing.assert_array_equal(table.storage.stored, before)
    assert plain.dtype == "fp32"
    with pytest.raises(ValueError, match="table 't'.*fp32 or bfloat16, not 'fp16'"):
        HostTable(5, 6, LazyAdam(), name="t", dtype="fp16")


@pytest.mark.parametrize("slots", ["bfloat16", "bf16"])
def test_bfloat16_slots_are_what_can_be_read_and_written(slots):
    """A value of a slot takes two bytes and is read as float32; only exact values are written."""
    table = HostTable(50, 6, Adagrad(initial_accum=0.1), name="t", seed=2, slots=slots)
    assert (table.dtype, table.slots_dtype) == ("fp32", "bf16")
    assert table.storage.nbytes == memory.table_bytes(50, 6, 1, slots_dtype="bf16") == 50 * 6 * (4 + 2)
    initial = table.slots["accum"].copy()
    np.testing.assert_array_equal(initial, torch.full((50, 6), 0.1).bfloat16().float())  # to nearest
    np.testing.assert_array_equal(table.weights, HostTable(50, 6, SGD(), name="t", seed=2).weights)
    with pytest.raises(TypeError, match="table 't' stores weights or slots in fewer than 32 bits.*use read_rows"):
        table.block  # noqa: B018
    with pytest.raises(ValueError, match="read-only"):
        table.slots["accum"][3] = 1
    with pytest.raises(ValueError, match="stores slots as bfloat16"), table.writing([4]) as w:
        w.slots["accum"][:] = 1.2345678
    with table.writing([4]) as w:
        w.weights[:] = 1.2345678
        w.slots["accum"][:] = 1.5
    block, none = np.empty((2, 2, 6), np.float32), np.empty((2, 0), np.float32)
    table.read_rows([4, 5], block, none)
    assert (block[0, 0] == np.float32(1.2345678)).all()
    np.testing.assert_array_equal(block[:, 1], np.array([[1.5] * 6, initial[5]], np.float32))
    table.write_rows(np.array([1, 2]), block, none)
    np.testing.assert_array_equal(table.slots["accum"][[1, 2]], block[:, 1])
    block[1, 1, 3] = 0.1
    with pytest.raises(ValueError, match="stores slots as bfloat16"):
        table.write_rows(np.array([1, 2]), block, none)
    table.erase([1, 4])
    np.testing.assert_array_equal(table.slots["accum"][[1, 4]], initial[[1, 4]])
    table.apply(np.arange(50, dtype=np.int32), np.ones((50, 6), np.float32))
    table.reset()
    np.testing.assert_array_equal(table.slots["accum"], initial)
    with pytest.raises(ValueError, match="table 't': slots must be fp32, bfloat16 or 8bit, not 'int8'"):
        HostTable(5, 6, LazyAdam(), name="t", slots="int8")


def test_a_small_change_of_a_bfloat16_slot_is_not_lost():
    """Adam's v moves by a thousandth of the difference in a step, less than half of bfloat16's gap."""
    exact, rounded = (
        HostTable(200, 50, LazyAdam(), name="t", seed=1, slots=slots, dtype="fp32") for slots in ("fp32", "bfloat16")
    )
    for table in (exact, rounded):
        for size in [2.0] * 100 + [1.0] * 300:
            table.update(np.arange(200, dtype=np.int32), np.full((200, 50), size, np.float32))
    wanted, found = exact.slots["v"].mean(dtype=np.float64), rounded.slots["v"].mean(dtype=np.float64)
    assert abs(found / wanted - 1) < 0.002
    wanted, found = exact.weights.mean(dtype=np.float64), rounded.weights.mean(dtype=np.float64)
    assert abs(found / wanted - 1) < 0.005


def test_a_bfloat16_table_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 9_999)
    message = r"needs 100 rows x 10 x \(2 \+ 2 slots x 4\) = 10000 bytes"
    with pytest.raises(UserError, match=message):
        HostTable(100, 10, LazyAdam(), name="deep", dtype="bf16")
    monkeypatch.setattr(memory, "available_bytes", lambda: 10_000)
    table = HostTable(100, 10, LazyAdam(), name="deep", dtype="bf16")
    monkeypatch.setattr(memory, "available_bytes", lambda: 3_999)
    with pytest.raises(UserError, match="table .deep.: .*float32 copy .* needs 3.9 KiB, .*look up only the rows"):
        table.weights  # noqa: B018


@pairs_first(
    ["optimizer", "dtype, slots"],
    [LazyAdam(), FTRL(), Momentum(), SGD(), RowWiseAdagrad()],
    [("bf16", "fp32"), ("bf16", "bf16"), ("fp32", "8bit"), ("bf16", "8bit")],
    quick=lambda optimizer, stored: stored != ("fp32", "8bit") or isinstance(optimizer, LazyAdam | FTRL),
    ids=str,
)
def test_rounded_rows_of_several_ranks_are_those_of_one(optimizer, dtype, slots):
    """Rounding depends on rows' ids, not on their place."""
    rows, ranks = 101, 3
    how = {"name": "t", "seed": 1, "dtype": dtype, "slots": slots}
    whole = HostTable(rows, 5, optimizer, **how)
    parts = [HostTable(rows, 5, optimizer, part=(rank, ranks), **how) for rank in range(ranks)]
    rng = np.random.default_rng(0)
    for _ in range(4):
        grads = rng.standard_normal((rows, 5), dtype=np.float32)
        chosen = rng.random(rows) < 0.5
        whole.update(np.flatnonzero(chosen).astype(np.int32), grads[chosen])
        for part in parts:
            ids = part.ids(0, part.rows)
            here = np.flatnonzero(chosen[ids]).astype(np.int32)
            np.testing.assert_array_equal(part.row_ids(here), ids[here])
            part.update(here, grads[ids[here]])
    for part in parts:
        for name, values in whole.columns().items():
            np.testing.assert_array_equal(part.columns()[name][:], values[part.ids(0, part.rows)])


def test_rows_that_bfloat16_cannot_represent_are_not_written():
    table = HostTable(10, 4, LazyAdam(), name="t", dtype="bf16")
    with pytest.raises(ValueError, match=r"table 't'.* bfloat16.*bfloat16\(\)\.float\(\)"), table.writing() as w:
        w.weights[3] = 1.2345678
    with table.writing() as w:
        w.weights[3] = 1.5
        w.slots["m"][4] = 1.2345678
    assert (table.weights[3] == 1.5).all()
    assert (table.slots["m"][4] == np.float32(1.2345678)).all()
