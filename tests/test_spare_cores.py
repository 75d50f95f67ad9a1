"""Steps on a CPU that run alone: when they do, that no other stage runs then, and that the bits are the same."""

import threading
import time

import numpy as np
import pytest
import torch

import hostdev
from hostdev.pipeline.scheduling import overlapped, passes, queues, spare_cores
from hostdev.pipeline.scheduling.spare_cores import SpareCores

CORES = 4


@pytest.fixture
def clock(monkeypatch):
    """Times that the test sets: seconds, and processor seconds."""
    times = {"perf_counter": 0.0, "process_time": 0.0}
    for name in times:
        monkeypatch.setattr(spare_cores, name, lambda name=name: times[name])
    monkeypatch.setattr(spare_cores, "available_cpus", lambda: CORES)
    return times


def alone(spare, clock, busy, *, steps, seconds=0.1):
    """Return by step whether it was to run alone; each takes `seconds`, and keeps `busy` processors busy."""
    found = []
    for _ in range(steps):
        spare.begin_step()
        found.append(spare.alone)
        clock["perf_counter"] += seconds
        clock["process_time"] += seconds * busy
        spare.end_step()
    return found


@pytest.mark.parametrize(
    ("busy", "seconds", "shares", "measured", "after"),
    [
        (4.0, 0.1, True, True, True),
        (3.7, 0.1, True, True, True),
        (3.2, 0.1, True, True, False),  # almost one is free
        (0.1, 0.1, True, True, False),  # the step waits, such as for an accelerator elsewhere
        (4.0, 0.0001, True, True, False),  # too short to matter
        (4.0, 0.1, False, False, False),  # the step is on a device of its own
    ],
)
def test_when_a_step_runs_alone(clock, busy, seconds, shares, measured, after):
    found = alone(SpareCores(shares=shares), clock, busy, steps=600, seconds=seconds)
    assert found[:4] == [False] * 4
    assert found[4:8] == [measured] * 4
    assert found[8:516] == [after] * 508
    assert found[516:520] == [measured] * 4


def test_a_program_may_change(clock):
    spare = SpareCores(shares=True)
    assert alone(spare, clock, 4.0, steps=516)[-1]
    assert not alone(spare, clock, 0.5, steps=5)[-1]


@pytest.fixture
def always_alone(monkeypatch):
    def begin(spare):
        spare.alone = True

    monkeypatch.setattr(SpareCores, "begin_step", begin)


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


@pytest.mark.usefixtures("always_alone")
@pytest.mark.parametrize("body", [lambda runtime, table: None, look_inside])
@pytest.mark.parametrize("cache", [None, "50%"])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_bits_are_those_of_depth_0(depth, cache, body):
    expected = trained(0, cache=cache, body=body)
    found = trained(depth, cache=cache, body=body)
    assert found[0] == expected[0]
    np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.usefixtures("always_alone")
def test_no_other_stage_runs_then(monkeypatch):
    """Once the batches that were fetched before have been taken, a batch is fetched when the caller waits for it."""
    in_step, found = threading.Event(), []

    def noted(module, name):
        original = getattr(module, name)

        def run(*arguments):
            found.append((name, in_step.is_set()))
            return original(*arguments)

        monkeypatch.setattr(module, name, run)

    noted(passes, "deduplicate")
    noted(overlapped, "look_up")
    noted(overlapped, "look_up_conflicting")

    def body(runtime, table):
        in_step.set()
        time.sleep(0.01)  # long enough for another stage to begin, if nothing holds it back
        in_step.clear()

    trained(2, body=body)
    assert ("look_up", False) in found
    assert [name for name, inside in found[8:] if inside] == []


@pytest.mark.usefixtures("always_alone")
def test_a_body_that_waits_for_the_background_goes_on(monkeypatch):
    monkeypatch.setattr(queues, "_LONGEST_PAUSE", 0.05)
    fetched = threading.Semaphore(0)
    original = overlapped.look_up

    def look_up(*arguments):
        fetched.release()
        return original(*arguments)

    monkeypatch.setattr(overlapped, "look_up", look_up)
    left = [12]

    def body(runtime, table):
        left[0] -= 1
        if left[0]:
            assert fetched.acquire(timeout=30)

    assert fetched.acquire(blocking=False) is False
    trained(2, body=body)
