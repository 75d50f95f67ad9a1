"""Training with a cache equals the serial run without one, bit for bit, for any policy, size, depth and future."""

import itertools
import time

import numpy as np
import pytest
import torch

from hostdev.cache.directory import Directory
from hostdev.cache.planner import Planner
from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.shards import ShardReader
from hostdev.models.wide_deep.network import WideDeep
from hostdev.pipeline.context import PipelineHooks
from hostdev.runtime.spec import CacheSpec
from tests.test_pipeline import ROWS, adversarial, outcome, trainer_of
from tests.trainers import make_trainer

SIZES = (0, 1, "1%", "10%", 100, "100%")
POLICIES = ("lookahead", "lru", "lfu", "static")
COUNTS = np.random.default_rng(0).permutation(ROWS)


def cached(size, policy="lookahead", window=3):
    return {"cache": {"capacity_rows": size, "policy": policy, "window": window, "counts": COUNTS}}


@pytest.mark.drawn
@pytest.mark.slow_on_standin
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", SIZES)
def test_every_policy_and_size_gives_the_bits_without_a_cache(device, policy, size):
    for seed, shared in ((0, 0.9), (1, 0.3))[: 2 if device.type == "cpu" and policy == POLICIES[0] else 1]:
        batches = adversarial(seed, 12, shared=shared)
        expected = outcome(batches, depth=0, device=device)
        for depth in (0, 2):
            assert outcome(batches, depth=depth, **cached(size, policy), device=device) == expected, (depth, seed)


@pytest.mark.parametrize("policy", [POLICIES[0], *(pytest.param(one, marks=pytest.mark.slow) for one in POLICIES[1:])])
@pytest.mark.parametrize("size", [pytest.param("2%", marks=pytest.mark.slow), "10%"])
def test_bfloat16_weights_are_rounded_alike_in_slots(device, policy, size):
    """Rounding depends on a row's id, not on its slot; another table evicts, and the host rounds bypassing rows."""
    batches = adversarial(8, 10)
    options = {"dtype": "bf16", "device": device}
    expected = outcome(batches, depth=0, **options)
    for depth in (0, 2):
        assert outcome(batches, depth=depth, **cached(size, policy), **options) == expected, depth


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("policy", POLICIES)
def test_a_planner_that_forgets_rows(device, policy, monkeypatch):
    """The same after the planner was reset to the slots' content by an early end."""
    monkeypatch.setitem(Planner.__init__.__kwdefaults__, "budget", 0)
    batches = adversarial(7, 14)
    expected = outcome(batches, depth=0, device=device)
    for depth, size in itertools.product((0, 2), (1, "10%")):
        assert outcome(batches, depth=depth, **cached(size, policy), device=device) == expected
    trainer = trainer_of(depth=2, **cached("10%", policy), device=device)
    results = trainer.train(batches)
    losses = [tuple(next(results).value) for _ in range(5)]
    results.close()
    losses += [tuple(result.value) for result in trainer.train(batches[5:])]
    assert (losses, trainer.evaluate(batches[:3]), trainer.state_sha256()) == expected
    [cache] = [group.cache for group in trainer.runtime.pipeline.groups]
    assert isinstance(cache.planner._directory, Directory)


@pytest.mark.slow_on_standin
def test_with_l2(device, l2="batch"):
    batches = adversarial(2, 12)
    expected = outcome(batches, depth=0, l2=l2, device=device)
    for depth, size in itertools.product((0, 1, 4), (20, "50%")):
        assert outcome(batches, depth=depth, l2=l2, **cached(size), device=device) == expected


@pytest.mark.parametrize("window", [0, 1, 5, 32])
def test_every_window(device, window):
    batches = adversarial(3, 15)
    expected = outcome(batches, depth=0, device=device)
    for depth in (0, 3):
        assert outcome(batches, depth=depth, **cached("20%", window=window), device=device) == expected


@pytest.mark.parametrize("depth", [0, 2])
def test_after_an_early_end_the_trainer_goes_on(device, depth):
    """The same with batches that were announced, planned and fetched, but not stepped."""
    batches = adversarial(4, 14)
    expected = outcome(batches, depth=0, device=device)
    trainer = trainer_of(depth=depth, **cached("20%"), device=device)
    results = trainer.train(batches)
    losses = [tuple(next(results).value) for _ in range(5)]
    results.close()
    losses += [tuple(result.value) for result in trainer.train(batches[5:])]
    assert (losses, trainer.evaluate(batches[:3]), trainer.state_sha256()) == expected


@pytest.mark.parametrize("stage", ["unique", "plan", "lookup"])
def test_closing_while_the_fetcher_is_slow(device, stage):
    """Batches that it still announces or plans must not reach the next run."""
    batches = adversarial(5, 14)
    expected = outcome(batches, depth=0, device=device)

    def hold_up(at, number):
        time.sleep(0.3 * (at == stage and 5 <= number <= 9))

    trainer = trainer_of(depth=2, hooks=PipelineHooks(before_stage=hold_up), **cached("20%", window=4), device=device)
    results = trainer.train(batches)
    losses = [tuple(next(results).value) for _ in range(2)]
    results.close()
    losses += [tuple(result.value) for result in trainer.train(batches[2:])]
    assert (losses, trainer.evaluate(batches[:3]), trainer.state_sha256()) == expected


def test_looking_in_the_middle_of_training(device):
    batches = adversarial(6, 8)
    plain = trainer_of(depth=0, device=device)
    trainers = [trainer_of(depth=depth, **cached("30%"), device=device) for depth in (0, 2)]
    for _ in zip(plain.train(batches), *(trainer.train(batches) for trainer in trainers), strict=True):
        seen = plain.evaluate(batches[:2]), plain.state_sha256()
        for trainer in trainers:
            assert (trainer.evaluate(batches[:2]), trainer.state_sha256()) == seen


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_every_policy_and_size_on_the_real_sample(criteo_sample, tmp_path, seed):
    build(CriteoText([criteo_sample]), tmp_path / "data", Options(threshold=2))
    found = manifest.read(tmp_path / "data")
    counts = manifest.read_counts(tmp_path / "data", found)
    reader = ShardReader(tmp_path / "data", found, "train")
    batches = list(itertools.islice(reader.batches(1000, seed=seed, epoch=1), 30))

    def result(depth, **cache):
        spec = CacheSpec(**cache, counts=counts) if cache else None
        model = WideDeep(found.schema, 8, seed=seed)
        device = torch.device("cpu")
        trainer = make_trainer(model, host_device_mix=True, device=device, seed=seed, depth=depth, cache=spec)
        losses = [tuple(step.value) for step in trainer.train(batches)]
        return losses, trainer.state_sha256()

    expected = result(0)
    for policy, size, depth in itertools.product(POLICIES, SIZES, (0, 2)):
        assert result(depth, policy=policy, rows=size) == expected, (policy, size, depth)
