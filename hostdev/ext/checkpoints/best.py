"""The best checkpoint of a run, according to the evaluations in its newest checkpoint."""

import math
from pathlib import Path
from typing import NamedTuple

from hostdev.checkpoint.folder import Chain, Checkpoint, names_in, read_chain
from hostdev.checkpoint.manifest import read
from hostdev.core.errors import HostdevError


class Best(NamedTuple):
    """A run's best evaluation so far, on the validation samples, or on the test samples if there are none.

    This is the earliest evaluation with the highest AUC or, if all labels are numbers, with the lowest RMSE.

    Attributes:
        metric: "AUC" or "RMSE".
        stops_early: Whether the run has --early-stop; this step's checkpoint is then kept.
    """

    step: int
    epoch: int
    metric: str
    value: float
    stops_early: bool


def of_run(newest: Checkpoint) -> Best | None:
    """Return the best evaluation recorded in a checkpoint of the command `train`, or None if there is none."""
    state = newest.manifest.state
    more = state.get("more") if isinstance(state, dict) else None
    if not isinstance(more, dict) or not isinstance(more.get("quality"), list):
        return None
    found: Best | None = None
    try:
        stops_early = more["settings"].get("early_stop") is not None
        for epoch, step, (auc, logloss, *others), *_ in more["quality"]:
            rmse = others[1] if len(others) > 1 else math.nan
            is_auc = math.isnan(rmse) or math.isfinite(logloss)
            value, sign = (auc, 1) if is_auc else (rmse, -1)
            if math.isfinite(value) and (found is None or sign * value > sign * found.value):
                found = Best(int(step), int(epoch), "AUC" if is_auc else "RMSE", float(value), stops_early)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found


def names_of(path: Path, best: Best | None) -> list[str]:
    """Return the names of a folder's checkpoints at the best step, newest first; [] if `best` is None."""
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


def find_best_chain(path: Path, best: Best) -> Chain | None:
    """Return the newest valid checkpoint at the best step, with its parents, or None if there is none."""
    for name in names_of(path, best):
        try:
            return read_chain(path / name)
        except HostdevError:
            continue
    return None
