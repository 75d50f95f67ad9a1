"""Several labels, numbers as labels, and weights: losses of plain torch, a batch in parts, refusals."""

import numpy as np
import pytest
import torch

from hostdev.core.errors import UserError
from hostdev.data.schema import Schema, Targets
from hostdev.models import make, names
from hostdev.models.model import TargetLoss
from hostdev.train.target_scores import Errors
from tests.models.samples import SMALL, batch_of, schema_of
from tests.models.twins import train_twin
from tests.trainers import make_trainer

SEVERAL = Targets(more=("buy", "stars"), numeric=("stars",), weight="w")
TARGETS = {
    "two labels": Targets(more=("buy",)),
    "labels, a number, weights": SEVERAL,
    "a number": Targets(numeric=("label",)),
    "weights": Targets(weight="w"),
}
CASES = [(name, targets) for name in ("shared_bottom", "mmoe") for targets in TARGETS]
CASES += [("deepfm", "a number"), ("wide_deep", "weights")]


def trainer_of(name, schema, *, mix=True, **options):
    model = make(name, schema, 8, seed=1, **SMALL[name])
    device = torch.device("cpu")
    return make_trainer(model, host_device_mix=mix, device=device, seed=1, schema=schema, **options)


@pytest.mark.parametrize(("name", "targets"), CASES)
def test_50_steps_of_plain_torch(name, targets):
    schema = schema_of(dense=3, ids=4, bags=0, targets=TARGETS[targets])
    batches = [batch_of(schema, 200, seed) for seed in range(50)]
    losses, _ = train_twin(name, schema, batches, 8, 1, **SMALL[name])
    trainer = trainer_of(name, schema, depth=2)
    found = [result.value.wide for result in trainer.train(batches)]
    np.testing.assert_allclose(found[:20], losses[:20], rtol=1e-5)
    np.testing.assert_allclose(found, losses, rtol=1e-4)  # rounding differs by processor, and grows with the steps
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


def test_a_batch_in_parts():
    schema = schema_of(dense=3, ids=4, bags=2, targets=SEVERAL)
    batches = [batch_of(schema, 60, seed) for seed in range(6)]

    def losses(micro_batches):
        trainer = trainer_of("mmoe", schema, depth=2, micro_batches=micro_batches)
        return [result.value.wide for result in trainer.train(batches)]

    np.testing.assert_allclose(losses(3), losses(1), rtol=1e-4)


def test_the_evaluation_has_figures_for_each_label():
    schema = schema_of(targets=SEVERAL)
    batches = [batch_of(schema, 60, seed) for seed in range(6)]
    trainer = trainer_of("mmoe", schema)
    found = trainer.evaluate(batches)
    assert [np.isfinite(each).tolist() for each in found.labels] == [[True, True, False, False]] * 2 + [
        [False, False, True, True]
    ]
    assert found.auc == pytest.approx(np.mean([each.auc for each in found.labels[:2]]))
    assert (found.rmse, found.mae) == (found.labels[2].rmse, found.labels[2].mae)
    assert type(found).from_values(found.as_values())[:5] == found[:5]
    assert found.metric == "AUC"


@pytest.mark.parametrize("sizes", [(7, 100), (1, 1000)])
def test_errors_of_numbers(sizes):
    """RMSE and MAE of NumPy, the same for any cuts and any order of `add` calls."""
    rng = np.random.default_rng(3)
    predictions, labels = rng.normal(size=(2, 1000)).astype(np.float32)
    block, step = sizes
    found = Errors(block)
    for start in range(0, 1000, step):
        found.add(predictions[start : start + step], labels[start : start + step])
    wrong = predictions.astype(np.float64) - labels
    figures = found.figures()
    np.testing.assert_allclose([figures.rmse, figures.mae], [np.sqrt(np.mean(wrong**2)), np.mean(np.abs(wrong))])
    whole = Errors(block)
    whole.add(predictions, labels)
    np.testing.assert_equal(whole.figures(), figures)
    whole = Errors(block)
    whole.add(np.float32([np.inf, 1]), np.float32([0, 1]))
    assert whole.figures().not_finite == 1


@pytest.mark.parametrize("name", sorted(set(names()) - {"shared_bottom", "mmoe"}))
def test_models_of_one_label_refuse_several(name):
    with pytest.raises(UserError, match=r"predicts one label, but the data has 2: label, buy; use --model"):
        make(name, schema_of(targets=Targets(more=("buy",))), 8, seed=1)


def test_outputs_of_another_shape_are_refused():
    loss = TargetLoss(("click", "buy"), Targets(more=("buy",)))
    with pytest.raises(UserError, match=r"outputs of shape \[4\] for labels of shape \[4, 2\] \(click, buy\)"):
        loss(torch.zeros(4), torch.zeros(4, 2))
    with pytest.raises(UserError, match=r"outputs of shape \[4, 1\] for labels of shape \[4\]"):
        TargetLoss()(torch.zeros(4, 1), torch.zeros(4))


def test_a_schema_names_each_target_once():
    with pytest.raises(ValueError, match="'x' occurs twice"):
        Schema("x", (), (), (), 0, Targets(more=("x",)))
    with pytest.raises(ValueError, match="'z' is not a label"):
        Schema("x", (), (), (), 0, Targets(numeric=("z",)))
