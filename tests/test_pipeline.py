"""The pipeline: the serial run's bits at any depth and timing, errors in every stage, bounded memory."""

import gc
import itertools
import random
import sys
import threading
import time
import weakref

import numpy as np
import psutil
import pytest
import torch

from hostdev import UserError
from hostdev.core.timeline import STAGES
from hostdev.pipeline.context import PipelineHooks
from hostdev.train.network import NonFiniteLossError
from tests import fields
from tests.combinations import pairs_first
from tests.fields import FIELDS, FieldsBatch

ROWS = 400
CPU = torch.device("cpu")


def adversarial(seed, count, size=24, shared=0.9):
    """Batches that share most of their ids with the one before, and some with the one before that."""
    rng = np.random.default_rng(seed)
    made, before = [], rng.integers(0, ROWS, (2, size, FIELDS))
    for _ in range(count):
        ids = rng.integers(0, ROWS, (size, FIELDS))
        ids = np.where(rng.random(ids.shape) < shared, before[0][rng.permutation(size)], ids)
        ids = np.where(rng.random(ids.shape) < 0.1, before[1], ids)
        before = [ids, before[0]]
        label = (rng.random(size) < 0.3).astype(np.float32)
        made.append(FieldsBatch(label, ids.astype(np.int32), rng.random((size, FIELDS), dtype=np.float32)))
    return made


def trainer_of(*, mix=True, l2="none", dim=8, device=CPU, **overlap):
    """A trainer, all of whose dense side is on the device, and the tables where they belong."""
    trainer = fields.trainer_of(ROWS, dim, mix=mix, device=device, l2=l2, **overlap)
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {device.type}
    if not mix:
        assert {table.block.device.type for table in trainer.tables.values()} == {device.type}
    for cache in trainer.caches:
        assert {slots.block.device.type for slots in cache.slots} == {device.type}
    return trainer


def outcome(batches, *, evaluate=3, **options):
    """Train, and return everything that must not depend on the overlap."""
    trainer = trainer_of(**options)
    losses = [tuple(result.value) for result in trainer.train(batches)]
    return losses, trainer.evaluate(batches[:evaluate]), trainer.state_sha256()


def threads():
    names = {thread.name for thread in threading.enumerate()}
    return names & {"hostdev-reader", "hostdev-fetcher", "hostdev-updater"}


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert threads() == set()


@pytest.mark.parametrize(
    ("l2", "dtype"),
    [
        ("none", "fp32"),
        ("none", "bf16"),
        pytest.param("batch", "fp32", marks=pytest.mark.slow_on_standin),
        ("table", "fp32"),
        pytest.param("table", "bf16", marks=pytest.mark.slow_on_standin),
    ],
)
def test_every_depth_gives_the_serial_bits(device, l2, dtype):
    batches = adversarial(0, 25 if device.type == "cpu" else 10)
    options = {"l2": l2, "dtype": dtype, "device": device}
    expected = outcome(batches, depth=0, **options)
    for mix, depth in itertools.product((True, False), (1, 2, 3, 7)):
        assert outcome(batches, depth=depth, mix=mix, **options) == expected, (mix, depth)
    for depth in (1, 2, 7) if device.type == "cpu" else ():
        assert outcome(batches, depth=depth, hooks=PipelineHooks(forward=True), **options) == expected, depth


def cache_of(seed):
    policy = ("lookahead", "lru", "lfu")[seed % 3]
    return {"capacity_rows": ("1%", "10%", "40%")[seed // 3 % 3], "policy": policy, "window": seed % 7}


def stress(seeds, device=CPU):
    for seed in seeds:
        batches = adversarial(seed, 12, shared=random.Random(seed).random())
        expected = outcome(batches, depth=0, dim=4, device=device)
        for depth, cache, forward in (
            (1, None, False),
            (2, None, True),
            (4, None, False),
            (4, None, True),
            (1 + seed % 4, cache_of(seed), False),
        ):
            delays = random.Random(seed * 10 + depth)
            # Most stages are not held up, one or two for longer than all the others take.
            slow = {stage: delays.choice((0, 0, 0.0005, 0.004)) for stage in STAGES}

            def hold_up(stage, number, slow=slow, delays=delays):
                time.sleep(slow.get(stage, 0.0) * delays.random())

            hooks = PipelineHooks(before_stage=hold_up, forward=forward)
            options = {"depth": depth, "cache": cache, "hooks": hooks}
            assert outcome(batches, dim=4, device=device, **options) == expected, (seed, depth, forward)


def test_random_delays_in_every_stage():
    stress(range(8))


@pytest.mark.slow
def test_random_delays_in_every_stage_200_seeds():
    stress(range(1000, 1200))


def test_without_the_rule_the_bits_differ(device):
    """The tests above can fail: a lookup that does not wait for updates changes the model."""
    batches = adversarial(0, 10)

    def hold_up(stage, number):
        time.sleep(0.01 * (stage == "update"))

    assert outcome(batches, depth=2, hooks=PipelineHooks(staleness=5, before_stage=hold_up), device=device) != outcome(
        batches, depth=0, device=device
    )


@pytest.mark.parametrize("staleness", [1, 2])
def test_staleness_is_bounded(device, staleness):
    """A batch sees every update but those of the last K batches before it."""
    updated, seen = [], []

    def watch(stage, number):
        if stage == "step":
            seen.append(number - 1 - (updated[-1] if updated else 0))
        time.sleep(0.003 * (stage == "update"))

    batches = adversarial(0, 30)
    trainer = trainer_of(
        depth=4,
        hooks=PipelineHooks(
            staleness=staleness, before_stage=watch, after_update=lambda number, *_: updated.append(number)
        ),
        device=device,
    )
    for _ in trainer.train(batches):
        pass
    assert max(seen) <= staleness + 1  # the one that `after_update` has not been told of yet
    assert max(seen) >= 1


@pytest.mark.slow_on_standin
@pairs_first("stage, depth, cache", list(STAGES), [0, 1, 4], [None, {"capacity_rows": "20%", "window": 5}])
def test_an_error_in_any_stage_surfaces_and_ends_every_thread(device, stage, depth, cache):
    class FaultError(Exception):
        pass

    raised = []

    def fail(at, number):
        if at == stage and number >= 4:
            raised.append(time.monotonic())
            raise FaultError(f"in {stage}")

    forward = stage == "lookup forwarded"
    hooks = PipelineHooks(before_stage=fail, forward=forward)
    trainer = trainer_of(depth=depth, cache=cache, hooks=hooks, device=device)
    happened = []
    try:
        for _ in trainer.train(adversarial(0, 30)):
            happened.append(time.monotonic())
    except FaultError as error:
        assert str(error) == f"in {stage}"
        assert time.monotonic() - raised[0] < 60  # it does not wait for anything that does not come
        assert len(happened) >= 2 or cache is not None  # the batches before are not far behind
    else:  # not every stage is used at every depth
        assert not raised
        assert stage in ("update first", "lookup late") or depth == 0 or (forward and cache is not None)


@pytest.mark.parametrize("depth", [1, 3])
def test_a_late_error_of_an_update(device, depth):
    """The caller has stepped all batches that may be alive, and nobody reads another."""
    rng = np.random.default_rng(0)
    batches = [  # no two share a row, so nothing waits for an update
        FieldsBatch(np.zeros(1, np.float32), rng.permutation(10)[None] + 10 * number, np.ones((1, 10), np.float32))
        for number in range(20)
    ]
    batches = [FieldsBatch(b.label, np.tile(b.ids, 4)[:, :FIELDS], np.ones((1, FIELDS), np.float32)) for b in batches]

    def fail(stage, number):
        if stage == "update" and number == 3:
            time.sleep(0.3)
            raise OSError("late")

    start = time.monotonic()
    with pytest.raises(OSError, match="late"):
        list(trainer_of(depth=depth, hooks=PipelineHooks(before_stage=fail), device=device).train(batches))
    assert time.monotonic() - start < 5


def test_an_error_comes_in_its_turn_however_slow_the_steps(device):
    """What was read before it is stepped, so that the state it leaves does not depend on the time."""
    batches = adversarial(0, 5)

    def source():
        yield from batches
        raise UserError("shard x is damaged")

    trainer = trainer_of(
        depth=8,
        device=device,
        hooks=PipelineHooks(before_stage=lambda stage, number: time.sleep(0.25 * (stage == "step"))),
    )
    with pytest.raises(UserError, match="shard x is damaged"):
        for _ in trainer.train(source()):
            pass
    assert trainer.tables["deep"].step == 5
    assert trainer.state_sha256() == outcome(batches, depth=0, device=device)[2]


@pytest.fixture
def _many_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.slow_on_standin
@pytest.mark.usefixtures("_many_switches")
def test_threads_that_take_turns_at_every_instruction(device):
    """What the threads share is changed and walked under its lock."""
    batches = adversarial(8, 8, size=4)
    expected = None
    for depth in (0, 4):
        made = trainer_of(depth=depth, dim=1, cache={"capacity_rows": "20%", "window": 3}, device=device)
        steps = 300 if device.type == "cpu" else 40
        for _ in made.train(itertools.islice(itertools.cycle(batches), steps)):
            pass
        digest = made.state_sha256()
        expected = expected or digest
        assert digest == expected


@pytest.mark.parametrize("depth", [1, 3])
def test_closing_tells_of_an_update_that_has_failed(device, depth):
    class DiskFullError(Exception):
        pass

    def fail(stage, number):
        if stage == "update" and number == 2:
            raise DiskFullError

    results = trainer_of(depth=depth, hooks=PipelineHooks(before_stage=fail), device=device).train(adversarial(0, 6))
    next(results)
    next(results)
    with pytest.raises(DiskFullError):
        results.close()


def test_the_l2_of_a_batch_is_added_in_one_order(device):
    """With a cache, whose rows lie in another order, too; large weights, so that the last bits differ if it is not."""
    batches = adversarial(19, 12)
    found = []
    for cache in (None, {"capacity_rows": "20%", "window": 3}):
        trainer = trainer_of(depth=2, l2="batch", cache=cache, device=device)
        with trainer.tables["deep"].writing() as w:
            w.weights *= 20
        found.append([tuple(result.value) for result in trainer.train(batches)])
    assert found[0] == found[1]


def test_a_table_that_is_not_finite_changes_nothing(device):
    """--l2 table reads rows that no gradient comes to."""
    batches = [FieldsBatch(b.label, b.ids % (ROWS - 1), b.weights) for b in adversarial(20, 3)]
    for mix in (True, False):
        trainer = trainer_of(l2="table", mix=mix, device=device)
        list(trainer.train(batches[:1]))
        table = trainer.tables["deep"]
        (table.storage.block if mix else table.block)[ROWS - 1, 0, 0] = float("inf")  # nothing else lets it in
        before = trainer.state_sha256()
        with pytest.raises(NonFiniteLossError, match="no row was updated"):
            for result in trainer.train(batches[1:]):
                _ = result.value
        assert trainer.state_sha256() == before


@pytest.mark.parametrize("cache", [None, {"capacity_rows": "20%"}], ids=["", "cache"])
@pytest.mark.parametrize("depth", [0, 2])
def test_tables_go_with_the_trainer(device, depth, cache):
    """Nobody has to wait for the garbage collector to get many GiB back."""
    trainer_of(depth=0, device=device)  # torch's first steps in a process leave frames behind
    trainer = trainer_of(depth=depth, cache=cache, device=device)
    for _ in trainer.train(adversarial(0, 4)):
        pass
    trainer.evaluate(adversarial(0, 1))
    held = [weakref.ref(table) for table in trainer.tables.values()]
    gc.disable()
    try:
        del trainer
        assert [table() for table in held] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize(("mix", "cache"), [(True, None), (True, {"capacity_rows": "20%", "window": 3}), (False, None)])
def test_a_finite_loss_with_gradients_that_are_not(device, depth, mix, cache):
    """Found before a row or a dense weight is written; the step says which it is."""
    batches = adversarial(9, 8)
    trainer = trainer_of(depth=depth, mix=mix, cache=cache, device=device)
    expected = outcome(batches, depth=0, device=device)
    steps = itertools.count(1)

    def spoil(grad):
        return grad * np.inf if next(steps) == 4 else grad

    trainer.model.deep[0].weight.register_hook(spoil)
    with pytest.raises(NonFiniteLossError, match="a gradient is not finite .*; no row was updated") as caught:
        for _ in trainer.train(batches):
            pass
    assert caught.value.step == 4
    assert trainer.tables["deep"].step == 3
    rest = [tuple(result.value) for result in trainer.train(batches[3:])]  # from 5 on the hook does nothing
    assert (rest, trainer.state_sha256()) == (expected[0][3:], expected[2])


@pytest.mark.parametrize("cache", [None, {"capacity_rows": "20%", "window": 3}], ids=["", "cache"])
@pytest.mark.parametrize("depth", [0, 2])
def test_what_came_before_an_error_is_done_and_the_trainer_goes_on(device, depth, cache):
    batches = adversarial(3, 12)
    expected = outcome(batches, depth=0, device=device)

    def source():
        yield from batches[:6]
        raise UserError("damaged")

    trainer = trainer_of(depth=depth, cache=cache, device=device)
    losses = []
    with pytest.raises(UserError, match="damaged"):
        for result in trainer.train(source()):
            losses.append(tuple(result.value))
    losses += [tuple(result.value) for result in trainer.train(batches[6:])]
    assert (losses, trainer.evaluate(batches[:3]), trainer.state_sha256()) == expected


@pytest.mark.parametrize("depth", [0, 2])
def test_closing_early_updates_what_was_stepped(device, depth):
    batches = adversarial(4, 12)
    trainer = trainer_of(depth=depth, device=device)
    results = trainer.train(batches)
    for _ in itertools.islice(results, 5):
        pass
    results.close()
    assert trainer.state_sha256() == outcome(batches[:5], depth=0, device=device)[2]
    assert trainer.tables["deep"].step == 5


@pytest.mark.parametrize("cache", [None, {"capacity_rows": "20%", "window": 3}], ids=["", "cache"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_an_id_beyond_the_table_and_a_loss_that_is_not_finite(device, depth, cache):
    batches = adversarial(5, 10)
    wrong = FieldsBatch(batches[6].label, batches[6].ids.copy(), batches[6].weights)
    wrong.ids[3, 20] = ROWS
    with pytest.raises(UserError, match=f"id {ROWS} at position .* is outside"):
        list(trainer_of(depth=depth, cache=cache, device=device).train([*batches[:6], wrong, *batches[7:]]))
    wrong = FieldsBatch(batches[6].label, batches[6].ids, np.full_like(batches[6].weights, np.nan))
    trainer = trainer_of(depth=depth, cache=cache, device=device)
    with pytest.raises(NonFiniteLossError):
        list(trainer.train([*batches[:6], wrong, *batches[7:]]))
    assert trainer.state_sha256() == outcome(batches[:6], depth=0, device=device)[2]


@pytest.mark.parametrize(
    ("depth", "window"), [(1, None), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((4, None), (2, 3)))]
)
def test_memory_is_bounded(depth, window):
    """At most depth + 2 batches are alive, whichever stage is slow, and 400 steps do not need more than 200.

    With a cache its window comes on top.
    """
    alive, most, resident = weakref.WeakSet(), [], []
    batches = adversarial(6, 8)

    def source():
        for number in range(400):
            batch = batches[number % len(batches)]
            batch = FieldsBatch(batch.label.copy(), batch.ids, batch.weights)
            alive.add(batch)
            most.append(len(alive))
            yield batch
            del batch

    def hold_up(stage, number):
        if number < 90:
            time.sleep(0.002 * (stage == ("step", "update", "unique")[number // 30]))

    cache = None if window is None else {"capacity_rows": "20%", "window": window}
    results = trainer_of(depth=depth, cache=cache, hooks=PipelineHooks(before_stage=hold_up)).train(source())
    for number in range(400):  # not enumerate, which keeps its last item
        next(results)
        if number >= 200 and number % 40 == 0:
            resident.append(psutil.Process().memory_info().rss)
    assert next(results, None) is None
    assert max(most) <= depth + 2 + (window or 0)
    assert max(resident) <= 1.05 * resident[0]


@pytest.mark.parametrize("forward", [False, True])
def test_overlap_is_seen_and_summed_up(device, forward):
    """A stage that waits leaves the others at work."""

    def hold_up(stage, number):
        if stage in ("step", "read"):
            time.sleep(0.005)

    batches = adversarial(7, 40)
    trainer = trainer_of(depth=2, hooks=PipelineHooks(before_stage=hold_up, forward=forward), device=device)
    for _ in trainer.train(batches):
        pass
    summary = trainer.runtime.pipeline.timeline.summary()
    assert set(summary["stall_us"]) == set(summary["busy_us"]) == set(STAGES)
    forwards = forward or device.type != "cpu"
    unused = {"update first", "lookup late"} if forwards else {"lookup forwarded"}
    assert all(summary["busy_us"][stage] > 0 for stage in set(STAGES) - unused)
    assert summary["busy_us"]["lookup forwarded"] > 0 or not forwards
    assert summary["busy_us"]["update first"] == 0 or not forwards
    assert summary["stall_us"]["update"] > 40 * 2000
    assert 0 < summary["overlap_efficiency"] <= 1
    assert max(summary["host_busy_us"], summary["device_busy_us"]) <= summary["wall_us"]
