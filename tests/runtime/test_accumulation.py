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


SAID = "the last batch's gradients were left without a step"


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
    """The gradients that its batches have brought to rows are dropped, and said to be; the dense side keeps its own."""
    options = {"depth": depth, "cache": cache}
    with pytest.warns(UserWarning, match=SAID):
        table, d = left_within(device, options)
    assert (values_of(table), d, table.step) == ([0.0, -1.0, -1.0, 0.0], -3.0, 1)
    with pytest.warns(UserWarning, match=SAID):
        table, d = left_within(device, options, at=2, together=3, batches=[(0,), (1,), (3,), (1,)])
    assert (values_of(table), d, table.step) == ([0.0, -1.0, 0.0, -1.0], -4.0, 1)


@pairs_first(
    ["depth, cache", "optimizer", "to_none"], MODES, [hostdev.SGD, hostdev.LazyAdam, hostdev.FTRL], [True, False]
)
def test_gradients_that_are_forgotten_after_a_loop(device, depth, cache, optimizer, to_none):
    """By `zero_grad` of both sides: nothing is said, and rows stay, whatever their optimizer."""

    def forget(runtime, dense):
        dense.zero_grad(set_to_none=to_none)
        runtime.optimizer.zero_grad()

    table, d = left_within(device, {"depth": depth, "cache": cache}, optimizer=optimizer(lr=1.0), between=forget)
    assert (values_of(table)[0], d, table.step) == (0.0, -2.0, 1)


@modes
def test_a_step_after_the_loop(device, depth, cache):
    """It is the dense side's alone: the rows' gradients are gone with the loop, as the warning says."""

    def flush(runtime, dense):
        assert torch.autograd.backward.__module__ == "torch.autograd"  # no loop is open
        dense.step()
        dense.zero_grad()
        with pytest.warns(UserWarning, match=SAID):
            assert runtime.lookup({"x": [0]})["x"].item() == 0.0
        with pytest.raises(ValueError, match="without a batch: call it in the body of a loop"):
            runtime.optimizer.step()

    table, d = left_within(device, {"depth": depth, "cache": cache}, between=flush)
    assert (values_of(table), d, table.step) == ([0.0, -1.0, -1.0, 0.0], -3.0, 1)


@modes
def test_scaled_gradients_of_a_group_that_was_left(device, depth, cache):
    """They are dropped, and the next group's are divided by the scale."""
    table = table_of(4, 0.0)
    runtime = hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache)
    d = torch.nn.Parameter(torch.zeros(1, device=device))
    dense = torch.optim.SGD([d], lr=1.0)
    scaler = torch.amp.GradScaler(device.type, 4.0)
    for _, rows in runtime.train([{"x": [0]}, {"x": [3]}], accumulate=2):
        scaler.scale((rows["x"] + d).sum()).backward()
        break
    del rows
    dense.zero_grad()
    with pytest.warns(UserWarning, match=SAID):
        loop = iter(runtime.train([{"x": [1]}, {"x": [2]}], accumulate=2))
        _, rows = next(loop)
    for last in (False, True):
        scaler.scale((rows["x"] + d).sum()).backward()
        if last:
            scaler.step(dense)
            scaler.update()
        _, rows = next(loop, (None, None))
    assert (values_of(table), d.item()) == ([0.0, -1.0, -1.0, 0.0], -2.0)
