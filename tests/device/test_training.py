"""Complete trainings on any device: one digest, for any placement of tables and any timing of stages and streams."""

import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from hostdev.core.memory import copied_bytes, pinned_size, row_bytes
from hostdev.device import backend, ops
from hostdev.kernels.pool import set_host_threads
from hostdev.models.wide_deep.network import LAYERS
from hostdev.pipeline.context import PipelineHooks
from hostdev.pipeline.scheduling.in_flight import InFlightBatches
from tests.conftest import devices, stand_in
from tests.device import twins
from tests.fields import FieldsBatch
from tests.test_pipeline import ROWS, adversarial, cache_of, outcome, trainer_of

CACHES = [None, {"capacity_rows": "20%", "window": 3}]
SIMULATED = devices() == ["standin"]


@pytest.mark.parametrize("cache", CACHES, ids=["", "cache"])
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("l2", ["none", "batch"])
def test_one_digest_wherever_tables_and_layers_lie(device, l2, depth, cache):
    """Host tables and device tables; on the simulated device, with the CPU's operations."""
    batches = adversarial(11, 8)
    found = outcome(batches, depth=depth, l2=l2, cache=cache, device=device)
    assert outcome(batches, depth=depth, l2=l2, mix=False, device=device) == found
    if SIMULATED:
        torch.use_deterministic_algorithms(True)
        assert outcome(batches, depth=0, l2=l2, device=torch.device("cpu")) == found


def test_another_device_of_several(device):
    batches = adversarial(15, 5)
    expected = outcome(batches, depth=0, device=device)
    for number in range(torch.accelerator.device_count() if device.type != "cpu" else 1):
        one = backend.select(device.type if device.type == "cpu" else f"{device.type}:{number}")
        for options in ({"depth": 0}, {"depth": 2, "cache": CACHES[1]}, {"depth": 2, "mix": False}):
            made = trainer_of(device=one, **options)
            assert {parameter.device.index for parameter in made.model.parameters()} == {one.index}
            assert outcome(batches, device=one, **options) == expected
    assert outcome(batches, depth=2, device=device) == expected  # on the last one, which is the current one
    assert number == 1 or not SIMULATED


@pytest.mark.parametrize("policy", ["lookahead", "lru", "lfu", "static"])
def test_bf16_with_every_policy(device, policy):
    batches = adversarial(12, 6)
    cache = {"capacity_rows": "30%", "policy": policy, "counts": np.arange(ROWS)}
    results = []
    for options in ({"depth": 0}, {"depth": 2, "cache": cache}, {"depth": 2, "mix": False}):
        made = trainer_of(device=device, precision="bf16", **options)
        losses = [tuple(result.value) for result in made.train(batches)]
        results.append((losses, made.evaluate(batches[:2]), made.state_sha256()))
    assert results[0] == results[1] == results[2]
    assert results[0][0] != outcome(batches, depth=0, device=device)[0]


@pytest.mark.parametrize("cache", CACHES, ids=["", "cache"])
def test_tritons_kernels_in_training(device, cache, monkeypatch):
    """CUDA's own sums for rows with many occurrences give one digest for any placement of tables."""
    batches = []
    for batch in adversarial(16, 6, size=100):
        ids = batch.ids.copy()
        ids[:, :2] = [3, 5]  # a use in every sample, as of the dense columns
        batches.append(FieldsBatch(batch.label, ids, batch.weights))
    plain = outcome(batches, depth=0, device=device)
    if SIMULATED:
        twins.register()
    monkeypatch.setattr(ops, "FUSED", {device.type})
    expected = outcome(batches, depth=0, device=device)
    for options in ({"depth": 2, "cache": cache}, {"depth": 0, "cache": cache}, {"depth": 2, "mix": False}):
        assert outcome(batches, device=device, **options) == expected, options
    assert (expected[2] == plain[2]) == (device.type == "cpu")  # another order of sums


@pytest.mark.skipif(not SIMULATED, reason="the simulated accelerator counts; make test-device")
@pytest.mark.parametrize("cache", CACHES, ids=["", "cache"])
def test_nobody_waits_and_nothing_is_pinned_once_it_runs(device, cache):
    """The step's thread only queues work; losses are known when the next step has been queued."""
    batches = adversarial(17, 24)
    counters, me = stand_in().counters, threading.current_thread().name
    results = trainer_of(device=device, depth=2, cache=cache).train(batches)
    last = None
    for number in range(1, len(batches) + 1):
        before = counters.waits_of(me)
        result = next(results)
        assert number <= 2 or counters.waits_of(me) == before, number
        if last is not None:
            assert np.isfinite(last.value.wide)
        last = result
        if number == 10:
            counters.reset()
    assert counters.pinned_allocations == 0
    results.close()


def test_what_tells_of_a_step_is_its_own(device):
    """The flag of a finite step is in flight to the host while the next steps compute theirs."""
    later = threading.Event()

    def held_up(stage, number):
        if (stage, number) == ("update", 1):
            later.wait(20)

    batches = [adversarial(23, 1, shared=0.0)[0] for _ in range(4)]
    batches = [replace(batch, ids=batch.ids % (ROWS // 4) + i * (ROWS // 4)) for i, batch in enumerate(batches)]
    results = trainer_of(device=device, depth=2, hooks=PipelineHooks(before_stage=held_up)).train(batches)
    try:
        stepped = [next(results) for _ in range(3)]  # of which the updater has not looked at the second and the third
    finally:
        later.set()
        results.close()
    assert np.isfinite([result.value.wide for result in stepped]).all()


@pytest.mark.skipif(not SIMULATED, reason="the simulated accelerator counts; make test-device")
def test_pinned_memory_comes_back_after_an_early_end(device):
    """Memory is pinned once per run, not per batch, also after batches that were fetched but not stepped."""
    batches = adversarial(21, 20)
    made = trainer_of(device=device, depth=2, cache=CACHES[1])
    for _ in range(3):
        results = made.train(batches)
        for _ in range(4):
            next(results)
        results.close()
    stand_in().counters.reset()
    for _ in made.train(batches):
        pass
    assert stand_in().counters.pinned_allocations <= 4


@pytest.mark.skipif(not SIMULATED, reason="the simulated accelerator counts; make test-device")
@pytest.mark.parametrize("shared", [0.0, 1.0])
@pytest.mark.parametrize("cache", CACHES, ids=["", "cache"])
def test_pinned_memory_is_at_most_what_was_counted(device, shared, cache):
    batches = adversarial(22, 12, size=200, shared=shared)
    counters = stand_in().counters
    made = trainer_of(device=device, depth=2, dim=16, cache=cache)
    for _ in made.train(batches):
        pass
    row, whole = row_bytes((table.dim, table.optimizer) for table in made.tables.values())
    uses = batches[0].ids.size
    each = copied_bytes(ROWS, 2 * ROWS if cache else 0, uses, row, whole)
    assert counters.pinned_bytes <= 4 * pinned_size(each)


@pytest.mark.skipif(devices() == ["cpu"], reason="on the CPU nothing is sent; make test-device")
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_rows_are_sent_when_the_device_has_taken_those_before(device, depth, monkeypatch):
    """Otherwise memory would hold the rows of every batch that was looked up."""
    marks, early, gather = {}, [], InFlightBatches.gather

    def noted(batches, number, mark):
        marks[number] = mark
        gather(batches, number, mark)

    def look(stage, number):
        if stage == "send" and number > 1 and not marks[number - 1].query():
            early.append(number)

    monkeypatch.setattr(InFlightBatches, "gather", noted)
    for _ in trainer_of(device=device, depth=depth, hooks=PipelineHooks(before_stage=look)).train(adversarial(18, 8)):
        pass
    assert len(marks) == 8
    assert not early


def test_the_whole_network(device):
    """Uses the layers of the published model, which other tests on a simulated device skip."""
    set_host_threads(2)
    batches = adversarial(13, 3)
    found = outcome(batches, depth=2, dim=16, device=device, layers=LAYERS)
    assert outcome(batches, depth=0, dim=16, mix=False, device=device, layers=LAYERS) == found


def test_rows_and_gradients_are_on_the_device(device, monkeypatch):
    """Inputs and outputs of the network stay on the accelerator: the CPU computes nothing in its place."""
    seen = set()
    made = trainer_of(device=device, depth=2, cache=CACHES[1])
    step = made._network._step

    def watched(rows, batch, dense, label, weight):
        parts = [part for value in rows.values() for part in value]
        seen.update(part.device.type for part in [*parts, dense, label])
        found = step(rows, batch, dense, label, weight)
        seen.update(grad.device.type for leaf in rows.leaves for grad in leaf.grads())
        seen.add(rows.guarded[0].device.type)
        return found

    monkeypatch.setattr(made._network, "_step", watched)
    for _ in made.train(adversarial(14, 6)):
        pass
    assert seen == {device.type}
    states = [values for state in made.adam.state.values() for values in state.values()]
    assert {values.device.type for values in states} == {device.type}
    if SIMULATED:
        launched = stand_in().counters.launches
        assert launched["host to device"] >= 6
        assert launched["device to host"] >= 6


def delayed(seeds, device):
    """Trainings with random delays in the device's streams."""
    for seed in seeds:
        if SIMULATED:
            stand_in().configure(schedule="delayed", seed=seed)
        chosen = random.Random(seed)
        batches = adversarial(seed, 6, shared=chosen.random())
        expected = outcome(batches, depth=0, dim=4, evaluate=1, device=torch.device("cpu") if SIMULATED else device)
        for depth, cache in ((0, cache_of(seed)), (1 + seed % 4, None), (1 + seed % 4, cache_of(seed + 1))):
            options = {"depth": depth, "cache": cache, "mix": True}
            assert outcome(batches, dim=4, evaluate=1, device=device, **options) == expected, (seed, options)
        assert outcome(batches, dim=4, evaluate=1, depth=2, mix=False, device=device) == expected, seed


def test_random_delays_in_the_devices_streams(device):
    delayed(range(3 if device.type == "standin" else 6), device)


@pytest.mark.slow
@pytest.mark.parametrize("first", [3000, 3050, 3100, 3150])
def test_random_delays_in_the_devices_streams_200_seeds(device, first):
    delayed(range(first, first + 50), device)
