"""The best checkpoint of a run, according to the evaluations in its newest checkpoint."""

import math
from pathlib import Path
from typing import NamedTuple

from hostdev.checkpoint.folder import Chain, Checkpoint, names_in, read_chain
from hostdev.checkpoint.manifest import read
from hostdev.core.errors import HostdevError


class Best(NamedTuple):
    """A run's best evaluation so far: the first with the highest AUC on the validation or test rows.

    Attributes:
        stops_early: Whether the run has --early-stop, which keeps the checkpoint of this step.
    """

    step: int
    epoch: int
    auc: float
    stops_early: bool


def of_run(newest: Checkpoint) -> Best | None:
    """Return the best evaluation recorded in a checkpoint of the command `train`, or None."""
    state = newest.manifest.state
    more = state.get("more") if isinstance(state, dict) else None
    if not isinstance(more, dict) or not isinstance(more.get("quality"), list):
        return None
    found: Best | None = None
    try:
        stops_early = more["settings"].get("early_stop") is not None
        for epoch, step, (auc, *_), *_ in more["quality"]:
            if math.isfinite(auc) and (found is None or auc > found.auc):
                found = Best(int(step), int(epoch), float(auc), stops_early)
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
    """Return a folder's best checkpoint, with its parents, or None if it is missing or damaged."""
    for name in names_of(path, best):
        try:
            return read_chain(path / name)
        except HostdevError:
            continue
    return None
