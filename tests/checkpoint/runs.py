"""Helpers for tests of resumed runs."""

import json

from hostdev.checkpoint import folder

MIX = ["--host-device-mix"]


def small(data, run_dir, *more, device=None):
    name = "cpu" if device is None else device.type
    options = ["--batch-size", 500, "--emb-dim", 4, "--epochs", 2]
    return ["--data", data, "--device", name, "--run-dir", run_dir, *options, *more]


def logs(run):
    """Return the logs that are equal for an undisturbed and a resumed run."""
    summary = json.loads((run / "summary.json").read_text())
    return [(run / name).read_text() for name in ("loss.log", "eval.log")], [
        summary[key] for key in ("state_sha256", "steps", "epochs", "auc", "logloss", "best_auc", "status")
    ]


def leftovers(path):
    return [each.name for each in path.iterdir() if each.name.startswith((".partial", ".removed"))]


def names(path):
    return folder.names_in(path)
