"""How a loop ends: breaks, errors anywhere, Ctrl-C, loops that are kept or dropped; and what is left of it."""

import contextlib
import gc
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

import hostdev
from hostdev.pipeline.context import PipelineHooks
from hostdev.runtime.loop import NonFiniteError
from tests.combinations import pairs_first
from tests.conftest import ROOT
from tests.runtime.cases import (
    MODES,
    BodyError,
    Case,
    batches_of,
    differing,
    ids,
    loss_of,
    overlapped,
    send,
    tables_state,
    threads,
    wanted_of,
)


@overlapped
def test_breaking_off(device, depth, cache):
    """What has been stepped is in the tables, and the next loop goes on from there."""
    batches = batches_of(12)
    case = Case(device, options={"depth": depth, "cache": cache})
    for label, rows in case.loop(batches):
        case.step(label, rows)  # of 4, the last one's as well
        if rows.step == 4:
            break
    assert case.tables["users"].step == 4
    for label, rows in case.loop(batches[4:]):
        if rows.step == 3:
            break  # before its step
        case.step(label, rows)
    assert case.tables["users"].step == 6
    for label, rows in case.loop(batches[6:]):
        case.adam.zero_grad()
        loss_of(case.model, rows, label).backward()
        if rows.step == 3:
            break  # after backward, before its step
        case.adam.step()
    with pytest.warns(UserWarning, match="gradients were left without a step: .* in its step 3,"):
        case.runtime.write_back()
    for label, rows in itertools.islice(case.loop(batches[8:]), 4):
        case.step(label, rows)
    assert threads() == set()
    assert differing(case.state(), wanted_of(device, batches)) == []


@pytest.mark.slow_on_standin
@pairs_first(["depth, cache", "where", "first"], MODES, ["before", "between", "after"], [True, False])
def test_an_error_in_the_body(device, depth, cache, where, first):
    """Between backward and the optimizer's step, before both or after; in the first batch, when no step is known."""
    batches = batches_of(7)
    at = 1 if first else 4
    case = Case(device, options={"depth": depth, "cache": cache})
    with pytest.raises(BodyError):
        for label, rows in case.loop(batches):
            if rows.step == at and where == "before":
                raise BodyError
            case.adam.zero_grad()
            loss_of(case.model, rows, label).backward()
            if rows.step == at and where == "between":
                raise BodyError
            case.adam.step()
            if rows.step == at:
                raise BodyError
    done = at if where == "after" else at - 1
    assert case.tables["users"].step == done
    assert threads() == set()
    left = pytest.warns(UserWarning, match="left without a step") if where == "between" else nullcontext()
    with left:
        case.train(batches[done:])
    assert differing(case.state(), wanted_of(device, batches)) == []


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("where", ["loader", "ids", "send", "iter"])
@overlapped
def test_an_error_before_the_step_comes_in_its_turn(device, depth, cache, where):
    """However slow the steps: the batches before it are stepped."""
    batches = batches_of(8)

    def fail(batch):
        if batch is batches[5]:
            raise OSError(f"in the {where}")

    def loader():
        for batch in batches:
            if where == "loader":
                fail(batch)
            yield batch

    class Loader:
        def __iter__(self):
            raise OSError("in the iter")

    def ids_of(batch):
        if where == "ids":
            fail(batch)
        return ids(batch)

    def send_of(batch):
        if where == "send":
            fail(batch)
        return send(batch)

    case = Case(device, options={"depth": depth, "cache": cache})
    with pytest.raises(OSError, match=f"in the {where}"):
        for label, rows in case.runtime.train(
            Loader() if where == "iter" else loader(), ids=ids_of, send=send_of, read_ahead=True
        ):
            time.sleep(0.003)
            case.step(label, rows)
    done = 0 if where == "iter" else 5
    assert case.tables["users"].step == done
    assert threads() == set()
    case.train(batches[done:])
    assert differing(case.state(), wanted_of(device, batches)) == []


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("stage", ["unique", "plan", "lookup", "send", "step", "update", "lookup late"])
@overlapped
def test_an_error_in_a_stage(device, depth, cache, stage):
    """Before a step it leaves the batches before; in an update, whatever: but threads end, and a loop goes on."""
    batches, failed = batches_of(10), []

    def fail(at, number):
        if at == stage and number >= 5 and not failed:
            failed.append(number)
            raise OSError(f"in {stage}")

    case = Case(device, options={"depth": depth, "cache": cache, "hooks": PipelineHooks(before_stage=fail)})
    try:
        case.train(batches)
    except OSError as error:
        assert str(error) == f"in {stage}"
    assert bool(failed) == (case.tables["users"].step < 10)
    assert failed or stage in ("plan", "lookup late")  # which not every setting has
    assert threads() == set()
    done = case.tables["users"].step
    if stage not in ("update", "lookup late"):  # of which the cached rows may be ahead
        assert tables_state(case.tables.values()) == tables_of_steps(device, batches, done)
    case.train(batches)
    assert case.tables["users"].step == done + 10


def tables_of_steps(device, batches, done):
    return tables_state(Case(device, options={"depth": 0}).train(batches[:done]).tables.values())


@overlapped
def test_ctrl_c_in_the_body(device, depth, cache):
    batches = batches_of(8)
    case = Case(device, options={"depth": depth, "cache": cache})
    with pytest.raises(KeyboardInterrupt):
        for label, rows in case.loop(batches):
            case.step(label, rows)
            if rows.step == 3:
                raise KeyboardInterrupt
    case.train(batches[3:])
    assert differing(case.state(), wanted_of(device, batches)) == []


class Slow:
    """An iterator that is interrupted once while it reads, by a real Ctrl-C, and goes on afterwards."""

    def __init__(self, batches, at):
        self.left, self.at = list(batches), at

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        if len(self.left) == self.at:
            self.at = None
            signal.raise_signal(signal.SIGINT)
        return self.left.pop(0)


@pytest.mark.parametrize(("depth", "cache"), [(0, None), (1, None), (2, hostdev.CacheSpec("20%", "lru"))])
def test_ctrl_c_while_a_batch_is_read(device, depth, cache):
    """It ends the loop at once; what was stepped stays, and the next loop over the iterator gets every other batch."""
    batches = batches_of(8)
    case, loader = Case(device, options={"depth": depth, "cache": cache}), Slow(batches, 3)
    with pytest.raises(KeyboardInterrupt):
        for label, rows in case.loop(loader):
            case.step(label, rows)
    assert case.tables["users"].step == {0: 5, 1: 4, 2: 3}[depth]
    assert threads() == set()
    case.train(loader)
    assert differing(case.state(), wanted_of(device, batches)) == []


@pytest.mark.parametrize("stage", ["step", "lookup"])
def test_ctrl_c_in_a_stage_of_the_callers_thread(device, stage):
    batches = batches_of(6)

    def interrupt(at, number):
        if at == stage and number == 4:
            raise KeyboardInterrupt

    case = Case(device, options={"depth": 0, "cache": "20%", "hooks": PipelineHooks(before_stage=interrupt)})
    with pytest.raises(KeyboardInterrupt):
        case.train(batches)
    assert case.tables["users"].step == 3
    assert tables_state(case.tables.values()) == tables_of_steps(device, batches, 3)


@pytest.mark.parametrize("cache", [None, "20%"])
@pytest.mark.parametrize("stage", ["step", "update"])
def test_ctrl_c_while_a_step_is_taken(device, stage, cache):
    """The step is taken as a whole, or not at all, in the tables as on the dense side."""
    batches = batches_of(6)

    def interrupt(at, number):
        if at == stage and number == 4:
            signal.raise_signal(signal.SIGINT)

    case = Case(device, options={"depth": 0, "cache": cache, "hooks": PipelineHooks(before_stage=interrupt)})
    with pytest.raises(KeyboardInterrupt):
        case.train(batches)
    stepped = 4 if stage == "update" else 3
    assert case.tables["users"].step == stepped
    assert differing(case.state(), wanted_of(device, batches[:stepped])) == []


@overlapped
def test_an_error_after_the_last_step_is_told_by_the_next_call(device, monkeypatch, depth, cache):
    """Where a loop is left by `break`, nobody catches what its last update raises."""
    batches, printed = batches_of(6), []
    case = Case(device, options={"depth": depth, "cache": cache})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda raised: printed.append(str(raised.exc_value)))
        for label, rows in case.loop(batches):
            loss = loss_of(case.model, rows, label)
            loss.backward()
            if rows.step == 3:
                rows.parameters()[0].grad.fill_(float("nan"))
            case.adam.step()
            if rows.step == 3:
                break
        del label, rows, loss
        gc.collect()
    assert len(printed) == 1
    with pytest.raises(NonFiniteError, match="step 3: a gradient of the rows"):
        case.runtime.write_back()
    assert case.tables["users"].step == 2
    case.runtime.write_back()


@pytest.mark.slow_on_standin
@overlapped
def test_a_loop_that_is_kept(device, depth, cache):
    """It may be continued; it is closed by hand or by `with`."""
    batches = batches_of(9)
    case = Case(device, options={"depth": depth, "cache": cache})
    loop = case.loop(batches)
    for label, rows in loop:
        case.step(label, rows)
        if rows.step == 2:
            break
    for label, rows in loop:
        case.step(label, rows)
        if rows.step == 4:
            break
    loop.close()
    loop.close()
    assert next(loop, None) is None
    with pytest.raises(ValueError, match=r"this loop is over; call runtime.train\(...\) or predict\(...\) again"):
        iter(loop)
    with case.loop(batches[4:]) as loop:
        case.step(*next(loop))
    with contextlib.suppress(BodyError), case.loop(batches[5:]) as loop:
        case.step(*next(loop))
        raise BodyError
    loop = case.loop(batches[6:])
    for label, rows in loop:
        case.step(label, rows)
    with pytest.raises(ValueError, match="this loop is over"):  # as in a second epoch
        list(loop)
    assert differing(case.state(), wanted_of(device, batches)) == []


@pytest.mark.slow_on_standin
@overlapped
def test_a_loop_that_was_left_ends_when_another_one_begins(device, depth, cache):
    batches = batches_of(4)
    case = Case(device, options={"depth": depth, "cache": cache})
    loop = case.loop(batches)
    for label, rows in loop:
        case.step(label, rows)
        break
    case.train(batches[1:])
    with pytest.raises(ValueError, match="this loop ended when another one began"):
        next(loop)
    assert differing(case.state(), wanted_of(device, batches)) == []


@pytest.mark.slow_on_standin
@overlapped
def test_a_loop_that_is_dropped(device, depth, cache):
    """It ends when nobody holds it, without the garbage collector; or with it, where it is in a cycle."""
    batches = batches_of(6)
    case = Case(device, options={"depth": depth, "cache": cache})
    gc.disable()
    try:
        loop = case.loop(batches)
        case.step(*next(loop))
        del loop
        assert threads() == set()
        loop = case.loop(batches[1:])
        case.step(*next(loop))
        loop.itself = loop
        del loop
    finally:
        gc.enable()
    gc.collect()
    assert threads() == set()
    case.train(batches[2:])
    assert differing(case.state(), wanted_of(device, batches)) == []
    case.loop(batches)  # never begun


def test_rows_of_a_batch_that_is_over():
    case = Case()
    kept = [rows for _, rows in case.loop(batches_of(2))]
    for use in (
        lambda rows: rows["user"],
        lambda rows: dict(rows),
        lambda rows: rows.parameters(),
        lambda rows: rows.unique("users"),
        lambda rows: rows.to_host([torch.ones(1)], list),
        lambda rows: "user" in rows,
    ):
        with pytest.raises(ValueError, match="this batch is over: the loop has asked for the next batch"):
            use(kept[0])
    assert [rows.step for rows in kept] == [1, 2]
    assert all(rows.is_due for rows in kept)
    for _, rows in case.loop(batches_of(1)):
        with pytest.raises(KeyError, match="no feature 'itme'; the features are user, item, history, words"):
            rows["itme"]
        assert list(rows) == ["user", "item", "history", "words"]
        assert len(rows) == 4


def test_a_loop_of_another_thread():
    case, errors = Case(), []
    loop = case.loop(batches_of(2))

    def tried(call):
        try:
            call()
        except ValueError as error:
            errors.append(str(error))

    def elsewhere(call):
        thread = threading.Thread(target=tried, args=[call])
        thread.start()
        thread.join()

    elsewhere(lambda: next(loop))
    for label, rows in loop:
        elsewhere(lambda: next(case.runtime.predict(batches_of(1), ids=ids)))
        elsewhere(case.runtime.write_back)
        case.step(label, rows)
    assert len(errors) == 5
    assert all("a loop over `train`" in error and "one thread" in error for error in errors)
    assert case.tables["users"].step == 2


SCRIPT = """
import numpy as np, torch, hostdev
table = hostdev.HostTable(100, 8, hostdev.SGD(lr=0.1), name="t")
runtime = hostdev.Runtime({"ids": table}, device="cpu", depth=2, cache="10%")
loops = [runtime.train(({"ids": np.arange(10)} for _ in range(50)), read_ahead=True)]
for batch, rows in loops[0]:
    rows["ids"].sum().backward()
    if rows.step == 3:
        break
print("end")
"""


def test_a_program_that_ends_within_a_loop():
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "end\n", "")


def test_the_file_is_where_it_says():
    assert Path(hostdev.__file__).resolve().parent.parent == ROOT
