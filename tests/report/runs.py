"""Run directories that look like those of long and short runs, written without a training."""

import json

import numpy as np

from hostdev.core.run_files import eval_line, loss_line
from hostdev.data.schema import SINGLE_LABEL
from hostdev.train.scores import ScoreCounts

GIB = 1 << 30
SUMMARY = {
    "status": "finished",
    "steps": 40,
    "epochs": 2,
    "auc": 0.72,
    "logloss": 0.5,
    "training_auc": 0.76,
    "samples_per_second": 1234.5,
    "state_sha256": "ab" * 32,
    "peak_rss_bytes": 3 * GIB,
    "memory": {"host": {"tables": GIB, "batches in flight": GIB // 8}, "device": {"dense weights": 1 << 20}},
    "pipeline": {
        "depth": 2,
        "busy_us": {"read": 2e5, "lookup": 3e5, "step": 4e6},
        "stall_us": {"step": 5e4},
        "host_busy_us": 5e5,
        "device_busy_us": 4e6,
        "wall_us": 5e6,
        "overlap_efficiency": 0.8,
    },
    "cache": {
        "rows": 100,
        "policy": "lookahead",
        "batches": 40,
        "hit_rate": 0.9,
        "admitted": 10,
        "evicted": 5,
        "bypassed": 100,
        "bytes_to_device": 4 << 20,
        "bytes_to_host": 2 << 20,
    },
    "ranks": {
        "size": 2,
        "hosts": 1,
        "exact": True,
        "sent_bytes": {"rows": 1 << 20, "least": 1 << 19, "dense": 1 << 24},
    },
    "checkpoints": {"path": "run/checkpoints", "saved": 2, "failed": 0, "last_step": 40, "stall_us": 1e5},
    "ops": {
        "DenseForward": {"count": 40, "total_us": 3e6, "mean_us": 75000.0, "p99_us": 9e4, "bytes": 0},
        "EmbeddingLookup": {
            "by_scope": {
                "deep": {"count": 40, "total_us": 4e4, "mean_us": 1000.0, "p99_us": 2e3, "bytes": 1 << 26},
                "wide": {"count": 40, "total_us": 1e4, "mean_us": 250.0, "p99_us": 3e2, "bytes": 1 << 20},
            }
        },
    },
}
CONFIG = {
    "data": "data",
    "epochs": 2,
    "model": "wide_deep",
    "batch_size": 500,
    "report": False,
    "lr": None,
    "run_dir": "run",
    "checkpoint_every": 20,
    "versions": {"hostdev": "0.2.0", "torch": "2.13.0"},
    "preprocess": {"preset": "table", "bags": {}, "seed": 1},
    "data_set": {
        "rows": {"train": 10_000, "test": 1_000},
        "shards": 2,
        "ids": 12_345,
        "labels": ["clicked"],
        "columns": {"numbers": 2, "ids": 3, "bags": 0},
        "rejected": 0,
        "label_mean": {"train": 0.25, "test": 0.24},
    },
}


def scores(seed=0, rows=2000):
    """Return counts of predictions that are calibrated, by label, as scores.jsonl has them."""
    random = np.random.default_rng(seed)
    logits = random.normal(-1.2, 1.0, rows).astype(np.float32)
    labels = (random.random(rows) < 1 / (1 + np.exp(-logits))).astype(np.float32)
    counts = ScoreCounts(("clicked",), SINGLE_LABEL)
    counts.add(logits, labels)
    return counts.as_lists()


def write_run(path, *, steps=40, epochs=2, seed=0, summary=SUMMARY, config=CONFIG):
    """Write a run directory with `steps` steps in all; `summary` of None is a run without summary.json."""
    path.mkdir(parents=True)
    random = np.random.default_rng(seed)
    each = steps // epochs
    values = 0.5 + 0.2 * np.exp(-np.arange(steps) / steps * 5) + random.normal(0, 0.01, steps)
    losses = (loss_line(i // each + 1, i % each + 1, loss, loss) for i, loss in enumerate(values))
    (path / "loss.log").write_text("".join(losses))
    found = [{"auc": 0.7 + 0.01 * epoch, "logloss": 0.52 - 0.01 * epoch, "rows": 1000} for epoch in range(epochs)]
    lines = (eval_line(n + 1, each * (n + 1), one, {**one, "auc": one["auc"] + 0.03}) for n, one in enumerate(found))
    (path / "eval.log").write_text("".join(lines))
    kept = {"epoch": epochs, "step": steps, "split": "test", "labels": scores(seed)}
    (path / "scores.jsonl").write_text(json.dumps(kept) + "\n")
    (path / "config.json").write_text(json.dumps(config))
    if summary is not None:
        (path / "summary.json").write_text(json.dumps({**summary, "steps": steps}))
    return path


def write_files(path, number=30):
    """Add the lines of a run with --follow."""
    with (path / "files.jsonl").open("w") as file:
        for n in range(1, number + 1):
            window = {"files": 3, "auc": 0.7, "logloss": 0.5, "calibration": 1.01}
            line = {"number": n, "file": f"day{n}.csv", "auc": 0.6 + n / 1000, "logloss": 0.5, "calibration": None}
            file.write(json.dumps({**line, "window": window}) + "\n")
    return path
