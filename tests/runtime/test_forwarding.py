"""Rows that go from one step to the next on the device: the bits of a serial loop. Here the CPU is the device."""

import random
import time

import numpy as np
import pytest
import torch

import hostdev
from hostdev.core.timeline import STAGES
from hostdev.pipeline.context import PipelineHooks
from hostdev.pipeline.forwarding import Forwarding
from tests.runtime.cases import BF16, Case, batches_of, differing
from tests.runtime.test_tables_in_loops import write_body

OPTIMIZERS = {
    "mixed": None,
    "ftrl": lambda: hostdev.FTRL(),
    "momentum": lambda: hostdev.Momentum(lr=0.1),
    "row-wise Adam": lambda: hostdev.RowWiseAdam(lr=0.01),
    "SGD, clipped": lambda: hostdev.SGD(lr=0.5, clip_norm=0.01),
    "lazy Adam, clipped": lambda: hostdev.LazyAdam(lr=0.05, clip_norm=0.01),
}


@pytest.fixture
def forwarded(monkeypatch):
    """Counts of rows that steps forwarded: all, and those read from the host's tables."""
    count, begin = [0, 0], Forwarding.begin

    def counting(self, groups, values):
        for rows in groups:
            if rows is not None:
                count[0] += len(rows.ids)
                count[1] += rows.new
        begin(self, groups, values)

    monkeypatch.setattr(Forwarding, "begin", counting)
    return count


def hooks_of(seed):
    """Forwarding, while some stages are held up."""
    delays = random.Random(seed)
    slow = {stage: delays.choice((0, 0, 0.0005, 0.003)) for stage in STAGES}

    def hold_up(stage, number):
        time.sleep(slow.get(stage, 0) * delays.random())

    return PipelineHooks(forward=True, before_stage=hold_up)


@pytest.mark.drawn
@pytest.mark.parametrize("bf16", [(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer(forwarded, optimizer, bf16):
    batches = batches_of(12)
    options = {"optimizer": OPTIMIZERS[optimizer], "bf16": bf16}
    wanted = Case(options={"depth": 0}, **options).train(batches).state()
    for depth in (1, 2, 4):
        found = Case(options={"depth": depth, "hooks": hooks_of(depth)}, **options).train(batches).state()
        assert differing(found, wanted) == []
    assert 0 < forwarded[1] < forwarded[0]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_tables_are_written_in_the_body(forwarded, depth, seed):
    batches, states = batches_of(20, seed=seed), []
    for options in ({"depth": 0}, {"depth": depth, "hooks": hooks_of(seed)}):
        case, seen = Case(bf16=("users",), options=options), []
        for number, (label, rows) in enumerate(case.loop(batches)):
            write_body(case, number, seen, "before")
            case.step(label, rows)
            write_body(case, number + seed, seen, "after")
        states.append((case.state(), seen))
    assert differing(states[0][0], states[1][0]) == []
    assert states[0][1] == states[1][1]
    assert forwarded[0]


def test_steps_without_gradients_and_loops_that_end_early(forwarded):
    """A step that leaves a table out forwards its rows unchanged; the next loop begins anew."""
    states = []
    for options in ({"depth": 0}, {"depth": 3, "hooks": hooks_of(1)}):
        case = Case(options=options)
        for first in (0, 7):
            for number, (label, rows) in enumerate(case.loop(batches_of(16)[first:])):
                if number % 3 == 1:
                    rows["user"].mean().backward()
                    case.adam.step()
                elif number % 3 == 2:
                    case.step(label, rows)
                if number == 6:
                    break
        states.append(case.state())
    assert differing(*states) == []
    assert forwarded[0]


def test_an_update_waits_while_its_rows_are_read(forwarded):
    """The next batch's state is from before the update, however late it is read."""
    batches = [{"user": np.arange(8), "item": np.arange(8), **batch} for batch in batches_of(10)]
    wanted = Case(options={"depth": 0}).train(batches).state()

    def hold_up(stage, number):
        time.sleep(0.02 * (stage == "lookup forwarded"))

    case = Case(options={"depth": 2, "hooks": PipelineHooks(forward=True, before_stage=hold_up)})
    assert differing(case.train(batches).state(), wanted) == []
    assert forwarded[0]


def test_an_error_while_rows_are_read():
    """It ends the loop; the updates of the batches before are finished."""

    def fail(stage, number):
        if stage == "lookup forwarded" and number >= 4:
            raise OSError("no rows")

    case = Case(options={"depth": 2, "hooks": PipelineHooks(forward=True, before_stage=fail)})
    with pytest.raises(OSError, match="no rows"):
        case.train(batches_of(10))
    steps = case.tables["users"].step
    wanted = Case(options={"depth": 0}).train(batches_of(10)[:steps])
    assert steps >= 2
    assert differing(case.state(), wanted.state()) == []


def test_losses_that_are_not_finite_change_nothing():
    case = Case(options={"depth": 2, "hooks": PipelineHooks(forward=True)})
    before = None
    with pytest.raises(hostdev.errors.NonFiniteError):
        for number, (label, rows) in enumerate(case.loop(batches_of(8))):
            if number == 4:
                before = case.state()
                label = label * float("nan")
            case.step(label, rows)
    names = [name for name in differing(case.state(), before) if name[0] != "dense"]
    assert names == []


def test_memory_of_the_last_step_is_dropped():
    case = Case(options={"depth": 2, "hooks": PipelineHooks(forward=True)})
    case.train(batches_of(5))
    forwarding = case.runtime.pipeline._context.forwarding
    assert not forwarding._taken
    assert not forwarding._states
    assert isinstance(case.losses[0], torch.Tensor)
