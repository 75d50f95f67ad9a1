"""On a stream that drifts, a run that follows it is close to the best, and better than a model of each day before."""

import json

import numpy as np
import pyarrow.parquet
import pytest

from hostdev.commands import train
from hostdev.data.preprocess import cli as preprocess
from hostdev.ext.predict import cli as predict
from tests.data import drift

MODEL = [
    "--capacity",
    "20MiB",
    "--model",
    "deepfm",
    "--emb-dim",
    4,
    "--device",
    "cpu",
    "--table-lr",
    0.02,
    "--lr",
    0.002,
]
COLUMNS = ["--label", "clicked", "--categorical", "user,item"]


def test_the_best_is_known():
    """No score beats the probabilities that the rows were drawn from; and they change from part to part."""
    made = list(drift.make(6, 4000))
    best = [auc for _, auc in made]
    assert all(0.65 < auc < 0.9 for auc in best)
    rates = []
    for table, _ in made:
        item, clicked = table.column("item").to_numpy(), table.column("clicked").to_numpy()
        rates.append({name: clicked[item == name].mean() for name in np.unique(item) if (item == name).sum() > 50})
    shared = set(rates[0]) & set(rates[3])
    assert len(shared) > 5 and np.mean([abs(rates[0][name] - rates[3][name]) for name in shared]) > 0.1


@pytest.mark.slow
def test_following_beats_a_model_of_the_day_before(run, tmp_path):
    """A day has four parts. The other model is trained each night on all days before, and predicts the next day."""
    days, each, rows = 4, 4, 6_000
    (tmp_path / "in").mkdir()
    best = []
    for number, (table, auc) in enumerate(drift.make(days * each, rows)):
        pyarrow.parquet.write_table(table, tmp_path / "in" / f"part-{number:02d}.parquet")
        best.append(auc)
    run(preprocess, "table", "in/part-00.parquet", "--out", "example", *COLUMNS, "--ids", "raw")
    options = [*MODEL, "--batch-size", 200]
    run(train, "--follow", "in", "--data", "example", *options, "--follow-until", "end", "--run-dir", "follow")
    lines = [json.loads(line) for line in (tmp_path / "follow" / "files.jsonl").read_text().splitlines()]
    progressive = [line["auc"] for line in lines]
    daily = []
    for day in range(1, days):
        before = [f"in/part-{number:02d}.parquet" for number in range(day * each)]
        more = ["--vocabulary", "example", "--test-fraction", 0]
        run(preprocess, "table", *before, "--out", f"day{day}", *COLUMNS, *more)
        how = ["--tables", "dynamic", "--host-device-mix", "--epochs", 2, "--checkpoint-every", 10_000]
        run(train, "--data", f"day{day}", *options, *how, "--run-dir", f"run{day}")
        for number in range(day * each, (day + 1) * each):
            out = run(
                predict, "--checkpoint", f"run{day}", "--data", f"in/part-{number:02d}.parquet", "--out", "p.parquet"
            )
            daily.append(float(out.split("AUC ")[1].split()[0].rstrip(",")))
            (tmp_path / "p.parquet").unlink()
    late = slice(each, None)
    print("best", np.mean(best[late]), "progressive", np.mean(progressive[late]), "daily", np.mean(daily))
    assert np.mean(progressive[late]) > np.mean(daily) + 0.01
    assert np.mean(best[late]) - 0.06 < np.mean(progressive[late]) < np.mean(best[late]) + 0.01
