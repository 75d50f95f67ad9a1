"""Check of a tracker."""

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hostdev.ext.tracking.callback import CheckpointInfo, EndInfo, EpochInfo, RunInfo, StepInfo
from hostdev.ext.tracking.tracker import Tracker

_STEPS = 50


def check_tracker(make: Callable[[], Tracker], folder: Path) -> None:
    """Check a tracker: it receives what a run reports, a resumed run, runs that fail, and one that ends at once.

    Args:
        make: Returns a new tracker; a tracker's class.
        folder: An empty folder for the run directories.

    Raises:
        AssertionError: A promise is broken. Exceptions of the tracker are raised unchanged.
    """
    for number, (status, resumed) in enumerate([("finished", 0), ("finished", 20), ("interrupted", 0), ("failed", 0)]):
        tracker = make()
        assert isinstance(tracker, Tracker), f"{tracker!r} must be a hostdev.tracking.Tracker"
        assert tracker.name, f"{tracker!r} has no name"
        run_dir = folder / f"run{number}"
        run_dir.mkdir(parents=True)
        _run(tracker, run_dir, status, resumed)
    unstarted = make()
    unstarted.close()
    unstarted = make()
    run_dir = folder / "abandoned"
    run_dir.mkdir()
    unstarted.take_again(None)
    unstarted.on_start(_describe(run_dir, 0))
    unstarted.abandon("failed")
    unstarted.close()


def _describe(run_dir: Path, first: int) -> RunInfo:
    config = {"epochs": 2, "lr": 1e-3, "name": "a \u00e9 b", "nothing": None, "versions": {"torch": "2"}}
    return RunInfo(
        run_dir=run_dir, config=config, rows={"train": 1000, "test": 100}, steps=_STEPS, first_step=first, processes=1
    )


def _run(tracker: Tracker, run_dir: Path, status: str, first: int) -> None:
    state = random.getstate()
    losses = {"wide_loss": 0.5, "deep_loss": 0.25}
    tracker.take_again(StepInfo(step=first, epoch=1, losses=losses, samples=100) if first else None)
    tracker.on_start(_describe(run_dir, first))
    for step in range(first + 1, _STEPS + 1):
        tracker.check()
        values = {**losses, "wide_loss": float("nan")} if step == 30 else losses
        tracker.on_step(StepInfo(step=step, epoch=1, losses=values, samples=100))
        if step % 20 == 0:
            tracker.write({"speed/samples per second": 1e5}, {"rows/user": np.ones(5, np.float32)}, step)
    metrics = {"validation": {"auc": float("nan"), "logloss": 0.4, "rows": 100.0}}
    tracker.on_epoch(EpochInfo(epoch=1, step=_STEPS, metrics=metrics))
    tracker.on_epoch(EpochInfo(epoch=2, step=_STEPS, metrics={}, file="a.parquet"))
    tracker.on_checkpoint(CheckpointInfo(step=_STEPS, path=run_dir / "checkpoints", seconds=0.5))
    tracker.on_end(EndInfo(status=status, steps=_STEPS, summary={"auc": 0.7, "ops": {}, "state_sha256": "0"}))
    tracker.close()
    assert random.getstate() == state, f"{tracker.name}: the tracker draws from Python's global generator"
