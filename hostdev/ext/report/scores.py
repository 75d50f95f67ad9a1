"""Calibration and distribution of predictions, from the lines of scores.jsonl."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.run_files import SCORE_BINS, SCORE_LIMIT

_GROUPS = 15  # of equally many samples, for the calibration
_MERGED = 5  # bins that are one bin of the distribution
_ERRORS = 2.0  # standard errors

Values = npt.NDArray[np.float64]


class Counts(NamedTuple):
    """The samples of an evaluation by bin of log-odds, each float64 [bins]."""

    step: int
    split: str
    negatives: Values
    positives: Values
    sums: Values  # of predictions

    @property
    def samples(self) -> float:
        """The number of samples."""
        return float((self.negatives + self.positives).sum())


class ScoreBin(NamedTuple):
    """Samples with similar predictions: mean prediction, share of positives with two standard errors around it."""

    predicted: float
    observed: float
    low: float
    high: float
    samples: int


def newest(lines: Iterable[dict[str, Any]]) -> dict[str, Counts]:
    """Return the counts of the last evaluation by label; lines of another form are left out."""
    found: dict[str, Counts] = {}
    for line in lines:
        try:
            found = {str(label): _parse(line, bins) for label, bins in line["labels"].items()} or found
        except (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError):
            continue
    return {label: counts for label, counts in found.items() if counts.samples}


def _parse(line: dict[str, Any], bins: Any) -> Counts:
    made = np.zeros((3, SCORE_BINS))
    values = np.array(bins, np.float64).reshape(-1, 4)
    if not np.isfinite(values).all() or (values[:, :3] < 0).any() or (values[:, 0] >= SCORE_BINS).any():
        raise ValueError
    places = values[:, 0].astype(np.int64)
    made[:, places] = values[:, 1:].T
    return Counts(int(line["step"]), str(line["split"]), *made)


def calibrate(counts: Counts) -> list[ScoreBin]:
    """Return groups of about equally many samples, by rising prediction."""
    samples = counts.negatives + counts.positives
    middle = np.cumsum(samples) - samples / 2
    groups = np.minimum((middle / samples.sum() * _GROUPS).astype(np.int64), _GROUPS - 1)
    found = []
    for number in np.unique(groups[samples > 0]):
        some = groups == number
        n, positives, total = (float(each[some].sum()) for each in (samples, counts.positives, counts.sums))
        share = positives / n
        error = _ERRORS * float(np.sqrt((share * (1 - share) + 1 / (4 * n)) / n))
        found.append(ScoreBin(total / n, share, max(0.0, share - error), min(1.0, share + error), int(n)))
    return found


def distribution(counts: Counts) -> tuple[Values, Values, Values]:
    """Return, for bins of log-odds, the left edges, and the shares of negatives and of positives, each float64 [bins].

    Empty bins at the ends are left out.
    """
    shares: list[Values] = [
        each.reshape(-1, _MERGED).sum(axis=1) / max(1.0, each.sum()) for each in (counts.negatives, counts.positives)
    ]
    width = 2.0 * SCORE_LIMIT / SCORE_BINS * _MERGED
    edges = -SCORE_LIMIT + width * np.arange(len(shares[0]), dtype=np.float64)
    used = np.flatnonzero(shares[0] + shares[1])
    kept = slice(max(0, int(used[0]) - 1), int(used[-1]) + 2)
    return edges[kept], shares[0][kept], shares[1][kept]
