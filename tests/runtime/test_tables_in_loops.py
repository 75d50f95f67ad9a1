"""Tables that are read and written in a loop's body: the bits of a serial loop without a cache, or a refusal."""

import copy
import pickle
import threading

import numpy as np
import pytest
import torch

import hostdev
from hostdev import DeviceTable, HostTable, Runtime
from hostdev.runtime.reading import reading_ahead
from tests.combinations import pairs_first
from tests.runtime.cases import MODES, Case, batches_of, bits, differing, loss_of, overlapped, weights_of

PLACES = [(), ("users", "words")]  # tables on the device
EACH = ("users", "items", "first", "words")


def reads(case, table):
    """Every public way to a table's rows, as bytes."""
    n = np.arange(7)
    found = [bits(table.weights), bits(table.block if table.dtype == "fp32" else table.weights), bits(table.row_slots)]
    found += [bits(values) for values in table.slots.values()]
    found += [bits(column[:]) for column in table.columns().values()]
    found += [table.sum_of_squares(), bits(copy.deepcopy(table).weights)]
    if isinstance(table, DeviceTable):
        return [*found, bits(table.lookup(torch.from_numpy(n).to(table.device)))]
    server = hostdev.ops.ParameterServer()
    server.add(table)
    block, row_slots = (
        np.empty((7, *table.storage.shape[1:]), np.float32),
        np.empty((7, table.row_slots.shape[1]), np.float32),
    )
    table.read_rows(n, block, row_slots)
    return [*found, bits(table.lookup(n)), bits(server.pull(table.name, n)), bits(block), bits(row_slots)]


def run(device, batches, body, *, depth=0, cache=None, on_device=(), bf16=(), **options):
    """Train with a body that is given the case, the batch's number and its rows, before and after the step."""
    case = Case(device, on_device=on_device, bf16=bf16, options={"depth": depth, "cache": None if on_device else cache})
    seen = []
    with case.loop(batches, **options) as loop:
        for number, (label, rows) in enumerate(loop):
            body(case, number, seen, "before")
            if options.get("accumulate", 1) == 1:
                case.step(label, rows)
            else:
                loss_of(case.model, rows, label).backward()
                if rows.is_due:
                    case.adam.step()
                    case.adam.zero_grad()
            body(case, number, seen, "after")
    return case.state(), seen


def read_body(case, number, seen, when):
    if number % 2 == (when == "after"):
        table = case.tables[EACH[number % 4]]
        seen.append((number, when, table.step, reads(case, table)))


def write_body(case, number, seen, when):
    """A write of each kind, of few rows and of all, before the step and after it."""
    rng = np.random.default_rng(number * 2 + (when == "after"))
    table = case.tables[EACH[number % 4]]
    some = np.unique(rng.integers(0, table.rows, 9))
    kind = number % 5
    if number % 3 == 2 and when == "before":
        return
    if kind == 0:
        with table.writing() as w:
            w.weights *= 0.5
    elif kind == 1:
        with table.writing(some) as w:
            values = (rng.integers(-4, 4, (len(some), table.dim)) / 8).astype(np.float32)
            w.weights = torch.from_numpy(values) if isinstance(table, DeviceTable) else values
            for name in w.slots:
                w.slots[name] = 0.25
    elif kind == 2:
        block = rng.integers(0, 9, (len(some), 1 + len(table.optimizer.slots), table.dim)).astype(np.float32) / 8
        row_slots = np.full((len(some), len(table.optimizer.row_slots)), 0.5, np.float32)
        table.write_rows(some, block, row_slots)
    elif kind == 3:
        table.erase(some)
        table.step = number
    else:
        grads = rng.standard_normal((len(some), table.dim)).astype(np.float32)
        if isinstance(table, DeviceTable):
            table.update(torch.from_numpy(some).to(table.device), torch.from_numpy(grads).to(table.device))
        else:
            table.apply(some, grads)
    seen.append(bits(table.weights))


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("on_device", PLACES, ids=["host", "both sides"])
@overlapped
def test_what_is_read_in_the_body_is_after_all_steps(device, depth, cache, on_device):
    batches = batches_of(12)
    state, seen = run(device, batches, read_body, on_device=on_device)
    other, found = run(device, batches, read_body, depth=depth, cache=cache, on_device=on_device)
    assert differing(other, state) == []
    assert found == seen
    assert differing(state, Case(device).train(batches).state()) == []


@pytest.mark.parametrize("policy", ["lookahead", "lru"])
def test_a_serial_loop_sees_its_own_batch(device, policy):
    """After the optimizer's step the batch is in the table; before, it is not."""
    for cache in (None, hostdev.CacheSpec("50%", policy)):
        table = HostTable(10, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
        dense = torch.nn.Parameter(torch.zeros(1, device=device))
        optimizer = torch.optim.SGD([dense], lr=1.0)
        runtime, found = Runtime({"x": table}, device=device, depth=2, cache=cache), []
        for _, rows in runtime.train([{"x": np.array([3, 4])}] * 3):
            found.append(float(table.weights[3, 0]))
            (rows["x"].sum() + dense.sum()).backward()
            found.append(float(table.lookup([3])[0, 0]))
            optimizer.step()
            found.append(float(table.lookup([3])[0, 0]))
            optimizer.zero_grad()
        assert found == [0, 0, -1, -1, -1, -2, -2, -2, -3]


@pytest.mark.slow_on_standin
@pairs_first(["depth, cache", "on_device", "bf16"], MODES, PLACES, [(), ("users",)])
def test_what_is_written_in_the_body_counts(device, depth, cache, on_device, bf16):
    batches = batches_of(20)
    state, seen = run(device, batches, write_body, on_device=on_device, bf16=bf16)
    other, found = run(device, batches, write_body, depth=depth, cache=cache, on_device=on_device, bf16=bf16)
    assert differing(other, state) == []
    assert found == seen
    assert differing(state, Case(device, bf16=bf16).train(batches).state()) != []


@pytest.mark.slow_on_standin
@overlapped
def test_what_is_written_counts_with_accumulation(device, depth, cache):
    batches = batches_of(16)
    state, seen = run(device, batches, write_body, accumulate=4)
    other, found = run(device, batches, write_body, depth=depth, cache=cache, accumulate=4)
    assert differing(other, state) == []
    assert found == seen


@overlapped
def test_a_norm_that_is_kept_in_every_step(device, depth, cache):
    """As max-norm renormalisation: the next batch's rows have it, whatever was looked up ahead."""
    states = []
    for options in ({}, {"depth": depth, "cache": cache}):
        case, largest = Case(device, options=options), []
        for label, rows in case.loop(batches_of(15)):
            users, _ = rows.unique("users")
            largest.append(float(users.detach().norm(dim=1).max()))
            case.step(label, rows)
            with case.tables["users"].writing() as w:
                w.weights /= np.maximum(1, np.linalg.norm(w.weights, axis=1, keepdims=True) / 0.5)
        states.append(case.state())
        assert largest[0] > 1
        assert max(largest[1:]) < 0.500001
    assert differing(*states) == []


@overlapped
def test_writes_during_an_evaluation_count_for_its_next_batch(device, depth, cache):
    table = HostTable(10, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
    runtime = Runtime({"x": table}, device=device, depth=depth, cache=None if isinstance(cache, dict) else cache)
    found = []
    for number, (_, rows) in enumerate(runtime.predict([{"x": np.array([3, 4])}] * 5), 1):
        found.append(rows["x"][0].item())
        table.write_rows(np.array([3]), np.full((1, 1, 1), number, np.float32), np.empty((1, 0), np.float32))
    assert found == [0, 1, 2, 3, 4]


@overlapped
def test_the_number_of_steps_may_be_set(device, depth, cache):
    """It counts from the next step on, and what is no number of steps is refused."""
    case = Case(device, options={"depth": depth, "cache": cache})
    for number, (label, rows) in enumerate(case.loop(batches_of(6)), 1):
        if number == 4:
            case.tables["users"].step = 0
        case.step(label, rows)
        if number == 4:
            case.tables["items"].step = np.int64(100)
    assert [case.tables[name].step for name in EACH] == [3, 102, 6, 6]
    with pytest.raises(ValueError, match="table 'users': step.* 0 or more, not -1"):
        case.tables["users"].step = -1
    for wrong in (2.5, True, "3"):
        with pytest.raises(TypeError, match="table 'users': step.* integer, not"):
            case.tables["users"].step = wrong
    assert case.tables["users"].step == 3


def test_reading_ahead_is_refused():
    """In the loader, `ids` and `send`, in other threads; and a loop goes on."""
    batches = batches_of(3)
    case = Case()
    for label, rows in case.loop(batches):
        with (
            reading_ahead(),
            pytest.raises(
                ValueError,
                match="table 'users': the loader, `ids` or `send` used this table, but they run ahead",
            ),
        ):
            case.tables["users"].lookup([1])
        caught = []

        def other(caught=caught):
            try:
                case.tables["users"].weights  # noqa: B018
            except ValueError as error:
                caught.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "table 'users' is being trained by a loop in another thread" in caught[0]
        case.step(label, rows)
    with reading_ahead():  # no loop is open
        case.tables["users"].lookup([1])
    assert differing(case.state(), Case().train(batches).state()) == []


def test_a_table_is_written_in_one_way_at_a_time():
    case = Case()
    users = case.tables["users"]
    for label, rows in case.loop(batches_of(2)):
        case.step(label, rows)
        before = weights_of(users)
        with users.writing() as w:
            w.weights[3] = 1
            for act in (
                lambda: users.apply([1], np.ones((1, 4), np.float32)),
                lambda: users.writing().__enter__(),
                lambda: users.erase([1]),
                users.reset,
            ):
                with pytest.raises(ValueError, match="table 'users': a `with table.writing\\(\\)` block is open"):
                    act()
            np.testing.assert_array_equal(users.weights, before)
        assert (users.weights[3] == 1).all()
        with pytest.raises(ValueError, match="writing\\(\\)` block has ended"):
            w.weights  # noqa: B018
        with pytest.raises(ZeroDivisionError), users.writing() as w:
            w.weights[:] = 5
            raise ZeroDivisionError
        assert not (users.weights == 5).any()
    pickle.loads(pickle.dumps(users))
