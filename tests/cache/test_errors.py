"""Updates in the cache survive any error or interrupt, and training continues."""

import threading
import time

import numpy as np
import pytest
import torch

import hostdev
from hostdev import HostTable, Runtime
from hostdev.cache import cache as cache_module
from hostdev.cache import planner, planning
from hostdev.cache.slots import DeviceSlots
from hostdev.device.staging import Staging
from hostdev.pipeline.context import PipelineHooks
from tests.fields import FieldsBatch
from tests.test_pipeline import FIELDS, adversarial, outcome, trainer_of

CACHE = {"capacity_rows": "20%", "policy": "lru"}  # which exchanges many rows
ROWS = 100


class FaultError(Exception):
    pass


def failing(function, call):
    """Return the function, except that one call raises."""
    calls = 0

    def wrapped(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            raise FaultError
        return function(*arguments, **options)

    return wrapped


def rows_that_differ(trainer, other):
    """Return the ids of rows that differ between both trainers' tables, with optimizer state."""
    differ = set()
    for name in ("wide", "deep"):
        ours, theirs = (one.tables[name] for one in (trainer, other))
        pairs = [(ours.weights, theirs.weights), *zip(ours.slots.values(), theirs.slots.values(), strict=True)]
        differ |= {row for left, right in pairs for row in np.flatnonzero((left != right).any(1)).tolist()}
    return differ


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [
        (DeviceSlots, "exchange", 15),  # two tables: of the 8th batch, the first one's, and the second's
        (DeviceSlots, "exchange", 16),
        (Staging, "receive", 15),  # what comes first, and the rest
        (Staging, "receive", 16),
        (HostTable, "update_tasks", 15),
        (HostTable, "write_rows_tasks", 9),
    ],
)
def test_rows_of_other_batches_keep_their_updates(device, monkeypatch, owner, name, call, depth):
    batches, begun = adversarial(3, 14, shared=0.3), []

    def note(stage, number):
        if stage == "update":
            begun.append(number)

    trainer = trainer_of(depth=depth, cache=CACHE, hooks=PipelineHooks(before_stage=note), device=device)
    monkeypatch.setattr(owner, name, failing(getattr(owner, name), call))
    [group] = trainer.runtime.pipeline.groups
    for embedding, slots in zip(group.embeddings, group.cache.slots, strict=True):
        embedding.use_cache(slots)
    with pytest.raises(FaultError):
        list(trainer.train(batches))
    monkeypatch.undo()
    first = begun[-1] - 1 if owner is HostTable else 7  # the batch that failed; some after it may have been stepped
    touched = {row for batch in batches[first : first + depth + 2] for row in batch.ids.ravel().tolist()}
    plain = trainer_of(depth=0, device=device)
    for _ in plain.train(batches[:first]):
        pass
    assert rows_that_differ(trainer, plain) <= touched


def test_rows_on_their_way_to_the_host_arrive(device, monkeypatch):
    """Batches without a row of the failed update are stepped meanwhile, and not awaited yet."""
    ids = np.arange(10 * FIELDS, dtype=np.int32).reshape(10, 1, FIELDS)
    batches = [FieldsBatch(np.zeros(1, np.float32), part, np.ones((1, FIELDS), np.float32)) for part in ids]
    stepped, calls, write_rows = [], [], HostTable.write_rows_tasks

    def fail_late(*arguments):
        calls.append(arguments)
        if len(calls) == 1:
            time.sleep(0.3)
            raise FaultError
        return write_rows(*arguments)

    trainer = trainer_of(depth=2, cache=CACHE, device=device)
    plain = trainer_of(depth=0, device=device)
    with monkeypatch.context() as patch:
        patch.setattr(HostTable, "write_rows_tasks", fail_late)
        with pytest.raises(FaultError):
            for result in trainer.train(batches):
                stepped.append(result)
    for _ in plain.train(batches[: len(stepped)]):
        pass
    assert len(stepped) > 3
    assert rows_that_differ(trainer, plain) <= set(range(3 * FIELDS))


@pytest.fixture
def table():
    return HostTable(ROWS, 4, hostdev.LazyAdam(lr=0.1), name="t")


def given(count):
    rng = np.random.default_rng(0)
    return [torch.from_numpy(rng.integers(0, ROWS, 20)) for _ in range(count)]


def runtime_of(table, device="cpu", **options):
    return Runtime({"id": table}, device=device, depth=0, **options)


def loop(runtime, batches, skipped=()):
    for number, (_, rows) in enumerate(runtime.train(batches, ids=lambda ids: {"id": ids})):
        if number not in skipped:
            rows["id"].square().sum().backward()


def plain(batches):
    table = HostTable(ROWS, 4, hostdev.LazyAdam(lr=0.1), name="t")
    loop(runtime_of(table), batches)
    return table


LRU = hostdev.CacheSpec(10, "lru")


@pytest.mark.parametrize("through", ["the table", "the runtime"])
def test_an_interrupt_in_a_tables_update(device, table, monkeypatch, through):
    """Rows that the batch evicted are on the host, and the others are unchanged."""
    batches, runtime = given(9), runtime_of(table, device, cache=LRU)
    loop(runtime, batches[:8])
    monkeypatch.setattr(table, "update_tasks", failing(table.update_tasks, 1))
    with pytest.raises(FaultError):
        loop(runtime, batches[8:])
    other = np.setdiff1d(np.arange(ROWS), batches[8])
    found = table.weights[other] if through == "the table" else runtime.lookup({"id": other})["id"].cpu().numpy()
    np.testing.assert_array_equal(found, plain(batches[:8]).weights[other])


def test_writing_back_may_be_repeated_after_an_interrupt(device, table, monkeypatch):
    batches, runtime = given(8), runtime_of(table, device, cache="100%")  # no row leaves before the end
    with monkeypatch.context() as patch:
        patch.setattr(table.stored, "write", failing(table.stored.write, 1))
        with pytest.raises(FaultError):
            loop(runtime, batches)  # at its end
    runtime.write_back()
    np.testing.assert_array_equal(table.weights, plain(batches).weights)


@pytest.mark.parametrize("kernel", ["classify", "score", "divide", "exchange"])
def test_an_interrupt_while_planning(device, table, monkeypatch, kernel):
    batches, runtime = given(12), runtime_of(table, device, cache=hostdev.CacheSpec(30, "lru"))
    loop(runtime, batches[:3])
    with monkeypatch.context() as patch:
        if kernel in ("classify", "score"):  # whose ranges are handed out in native code
            work, run_tasks = getattr(planning, kernel), planner.run_tasks
            fail = failing(run_tasks, 1)
            patch.setattr(planner, "run_tasks", lambda tasks: (fail if tasks[0].kernel is work else run_tasks)(tasks))
        else:
            patch.setattr(planning, kernel, failing(getattr(planning, kernel), 1))
        with pytest.raises(FaultError):
            loop(runtime, batches[3:])
    loop(runtime, batches[table.step :])
    np.testing.assert_array_equal(table.weights, plain(batches).weights)
    [cache] = runtime.caches
    slots = cache.planner.slot_ids
    assert len(np.unique(slots[: cache.planner.filled])) == cache.planner.filled == (slots >= 0).sum()


def test_the_optimum_is_that_of_the_batches_that_were_planned(device, table):
    """This includes skipped steps: their rows entered the cache."""
    batches, found = given(12), []
    for skipped in ((4, 5), ()):
        made = HostTable(ROWS, 4, hostdev.SGD(), name="t")
        runtime = runtime_of(made, device, cache=hostdev.CacheSpec(10, window=3, record=True))
        loop(runtime, batches, skipped)
        found.append(runtime.caches[0].summary())
    assert found[0]["batches"] == found[0]["optimal_batches"] == 12
    assert found[0] == found[1]
    runtime = runtime_of(HostTable(ROWS, 4, hostdev.SGD(), name="t"), device, cache=10)
    loop(runtime, batches)
    assert runtime.caches[0].summary()["optimal_hit_rate"] is None  # nothing was kept for it
    assert runtime.caches[0].summary()["no_optimum"] == "no batch was recorded for it"


@pytest.mark.parametrize("limit", ["_MOST_RECORDED", "_MOST_VISITS"])
def test_the_optimum_is_that_of_the_first_batches_where_all_would_take_too_long(device, monkeypatch, limit):
    def summary(batches):
        table = HostTable(ROWS, 4, hostdev.SGD(), name="t")
        runtime = runtime_of(table, device, cache=hostdev.CacheSpec(10, "lru", record=True))
        loop(runtime, batches)
        [cache], calls = runtime.caches, []
        found = cache.summary(progress=lambda: calls.append(1))
        assert len(calls) > 5
        return found, cache

    batches = given(12)
    few, cache = summary(batches[:5])
    monkeypatch.setattr(cache_module, limit, cache._recorded_ids if limit == "_MOST_RECORDED" else cache._visits)
    found, _ = summary(batches)
    assert (found["batches"], found["optimal_batches"], found["no_optimum"]) == (12, 5, None)
    for name in ("optimal_hit_rate", "hit_rate_of_these", "least_bytes", "bytes_of_these"):
        assert found[name] == few[name]


def test_a_reader_that_comes_back_late_has_no_part_in_the_next_run(device):
    """Closing waits at most a second for a source that hangs."""
    batches, late = adversarial(0, 24), threading.Event()

    def hanging():
        yield from batches[:4]
        late.wait(20)
        yield batches[20]

    trainer = trainer_of(depth=2, device=device)
    results = trainer.train(hanging())
    losses = [tuple(next(results).value) for _ in range(3)]
    results.close()
    [reader] = (thread for thread in threading.enumerate() if thread.name == "hostdev-reader")
    for number, result in enumerate(trainer.train(batches[3:])):
        losses.append(tuple(result.value))
        if number == 5:
            late.set()
            reader.join()
    assert (losses, trainer.evaluate(batches[:3]), trainer.state_sha256()) == outcome(batches, depth=0, device=device)
