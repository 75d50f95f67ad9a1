"""Loops without a dense optimizer: their steps, and what is left by `break`, by closing the loop, by an exception."""

import contextlib
import itertools
import warnings

import numpy as np
import pytest
import torch
from tqdm import tqdm

import hostdev
from hostdev.ext.parallel.state import DenseState
from hostdev.runtime.digest import state_sha256

small = pytest.mark.parametrize(("depth", "cache"), [(0, None), (2, None), (3, "40%")])


def counts_of(device, depth, cache, rows=3):
    """A runtime over one table of zeros that is trained with a rate of 1: each use of a row takes 1 from it."""
    table = hostdev.HostTable(rows, 1, hostdev.SGD(lr=1.0), name="t", init=hostdev.Constant(0.0))
    return table, hostdev.Runtime({"x": table}, device=device, depth=depth, cache=cache)


def values_of(table):
    return table.lookup(np.arange(table.rows))[:, 0].tolist()


LEFT = ["break", "return", "close", "with", "closing", "del", "next", "tqdm", "held", "islice"]
SAID = "the last batch's gradients were left without a step: .* ended in its step {}, .* optimizer.step"


def left_by(how, runtime, batches, body, count):
    """Leave a loop in its body number `count`, which `body` tells; return what the program still holds of it."""

    def whole(given):
        for _, rows in given:
            if body(rows):
                return rows.step
        raise AssertionError

    loop = runtime.train(batches)
    if how == "break":
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
    elif how == "next":
        bodies = iter(loop)
        while not body(next(bodies)[1]):
            pass
        bodies.close()
    elif how == "tqdm":
        for _, rows in tqdm(runtime.train(batches), disable=True):
            if body(rows):
                break
    elif how == "held":
        for _, rows in loop:
            if body(rows):
                break
        assert loop.is_left
        loop.close()
    else:
        for _, rows in itertools.islice(runtime.train(batches), count):
            body(rows)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("how", LEFT)
@small
def test_a_loop_without_an_optimizer_that_is_left(device, depth, cache, how, count):
    """Steps are taken when the loop goes on, or by the tables' optimizer; what was left without one is told, once."""
    table, runtime = counts_of(device, depth, cache)
    batches = [{"x": [0]}, {"x": [1]}, {"x": [2]}]

    def body(rows, step):
        rows["x"].sum().backward()
        if step and rows.step == count:
            runtime.optimizer.step()
        return rows.step == count

    left_by(how, runtime, batches, lambda rows: body(rows, step=True), count)
    assert values_of(table) == [-1.0] * count + [0.0] * (3 - count)
    assert table.step == count
    left_by(how, runtime, batches, lambda rows: body(rows, step=False), count)
    with pytest.warns(UserWarning, match=SAID.format(count)):
        assert runtime.lookup({"x": [count - 1]})["x"].item() == -1.0
    assert values_of(table) == [-2.0] * (count - 1) + [-1.0] + [0.0] * (3 - count)
    assert table.step == 2 * count - 1


USES = {
    "the next loop": lambda table, runtime, path: next(runtime.train([{"x": [0]}])),
    "a prediction": lambda table, runtime, path: list(runtime.predict([{"x": [0]}])),
    "a look-up": lambda table, runtime, path: runtime.lookup({"x": [0]}),
    "a save": lambda table, runtime, path: runtime.save(path),
    "writing back": lambda table, runtime, path: runtime.write_back(),
    "close": lambda table, runtime, path: runtime.close(),
    "a read of the table": lambda table, runtime, path: table.weights,
    "a write to the table": lambda table, runtime, path: table.apply([0], np.zeros((1, 1), np.float32)),
    "a digest": lambda table, runtime, path: state_sha256([table], DenseState({}, {"state": {}}, [], [])),
}


@pytest.mark.parametrize("use", USES)
def test_the_next_use_tells_of_gradients_that_were_left(device, tmp_path, use):
    """Whatever it is; not after the tables' `zero_grad`."""
    for forgets in (False, True):
        table, runtime = counts_of(device, 2, None)
        for _, rows in runtime.train([{"x": [0]}, {"x": [1]}]):
            rows["x"].sum().backward()
            break
        del rows
        if forgets:
            runtime.optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            USES[use](table, runtime, tmp_path / str(forgets))
            assert table.lookup([0]).item() == 0.0
        assert [SAID.partition(":")[0] in str(one.message) for one in caught] == [True] * (not forgets)


def fails(rows):
    rows["x"].sum().backward()
    return int("no number")


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("how", ["dropped", "held", "tqdm", "closing", "manual", "generator", "caught"])
@small
def test_a_body_that_raises_without_an_optimizer(device, depth, cache, how, at):
    """Its step is not made, since the loop has not gone on; which is told, too."""
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
        with pytest.warns(UserWarning, match=SAID.format(at)):
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
    with pytest.warns(UserWarning, match=SAID.format(at)):
        if how == "held":
            assert loop.is_left
            list(runtime.train([]))  # which ends it
        else:
            runtime.write_back()
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
    """It sees the rows before the batch's step, which is taken when the loop goes on, or by an optimizer."""
    table, runtime = counts_of(device, depth, cache)
    seen = []
    for _, rows in runtime.train([{"x": [0]}, {"x": [0]}]):
        rows["x"].sum().backward()
        seen.append(runtime.lookup({"x": [0]})["x"].item())
    assert seen == [0.0, -1.0]
    for _, rows in runtime.train([{"x": [0]}, {"x": [0]}]):
        rows["x"].sum().backward()
        runtime.optimizer.step()
        seen.append(runtime.lookup({"x": [0]})["x"].item())
    assert seen[2:] == [-3.0, -4.0]
    weight = torch.nn.Parameter(torch.ones(1, device=device))
    dense = torch.optim.SGD([weight], lr=0.5)
    for _ in range(2):
        for _, rows in runtime.train([{"x": [1]}, {"x": [1]}]):
            (rows["x"] * 2 + weight).sum().backward()
            seen.append(runtime.lookup({"x": [1]})["x"].item())
            dense.step()
            dense.zero_grad()
            if rows.step == 1:
                break
    assert seen[4:] == [0.0, -2.0]
    assert values_of(table) == [-4.0, -4.0, 0.0]
