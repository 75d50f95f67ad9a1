"""Host tables that store optimizer state in 8 bits."""

import numpy as np
import pytest

from hostdev import FTRL, SGD, Adagrad, HostTable, LazyAdam, RowWiseAdagrad, UserError
from hostdev.core import memory
from hostdev.kernels.eight_bits import to_nearest


def test_slots_in_8_bits_are_what_can_be_read_and_written():
    """A slot of a row takes a byte a value, padded to a multiple of 4, and 4 for its scale."""
    table = HostTable(50, 6, Adagrad(initial_accum=0.1), name="t", seed=2, slots="8bit")
    assert (table.dtype, table.slots_dtype) == ("fp32", "8bit")
    assert table.storage.nbytes == memory.table_bytes(50, 6, 1, slots_dtype="8bit") == 50 * (6 * 4 + 8 + 4)
    assert (table.slots["accum"] == np.float32(0.1)).all()
    np.testing.assert_array_equal(table.weights, HostTable(50, 6, SGD(), name="t", seed=2).weights)
    with pytest.raises(TypeError, match="table 't' stores weights or slots in fewer than 32 bits.*use read_rows"):
        table.block  # noqa: B018
    with pytest.raises(ValueError, match="read-only"):
        table.slots["accum"][3] = 1
    new = np.array([[1, 0.123, 0, 2, 1e-3, 1.999]], np.float32)
    with pytest.raises(ValueError, match=r"stores slots in 8 bits.*unsigned=True"), table.writing([4]) as w:
        w.slots["accum"][:] = new
    with table.writing([4]) as w:
        w.weights[:] = 1.2345678
        w.slots["accum"][:] = to_nearest(new, unsigned=True)
    block, none = np.empty((2, 2, 6), np.float32), np.empty((2, 0), np.float32)
    table.read_rows([4, 5], block, none)
    assert (block[0, 0] == np.float32(1.2345678)).all()
    np.testing.assert_allclose(block[0, 1], new[0], rtol=0.03)
    table.write_rows(np.array([1, 2]), block, none)
    np.testing.assert_array_equal(table.slots["accum"][[1, 2]], block[:, 1])
    block[1, 1, 3] = 0.123
    with pytest.raises(ValueError, match="stores slots in 8 bits"):
        table.write_rows(np.array([1, 2]), block, none)
    table.erase([1, 4])
    assert (table.slots["accum"][[1, 4]] == np.float32(0.1)).all()
    table.apply(np.arange(50, dtype=np.int32), np.ones((50, 6), np.float32))
    assert not (table.slots["accum"] == np.float32(0.1)).any()
    table.reset()
    assert (table.slots["accum"] == np.float32(0.1)).all()


def test_slots_of_one_value_stay_float32():
    """The scale of a slot of one value would take more than 8 bits save."""
    for optimizer, dim in ((FTRL(), 1), (RowWiseAdagrad(), 6)):
        table = HostTable(5, dim, optimizer, name="t", slots="8bit")
        assert table.slots_dtype == ("fp32" if dim == 1 else "8bit")
        assert table.storage.nbytes == memory.table_bytes(5, dim, len(optimizer.slots), len(optimizer.row_slots))
        assert table.block.shape == (5, 1 + len(optimizer.slots), dim)


def test_a_tiny_initial_value_is_0():
    table = HostTable(5, 4, FTRL(initial_accum=1e-30), name="t", slots="8bit")
    assert not table.slots["accum"].any()


def test_a_small_change_is_not_lost():
    """Adam's v moves by a thousandth of the difference in a step, a fraction of the distance of codes."""
    exact, rounded = (HostTable(200, 50, LazyAdam(), name="t", seed=1, slots=slots) for slots in ("fp32", "8bit"))
    sizes = np.geomspace(0.01, 1, 50, dtype=np.float32)
    for table in (exact, rounded):
        for size in [2.0] * 100 + [1.0] * 300:
            table.update(np.arange(200, dtype=np.int32), np.tile(np.float32(size) * sizes, (200, 1)))
    wanted, found = exact.slots["v"].mean(0, dtype=np.float64), rounded.slots["v"].mean(0, dtype=np.float64)
    np.testing.assert_allclose(found, wanted, rtol=0.02)
    wanted, found = exact.weights.mean(dtype=np.float64), rounded.weights.mean(dtype=np.float64)
    assert abs(found / wanted - 1) < 0.02


def test_a_tiny_second_moment_makes_no_huge_step():
    """v is not rounded to 0 where m is not: m / (sqrt(v) + eps) stays bounded."""
    table = HostTable(20, 8, LazyAdam(lr=1e-3), name="t", slots="8bit")
    before, grads = table.weights.copy(), np.ones((20, 8), np.float32)
    grads[:, 1:] = [1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-9, 1e-12]
    for _ in range(20):
        table.apply(np.arange(20, dtype=np.int32), grads)
    assert np.abs(table.weights - before).max() < 20 * 1.01e-3


def test_a_table_says_what_it_needs(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 7_199)
    with pytest.raises(UserError, match=r"needs 100 rows x \(10 x 4 \+ 2 slots x 16\) = 7200 bytes"):
        HostTable(100, 10, LazyAdam(), name="deep", slots="8bit")
    monkeypatch.setattr(memory, "available_bytes", lambda: 7_200)
    table = HostTable(100, 10, LazyAdam(), name="deep", slots="8bit")
    monkeypatch.setattr(memory, "available_bytes", lambda: 7_999)
    with pytest.raises(UserError, match="table .deep.: .*float32 copy .* needs 7.8 KiB, .*look up only the rows"):
        table.slots  # noqa: B018
