"""Sets of rows with a bit per row, and snapshots of a table while other threads write it."""

import threading

import numpy as np
import pytest

from hostdev import FTRL, HostTable, LazyAdam, RowWiseAdagrad, RowWiseAdam
from hostdev.host.snapshot import Budget
from hostdev.kernels import bits
from hostdev.kernels.pool import set_host_threads


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_sets_of_rows(rows, dtype):
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, rows, rows // 2 + 1).astype(dtype)
    marked = bits.empty_bits(rows)
    bits.mark(ids, marked)
    there = set(ids.tolist())
    assert bits.count_bits(marked) == len(there)
    assert bits.count_bits(bits.full_bits(rows)) == rows
    for first, last in ((0, rows), (rows // 3, rows // 2 + 1), (rows, rows)):
        out = np.empty(rows, np.int64)
        count = bits.rows_between(first, last, marked, out)
        assert out[:count].tolist() == sorted(row for row in there if first <= row < last)
    wanted = rng.permutation(rows).astype(dtype)[: rows // 2]
    out = np.empty(len(wanted), dtype)
    count = bits.take(wanted, marked, out)
    assert out[:count].tolist() == [row for row in wanted.tolist() if row in there]
    assert bits.count_bits(marked) == len(there - set(wanted.tolist()))


def test_threads_that_mark_neighbours_lose_none():
    set_host_threads(4)
    rows = 1 << 17
    for seed in range(20):
        marked = bits.empty_bits(rows)
        bits.mark(np.random.default_rng(seed).permutation(rows).astype(np.int32), marked)
        np.testing.assert_array_equal(marked, bits.full_bits(rows))


@pytest.mark.parametrize(("rows", "dim", "slots"), [(1, 1, 0), (50, 3, 2), (50, 80, 1)])
def test_rows_to_columns(rows, dim, slots):
    rng = np.random.default_rng(0)
    block = rng.random((rows, 1 + slots, dim), np.float32)
    ids = rng.integers(0, rows, 2 * rows)
    out = np.empty((1 + slots, len(ids), dim), np.float32)
    bits.copy_to_columns(0, len(ids), 0, ids, block, out)
    np.testing.assert_array_equal(out, block[ids].transpose(1, 0, 2))
    first = rows // 2
    out = np.empty((1 + slots, rows - first, dim), np.float32)
    bits.copy_to_columns(0, rows - first, first, None, block, out)
    np.testing.assert_array_equal(out, block[first:].transpose(1, 0, 2))


def read_all(snapshot, table, step, ids=True):
    """Read all wanted rows by range: {row: (its vectors, its single values)}."""
    found = {}
    (_, S, D), R = table.storage.shape, table.storage.row_slots.shape[1]
    for first in range(0, table.rows, step):
        last = min(table.rows, first + step)
        rows = snapshot.rows_between(first, last)
        if not len(rows):
            continue
        columns, singles = np.empty((S, len(rows), D), np.float32), np.empty((R, len(rows)), np.float32)
        snapshot.read(first, last, rows if ids else None, columns, singles)
        for i, row in enumerate(rows.tolist()):
            found[row] = columns[:, i].tobytes(), singles[:, i].tobytes()
    return found


@pytest.mark.drawn
@pytest.mark.parametrize("optimizer", [LazyAdam, FTRL, RowWiseAdagrad, RowWiseAdam])
@pytest.mark.parametrize("limit", [1, 1 << 30])
@pytest.mark.parametrize(("dtype", "slots"), [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "8bit")])
def test_a_snapshot_is_of_its_moment(optimizer, limit, dtype, slots):
    """A thread writes rows all the time, but reads return the snapshot's. With a tiny budget the writer waits."""
    table = HostTable(3000, 5, optimizer(), name="t", seed=1, dtype=dtype, slots=slots)
    changes = table.stored.note_changes()
    block = table.storage.taken(np.arange(table.rows))
    before = [(block[row].tobytes(), table.storage.row_slots[row].tobytes()) for row in range(table.rows)]
    budget = Budget(limit)
    snapshot = changes.begin(budget, everything=True)
    stop, rng = threading.Event(), np.random.default_rng(2)

    def write():
        while not stop.is_set():
            table.apply(rng.integers(0, table.rows, 200).astype(np.int32), rng.random((200, 5), np.float32))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        found = read_all(snapshot, table, 100, ids=False)
    finally:
        stop.set()
        changes.end(snapshot, saved=True)
        budget.close()
        writer.join()
    assert [found[row] for row in range(table.rows)] == before
    after = table.storage.taken(np.arange(table.rows))
    assert any(after[row].tobytes() != before[row][0] for row in range(table.rows))
    assert budget._used == 0


def test_changes_are_those_since_the_last_one_that_was_saved():
    table = HostTable(500, 3, LazyAdam(), name="t")
    changes = table.stored.note_changes()
    grads = np.ones((2, 3), np.float32)

    def snapshot(*, saved):
        found = changes.begin(Budget(1 << 20), everything=False)
        rows = sorted(read_all(found, table, 64))
        changes.end(found, saved=saved)
        return rows

    table.update(np.array([3, 499]), grads)
    table.apply(np.array([7, 7]), grads)
    assert snapshot(saved=False) == [3, 7, 499]
    row = np.empty((1, 3, 3), np.float32), np.empty((1, 0), np.float32)
    table.read_rows(np.array([9]), *row)
    table.write_rows(np.array([8]), *row)
    assert snapshot(saved=True) == [3, 7, 8, 499]
    table.lookup(np.array([1]))
    assert snapshot(saved=True) == []
    first = changes.begin(Budget(1), everything=False)
    with pytest.raises(RuntimeError, match="is still being saved"):
        changes.begin(Budget(1), everything=False)
    changes.end(first, saved=True)


def test_who_waits_for_room_goes_on_when_it_ends():
    table = HostTable(100, 3, LazyAdam(), name="t")
    changes = table.stored.note_changes()
    budget = Budget(1)
    snapshot = changes.begin(budget, everything=True)
    table.update(np.array([1]), np.ones((1, 3), np.float32))  # the limit is passed
    writer = threading.Thread(target=lambda: table.update(np.array([2]), np.ones((1, 3), np.float32)))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    changes.end(snapshot, saved=False)
    budget.close()
    writer.join(5)
    assert not writer.is_alive()
    assert sorted(read_all(changes.begin(Budget(9), everything=False), table, 10)) == list(range(100))


def test_a_reset_while_a_checkpoint_is_written_is_in_the_next_one(tmp_path):
    import hostdev

    table = HostTable(100, 4, hostdev.SGD(lr=0.5), name="t")
    with hostdev.Runtime({"t": table}, device="cpu", depth=0) as runtime:
        table.apply([1, 2], np.ones((2, 4), np.float32))
        runtime.save(tmp_path, wait=False)
        table.reset()
        table.apply([3], np.ones((1, 4), np.float32))
        runtime.save(tmp_path)
    other = HostTable(100, 4, hostdev.SGD(lr=0.5), name="t")
    with hostdev.Runtime({"t": other}, device="cpu", depth=0) as runtime:
        runtime.load(tmp_path)
    np.testing.assert_array_equal(other.weights, table.weights)
