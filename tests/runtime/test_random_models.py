"""Random models over random tables, caches, depths and delays have the bits of a serial loop over host tables."""

import random
import time
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import clip_grad_norm_

import hostdev
from hostdev import Bag, CacheSpec, DeviceTable, Feature, HostTable, Runtime
from hostdev.pipeline.context import PipelineHooks
from tests.conftest import devices
from tests.runtime.cases import ROWS, Case, batches_of, bits, differing, tables_state

OPTIMIZERS = [
    hostdev.LazyAdam,
    hostdev.FTRL,
    hostdev.SGD,
    hostdev.Adagrad,
    hostdev.RowWiseAdagrad,
    hostdev.RowWiseAdam,
    hostdev.Momentum,
]
STAGES = ["read", "unique", "plan", "lookup", "send", "step", "lookup late", "update"]


class TableDraw(NamedTuple):
    """A table, and where it is in the run that is compared."""

    rows: int
    dim: int
    optimizer: type
    on_device: bool
    cache: CacheSpec | None  # of its group, where it has the first say


class FeatureDraw(NamedTuple):
    """A feature, and what its ids look like."""

    tables: tuple[int, ...]
    pooling: str | None
    padding: int | None
    dtype: str
    kind: str  # of ids: "one", "some", "bags"
    weighted: bool


class Draw(NamedTuple):
    """A model, its batches and the ways of the run that is compared."""

    seed: int
    tables: list[TableDraw]
    features: list[FeatureDraw]
    depth: int
    batches: int
    skipped: set[int]
    unused: set[tuple[int, int]]  # batches and features that are not in the loss
    together: int
    clip: bool
    unique: bool
    delays: dict[str, float]


@st.composite
def models(draw):
    number = draw(st.integers(1, 5))
    spec = st.builds(
        CacheSpec,
        st.sampled_from(["5%", "30%", "100%", 0, 3]),
        st.sampled_from(["lookahead", "lru", "lfu"]),
        st.integers(0, 5),
    )
    rows = st.sampled_from([1, 7, 30, 30, 30, 60])
    table = st.builds(
        TableDraw,
        rows,
        st.integers(1, 5),
        st.sampled_from(OPTIMIZERS),
        st.sampled_from([False] * 4 + [True]),
        st.none() | spec | spec,
    )
    tables = draw(st.lists(table, min_size=number, max_size=number))
    feature = st.builds(
        FeatureDraw,
        st.lists(st.integers(0, number - 1), min_size=1, max_size=3, unique=True).map(tuple),
        st.sampled_from([None, "sum", "mean"]),
        st.sampled_from([None, None, -1, 0]),
        st.sampled_from(["float32"] * 3 + ["bfloat16"]),
        st.sampled_from(["one", "some", "bags"]),
        st.booleans(),
    )
    features = draw(st.lists(feature, min_size=1, max_size=6))
    batches = draw(st.integers(1, 9))
    at = st.integers(0, batches - 1)
    return Draw(
        draw(st.integers(0, 2**20)),
        tables,
        features,
        draw(st.integers(0, 4)),
        batches,
        draw(st.sets(at, max_size=3)),
        draw(st.sets(st.tuples(at, st.integers(0, len(features) - 1)), max_size=4)),
        draw(st.sampled_from([1, 1, 1, 2, 3])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.dictionaries(st.sampled_from(STAGES), st.sampled_from([0.0005, 0.003]), max_size=3)),
    )


def ids_of(rng, feature, limit):
    """A batch's ids of a feature, of which many are small, so that batches share them."""

    def values(*shape):
        out = np.minimum(rng.geometric(0.15, shape) - 1, rng.integers(0, limit, shape)).astype(rng.choice(["i4", "i8"]))
        if feature.padding is not None:
            out[rng.random(shape) < 0.2] = feature.padding
        return out

    size = int(rng.integers(0, 9))
    if feature.kind == "bags":
        lengths = rng.integers(0, 4, size)
        at = values(lengths.sum())
        return Bag(at, lengths, weights=rng.random(len(at), np.float32) if feature.weighted else None)
    at = values(size) if feature.kind == "one" else values(size, 3)
    return Bag(at, weights=rng.random(at.shape, np.float32) if feature.weighted else None)


def run(draw, device, *, reference):
    """Train, and return everything that must not depend on where and when it was done."""
    rng = np.random.default_rng(draw.seed)
    tables = []
    used = {at for feature in draw.features for at in feature.tables}
    for number, one in enumerate(draw.tables):
        arguments = {"name": f"t{number}", "init": hostdev.Normal(0.5), "seed": draw.seed}
        optimizer = one.optimizer(lr=0.1)
        if one.on_device and not reference:
            tables.append(DeviceTable(one.rows, one.dim, optimizer, device, **arguments))
        else:
            tables.append(HostTable(one.rows, one.dim, optimizer, **arguments))
    features = {}
    for number, one in enumerate(draw.features):
        of = tuple(tables[at] for at in one.tables)
        features[f"f{number}"] = Feature(of if len(of) > 1 else of[0], one.pooling, one.padding, one.dtype)
    limits = [min(draw.tables[at].rows for at in one.tables) for one in draw.features]
    batches = [
        {f"f{n}": ids_of(rng, one, limit) for n, (one, limit) in enumerate(zip(draw.features, limits, strict=True))}
        for _ in range(draw.batches)
    ]
    noise = random.Random(draw.seed)

    def hold_up(stage, number):
        time.sleep(draw.delays.get(stage, 0.0) * noise.random())

    options = {"depth": 0} if reference else {"depth": draw.depth, "hooks": PipelineHooks(before_stage=hold_up)}
    runtime = Runtime(features, device=device, **options)
    if not reference:
        caches = {}
        for group in runtime.group_specs:
            first = draw.tables[int(group.tables[0].name[1:])]
            if first.cache is not None and group.tables[0].primitive_target == "CPU":
                caches[group.tables[0].name] = first.cache
        runtime = Runtime(features, device=device, cache=caches or None, **options)
    scales = nn.Parameter(torch.ones(len(features), device=device))
    adam, losses = torch.optim.Adam([scales], lr=0.05), []
    for _, rows in runtime.train(batches, accumulate=draw.together):
        batch = draw_number = (rows.step - 1) * draw.together + len(losses) % draw.together
        losses.append(None)
        if draw_number not in draw.skipped:
            loss = (scales * 0).sum()
            for number, name in enumerate(features):
                if (batch, number) not in draw.unused:
                    parts = rows[name] if isinstance(rows[name], tuple) else (rows[name],)
                    loss = loss + scales[number] * sum(part.float().sin().sum() for part in parts) / 8
            if draw.unique:
                values, counts = rows.unique(tables[min(used)].name)
                loss = loss + 0.01 * (values.square().sum(1) * counts).sum()
            loss.backward()
            losses[-1] = bits(loss)
            if draw.clip and rows.is_due:
                clip_grad_norm_([scales, *rows.parameters()], 1.0)
        if rows.is_due and scales.grad is not None:
            adam.step()
            adam.zero_grad()
    assert len(losses) == draw.batches
    state = tables_state(tables) | {"scales": bits(scales)}
    state |= {("adam", name): bits(torch.as_tensor(value)) for name, value in adam.state[scales].items()}
    return state | {("loss", number): value for number, value in enumerate(losses)}


def check(draw, device):
    assert differing(run(draw, device, reference=False), run(draw, device, reference=True)) == []


QUIET = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


# One of three tables that a feature names lies on the device, and so in another group: the norm of a clip is the same.
_PLAIN = TableDraw(1, 1, hostdev.LazyAdam, False, None)
_CLIPPED = Draw(
    0,
    [_PLAIN, _PLAIN._replace(on_device=True), _PLAIN, _PLAIN._replace(rows=7)],
    [FeatureDraw((0, 3, 1), None, None, "float32", "one", weighted) for weighted in (False, True)],
    0,
    1,
    set(),
    set(),
    1,
    True,
    False,
    {},
)


@example(_CLIPPED)
@settings(max_examples=12 if devices() == ["standin"] else 25, **QUIET)
@given(models())
def test_any_model_has_the_bits_of_a_serial_loop(device, draw):
    check(draw, device)


@pytest.mark.slow
@settings(max_examples=200, **QUIET)
@given(models())
def test_any_model_has_the_bits_of_a_serial_loop_200_examples(device, draw):
    check(draw, device)


@pytest.mark.slow_on_standin
@pytest.mark.parametrize("cache", [None, "lru"])
@pytest.mark.parametrize("group", range(4))
def test_a_hazard_that_is_not_seen_is_found(device, group, cache):
    """In each group alone: rows that are looked up before their update are other rows."""
    batches, name = batches_of(8), list(ROWS)[group]
    wanted = Case(device, options={"depth": 0}).train(batches).state()

    def hold_up(stage, number):
        time.sleep(0.01 * (stage == "update"))

    for ignored, found in (([], False), ([group], True)):
        options = {"depth": 3, "hooks": PipelineHooks(ignore_hazards=ignored, before_stage=hold_up)}
        options["cache"] = None if cache is None else {name: CacheSpec(3, cache)}
        wrong = differing(Case(device, options=options).train(batches).state(), wanted)
        assert ((name, "weights") in wrong) == found
        assert bool(wrong) == found


def test_staleness_is_found(device):
    batches = batches_of(8)

    def hold_up(stage, number):
        time.sleep(0.01 * (stage == "update"))

    options = {"depth": 3, "hooks": PipelineHooks(staleness=2, before_stage=hold_up)}
    wrong = differing(Case(device, options=options).train(batches).state(), Case(device).train(batches).state())
    assert {(name, "weights") for name in ROWS} <= set(wrong)
