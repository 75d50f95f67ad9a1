"""A model over host tables against its plain torch twin: the losses of 50 steps, and what is predicted then."""

import dataclasses

import numpy as np
import pytest
import torch

from hostdev.core.optimizers import FTRL, SGD, Adagrad, LazyAdam, RowWiseAdagrad
from hostdev.host.table import HostTable
from tests.models.host_run import HostRun
from tests.models.samples import batch_of, schema_of
from tests.models.twins import Twin, train_twin

DIM, STEPS, SIZE = 8, 50, 200
OPTIMIZERS = [LazyAdam(lr=2e-3, nesterov=True), FTRL(l1=1e-3, l2=1e-3), SGD(lr=0.1), Adagrad(initial_accum=0.1),
              RowWiseAdagrad(initial_accum=0.1)]  # fmt: skip


def compare(name, schema, batches, dim, *, optimizer=None):
    """Losses within 1e-5; then logits, in which Adam's steps on gradients near 0 show more of the rounding."""
    run = HostRun(name, schema, dim, 1, optimizer=copy_of(optimizer))
    losses, predict = train_twin(name, schema, batches, dim, 1, optimizer=copy_of(optimizer))
    found = [run.step(batch) for batch in batches]
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    logits = predict(batches[0])
    np.testing.assert_allclose(run.predict(batches[0]), logits, atol=1e-3 * np.abs(logits).max())
    return found


def copy_of(optimizer):
    return None if optimizer is None else dataclasses.replace(optimizer)


@pytest.mark.parametrize("name", ["wide_deep", "deepfm", "dlrm", "dcn"])
def test_a_model_over_host_tables_follows_its_twin(name):
    schema = schema_of(dense=3, ids=4, bags=2)
    losses = compare(name, schema, [batch_of(schema, SIZE, seed) for seed in range(STEPS)], DIM)
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.01


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: type(optimizer).__name__)
def test_every_table_optimizer_follows_its_twin(optimizer):
    schema = schema_of(dense=3, ids=4, bags=1)
    compare("deepfm", schema, [batch_of(schema, SIZE, seed) for seed in range(STEPS)], DIM, optimizer=optimizer)


def test_the_twin_starts_from_the_host_tables_values():
    schema = schema_of()
    twin = Twin("wide_deep", schema, DIM, 5)
    for name, (columns, optimizer) in {"wide": (1, FTRL()), "deep": (DIM, LazyAdam())}.items():
        table = HostTable(schema.rows, columns, optimizer, name=name, seed=5)
        np.testing.assert_array_equal(twin.tables[name].detach(), table.weights)
        slots = zip(twin.slots[name].values(), table.slots.values(), strict=True)
        assert all(np.array_equal(one, other) for one, other in slots)


def test_the_twin_notices_an_error(monkeypatch):
    """A step with one wrong row is no longer within what the comparison lets pass."""
    schema = schema_of()
    batches = [batch_of(schema, SIZE, seed) for seed in range(5)]
    original = HostTable.apply
    monkeypatch.setattr(HostTable, "apply", lambda table, ids, grads: original(table, ids, 1.01 * grads))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare("deepfm", schema, batches, DIM, optimizer=SGD(lr=0.1))


def test_rows_that_a_batch_does_not_use_stay():
    schema = schema_of(values=200)
    twin = Twin("dcn", schema, DIM, 1)
    batch = batch_of(schema, 20)
    before = twin.tables["vectors"].detach().clone()
    twin.step(batch)
    changed = set(torch.nonzero((twin.tables["vectors"].detach() != before).any(1)).ravel().tolist())
    assert changed == set(batch.ids.ravel().tolist()) | set(batch.bags["b0"][0].tolist())
