import numpy as np
import pytest

import hostdev
from hostdev import FTRL, SGD, HostTable, LazyAdam, RowWiseAdagrad, UserError
from hostdev.core import memory
from hostdev.kernels.pool import run_tasks, set_host_threads
from hostdev.ops import ParameterServer


@pytest.fixture
def table():
    return HostTable(10, 4, LazyAdam(), name="deep")


def test_views_are_shared_and_read_only(table):
    before = table.weights
    with table.writing() as w:
        w.weights[3] = 7
        w.slots["v"][3] = 2
    assert (before[3] == 7).all()
    for view in (table.weights, table.slots["v"], table.block, table.row_slots):
        with pytest.raises(ValueError, match="read-only"):
            view[3] = 1
    np.testing.assert_array_equal(table.lookup([3]), [[7, 7, 7, 7]])
    assert table.weights.shape == table.slots["m"].shape == (10, 4)
    assert table.weights.dtype == table.slots["v"].dtype == np.float32
    assert list(table.slots) == ["m", "v"]
    with pytest.raises(TypeError):
        table.slots["v"] = 0


def test_lookup_returns_a_copy(table):
    rows = table.lookup(np.array([1, 1, 2]))
    rows[:] = 0
    assert table.weights[1].any()


def test_lookup_into_a_buffer(table):
    out = np.empty((2, 4), np.float32)
    assert table.lookup([5, 0], out=out) is out
    np.testing.assert_array_equal(out, table.weights[[5, 0]])


def test_empty_batches(table):
    assert table.lookup([]).shape == (0, 4)
    table.apply([], np.empty((0, 4), np.float32))
    assert table.step == 1


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(("ids", "wrong", "position"), [([0, 10], 10, 1), ([-1], -1, 0), ([2, 3, 11, -4], 11, 2)])
def test_an_id_outside_names_table_id_and_position(table, ids, wrong, position, dtype):
    before = table.block.copy()
    message = f"table 'deep': id {wrong} at position {position} is outside 0..9"
    for act in (
        lambda: table.lookup(np.array(ids, dtype)),
        lambda: table.apply(np.array(ids, dtype), np.ones((len(ids), 4), np.float32)),
        lambda: table.update(np.array(ids, dtype), np.ones((len(ids), 4), np.float32)),
    ):
        with pytest.raises(UserError, match=message):
            act()
    np.testing.assert_array_equal(table.block, before)
    assert table.step == 0


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([1.5], TypeError, "int32 or int64, not float64"),
        (np.array([1], np.uint8), TypeError, "not uint8"),
        ([[1, 2]], ValueError, "one dimension, not 2"),
    ],
)
def test_wrong_ids(table, ids, error, message):
    with pytest.raises(error, match=message):
        table.lookup(ids)


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        (np.ones((2, 4)), TypeError, "float32, not float64"),
        (np.ones((1, 4), np.float32), ValueError, r"shape \(2, 4\), not \(1, 4\)"),
        (np.ones((2, 3), np.float32), ValueError, r"shape \(2, 4\), not \(2, 3\)"),
    ],
)
def test_wrong_gradients(table, grads, error, message):
    with pytest.raises(error, match=message):
        table.apply([1, 2], grads)
    assert table.step == 0


def test_gradients_need_not_be_contiguous(table):
    other = HostTable(10, 4, LazyAdam(), name="deep")
    grads = np.random.default_rng(0).standard_normal((4, 3), dtype=np.float32).T
    table.apply([1, 2, 1], grads)
    other.apply([1, 2, 1], np.ascontiguousarray(grads))
    np.testing.assert_array_equal(table.block, other.block)


def test_a_buffer_of_the_wrong_kind(table):
    with pytest.raises(ValueError, match="C-contiguous"):
        table.lookup([1, 2], out=np.empty((2, 8), np.float32)[:, ::2])
    with pytest.raises(TypeError, match="out must be float32"):
        table.lookup([1, 2], out=np.empty((2, 4)))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (-1, 4)])
def test_a_table_has_rows_and_columns(shape):
    with pytest.raises(ValueError, match="at least one row"):
        HostTable(*shape, FTRL(), name="t")


def test_a_table_too_large_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 11_999)
    HostTable(100, 9, LazyAdam(), name="small")
    with pytest.raises(UserError) as error:
        HostTable(100, 10, LazyAdam(), name="deep")
    assert "table 'deep' needs 100 rows x 10 x (1 + 2 slots) x 4 = 12000 bytes" in str(error.value)
    assert "11999 bytes" in str(error.value)


def test_a_table_larger_than_this_machine():
    rows = memory.available_bytes() // 4
    with pytest.raises(UserError, match="of host memory are free"):
        HostTable(rows, 80, LazyAdam(), name="deep")


def test_memory_is_what_the_formula_says(table):
    assert table.block.nbytes == memory.table_bytes(10, 4, 2) == 10 * 4 * 3 * 4


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [LazyAdam(), FTRL()])
def test_rows_beyond_2_to_the_31_elements(optimizer):
    rows, dim = 11_000_000, 80  # 880 million weights, 2.64e9 elements with the slots: 10.6 GB
    needed = memory.table_bytes(rows, dim, 2)
    if memory.available_bytes() < needed * 1.1:
        pytest.skip(f"needs {needed} bytes of memory")
    table = HostTable(rows, dim, optimizer, name="deep", seed=1)
    assert table.block.size > 2**31
    ids = np.array([rows - 1, 0, rows - 2, rows - 1])
    small = HostTable(2, dim, optimizer, name="small")
    small.storage.block[:] = table.block[[rows - 1, 0]]
    grads = np.random.default_rng(0).standard_normal((4, dim), dtype=np.float32)
    table.apply(ids, grads)
    small.apply([0, 1, 0], grads[[0, 1, 3]])
    np.testing.assert_array_equal(table.block[[rows - 1, 0]], small.block)
    np.testing.assert_array_equal(table.lookup([rows - 1, 0]), small.weights)


@pytest.mark.slow
def test_more_than_2_to_the_31_weights():
    rows, dim = 27_500_000, 80  # 2.2e9 weights without slots: 8.8 GB
    needed = memory.table_bytes(rows, dim, 0)
    if memory.available_bytes() < needed * 1.1:
        pytest.skip(f"needs {needed} bytes of memory")
    table = HostTable(rows, dim, SGD(lr=1.0), name="deep", seed=1)
    assert table.weights.size > 2**31
    ends = np.array([rows - 1, 0, rows - 1])
    before = table.lookup(ends)
    table.apply(ends, np.ones((3, dim), np.float32))
    np.testing.assert_array_equal(table.lookup(ends), before - np.float32([2, 1, 2])[:, None])
    np.testing.assert_array_equal(table.lookup([rows - 2]), table.weights[rows - 2 : rows - 1])


def test_the_server_names_tables():
    server = ParameterServer()
    deep = server.add(HostTable(10, 4, LazyAdam(), name="deep"))
    server.add(HostTable(10, 1, FTRL(), name="wide"))
    with pytest.raises(ValueError, match="already"):
        server.add(HostTable(1, 1, FTRL(), name="deep"))
    assert list(server) == ["deep", "wide"]
    assert "deep" in server
    assert len(server) == 2
    before = server.pull("deep", [3])
    server.push("deep", [3, 3], np.ones((2, 4), np.float32))
    assert server["deep"] is deep
    assert deep.step == 1
    assert np.all(server.pull("deep", [3]) < before)
    with pytest.raises(UserError, match=r"no table 'dep'; the tables are \['deep', 'wide'\]"):
        server.pull("dep", [1])


def test_the_public_surface():
    for name in hostdev.__all__:
        assert getattr(hostdev, name).__name__ in (name, f"hostdev.{name}")
    assert sorted(hostdev.__all__) == sorted(dir(hostdev))
    with pytest.raises(AttributeError, match="nothing"):
        hostdev.nothing  # noqa: B018


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dim", [1, 80])
@pytest.mark.parametrize("stored", ["fp32", "bf16"])
def test_rows_at_positions(dtype, dim, stored):
    """Rows are read from, and gradients written to, positions of a larger array; other rows are unchanged."""
    rng = np.random.default_rng(dim)
    split, whole = (HostTable(3000, dim, LazyAdam(), name="t", dtype=stored) for _ in range(2))
    ids = rng.permutation(3000)[:2000].astype(dtype)
    grads = rng.standard_normal((2000, dim), dtype=np.float32)
    order = rng.permutation(2000).astype(np.int32)
    first, rest = np.sort(order[:700]), np.sort(order[700:])
    step = split.begin_step()
    for part in (first, rest):
        split.update(ids[part], grads, step, part)
    whole.update(ids, grads)
    for name, values in whole.columns().items():
        assert np.array_equal(split.columns()[name][:], values[:])
    out = np.full((2000, dim), np.nan, np.float32)
    split.lookup(ids[first], out, first)
    assert np.array_equal(out[first], whole.weights[ids[first]])
    assert np.isnan(out[rest]).all()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_tasks_of_several_tables_run_together(threads):
    """Tasks of several tables do the same as the tables' methods in turn."""
    set_host_threads(threads)
    rng = np.random.default_rng(threads)
    kinds = [(3000, 80, LazyAdam()), (500, 1, FTRL()), (9000, 16, RowWiseAdagrad()), (4, 8, SGD())]
    apart, together = ([HostTable(V, D, how, name=f"t{D}") for V, D, how in kinds] for _ in range(2))
    ids = [rng.permutation(V)[: V // 2].astype(np.int32) for V, _, _ in kinds]
    order = [rng.permutation(len(some)).astype(np.int32) for some in ids]

    def run(act, *arguments):
        parts = [act(*some) for some in zip(together, *arguments, strict=True)]
        run_tasks([task for tasks in parts for task in tasks])

    for _ in range(2):
        grads = [
            rng.standard_normal((len(some), D), dtype=np.float32) for some, (_, D, _) in zip(ids, kinds, strict=True)
        ]
        for table, *some in zip(apart, ids, grads, strict=True):
            table.update(*some)
        run(HostTable.update_tasks, ids, grads)
    for table, other in zip(apart, together, strict=True):
        np.testing.assert_array_equal(other.block, table.block)
        np.testing.assert_array_equal(other.row_slots, table.row_slots)
        assert table.step == other.step == 2

    out = [np.empty_like(rows) for rows in grads]
    run(HostTable.lookup_tasks, ids, out, order)
    for table, some, at, rows in zip(apart, ids, order, out, strict=True):
        np.testing.assert_array_equal(rows[at], table.lookup(some))

    held = [
        [np.empty((len(ids[i]), *of.shape[1:]), np.float32) for i, of in enumerate(every)]
        for every in ([table.block for table in apart], [table.row_slots for table in apart])
    ]
    run(HostTable.read_rows_tasks, ids, *held, order)
    for table in together:
        table.storage.block[:] = 0
        table.storage.row_slots[:] = 0
    run(HostTable.write_rows_tasks, ids, *held, order)
    for table, other, some in zip(apart, together, ids, strict=True):
        np.testing.assert_array_equal(other.block[some], table.block[some])
        np.testing.assert_array_equal(other.row_slots[some], table.row_slots[some])
        assert not np.delete(other.block, some, 0).any()


def test_tasks_check_the_shape_of_what_they_write(table):
    with pytest.raises(ValueError, match=r"out must have shape \(2, 4\)"):
        table.lookup_tasks(np.array([1, 2]), np.empty((3, 4), np.float32))
    with pytest.raises(ValueError, match="C-contiguous"):
        table.update_tasks(np.array([1, 2]), np.ones((4, 2), np.float32).T)
    assert table.step == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("method", ["read_rows", "write_rows"])
def test_rows_with_their_slots_have_a_shape(method, dtype):
    table = HostTable(10, 4, RowWiseAdagrad(), name="t", dtype=dtype)
    call, ids = getattr(table, method), np.array([1, 2, 3])
    block, row_slots = np.ones((3, 1, 4), np.float32), np.ones((3, 1), np.float32)
    before = table.lookup(np.arange(10)), table.row_slots.copy()
    for wrong, error, message in (
        ((block[:1], row_slots), ValueError, r"block must have shape \(3, 1, 4\), not \(1, 1, 4\)"),
        ((block[:, 0], row_slots), ValueError, r"block must have shape \(3, 1, 4\), not \(3, 4\)"),
        ((np.ones((3, 3, 4), np.float32), row_slots), ValueError, r"not \(3, 3, 4\)"),
        ((block, row_slots[:2]), ValueError, r"row_slots must have shape \(3, 1\), not \(2, 1\)"),
        ((block, row_slots[:, :0]), ValueError, r"not \(3, 0\)"),
        ((block.astype(np.float64), row_slots), TypeError, "block must be float32, not float64"),
        ((block, row_slots.astype(np.float16)), TypeError, "row_slots must be float32, not float16"),
        ((np.ones((4, 1, 3), np.float32).T, row_slots), ValueError, "C-contiguous"),
        ((block, row_slots[:1], np.array([0, 1, 2], np.int32)), ValueError, r"row_slots must have shape \(3, 1\)"),
    ):
        with pytest.raises(error, match=message):
            call(ids, *wrong)
    np.testing.assert_array_equal(table.lookup(np.arange(10)), before[0])
    np.testing.assert_array_equal(table.row_slots, before[1])
    call(ids, np.ones((5, 1, 4), np.float32), np.ones((5, 1), np.float32), np.array([4, 0, 2], np.int32))


@pytest.mark.parametrize("part", [(2, 2), (-1, 2), (0, 0)])
def test_a_part_is_that_of_a_rank(part):
    with pytest.raises(ValueError, match=r"table 't': part must be \(rank, ranks\)"):
        HostTable(10, 4, LazyAdam(), name="t", part=part)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_what_is_not_finite_is_not_written(dtype):
    """Weights and optimizer state must be finite; the error names the row, and nothing is written."""
    table = HostTable(10, 4, RowWiseAdagrad(), name="t", dtype=dtype)
    before = {name: column[:].copy() for name, column in table.columns().items()}
    block, row_slots = np.ones((3, 1, 4), np.float32), np.ones((3, 1), np.float32)
    wrong, wrong_slots = block.copy(), row_slots.copy()
    wrong[1, 0, 2], wrong_slots[1] = np.nan, np.inf
    for values, message in (((wrong, row_slots), "nan"), ((block, wrong_slots), "inf")):
        with pytest.raises(ValueError, match=f"table 't': {message} .*row 7: .*finite"):
            table.write_rows([2, 7, 4], *values)
        positions = np.array([2, 1], np.int32)
        with pytest.raises(ValueError, match="to row 9"):
            table.write_rows([5, 9], *values, positions)
    for name, value in (("weights", np.nan), ("accum", np.inf)):
        for ids, row in ((None, 3), ([6, 3], 3)):
            with pytest.raises(ValueError, match=f"table 't': {value} .*row {row}:"), table.writing(ids) as w:
                (w.weights if name == "weights" else w.slots[name])[3 if ids is None else 1] = value
    assert all(np.array_equal(before[name], column[:]) for name, column in table.columns().items())
    table.write_rows([5, 9], wrong, row_slots, np.array([2, 0], np.int32))  # the wrong one is not among these


def test_some_rows_are_written_as_arrays(table):
    before = table.block.copy()
    with table.writing([7, 2]) as w:
        assert w.weights.shape == w.slots["m"].shape == (2, 4)
        assert list(w.slots) == ["m", "v"]
        w.weights[0] = 1
        w.slots["v"] = 3
        with pytest.raises(KeyError, match="table 'deep': no slot 'accum'; .* m, v"):
            w.slots["accum"]
    assert (table.weights[7] == 1).all()
    assert (table.slots["v"][[2, 7]] == 3).all()
    np.testing.assert_array_equal(np.delete(table.block, [2, 7], 0), np.delete(before, [2, 7], 0))
    with (
        pytest.raises(ValueError, match="table 'deep': the ids of writing\\(\\) must be all different"),
        table.writing([1, 1]),
    ):
        pass
    with pytest.raises(UserError, match="table 'deep': id 10 at position 0 is outside"), table.writing([10]):
        pass


def test_writing_says_what_memory_it_needs(monkeypatch):
    table = HostTable(100, 10, LazyAdam(), name="deep")
    monkeypatch.setattr(memory, "available_bytes", lambda: 3_999)
    message = "a copy of weights for writing needs 3.9 KiB, .*writing.ids"
    with pytest.raises(UserError, match=message), table.writing() as w:
        w.weights  # noqa: B018
    with table.writing(np.arange(99)) as w:
        w.weights[:] = 1
    assert (table.weights[:99] == 1).all()


@pytest.mark.parametrize("ids", [[2**63], [5, 2**64 - 1, -1], [2**70, 1], [-(2**63) - 1]])
def test_integers_that_int64_does_not_have(table, ids):
    position = next(i for i, one in enumerate(ids) if not -(2**63) <= one < 2**63)
    with pytest.raises(UserError, match=f"table 'deep': id {ids[position]} at position {position} is outside 0..9"):
        table.lookup(ids)
    with pytest.raises(UserError, match="is outside 0..9"):
        table.lookup(ids * 100)
