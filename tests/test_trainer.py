"""The training step: a plain torch twin, equal bits in every mode, what a non-finite loss leaves alone."""

import itertools

import numpy as np
import pytest
import torch

from hostdev import UserError
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.data.shards import ShardReader
from hostdev.models.wide_deep.network import LAYERS, WideDeep
from hostdev.train.trainer import Trainer
from tests.fields import SMALL
from tests.torch_twin import Twin

CPU = torch.device("cpu")


def make(schema, dim=8, *, mix=True, l2="none", precision="fp32", seed=3, lr=None, device=CPU):
    large = device.type == "cpu" and precision == "fp32"  # others are slow, and see no more in a large network
    model = WideDeep(schema, dim, seed=seed, layers=LAYERS if large else SMALL)
    return Trainer(model, host_device_mix=mix, device=device, l2=l2, precision=precision, seed=seed, lr=lr)


def step(trainer, batch):
    """One training step, from the batch to the updated rows; returns the losses."""
    [result] = trainer.train([batch])
    return result.value


def batches(folder, size, count):
    found = manifest.read(folder)
    reader = ShardReader(folder, found, "train")
    epochs = itertools.chain.from_iterable(reader.batches(size, seed=1, epoch=epoch) for epoch in itertools.count(1))
    return found.schema, list(itertools.islice(epochs, count))


def fields(trainer, batch):
    """The ids [B, F] and weights [B, F] of all columns."""
    bag = trainer.model.ids(batch)["fields"]
    return bag.values, bag.weights


def compare_with_twin(folder, size, count, dim, l2, device=CPU):
    rows, steps = batches(folder, size, count)
    trainer = make(rows, dim, l2=l2, device=device)
    dense = {name: value.detach().cpu().numpy() for name, value in trainer.model.named_parameters()}
    twin = Twin(trainer.tables["wide"].weights, trainer.tables["deep"].weights, dense, l2)
    for number, batch in enumerate(steps, 1):
        ours = step(trainer, batch)
        theirs = twin.step(*map(torch.from_numpy, (*fields(trainer, batch), batch.label)))
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, err_msg=f"step {number}")
    assert twin.t == trainer.tables["deep"].step == count


@pytest.mark.parametrize("l2", ["none", pytest.param("batch", marks=pytest.mark.slow_on_standin), "table"])
def test_losses_equal_a_plain_torch_twins(device, small_data, l2):
    compare_with_twin(small_data, 256, 50, 16, l2, device=device)


@pytest.mark.slow
def test_losses_equal_a_plain_torch_twins_on_the_real_sample(criteo_sample, tmp_path):
    build(CriteoText([criteo_sample]), tmp_path / "data", Options(threshold=10))
    compare_with_twin(tmp_path / "data", 1000, 50, 80, "none")


def test_a_rate_of_zero_is_a_rate(small_data):
    rows, steps = batches(small_data, 256, 2)
    trainer = make(rows, 4, lr=0.0)
    before = [value.clone() for value in trainer.model.parameters()]
    for batch in steps:
        step(trainer, batch)
    assert all(map(torch.equal, before, trainer.model.parameters()))


def test_the_gap_of_the_reference_log(tmp_path):
    """--l2 batch, batch 16000: 8e-5 / 2 * 16000 * 39 * 80 * 0.01^2 = 0.1997."""
    build(Synthetic(18_000, 1), tmp_path / "data", Options())
    rows, [batch] = batches(tmp_path / "data", 16_000, 1)
    losses = step(make(rows, 80, l2="batch"), batch)
    assert losses.deep - losses.wide == pytest.approx(0.1997, rel=0.01)


@pytest.mark.parametrize("mix", [True, False])
def test_a_loss_that_is_not_finite_changes_nothing(device, small_data, mix):
    rows, steps = batches(small_data, 100, 2)
    trainer = make(rows, mix=mix, device=device)
    step(trainer, steps[0])
    before = trainer.state_sha256()
    dense = steps[1].dense.copy()
    dense[5, 2] = np.nan
    with pytest.raises(UserError, match="the loss is not finite .*no row was updated"):
        step(trainer, Batch(steps[1].label, dense, steps[1].ids, {}))
    assert trainer.state_sha256() == before


def test_evaluation_changes_nothing_and_counts_every_row(device, small_data):
    rows, steps = batches(small_data, 100, 3)
    trainer = make(rows, device=device)
    before = trainer.state_sha256()
    evaluation = trainer.evaluate(steps)
    assert evaluation.rows == 300
    assert trainer.state_sha256() == before
    assert trainer.evaluate([]) is None


def test_the_digest_sees_every_part(device, small_data):
    rows, steps = batches(small_data, 100, 1)
    trainer = make(rows, device=device)
    step(trainer, steps[0])
    digests = [trainer.state_sha256()]
    adam_state = trainer.adam.state[trainer.model.bias]
    places = ("deep", "weights", -1), ("wide", "weights", -1), ("deep", "m", 0), ("wide", "linear", 0)
    for name, column, row in places:
        with trainer.tables[name].writing() as w:
            (w.weights if column == "weights" else w.slots[column])[row] += 1
        digests.append(trainer.state_sha256())
    for values in (trainer.model.bias.data, adam_state["exp_avg_sq"]):
        values += 1
        digests.append(trainer.state_sha256())
    trainer.tables["deep"].step += 1
    digests.append(trainer.state_sha256())
    assert len(set(digests)) == len(digests)


def test_targets_follow_the_mode(device, small_data):
    rows, _ = batches(small_data, 100, 1)
    for mix, target in [(True, "CPU"), (False, "DEVICE")]:
        trainer = make(rows, mix=mix, device=device)
        [group] = trainer.runtime.pipeline.groups
        for embedding in group.embeddings:
            assert embedding.table.primitive_target == target
            assert embedding.lookup.primitive_target == embedding.update.primitive_target == target
        assert list(trainer.server) == (["deep", "wide"] if mix else [])


def test_rows_that_no_batch_uses_do_not_change(device, small_data):
    rows, steps = batches(small_data, 50, 2)
    trainer = make(rows, l2="table", device=device)
    before = trainer.tables["deep"].block.copy()
    for batch in steps:
        step(trainer, batch)
    changed = np.flatnonzero((trainer.tables["deep"].block != before).any(axis=(1, 2)))
    used = np.unique(np.concatenate([fields(trainer, batch)[0] for batch in steps]))
    assert set(changed) == set(used)


def test_predictions_that_are_not_finite_are_no_auc(device, small_data):
    rows, steps = batches(small_data, 100, 1)
    trainer = make(rows, device=device)
    dense = steps[0].dense.copy()
    dense[5, 2] = np.inf
    with pytest.raises(UserError, match="1 of 100 predictions are not finite"):
        trainer.evaluate([Batch(steps[0].label, dense, steps[0].ids, {})])


def test_bf16_stays_close_to_fp32(device, small_data):
    rows, steps = batches(small_data, 300, 10)
    trainers = [make(rows, 16, precision=precision, device=device) for precision in ("fp32", "bf16")]
    losses = np.array([[step(trainer, batch).wide for batch in steps] for trainer in trainers])
    assert not np.array_equal(*losses)
    np.testing.assert_allclose(*losses, rtol=0.01)
    assert all(parameter.dtype == torch.float32 for parameter in trainers[1].model.parameters())
