"""A model over host tables against plain torch: the losses of 50 steps, and the predictions afterwards."""

import dataclasses

import numpy as np
import pytest
import torch

from hostdev.core.optimizers import FTRL, SGD, Adagrad, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam
from hostdev.host.table import HostTable
from tests.models.host_run import HostRun
from tests.models.samples import SMALL, batch_of, schema_of
from tests.models.twins import Twin, train_twin

DIM, STEPS, SIZE = 8, 50, 200
OPTIMIZERS = [
    LazyAdam(lr=2e-3, nesterov=True),
    FTRL(l1=1e-3, l2=1e-3),
    SGD(lr=0.1),
    Adagrad(initial_accum=0.1),
    RowWiseAdagrad(initial_accum=0.1),
    RowWiseAdam(lr=2e-3),
    Momentum(lr=0.02, nesterov=True),
]


def batches_of(schema, steps):
    return [batch_of(schema, SIZE, seed) for seed in range(steps)]


def compare(name, schema, batches, *, optimizer=None, network="module"):
    """Losses within 1e-5 at every step, and then predictions."""
    optimizers = [None if optimizer is None else dataclasses.replace(optimizer) for _ in range(2)]
    run = HostRun(name, schema, DIM, 1, optimizer=optimizers[0], **SMALL[name])
    losses, predict = train_twin(name, schema, batches, DIM, 1, optimizer=optimizers[1], network=network, **SMALL[name])
    found = [run.step(batch) for batch in batches]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    logits = predict(batches[0])
    np.testing.assert_allclose(run.predict(batches[0]), logits, atol=1e-4 * np.abs(logits).max())
    return found


@pytest.mark.parametrize("name", SMALL)
def test_a_model_over_host_tables_follows_its_twin(name):
    schema = schema_of(dense=3, ids=4, bags=0)
    losses = compare(name, schema, batches_of(schema, STEPS))
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.005


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_every_table_optimizer_follows_its_twin(optimizer):
    schema = schema_of(dense=3, ids=4, bags=0)
    compare("deepfm", schema, batches_of(schema, STEPS), optimizer=optimizer)


@pytest.mark.parametrize("name", SMALL)
def test_bags_and_the_papers_network(name):
    """A few steps: means of bags and loops over pairs round differently, and training amplifies that."""
    schema = schema_of(dense=3, ids=4, bags=2)
    compare(name, schema, batches_of(schema, 5), network="paper")


def test_the_twin_starts_from_the_host_tables_values():
    schema = schema_of()
    twin = Twin("wide_deep", schema, DIM, 5)
    for name, (columns, optimizer) in {"wide": (1, FTRL()), "deep": (DIM, LazyAdam())}.items():
        table = HostTable(schema.rows, columns, optimizer, name=name, seed=5)
        np.testing.assert_array_equal(twin.tables[name].detach(), table.weights)
        slots = zip(twin.slots[name].values(), table.slots.values(), strict=True)
        assert all(np.array_equal(one, other) for one, other in slots)


def test_the_twin_notices_an_error(monkeypatch):
    """The comparison detects a step with one wrong row."""
    schema = schema_of()
    batches = batches_of(schema, 5)
    original = HostTable.apply
    monkeypatch.setattr(HostTable, "apply", lambda table, ids, grads: original(table, ids, 1.01 * grads))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare("deepfm", schema, batches, optimizer=SGD(lr=0.1))


def test_rows_that_a_batch_does_not_use_stay():
    schema = schema_of(values=200)
    twin = Twin("dcn", schema, DIM, 1)
    batch = batch_of(schema, 20)
    before = twin.tables["vectors"].detach().clone()
    twin.step(batch)
    changed = set(torch.nonzero((twin.tables["vectors"].detach() != before).any(1)).ravel().tolist())
    assert changed == set(batch.ids.ravel().tolist()) | set(batch.bags["b0"][0].tolist())
