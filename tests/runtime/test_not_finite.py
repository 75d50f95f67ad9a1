"""Gradients that are not finite change no row: not in their step, nor in those queued behind it before it is known."""

import contextlib

import numpy as np
import pytest
import torch

import hostdev
from hostdev import UserError
from hostdev.runtime.loop import NonFiniteError
from tests.combinations import pairs_first
from tests.runtime.cases import (
    MODES,
    Case,
    batches_of,
    dense_state,
    differing,
    ids,
    loss_of,
    overlapped,
    send,
    tables_state,
)

PLACES = [(), ("users", "words")]  # tables on the device
MODE, ON_DEVICE = "depth, cache", "on_device"


def cost(mode, on_device, *others):
    """A cache is not used with tables on the device."""
    return 3 if mode[1] and on_device else 1


def spoiled(rows, at, value):
    """Let the gradient of one row of a table be infinite, or not a number, after `backward`."""
    leaf = next(leaf for leaf in rows.leaves if leaf.table.name == at)
    leaf.rows.grad[len(leaf.rows) // 2, 0] = value


@pytest.mark.slow_on_standin
@pairs_first(
    [MODE, ON_DEVICE, "at, value"],
    MODES,
    PLACES,
    [("users", float("nan")), ("first", float("inf")), ("words", -float("inf"))],
    cost=cost,
)
def test_no_row_is_changed(device, depth, cache, on_device, at, value):
    """Of any table; and the loop can be begun again."""
    batches = batches_of(8)
    case = Case(device, on_device=on_device, options={"depth": depth, "cache": cache if not on_device else None})
    with pytest.raises(NonFiniteError) as caught:
        for label, rows in case.loop(batches):
            case.adam.zero_grad()
            loss_of(case.model, rows, label).backward()
            if rows.step == 4:
                spoiled(rows, at, value)
            case.adam.step()
    assert caught.value.step == 4
    assert str(caught.value) == (
        "step 4: a gradient of the rows of 'users', 'items', 'first', 'words' is not finite; no row was updated. Look "
        "at the loss before backward(), or use a smaller learning rate"
    )
    wanted = Case(device).train(batches[:3])
    assert tables_state(case.tables.values()) == tables_state(wanted.tables.values())
    assert isinstance(caught.value, UserError)
    case.train(batches[:2])
    assert case.tables["users"].step == 5


@overlapped
def test_the_last_batch_and_a_loop_that_is_closed(device, depth, cache):
    """It is told at the end of the loop, or by `with`, and to an evaluation in between."""
    batches = batches_of(5)
    wanted = tables_state(Case(device).train(batches[:4]).tables.values())
    for end in ("loop", "with", "evaluation"):
        case = Case(device, options={"depth": depth, "cache": cache})
        with pytest.raises(NonFiniteError, match="step 5: a gradient"), case.loop(batches) as loop:
            for label, rows in loop:
                case.step(label * float("nan") if rows.step == 5 else label, rows)
                if rows.step == 5 and end == "with":
                    break
                if rows.step == 5 and end == "evaluation":
                    case.runtime.lookup(ids(batches[0]))
        assert tables_state(case.tables.values()) == wanted


@overlapped
def test_an_error_that_is_told_elsewhere_ends_the_loop(device, depth, cache):
    """By writing back in the middle, and caught there."""
    batches, steps, caught = batches_of(6), 0, 0
    case = Case(device, options={"depth": depth, "cache": cache})
    for label, rows in case.loop(batches):
        case.step(label * float("nan") if rows.step == 2 else label, rows)
        steps += 1
        try:
            case.runtime.write_back()
        except NonFiniteError:
            caught += 1
    assert (steps, caught) == (2, 1)
    wanted = Case(device).train(batches[:1])
    assert tables_state(case.tables.values()) == tables_state(wanted.tables.values())


def guarded(case, batches, spoil, *, only=None):
    """A loop whose steps are guarded on the device; returns the losses."""

    def read(results):
        if results[1][0]:
            raise NonFiniteError(f"step {len(outcomes) - 1} or so")
        return float(results[0][0])

    outcomes = []
    for label, rows in case.loop(batches):
        loss = loss_of(case.model, rows, label)
        case.adam.zero_grad()
        loss.backward()
        if rows.step == 4:
            spoil(rows, loss)
        if only is None or rows.step in only:
            outcomes.append(rows.guard(case.adam, [loss.detach()], [loss.detach().view(1)], read))
        case.adam.step()
    return [outcome.get() for outcome in outcomes]


@pytest.mark.slow_on_standin
@pairs_first([MODE, ON_DEVICE, "where"], MODES, PLACES, ["dense", "rows", "loss"], cost=cost)
def test_a_guarded_step(device, depth, cache, on_device, where):
    """The dense side and the tables stop together, wherever the gradient is; then both go on."""
    batches = batches_of(8)
    options = {"depth": depth, "cache": cache if not on_device else None}
    case = Case(device, on_device=on_device, options=options, adam={"fused": True})

    def spoil(rows, loss):
        if where == "dense":
            case.model.top.bias.grad[0] = float("nan")
        elif where == "rows":
            spoiled(rows, "words", float("inf"))
        else:
            loss.data.fill_(float("nan"))

    with pytest.raises(NonFiniteError, match="or so"):
        guarded(case, batches, spoil)
    wanted = Case(device, adam={"fused": True}).train(batches[:3])
    assert differing(case.state(), wanted.state()) == []
    assert not hasattr(case.adam, "found_inf")
    case.train(batches[3:5])
    wanted.train(batches[3:5])
    assert differing(case.state(), wanted.state()) == []


@overlapped
def test_a_guard_changes_no_bit(device, depth, cache):
    batches = batches_of(6)
    case = Case(device, options={"depth": depth, "cache": cache}, adam={"fused": True})
    losses = guarded(case, batches, lambda rows, loss: None, only={1, 2, 5, 6})
    wanted = Case(device, adam={"fused": True}).train(batches)
    assert differing(case.state(), wanted.state()) == []
    assert losses == [float(wanted.losses[number]) for number in (0, 1, 4, 5)]


@pytest.mark.parametrize("depth", [0, 2])
def test_a_guard_where_no_row_is_trained(device, depth):
    case = Case(device, options={"depth": depth}, adam={"fused": True})
    case.runtime.freeze()
    with pytest.raises(NonFiniteError, match="or so"):
        guarded(case, batches_of(5), lambda rows, loss: loss.data.fill_(float("nan")))


def test_a_guard_needs_an_optimizer_that_can_wait():
    case = Case()
    for label, rows in case.loop(batches_of(1)):
        loss_of(case.model, rows, label).backward()
        with pytest.raises(ValueError, match="Adam ignores found_inf; use a torch optimizer with fused=True"):
            rows.guard(case.adam, [], [], list)


def test_results_on_their_way(device):
    """Small tensors come to the host without anybody waiting; any value, and errors, as often as they are asked for."""
    case, outcomes = Case(device), []
    for label, rows in case.loop(batches_of(3)):
        loss = loss_of(case.model, rows, label)
        loss.backward()
        outcomes.append(rows.to_host([loss.detach(), label.sum()], lambda arrays: [float(array) for array in arrays]))
        case.adam.step()
        case.losses.append(float(loss.detach()))
    labels = [float(send(batch).sum()) for batch in batches_of(3)]
    for _ in range(2):
        assert [outcome.get() for outcome in outcomes] == [list(pair) for pair in zip(case.losses, labels, strict=True)]
    with pytest.raises(ValueError, match="this batch is over"):
        rows.to_host([torch.ones(1)], list)
    for _, rows in case.loop(batches_of(1)):
        outcome = rows.to_host([torch.ones(1, device=device)], lambda arrays: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            outcome.get()


@pytest.mark.parametrize(("depth", "cache"), [(0, None), (2, "20%")])
@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("plain", "nan"),
        ("plain", "inf"),
        ("accumulate", "inf"),
        ("without an optimizer", "nan"),
        ("micro_batches", "nan"),
    ],
)
def test_a_loss_that_is_not_finite_with_gradients_that_are(device, depth, cache, mode, value):
    """It is seen where its `backward` is called; one whose gradients do not go to rows is not this loop's."""
    batches = batches_of(6)
    case = Case(device, options={"depth": depth, "cache": cache})
    together = {mode: 2} if mode in ("accumulate", "micro_batches") else {}
    before = torch.autograd.backward
    with pytest.raises(NonFiniteError, match="^step 3: a loss is not finite; no row was updated") as caught:
        for label, rows in case.loop(batches, **together):
            loss = loss_of(case.model, rows, label)
            other = (case.model.top.bias * float("inf")).sum()
            other.backward()  # of the dense side alone
            case.adam.zero_grad()
            (loss + float(value) if rows.step == 3 else loss).backward()
            rows.reduce(case.model.parameters())
            if rows.is_due and mode != "without an optimizer":
                case.adam.step()
    assert caught.value.step == 3
    assert torch.autograd.backward is before
    assert {table.step for table in case.tables.values()} == {2}


def test_losses_that_are_not_finite_and_change_nothing(device):
    """Those that are given up, those of which the gradients are forgotten, and values that are no losses."""
    batches = batches_of(4)
    case = Case(device)
    for label, rows in case.loop(batches):
        bad = loss_of(case.model, rows, label) + float("nan")
        if rows.step == 1:
            bad.backward(retain_graph=True)
            case.runtime.optimizer.zero_grad()
        elif rows.step == 2:
            bad.backward(retain_graph=True)
            for parameter in rows.parameters():
                parameter.grad = None
        elif rows.step == 3:
            case.adam.zero_grad()
            (loss_of(case.model, rows, label).view(1) + torch.tensor([0.0, float("nan")], device=device)).backward(
                torch.tensor([1.0, 0.0], device=device)
            )
            case.adam.step()
            continue
        case.step(label, rows)
    assert differing(case.state(), Case(device).train(batches).state()) == []


@pairs_first(
    [MODE, "where", "name"],
    [(0, None), (2, None), (2, "50%")],
    ["host", "device"],
    ["SGD", "LazyAdam", "FTRL", "Adagrad", "RowWiseAdagrad", "RowWiseAdam", "Momentum"],
    cost=lambda mode, where, name: 3 if mode[1] and where == "device" else 1,  # it has no cache
)
def test_gradients_that_are_too_large(device, name, where, depth, cache):
    """The largest finite gradients that an optimizer can take change rows to finite values, larger ones nothing."""
    for share, fits in ((0.9, True), (2.1, False)):
        optimizer = getattr(hostdev, name)(lr=1e-3)
        size = share * optimizer.largest_gradient
        arguments = {"name": "t", "init": hostdev.Constant(0.5)}
        if where == "device":
            table = hostdev.DeviceTable(5, 4, optimizer, device, **arguments)
        else:
            table = hostdev.HostTable(5, 4, optimizer, **arguments)
        runtime = hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache if where == "host" else None)
        ends = contextlib.nullcontext() if fits else pytest.raises(NonFiniteError, match="step 2: a gradient of the ro")
        with ends as caught:
            for _, rows in runtime.train([{"x": [0, 1]}, {"x": [2, 3]}, {"x": [0, 4]}]):
                (rows["x"] * 0.5).sum().backward()
                if rows.step == 2:
                    rows.parameters()[0].grad.fill_(size)
        columns = {key: np.asarray(torch.as_tensor(value).cpu()) for key, value in table.columns().items()}
        assert all(np.isfinite(values).all() for values in columns.values())
        assert (columns["weights"][2, 0] != 0.5) == fits
        assert table.step == (3 if fits else 1)
        if caught is not None:
            assert "is too large for the table's optimizer; no row was updated" in str(caught.value)


def _require_zero(results):
    if results[-1][0]:
        raise ZeroDivisionError


@pairs_first([MODE, ON_DEVICE, "guarded"], MODES, PLACES, [False, True], cost=cost)
def test_a_gradient_whose_square_is_infinite(device, depth, cache, on_device, guarded):
    """1e20 is finite, and FTRL would write NaN, Adam an infinite moment: no row changes."""
    batches = batches_of(5)
    for places in (("users",), ("users", "first", "words")):
        case = Case(device, on_device=on_device, options={"depth": depth, "cache": cache if not on_device else None})
        case.adam = torch.optim.Adam(case.model.parameters(), lr=0.02, fused=True)
        with pytest.raises((NonFiniteError, ZeroDivisionError)) as caught:
            for label, rows in case.loop(batches):
                case.adam.zero_grad()
                loss_of(case.model, rows, label).backward()
                for at in places if rows.step == 3 else ():
                    spoiled(rows, at, 1e20)
                if guarded:
                    rows.guard(case.adam, [], [], _require_zero)
                case.adam.step()
        if not guarded:
            assert "is too large for the table's optimizer; no row was updated" in str(caught.value)
        wanted = Case(device, on_device=on_device)
        wanted.adam = torch.optim.Adam(wanted.model.parameters(), lr=0.02, fused=True)
        wanted.train(batches[:2])
        assert tables_state(case.tables.values()) == tables_state(wanted.tables.values())
        if guarded:  # torch's optimizer is held, too
            assert dense_state(case.model, case.adam) == dense_state(wanted.model, wanted.adam)


def test_a_large_gradient_of_plain_descent_is_taken(device):
    """Nothing is squared there."""
    table = hostdev.HostTable(3, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
    runtime = hostdev.Runtime({"x": table}, device=device)
    for _, rows in runtime.train([{"x": [1]}]):
        (rows["x"] * 1e20).sum().backward()
    assert table.weights[1, 0] == np.float32(-1e20)


def test_an_infinite_loss_in_an_early_micro_batch(device):
    """With gradients that are finite: it was forgotten when the next micro-batch came."""
    batches = batches_of(4)
    case = Case(device)
    with pytest.raises(NonFiniteError, match="^step 1: a loss is not finite"):
        for number, (label, rows) in enumerate(case.loop(batches, micro_batches=2)):
            loss = loss_of(case.model, rows, label)
            (loss if number else loss + float("inf")).backward()
            rows.reduce(case.model.parameters())
            if rows.is_due:
                case.adam.step()
