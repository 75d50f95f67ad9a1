"""--cache-rows auto: choose a cache as `advise` does, from the first batches and the memory a step leaves free."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from hostdev.cache.options import AUTO, POLICIES, WINDOW
from hostdev.cache.planner import planner_bytes
from hostdev.core.errors import UserError
from hostdev.core.memory import available_bytes, cache_room, format_bytes
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader
from hostdev.device.backend import describe, is_accelerator
from hostdev.device.clock import measure
from hostdev.distributed.world import World
from hostdev.ext.advice.curves import (
    CachePoint,
    Curves,
    TableGroup,
    Trial,
    choose_sizes,
    format_size,
    gains,
    make_curves,
    measure_groups,
    read_unique,
    recommend,
    require_plan,
    run_passes,
)
from hostdev.ext.advice.simulation import SimulatedCache, UniqueIds
from hostdev.kernels.pool import set_host_threads
from hostdev.models.model import Model
from hostdev.runtime.spec import CacheSpec
from hostdev.train.build import device_of, known_counts, model_of
from hostdev.train.options import TrainConfig
from hostdev.train.room import estimate_host_memory, measure_free_after_step

# The simulation reads 48 to 256 batches, if there are so many; from the 48th on, it stops once it has read 2**24 ids.
_LEAST_BATCHES, _MOST_BATCHES, _MOST_IDS = 48, 256, 1 << 24
_SAMPLE = 1000  # samples in the batch from which the shapes of the model's inputs are read

Config = TypeVar("Config", bound=TrainConfig)
Sampled = list[UniqueIds]  # for each batch, a group's unique ids and their uses


def choose_cache(settings: Config, data: Path, found: Manifest, world: World) -> tuple[Config, list[str]]:
    """Replace --cache-rows auto by a number of rows and a policy; return the settings, and lines about the choice.

    All ranks must call this. Rank 0 chooses, for the device with the least free memory.
    """
    if settings.cache_rows != AUTO:
        return settings, []
    assert settings.batch_size is not None
    if settings.host_threads is not None:
        set_host_threads(settings.host_threads)
    model, device = model_of(settings, found.schema), device_of(settings.device, tf32=settings.tf32)
    reader = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
    reader.require(settings.batch_size)
    groups = measure_groups(model, reader, settings.batch_size, settings.seed)
    batches = _sample(model, groups, reader, settings)
    room = _room(settings, model, found, reader, device, groups, batches, world)
    rooms = world.control.share(room)
    room = min(rooms) * len(rooms)  # each rank caches its part of the rows
    choice: Any = None
    if world.rank == 0:
        counts: list[Any] = [None] * len(groups)
        counts[0] = known_counts(model, data, found, reader)
        curves = _simulate(settings, groups, batches, counts, room, device)
        chosen = recommend(curves, room) if curves else None
        line = _line(chosen, room, device, len(batches[0]))
        choice = [format_size(chosen[1], world.size), chosen[0], line] if chosen is not None else ["0", None, line]
    rows, policy, line = world.control.share(choice)[0]
    window = settings.cache_window if policy == POLICIES[0] else None
    return replace(settings, cache_rows=rows, cache_policy=policy, cache_window=window).resolved(), [line]


def _sample(model: Model, groups: Sequence[TableGroup], reader: ShardReader, settings: TrainConfig) -> list[Sampled]:
    """Return, for each group, the unique ids of the first training batches and how often they occur."""
    assert settings.batch_size is not None
    sampled: list[Sampled] = [[] for _ in groups]
    ids = 0
    batches = read_unique(model, groups, reader, settings.batch_size, settings.seed)
    for batch in itertools.islice(batches, _MOST_BATCHES):
        for one, mine in zip(batch, sampled, strict=True):
            mine.append(one)
            ids += int(one[1].sum())
        if ids > _MOST_IDS and len(sampled[0]) >= _LEAST_BATCHES:
            break
    return sampled


def _room(
    settings: TrainConfig,
    model: Model,
    found: Manifest,
    reader: ShardReader,
    device: torch.device,
    groups: Sequence[TableGroup],
    batches: Sequence[Sampled],
    world: World,
) -> int:
    """Return the bytes that are free for a cache on this process's device."""
    assert settings.batch_size is not None
    shares = world.share()[1]
    if not is_accelerator(device):
        most = CacheSpec("100%", window=WINDOW if settings.cache_window is None else settings.cache_window)
        part = world.part()
        uses = -(-max(sum(int(uses.sum()) for _, uses in each) for each in zip(*batches, strict=True)) // shares)
        kept = estimate_host_memory(
            model, most, part, device, depth=settings.pipeline_depth, uses=uses, saves=settings.saves
        )
        counts = 0 if found.vocabulary is None else 8 * found.schema.rows  # read to make the choice, and kept in memory
        return max(0, available_bytes() - counts - sum(kept.values()) + kept.get("cached rows", 0))
    [sample] = itertools.islice(reader.batches(_SAMPLE), 1)
    autocast = torch.bfloat16 if settings.precision == "bf16" else None
    samples = -(-settings.batch_size // settings.micro_batches)
    left = measure_free_after_step(model, sample, samples, device, autocast)
    if left is None:
        raise UserError(
            f"--cache-rows auto: torch does not report the free memory of {describe(device)}; give a number of rows"
        )
    step = sum(
        group.passing * max((len(ids) for ids, _ in mine), default=0)
        for group, mine in zip(groups, batches, strict=True)
    )
    return cache_room(left, (settings.pipeline_depth + 3) * step // shares)


def _simulate(
    settings: TrainConfig,
    groups: list[TableGroup],
    batches: Sequence[Sampled],
    counts: Sequence[Any],
    room: int,
    device: torch.device,
) -> Curves:
    """Simulate the caches that fit, on the sampled batches.

    Only one cache is simulated at a time, because each plan takes memory for all rows.
    """
    policies = [settings.cache_policy] if settings.cache_policy is not None else [POLICIES[0], "static"]
    policies = [policy for policy in policies if policy != "static" or all(each is not None for each in counts)]
    window = WINDOW if settings.cache_window is None else settings.cache_window
    sizes = [
        mine
        for mine in zip(*choose_sizes(groups, room), strict=True)
        if sum(size * group.whole for size, group in zip(mine, groups, strict=True)) <= room
    ]
    if not sizes or not policies:
        return {}
    steps = len(batches[0])
    require_plan(
        max(
            planner_bytes(group.rows, size, max(len(ids) for ids, _ in sampled), window, batches=steps)
            for group, size, sampled in zip(groups, sizes[-1], batches, strict=True)
        )
    )
    by_group = [list(mine) for mine in zip(*sizes, strict=True)]

    def make(trial: Trial) -> SimulatedCache:
        group, size = groups[trial.group], by_group[trial.group][trial.number]
        return SimulatedCache(group.rows, size, trial.policy, steps, window, counts[trial.group], group.costs)

    passes = [[Trial(*trial)] for trial in itertools.product(policies, range(len(sizes)), range(len(groups)))]
    ended = run_passes(passes, make, lambda: zip(*batches, strict=True), steps, "choosing a cache")
    return make_curves(groups, by_group, ended, measure(device))


def _line(chosen: tuple[str, CachePoint] | None, room: int, device: torch.device, batches: int) -> str:
    """Return a line that explains the choice."""
    where = f"{format_bytes(room)} that a dense step leaves free on {describe(device)}"
    if not is_accelerator(device):
        where = f"{format_bytes(room)} of host memory that the tables leave free"
    if chosen is None:
        return f"cache    auto: none; no cache that fits in the {where} makes a step shorter"
    policy, point = chosen
    return (
        f"cache    auto: {point.rows:,} rows, {policy}, {format_bytes(point.nbytes)} of the {where}; "
        f"over {batches} batches, {gains(point)}"
    )
