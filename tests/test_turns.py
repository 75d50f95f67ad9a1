"""Steps on a CPU that run alone: when they do, that no other stage runs then, and that the bits are the same."""

import threading
import time

import numpy as np
import pytest
import torch

import hostdev
from hostdev.pipeline import context, path
from hostdev.pipeline.context import Turns
from hostdev.pipeline.scheduling import workers

CLOCK = [0.0]


def steps(turns, seconds, count):
    """Return by step whether it was to run alone; `seconds` gives its duration by its number and by that."""
    found = []
    for number in range(count):
        turns.begin_step()
        found.append(turns.alone)
        CLOCK[0] += seconds(number, turns.alone)
    return found


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(context, "perf_counter", lambda: CLOCK[0])


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize(("alone", "overlapped"), [(1.0, 1.3), (1.3, 1.0)])
def test_the_faster_way_is_kept(depth, alone, overlapped):
    found = steps(Turns(shares=True, depth=depth), lambda number, is_alone: alone if is_alone else overlapped, 2000)
    block = depth + 6
    trial = [*[False] * block, *[True] * block] * 2
    chosen, first = alone < overlapped, 4 + len(trial)
    assert found[:first] == [False] * 4 + trial
    period = 512 if chosen else 1024  # overlapping was the first choice, too
    assert found[first:][:period] == [chosen] * period
    assert found[first + period :][: len(trial)] == trial
    assert set(found[first + period + len(trial) :][:400]) == {chosen}


def test_a_single_long_step_changes_nothing():
    found = steps(
        Turns(shares=True, depth=2), lambda number, is_alone: 50.0 if number in (13, 31) else 2 - is_alone, 500
    )
    assert all(found[36:])


def test_a_program_may_change():
    seconds = lambda number, is_alone: 2 - is_alone if number < 300 else 1 + is_alone  # noqa: E731
    found = steps(Turns(shares=True, depth=2), seconds, 1000)
    assert all(found[36:548])
    assert not any(found[580:])


def test_a_step_on_a_device_of_its_own_always_overlaps():
    assert not any(steps(Turns(shares=False, depth=2), lambda number, is_alone: 2 - is_alone, 600))


@pytest.fixture
def always_alone(monkeypatch):
    def begin(self):
        self.alone = True

    monkeypatch.setattr(Turns, "begin_step", begin)


@pytest.fixture
def sometimes_alone(monkeypatch):
    """Changes from one way to the other at steps of no order."""
    drawn = np.random.default_rng(8)

    def begin(self):
        self.alone = bool(drawn.random() < 0.5)

    monkeypatch.setattr(Turns, "begin_step", begin)


def trained(depth, *, cache=None, body=lambda runtime, table: None, batches=12):
    """Return the losses, and the table's weights after training."""
    table = hostdev.HostTable(60, 4, hostdev.LazyAdam(lr=0.05), name="t", seed=3)
    runtime = hostdev.Runtime({"t": table}, device="cpu", depth=depth, cache=cache)
    rng = np.random.default_rng(5)
    losses = []
    for _, rows in runtime.train([rng.integers(0, 60, 20) for _ in range(batches)], ids=lambda ids: {"t": ids}):
        loss = (rows["t"] - 1).square().mean()
        loss.backward()
        body(runtime, table)
        losses.append(loss.item())
    runtime.close()
    return losses, table.weights.copy()


def look_inside(runtime, table):
    """Read the table, and predict with its rows, within a body."""
    table.lookup([1, 2])
    for _, rows in runtime.predict([np.arange(5)], ids=lambda ids: {"t": ids}):
        assert torch.equal(rows["t"], torch.tensor(table.weights[:5]))


@pytest.mark.parametrize("way", ["always_alone", "sometimes_alone"])
@pytest.mark.parametrize("body", [lambda runtime, table: None, look_inside])
@pytest.mark.parametrize("cache", [None, "50%"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_bits_are_those_of_depth_0(request, way, depth, cache, body):
    expected = trained(0, cache=cache, body=body, batches=40)
    request.getfixturevalue(way)
    found = trained(depth, cache=cache, body=body, batches=40)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.usefixtures("always_alone")
def test_no_other_stage_runs_then(monkeypatch):
    """Once the batches that were fetched before have been taken, a batch is fetched when the caller waits for it."""
    in_step, found = threading.Event(), []

    def noted(module, name):
        original = getattr(module, name)

        def run(*arguments, **named):
            found.append((name, in_step.is_set()))
            return original(*arguments, **named)

        monkeypatch.setattr(module, name, run)

    noted(path, "deduplicate")
    noted(path, "look_up")
    noted(path, "look_up_conflicting")

    def body(runtime, table):
        in_step.set()
        time.sleep(0.01)  # long enough for another stage to begin, if nothing holds it back
        in_step.clear()

    trained(2, body=body)
    assert ("look_up", False) in found
    assert [name for name, inside in found[8:] if inside] == []


@pytest.mark.usefixtures("always_alone")
def test_a_body_that_waits_for_the_background_goes_on(monkeypatch):
    monkeypatch.setattr(workers, "_LONGEST_PAUSE", 0.05)
    fetched = threading.Semaphore(0)
    original = path.look_up

    def look_up(*arguments):
        fetched.release()
        return original(*arguments)

    monkeypatch.setattr(path, "look_up", look_up)
    left = [12]

    def body(runtime, table):
        left[0] -= 1
        if left[0]:
            assert fetched.acquire(timeout=30)

    assert fetched.acquire(blocking=False) is False
    trained(2, body=body)
