"""Which checkpoint of a run was the best: the evaluations that the newest one holds say it, without another mark."""

import math
from pathlib import Path
from typing import NamedTuple

from hostdev.checkpoint.folder import Chain, Checkpoint, chain_of, names_in
from hostdev.checkpoint.manifest import read
from hostdev.core.errors import HostdevError


class Best(NamedTuple):
    """A run's best evaluation so far: the highest AUC of the test rows, of equal ones the first.

    stops_early  the run has --early-stop, and so keeps the checkpoint
    """

    step: int
    epoch: int
    auc: float
    stops_early: bool


def of_run(newest: Checkpoint) -> Best | None:
    """Return the best evaluation that a checkpoint of the command `train` holds; None where it has none."""
    state = newest.manifest.state
    more = state.get("more") if isinstance(state, dict) else None
    if not isinstance(more, dict) or not isinstance(more.get("quality"), list):
        return None
    found: Best | None = None
    try:
        stops_early = more["settings"].get("early_stop") is not None
        for epoch, step, (auc, *_), _ in more["quality"]:
            if math.isfinite(auc) and (found is None or auc > found.auc):
                found = Best(int(step), int(epoch), float(auc), stops_early)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found


def names_of(path: Path, best: Best | None) -> list[str]:
    """Return the checkpoints in a folder that are of the best's step, the newest first."""
    if best is None:
        return []
    found = []
    for name in reversed(names_in(path)):
        try:
            if read(path / name).step == best.step:
                found.append(name)
        except HostdevError:
            continue
    return found


def chain_in(path: Path, best: Best) -> Chain | None:
    """Return the best checkpoint in a folder, with what it adds to; None where it is not there, or not whole."""
    for name in names_of(path, best):
        try:
            return chain_of(path / name)
        except HostdevError:
            continue
    return None
