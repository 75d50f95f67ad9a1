"""Batches that add up to one step: which rows each has, and what is left of a group that a loop is left within."""

import numpy as np
import pytest
import torch

import hostdev
from tests.combinations import pairs_first

MODES = [(0, None), (2, None), (2, "50%")]  # depth and cache
modes = pytest.mark.parametrize(("depth", "cache"), MODES)


def table_of(rows, value, optimizer=None):
    return hostdev.HostTable(rows, 1, optimizer or hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(value))


def values_of(table):
    return table.lookup(np.arange(table.rows))[:, 0].tolist()


@modes
@pytest.mark.parametrize("mode", ["accumulate", "micro_batches"])
def test_unique_rows_are_those_of_each_batch(device, depth, cache, mode):
    """In its own order, with its own counts; and a penalty on them counts once for each."""
    table = table_of(4, 1.0)
    runtime = hostdev.Runtime({"x": table, "y": table}, device=device, depth=depth, cache=cache)
    batches = [([1, 1, 2], [1, 1, 0]), ([2, 3], [3, 3])]
    seen = []
    for _, rows in runtime.train([{"x": x, "y": y} for x, y in batches], **{mode: 2}):
        unique, counts = rows.unique("t")
        assert rows.unique("t")[0] is unique
        seen.append((unique[:, 0].tolist(), counts.tolist()))
        (0.02 * unique.square().sum()).backward()
        (0.03 * rows.unique("t")[0].square().sum()).backward()  # several losses, one after the other
        rows.reduce([])
    assert seen == [([1.0] * 3, [4.0, 1.0, 1.0]), ([1.0] * 2, [1.0, 3.0])]
    np.testing.assert_allclose(values_of(table), [0.9, 0.9, 0.8, 0.9], rtol=1e-6)
    assert table.step == 1


def left_within(device, options, *, optimizer=None, between=None, at=1, batches=((0,), (1,), (2,)), together=2):
    """A loop that is left within its group of batches, then one over the rest; the tables and the dense parameter."""
    table = table_of(4, 0.0, optimizer)
    runtime = hostdev.Runtime({"x": table}, device=device, **options)
    d = torch.nn.Parameter(torch.zeros(1, device=device))
    dense = torch.optim.SGD([d], lr=1.0)

    def step(rows):
        (rows["x"] + d).sum().backward()
        if rows.is_due:
            dense.step()
            dense.zero_grad()

    given = [{"x": list(ids)} for ids in batches]
    for number, (_, rows) in enumerate(runtime.train(given, accumulate=together), 1):
        step(rows)
        if number == at:
            break
    if between is not None:
        between(runtime, dense)
    for _, rows in runtime.train(given[at:], accumulate=together):
        step(rows)
    return table, d.item()


@modes
def test_a_loop_that_is_left_within_a_group(device, depth, cache):
    """What its batches have brought counts in the next step, in the rows as in the dense parameters."""
    options = {"depth": depth, "cache": cache}
    table, d = left_within(device, options)
    assert (values_of(table), d, table.step) == ([-1.0, -1.0, -1.0, 0.0], -3.0, 1)
    table, d = left_within(device, options, batches=[(0, 1), (0,), (1, 1), (2,)])
    assert (values_of(table), d, table.step) == ([-2.0, -3.0, -1.0, 0.0], -6.0, 2)
    table, d = left_within(device, options, at=2, together=3, batches=[(0,), (1,), (3,), (1,)])
    assert (values_of(table), d, table.step) == ([-1.0, -2.0, 0.0, -1.0], -4.0, 1)


@modes
def test_a_loop_that_is_left_within_a_group_again(device, depth, cache):
    table, d = left_within(device, {"depth": depth, "cache": cache}, between=leave_again, batches=[(0,), (1,), (2,)])
    assert (values_of(table), d, table.step) == ([-1.0, -1.0, -1.0, -1.0], -4.0, 1)


def leave_again(runtime, dense):
    """Skip batches, which changes nothing, and leave another group within."""
    for _ in runtime.train([{"x": [1]}, {"x": [3]}, {"x": [1]}], accumulate=2):
        pass
    for _, rows in runtime.train([{"x": [3]}, {"x": [1]}], accumulate=2):
        (rows["x"] + dense.param_groups[0]["params"][0]).sum().backward()
        break


@pairs_first(
    ["depth, cache", "optimizer", "to_none"], MODES, [hostdev.SGD, hostdev.LazyAdam, hostdev.FTRL], [True, False]
)
def test_gradients_that_are_forgotten_after_a_loop(device, depth, cache, optimizer, to_none):
    """By `zero_grad` of the dense side, before the next loop or in its body: rows stay, whatever their optimizer."""
    options = {"depth": depth, "cache": cache}

    def forget(_, dense):
        dense.zero_grad(set_to_none=to_none)

    table, d = left_within(device, options, optimizer=optimizer(lr=1.0), between=forget)
    wanted, runtime = values_of(table), None
    assert (wanted[0], d, table.step) == (0.0, -2.0, 1)
    other = table_of(4, 0.0, optimizer(lr=1.0))
    runtime = hostdev.Runtime({"x": other}, device=device, **options)
    d = torch.nn.Parameter(torch.zeros(1, device=device))
    dense = torch.optim.SGD([d], lr=1.0)
    for given in ([[0], [3]], [[1], [2]]):
        for number, (_, rows) in enumerate(runtime.train([{"x": ids} for ids in given], accumulate=2)):
            if number == 0:
                forget(runtime, dense)
            (rows["x"] + d).sum().backward()
            if given[0] == [0]:
                break
            if rows.is_due:
                dense.step()
    assert (values_of(other), d.item(), other.step) == (wanted, -2.0, 1)
    for name in other.slots:
        np.testing.assert_array_equal(other.slots[name], table.slots[name])


@modes
def test_a_step_after_the_loop(device, depth, cache):
    """Of the dense side's optimizer, for a group that was left: the rows take it, too; once."""

    def flush(runtime, dense):
        assert torch.autograd.backward.__module__ == "torch.autograd"  # no loop is open
        dense.step()
        assert runtime.lookup({"x": [0]})["x"].item() == -1.0
        dense.zero_grad()
        dense.step()

    table, d = left_within(device, {"depth": depth, "cache": cache}, between=flush)
    assert (values_of(table), d, table.step) == ([-1.0, -1.0, -1.0, 0.0], -3.0, 2)


@modes
def test_a_loop_without_an_optimizer_that_is_left_within_a_group(device, depth, cache):
    """Its gradients wait for the next group's step; the tables' `zero_grad` forgets them."""
    for forgets in (False, True):
        table = table_of(4, 0.0)
        runtime = hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache)
        for given in ([[0], [3]], [[1], [2]]):
            for _, rows in runtime.train([{"x": ids} for ids in given], accumulate=2):
                rows["x"].sum().backward()
                if given[0] == [0]:
                    break
            if forgets:
                runtime.optimizer.zero_grad()
        assert (values_of(table), table.step) == ([-1.0 + forgets, -1.0, -1.0, 0.0], 1)


@modes
def test_gradients_that_wait_are_clipped_with_the_next(device, depth, cache):
    """Their norm is over the rows of both, as with the table as a parameter of torch's."""
    table = table_of(4, 0.0)
    runtime = hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache)
    d = torch.nn.Parameter(torch.zeros(1, device=device))
    dense = torch.optim.SGD([d], lr=1.0)
    for given in ([[0, 1], [3]], [[1], [2]]):
        for _, rows in runtime.train([{"x": ids} for ids in given], accumulate=2):
            asked = rows.parameters() if given[0] == [1] else None
            (rows["x"].sum() + 0 * d.sum()).backward()
            if given[0] == [0, 1]:
                break
            if rows.is_due:
                assert torch.nn.utils.clip_grad_norm_([d, *asked], 1.0).item() == pytest.approx(6**0.5)
                dense.step()
                dense.zero_grad()
    np.testing.assert_allclose(values_of(table), -np.array([1, 2, 1, 0]) / 6**0.5, rtol=1e-5)


@modes
@pytest.mark.parametrize("optimizer", [hostdev.LazyAdam, hostdev.FTRL])
def test_forgotten_gradients_change_no_row_that_is_read_or_written_meanwhile(device, depth, cache, optimizer, tmp_path):
    """In the body of the next loop: reads, predictions and checkpoints had the rows after an update by 0."""
    table = table_of(5, 0.0, optimizer(lr=1.0))
    runtime = hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache)
    d = torch.nn.Parameter(torch.ones(1, device=device))
    dense = torch.optim.SGD([d], lr=1.0)
    for at, _ in enumerate(range(2)):
        for _, rows in runtime.train([{"x": [0, 1]}, {"x": [0, 1]}]):
            (rows["x"] * d).sum().backward()
            if at:
                break
            dense.step()
            dense.zero_grad()
    before = values_of(table)
    for _, rows in runtime.train([{"x": [2]}, {"x": [3]}, {"x": [4]}]):
        if rows.step == 1:
            with table.writing([1]) as w:
                w.weights[:] = 7
        dense.zero_grad()
        (rows["x"] * d).sum().backward()
        dense.step()
        wanted = [before[0], 3.5 if rows.step > 1 else 7.0]
        assert values_of(table)[:2] == wanted
        assert runtime.lookup({"x": [0, 1]})["x"][:, 0].tolist() == wanted
        assert [found["x"][:, 0].tolist() for _, found in runtime.predict([{"x": [0, 1]}])] == [wanted]
        if rows.step == 1:
            runtime.save(tmp_path)
            assert hostdev.open(tmp_path)["t"].lookup([0, 1])[:, 0].tolist() == wanted
            with table.writing([1]) as w:
                w.weights[:] *= 0.5
    assert values_of(table)[:2] == [before[0], 3.5]


@modes
@pytest.mark.parametrize("where", ["the next loop", "after the loop", "an overflow"])
def test_scaled_gradients_of_a_group_that_was_left(device, depth, cache, where):
    """They count, divided as those of the dense side are."""
    found = []
    for enabled in (False, True):
        table = table_of(4, 0.0)
        runtime = hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache)
        d = torch.nn.Parameter(torch.zeros(1, device=device))
        dense = torch.optim.SGD([d], lr=1.0)
        scaler = torch.amp.GradScaler(device.type, 4.0, enabled=enabled)
        for _, rows in runtime.train([{"x": [0]}, {"x": [3]}], accumulate=2):
            scaler.scale((rows["x"] + d).sum()).backward()
            break
        if where == "an overflow":
            if not enabled:
                continue
            d.grad.fill_(float("inf"))
        if where != "the next loop":
            scaler.step(dense)
            scaler.update()
            dense.zero_grad()
        for _, rows in runtime.train([{"x": [1]}, {"x": [2]}], accumulate=2):
            scaler.scale((rows["x"] + d).sum()).backward()
            if rows.is_due:
                scaler.step(dense)
                scaler.update()
        found.append((values_of(table), d.item()))
    first = 0.0 if where == "an overflow" else -1.0
    assert found[-1] == found[0] == ([first, -1.0, -1.0, 0.0], -2.0 + first)
