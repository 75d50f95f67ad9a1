"""How good the model is: the best epoch, the training rows beside the test rows, an early stop, the picture."""

import json
import re
from array import array

import numpy as np
import pytest
from matplotlib import image
from matplotlib.axes import Axes

from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.synthetic import Synthetic
from hostdev.data.shards import ShardReader
from hostdev.train import quality, trainer
from hostdev.train.quality import Point, Quality
from hostdev.train.session import TrainingSample
from hostdev.train.trainer import Evaluation
from tests.test_train import small, trained  # noqa: F401  (a fixture)

pytestmark = pytest.mark.draws


def quality_of(aucs, patience=None, training=True):
    found = Quality(patience)
    enough = []
    for epoch, auc in enumerate(aucs, 1):
        beside = Evaluation(auc + 0.02, 0.4, 90) if training else None
        found.add(Point(epoch, 10 * epoch, Evaluation(auc, 0.5 - epoch / 100, 100), beside))
        enough.append(found.is_enough)
    return found, enough


def test_the_best_epoch_is_the_first_of_the_highest_auc():
    found, enough = quality_of([0.7, 0.75, 0.74, 0.75, float("nan")])
    assert found.best.epoch == 2
    assert enough == [False] * 5
    summary = found.summary()
    assert (summary["best_epoch"], summary["best_auc"]) == (2, 0.75)
    assert (summary["auc"], summary["training_auc"]) == (None, None)  # JSON has no NaN
    assert json.loads(json.dumps(summary, allow_nan=False))["logloss"] == 0.45
    assert set(Quality().summary().values()) == {None}
    assert quality_of([0.7], training=False)[0].summary()["training_auc"] is None


@pytest.mark.parametrize(
    ("aucs", "patience", "enough"),
    [
        ([0.7, 0.71, 0.72], 1, [False, False, False]),
        ([0.7, 0.7, 0.72], 1, [False, True, False]),  # as good is not better
        ([0.7, 0.69, 0.68, 0.71, 0.70, 0.70], 2, [False, False, True, False, False, True]),
        ([float("nan")] * 3, 2, [False, True, True]),
    ],
)
def test_when_it_is_enough(aucs, patience, enough):
    assert quality_of(aucs, patience)[1] == enough


def rows_of(batches):
    return [tuple(row) for batch in batches for row in np.column_stack([batch.label, batch.dense, batch.ids])]


@pytest.mark.parametrize(("rows", "size"), [(400, 1000), (401, 30), (3, 100), (10**6, 250)])
def test_the_sample_is_of_every_shard(small_data, rows, size):
    found = manifest.read(small_data)
    sample = TrainingSample(small_data, found, rows, 7)
    batches = list(sample.batches(size))
    assert len(batches) == sample.steps(size)
    assert max(map(len, batches)) <= size
    drawn = rows_of(batches)
    wanted = min(rows, found.rows("train"))
    assert wanted <= len(drawn) < wanted + len(batches)
    whole = rows_of(ShardReader(small_data, found, "train").batches(1000))
    counts = {row: whole.count(row) for row in set(drawn)}
    assert all(0 < drawn.count(row) <= counts[row] for row in counts)  # training rows, and none twice
    if wanted == len(whole):
        assert sorted(drawn) == sorted(whole)
    assert rows_of(sample.batches(size)) == drawn  # the same each time
    assert rows == 10**6 or rows_of(TrainingSample(small_data, found, rows, 8).batches(size)) != drawn


def test_the_sample_takes_a_share_of_each_shard(tmp_path):
    """Shards may be of different times: rows of the first few would not be like the test rows."""
    build(Synthetic(900, 4), tmp_path / "data", Options(threshold=1, rows_per_shard=100))
    found = manifest.read(tmp_path / "data")
    sample = TrainingSample(tmp_path / "data", found, found.rows("test"), 1)
    lengths = [len(batch) for batch in sample.batches(500)]
    share = found.rows("test") / found.rows("train")
    assert lengths == pytest.approx([shard.rows * share for shard in found.train], abs=1)


def test_a_run_stops_early(trained, small_data, tmp_path, capsys, monkeypatch):  # noqa: F811
    """After the epoch that makes it two without a better AUC; the rest is that of a run that ends."""
    aucs = iter([0.7, 0.8, 0.72, 0.8, 0.71, 0.8, 0.72, 0.8])  # of test rows and of training rows

    def evaluate(self, batches, progress, folder, counted=None):
        return Evaluation(next(aucs), 0.5, sum(len(batch) for batch in batches))

    monkeypatch.setattr(trainer.Trainer, "evaluate", evaluate)
    options = ["--host-device-mix", "--batch-size", 2000, "--epochs", 9, "--early-stop", 2, "--cache-rows", "10%"]
    assert trained(*small(small_data, *options)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert (
        "\nstopped after epoch 4 (--early-stop 2): no better AUC in the last 2 epochs; the best is 0.7200, after "
        in out
    )
    assert "\nbest           AUC 0.7200 after epoch 2 of 9\n" in out
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["epochs"], summary["best_epoch"]) == ("stopped early", 4, 2)
    assert len(summary["state_sha256"]) == 64
    assert 0 < summary["cache"]["hit_rate"] < 1
    assert len((tmp_path / "run" / "eval.log").read_text().splitlines()) == 4
    assert (tmp_path / "run" / "curve.png").exists()


def test_no_early_stop_where_the_last_epoch_is_over_anyway(trained, small_data, tmp_path, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(trainer.Trainer, "evaluate", lambda *arguments, **options: Evaluation(0.7, 0.5, 10))
    options = ["--host-device-mix", "--batch-size", 3000, "--epochs", 3, "--early-stop", 1, "--max-steps", 3]
    assert trained(*small(small_data, *options)) == 0  # the limit comes with the second epoch
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
    assert "stopped" not in capsys.readouterr().out


LOSSES = array("f", 0.5 + 0.3 * np.exp(-np.arange(700) / 100) + 0.02 * np.sin(np.arange(700)))


@pytest.mark.parametrize(("steps", "aucs"), [(1, []), (5, [0.7]), (700, [0.7, 0.72, 0.71]), (90, [float("nan")] * 2)])
def test_the_picture(tmp_path, steps, aucs):
    """Any run's: one step, one epoch, no AUC; no warning of matplotlib's is an error here."""
    found, _ = quality_of(aucs)
    quality.draw(tmp_path / "curve.png", LOSSES[:steps], [50] * steps, found)
    pixels = image.imread(tmp_path / "curve.png")
    assert pixels.shape[:2] == (460, 1200)
    assert (pixels[..., :3].std(axis=2) > 0.1).sum() > 50  # there is something in colour


def test_a_small_batch_weighs_little():
    """The last of an epoch has a few rows, whose loss may be anything."""
    means = quality._means(np.array([1.0, 2.0, 4.0, 9.0]), np.array([10, 30, 10, 0]), 2)
    np.testing.assert_allclose(means, [70 / 40, 100 / 40, 40 / 10])


def test_many_steps_are_thinned_out(tmp_path, monkeypatch):
    lengths = []
    plot = Axes.plot

    def counted(self, x, *arguments, **options):
        lengths.append(len(x))
        return plot(self, x, *arguments, **options)

    monkeypatch.setattr(Axes, "plot", counted)
    quality.draw(tmp_path / "curve.png", np.ones(100_001, np.float32), [9] * 100_001, quality_of([0.7])[0])
    assert 1000 < max(lengths) <= 4000


def test_a_picture_never_fails_a_run(trained, small_data, tmp_path, capsys, monkeypatch):  # noqa: F811
    def fail(*arguments):
        raise ZeroDivisionError("no pencil")

    monkeypatch.setattr(quality, "draw", fail)
    assert trained(*small(small_data, "--host-device-mix", "--max-steps", 2)) == 0
    out = capsys.readouterr().out
    assert re.search(r"^files +run/: loss.log, eval.log, scores.jsonl, ops.log, config.json, summary.json$", out, re.M)
    assert out.endswith("no curve.png   ZeroDivisionError: no pencil\n")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
