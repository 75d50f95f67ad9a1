"""Training like `hostdev.train`: plain torch's losses on real samples, and what draws."""

import itertools

import numpy as np
import pytest
import torch

from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.shards import ShardReader
from hostdev.models import make, names
from hostdev.train import scores
from tests.models.samples import SMALL, batch_of, schema_of
from tests.models.twins import Twin, train_twin
from tests.trainers import make_trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def real(criteo_sample, tmp_path_factory):
    """Return the real data's schema, and a function from a split to batches of 1,000."""
    folder = tmp_path_factory.mktemp("real") / "data"
    build(CriteoText([criteo_sample]), folder, Options(threshold=10, dense="log"))
    found = manifest.read(folder)

    def batches(split, **order):
        return ShardReader(folder, found, split).batches(1000, **order)

    return found.schema, batches


def trainer_of(name, schema, dim, device=CPU, *, mix=True, options=None, **others):
    model = make(name, schema, dim, seed=1, **(options or {}))
    return make_trainer(model, host_device_mix=mix, device=device, seed=1, **others)


@pytest.mark.parametrize("name", names())
def test_50_steps_on_real_rows(real, name):
    schema, batches_of = real
    batches = list(itertools.islice(batches_of("train", seed=2020), 50))
    losses, predict = train_twin(name, schema, batches, 8, 1, **SMALL[name])
    trainer = trainer_of(name, schema, 8, depth=2, options=SMALL[name])
    np.testing.assert_allclose([result.value.wide for result in trainer.train(batches)], losses, rtol=1e-5)
    rows = batches[:5]
    labels = np.concatenate([batch.label for batch in rows])
    auc = scores.auc(np.concatenate([predict(batch) for batch in rows]), labels)
    assert trainer.evaluate(rows).auc == pytest.approx(auc, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least"), [("wide_deep", 0.750), ("deepfm", 0.750), ("dlrm", 0.753), ("dcn", 0.756)])
def test_two_epochs_on_real_rows(real, name, least):
    schema, batches_of = real
    trainer, twin = trainer_of(name, schema, 16, depth=2), Twin(name, schema, 16, 1)
    for epoch in range(2):
        for batch in batches_of("train", seed=2020, epoch=epoch):
            twin.step(batch)
        for result in trainer.train(batches_of("train", seed=2020, epoch=epoch)):
            assert np.isfinite(result.value.wide)
    rows = list(batches_of("test"))
    labels = np.concatenate([batch.label for batch in rows])
    expected = scores.auc(np.concatenate([twin.predict(batch) for batch in rows]), labels)
    found = trainer.evaluate(rows)
    assert found.auc == pytest.approx(expected, abs=1e-4)
    assert found.auc > least


def test_dropout_draws_the_same_in_every_mode():
    """Steps run one after the other in the caller's thread, and an evaluation draws nothing."""
    schema = schema_of(dense=3, ids=4, bags=1)
    batches = [batch_of(schema, 60, seed) for seed in range(6)]

    def digest(seed, **mode):
        trainer = trainer_of("deepfm", schema, 4, options={"layers": (32, 16), "dropout": 0.5}, **mode)
        torch.manual_seed(seed)
        for part in (batches[:3], batches[3:]):
            for result in trainer.train(part):
                assert np.isfinite(result.value.wide)
            trainer.evaluate(batches)
        return trainer.state_sha256()

    assert digest(1, depth=0) == digest(1, depth=2) == digest(1, depth=1, mix=False)
    assert digest(1, depth=0) != digest(2, depth=0)


@pytest.mark.parametrize("name", names())
def test_bfloat16_learns_the_same(name):
    schema = schema_of(dense=3, ids=4, bags=1)
    batches = [batch_of(schema, 200, seed) for seed in range(10)]
    exact, rounded = (
        [r.value.wide for r in trainer_of(name, schema, 8, options=SMALL[name], precision=precision).train(batches)]
        for precision in ("fp32", "bf16")
    )
    np.testing.assert_allclose(rounded, exact, rtol=0.02)
    assert rounded != exact
