"""The end of a loop's body without a dense optimizer: left by `break`, by closing the loop, by an exception."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from tqdm import tqdm

import hostdev

small = pytest.mark.parametrize(("depth", "cache"), [(0, None), (2, None), (3, "40%")])


def counts_of(device, depth, cache, rows=3):
    """A runtime over one table of zeros that is trained with a rate of 1: each use of a row takes 1 from it."""
    table = hostdev.HostTable(rows, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
    return table, hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache)


def values_of(table):
    return table.lookup(np.arange(table.rows))[:, 0].tolist()


LEFT = ["break", "return", "close", "with", "closing", "del", "next", "tqdm", "held", "islice"]


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", LEFT)
@small
def test_a_loop_without_an_optimizer_that_is_left(device, depth, cache, how, count):
    """Its steps are at the ends of the bodies, of the first one, too, however the loop is left."""
    table, runtime = counts_of(device, depth, cache)
    batches = [{"x": [0]}, {"x": [1]}, {"x": [2]}]
    loop = runtime.train(batches)

    def body(rows):
        rows["x"].sum().backward()
        return rows.step == count

    def whole(given):
        for _, rows in given:
            if body(rows):
                return rows.step
        raise AssertionError

    if how == "break":
        del loop
        for _, rows in runtime.train(batches):
            if body(rows):
                break
    elif how == "return":
        held = [loop]
        del loop
        assert whole(held.pop()) == count
    elif how == "close":
        for _, rows in loop:
            if body(rows):
                loop.close()
                break
    elif how in ("with", "closing"):
        with loop if how == "with" else contextlib.closing(loop):
            for _, rows in loop:
                if body(rows):
                    break
    elif how == "del":
        while not body(next(loop)[1]):
            pass
        del loop
    elif how == "next":
        bodies = iter(loop)
        while not body(next(bodies)[1]):
            pass
        bodies.close()
    elif how == "tqdm":
        del loop
        for _, rows in tqdm(runtime.train(batches), disable=True):
            if body(rows):
                break
    elif how == "held":
        for _, rows in loop:
            if body(rows):
                break
        assert not loop.is_abandoned
        loop.close()
    else:
        del loop
        for _, rows in itertools.islice(runtime.train(batches), count):
            body(rows)
    assert values_of(table) == [-1.0] * count + [0.0] * (3 - count)
    assert table.step == count


def fails(rows):
    rows["x"].sum().backward()
    return int("no number")


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("how", ["dropped", "held", "tqdm", "closing", "manual", "generator", "caught"])
@small
def test_a_body_that_raises_without_an_optimizer(device, depth, cache, how, at):
    """Its step is not made: it would have come at the end of the body."""
    table, runtime = counts_of(device, depth, cache)
    batches = [{"x": [0]}, {"x": [1]}, {"x": [2]}]

    def body(rows):
        rows["x"].sum().backward()
        if rows.step == at:
            fails(rows)

    def run(loop):
        for _, rows in loop:
            body(rows)

    if how == "caught":
        loop = runtime.train(batches)
        with pytest.raises(ValueError, match="no number"):
            run(loop)
        assert runtime.lookup({"x": [at - 1]})["x"].item() == 0.0
        for _, rows in loop:  # it is gone on with; the batch is skipped
            rows["x"].sum().backward()
        assert values_of(table) == [-1.0 * (row != at - 1) for row in range(3)]
        return
    with pytest.raises(ValueError, match="no number"):
        if how == "dropped":
            for _, rows in runtime.train(batches):
                body(rows)
        elif how == "held":
            run(loop := runtime.train(batches))
        elif how == "tqdm":
            run(tqdm(runtime.train(batches), disable=True))
        elif how == "closing":
            with contextlib.closing(runtime.train(batches)) as loop:
                while True:
                    body(next(loop)[1])
        elif how == "manual":
            with runtime.train(batches) as loop:
                while True:
                    body(next(loop)[1])
        else:
            run(batch for batch in runtime.train(batches))
    if how == "held":
        assert loop.is_abandoned
        list(runtime.train([]))  # which ends it
    assert values_of(table) == [-1.0] * (at - 1) + [0.0] * (4 - at)


@small
def test_a_rate_without_an_optimizer(device, depth, cache):
    """Set at the top of the body it holds for this batch, and set after `backward` for the next, as torch's."""
    for where, wanted in (("top", [-1.0, -0.1, -0.01]), ("end", [-2.0, -1.0, -0.1])):
        table, runtime = counts_of(device, depth, cache)
        table.optimizer.lr = 2.0
        for number, (_, rows) in enumerate(runtime.train([{"x": [0]}, {"x": [1]}, {"x": [2]}])):
            if where == "top":
                runtime.optimizer.param_groups[0]["lr"] = 0.1**number
            rows["x"].sum().backward()
            if where == "end":
                table.optimizer.lr = 0.1**number
        np.testing.assert_allclose(values_of(table), wanted, rtol=1e-6)


@small
def test_looking_up_after_backward_without_an_optimizer(device, depth, cache):
    """It sees the batch's step, of the first batch, too; with an optimizer that has still to step it does not."""
    table, runtime = counts_of(device, depth, cache)
    seen = []
    for _, rows in runtime.train([{"x": [0]}, {"x": [0]}]):
        rows["x"].sum().backward()
        seen.append(runtime.lookup({"x": [0]})["x"].item())
    assert seen == [-1.0, -2.0]
    weight = torch.nn.Parameter(torch.ones(1, device=device))
    dense = torch.optim.SGD([weight], lr=0.5)
    for _ in range(2):  # in the second loop with a gradient that is left from the first
        for _, rows in runtime.train([{"x": [1]}, {"x": [1]}]):
            (rows["x"] * 2 + weight).sum().backward()
            seen.append(runtime.lookup({"x": [1]})["x"].item())
            dense.step()
            dense.zero_grad()
            if rows.step == 1:
                break
    assert seen[2:] == [0.0, -2.0]
    for _, rows in runtime.train([{"x": [2]}, {"x": [2]}]):
        (rows["x"] + weight).sum().backward()
        break  # before the optimizer's step
    assert values_of(table) == [-2.0, -4.0, 0.0]
    dense.zero_grad()
    weight.grad = torch.ones(1, device=device)
    dense.step()  # a gradient that has been used does not wait
    for _, rows in runtime.train([{"x": [2]}, {"x": [2]}]):
        rows["x"].sum().backward()
        break
    assert values_of(table) == [-2.0, -4.0, -1.0]
