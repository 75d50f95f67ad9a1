"""What a loop holds while it runs, and what is held after its end."""

import gc
import time
import weakref

import numpy as np
import pytest
import torch

import hostdev
from hostdev import UserError
from hostdev.pipeline.context import PipelineHooks
from tests.runtime.cases import ROWS, Case, batches_of, ids


class Label(np.ndarray):
    """A batch's part to which weak references are possible."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(("depth", "window"), [(0, None), (0, 3), (1, None), (4, None), (2, 3)])
def test_memory_is_bounded(depth, window):
    """At most depth + 2 batches are alive, and those of which only the ids are known, whichever stage is slow."""
    alive, most = weakref.WeakSet(), []
    batches = batches_of(6)

    def loader():
        for number in range(120):
            batch = batches[number % 6]
            label = batch["label"].view(Label).copy()
            alive.add(label)
            most.append(len(alive))
            yield {**batch, "label": label}
            del label, batch

    def hold_up(stage, number):
        time.sleep(0.001 * (stage == ("step", "update", "unique", "send")[number // 30 % 4]))

    cache = None if window is None else hostdev.CacheSpec("20%", window=window)
    case = Case(options={"depth": depth, "cache": cache, "hooks": PipelineHooks(before_stage=hold_up)})
    loop = case.runtime.train(loader(), ids=ids, read_ahead=True)
    for _ in range(120):
        case.step(*_label_of(next(loop)))
    assert next(loop, None) is None
    assert max(most) <= (depth + 2 if depth else 1) + (window or 0)
    assert len(alive) == 0


def _label_of(item):
    return torch.from_numpy(np.array(item[0]["label"])), item[1]


@pytest.mark.drawn
@pytest.mark.slow_on_standin
@pytest.mark.parametrize(("depth", "cache"), [(0, None), (0, "20%"), (2, None), (2, "20%")])
@pytest.mark.parametrize("end", ["well", "break", "body", "loader", "stage", "not finite", "late"])
def test_tables_go_with_the_runtime(device, depth, cache, end):
    """Nobody has to wait for the garbage collector to get many GiB back."""
    Case(device).train(batches_of(1))  # torch's first steps in a process leave frames behind
    gc.collect()
    gc.disable()
    try:
        held = _train_to_the(end, device, depth, cache)
        assert [reference() for reference in held] == [None] * len(held)
    finally:
        gc.enable()


def _train_to_the(end, device, depth, cache):
    def loader():
        yield from batches_of(6)
        if end == "loader":
            raise UserError("damaged")

    def fail(stage, number):
        if (end, stage) in (("stage", "lookup"), ("late", "update")) and number == 3:
            raise UserError(f"in {stage}")

    case = Case(device, options={"depth": depth, "cache": cache, "hooks": PipelineHooks(before_stage=fail)})
    for _ in case.runtime.predict(batches_of(2), ids=ids):
        pass
    error = None
    try:
        for label, rows in case.loop(loader()):
            if end == "not finite" and rows.step == 4:
                label = label * float("nan")
            case.step(label, rows)
            if rows.step == 3 and end == "break":
                break
            if rows.step == 3 and end == "body":
                raise UserError("of the body")
    except UserError as caught:
        error = str(caught)
    assert (error is None) == (end in ("well", "break"))
    case.runtime.predict(batches_of(1))
    label = rows = None
    held = [weakref.ref(case.tables[name]) for name in ROWS]
    return [*held, weakref.ref(case.runtime), weakref.ref(case.runtime.pipeline)]
