"""AUC and log loss of any number of samples in bounded memory.

Samples that do not fit in memory are written to a file, in sorted runs, and read back one range of scores at a time.
"""

import math
import tempfile
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import naming
from hostdev.core.run_files import SCORE_BINS, SCORE_LIMIT
from hostdev.data.schema import Targets, columns_of
from hostdev.kernels.arrays import Values

BLOCK = 1 << 24  # maximum number of samples in memory
_STRIDE = 1 << 12  # every _STRIDE-th key of a run is kept in memory
_FIRST, _END = -(1 << 31), 1 << 31  # range of the keys

Keys = npt.NDArray[np.int32]
_AT_ONCE = 1 << 20  # values processed at a time


class Figures(NamedTuple):
    """The quality of predictions. AUC is NaN unless both labels occur; log loss is NaN without samples."""

    auc: float
    logloss: float
    rows: int
    not_finite: int  # samples with a non-finite output; if there are any, the other figures are meaningless
    rmse: float = float("nan")  # for a label that can be any number
    mae: float = float("nan")


class Scores:
    """Collects logits and labels; a context manager that closes its file at the end.

    Up to `block` samples, AUC and log loss equal the functions `auc` and `log_loss` bit for bit. For more samples,
    the AUC is still equal, because pairs are counted in integers; the log loss is the correctly rounded sum of the
    blocks' sums, divided by the number of samples. The results do not depend on how many samples each call of `add`
    adds.

    Args:
        folder: Folder for an unnamed temporary file, which is needed for more than `block` samples and takes 4 bytes
            for each sample; None for the system's temporary folder.
        block: Maximum number of samples in memory. They take at most 20 bytes each: 320 MiB by default.
    """

    def __init__(self, folder: Path | None = None, block: int = BLOCK) -> None:
        self.rows = 0
        self._folder, self._block = folder, block
        self._logits, self._labels = np.empty(block, np.float32), np.empty(block, np.bool_)
        self._held = self._not_finite = 0
        self._losses: list[float] = []  # sums of the spilled blocks
        self._file: IO[bytes] | None = None
        self._runs: tuple[list[_Run], list[_Run]] = [], []  # runs of negatives, and of positives

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Add copies of samples: logits float32 [n], and labels float32 [n], each 0 or 1.

        Raises:
            OSError: The disk is full.
        """
        start = 0
        while start < len(logits):
            if self._held == self._block:
                self._spill()
            n = min(len(logits) - start, self._block - self._held)
            self._logits[self._held : self._held + n] = logits[start : start + n]
            self._labels[self._held : self._held + n] = labels[start : start + n] != 0
            self._held, start = self._held + n, start + n
        self.rows += len(logits)
        self._not_finite += len(logits) - int(np.count_nonzero(np.isfinite(logits)))

    def figures(self) -> Figures:
        """Return AUC and log loss of all samples; nothing may be added afterwards."""
        if self._file is None:
            total, parts = self._sort_block()
            twice, sizes = twice_above(parts[1], parts[0]), [len(part) for part in parts]
        else:
            self._spill()
            self._logits, self._labels = np.empty(0, np.float32), np.empty(0, np.bool_)
            total, twice = math.fsum(self._losses), self._twice_above(self._file)
            sizes = [sum(run.size for run in runs) for runs in self._runs]
        logloss = total / self.rows if self.rows else float("nan")
        return Figures(make_auc(twice, sizes[1], sizes[0]), logloss, self.rows, self._not_finite)

    def _sort_block(self) -> tuple[float, list[Keys]]:
        """Return the summed loss of the samples in memory, and the sorted keys of negatives and of positives."""
        logits, labels = self._logits[: self._held], self._labels[: self._held]
        total = float(losses(logits, labels).sum())
        keys = make_keys(logits)
        parts = [keys[~labels], keys[labels]]
        for part in parts:
            part.sort()
        return total, parts

    def _spill(self) -> None:
        """Write the samples in memory to the file."""
        folder = self._folder if self._folder is not None and self._folder.is_dir() else None  # may have been removed
        with naming(folder or tempfile.gettempdir()):
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
            total, parts = self._sort_block()
            self._losses.append(total)
            self._held = 0
            for keys, runs in zip(parts, self._runs, strict=True):
                runs.append(_Run(self._file.seek(0, 2), len(keys), keys[::_STRIDE].copy()))
                self._file.write(keys.data)

    def _twice_above(self, file: IO[bytes]) -> int:
        """Compute `twice_above` over all runs, in ranges of keys that hold at most a block of samples."""
        runs = [*self._runs[0], *self._runs[1]]
        negatives = len(self._runs[0])

        low, at = _FIRST, [0] * len(runs)
        twice = before = 0  # before: negatives in earlier ranges
        while low < _END:
            within, most = range(low + 1, _END + 1), sum(at) + self._block
            fitting = bisect_right(within, most, key=lambda key: sum(run.below(key, file) for run in runs))
            high = low + max(1, fitting)
            ends = [run.below(high, file) for run in runs]
            counts = [end - start for start, end in zip(at, ends, strict=True)]
            below, above = sum(counts[:negatives]), sum(counts[negatives:])
            twice += 2 * before * above
            if not fitting:  # a single key with more than a block of samples
                twice += below * above
            elif below and above:
                parts = [run.read(start, end, file) for run, start, end in zip(runs, at, ends, strict=True)]
                both = [np.concatenate(some) for some in (parts[negatives:], parts[:negatives])]
                del parts
                for keys in both:
                    keys.sort()
                twice += twice_above(*both)
            before, low, at = before + below, high, ends
        return twice


class _Run(NamedTuple):
    """A sorted run of keys in the file."""

    offset: int  # position in the file, in bytes
    size: int
    marks: Keys  # every _STRIDE-th key

    def below(self, key: int, file: IO[bytes]) -> int:
        """Return how many of the keys are smaller than `key`."""
        stop = int(np.searchsorted(self.marks, np.int64(key))) * _STRIDE
        start = max(0, stop - _STRIDE)
        return start + int(np.searchsorted(self.read(start, min(stop, self.size), file), np.int64(key)))

    def read(self, start: int, stop: int, file: IO[bytes]) -> Keys:
        """Return the keys at positions [start, stop)."""
        keys = np.empty(stop - start, np.int32)
        file.seek(self.offset + 4 * start)
        file.readinto(keys.data)  # type: ignore[attr-defined]
        return keys


def make_keys(logits: npt.NDArray[np.float32]) -> Keys:
    """Return int32 keys that sort like the logits; 0.0 and -0.0 have the same key."""
    keys = (logits + np.float32(0)).view(np.int32)
    signs = keys >> 31
    signs &= np.int32(0x7FFFFFFF)
    keys ^= signs
    return keys


class ScoreCounts:
    """Counts the samples of an evaluation by label and probability, in memory that does not grow.

    Bins have equal widths in log-odds, so that they are narrow where probabilities are small; the first and the last
    bin also hold the samples beyond them.

    Args:
        labels: Names of all labels.
        targets: Which labels are numbers; they have no probability, and are left out.
    """

    def __init__(self, labels: tuple[str, ...], targets: Targets) -> None:
        self._names = [None if name in targets.numeric else name for name in labels]
        self._counts = np.zeros((len(labels), 2, SCORE_BINS), np.int64)
        self._sums = np.zeros((len(labels), SCORE_BINS))

    def add(self, outputs: Values, labels: Values) -> None:
        """Add samples: logits and labels, each float32 [n], or [n, labels] if there are several labels."""
        for i, (output, label) in enumerate(zip(columns_of(outputs), columns_of(labels), strict=True)):
            if self._names[i] is None:
                continue
            known = np.isfinite(output)
            logits = output[known].astype(np.float64)
            positive = label[known] != 0
            scaled = (logits + SCORE_LIMIT) * (SCORE_BINS / (2 * SCORE_LIMIT))
            bins = np.clip(scaled, 0, SCORE_BINS - 1).astype(np.int64)
            for to, some in zip(self._counts[i], (bins[~positive], bins[positive]), strict=True):
                to += np.bincount(some, minlength=SCORE_BINS)
            with np.errstate(over="ignore"):
                self._sums[i] += np.bincount(bins, 1 / (1 + np.exp(-logits)), SCORE_BINS)

    def as_lists(self) -> dict[str, list[list[float]]]:
        """Return, by label, [bin, negatives, positives, sum of predictions] for each bin that has samples."""
        found: dict[str, list[list[float]]] = {}
        for name, (negatives, positives), sums in zip(self._names, self._counts, self._sums, strict=True):
            if name is not None:
                used = np.flatnonzero(negatives + positives)
                each: list[Any] = [used, negatives[used], positives[used], sums[used].round(6)]
                found[name] = [list(values) for values in zip(*(one.tolist() for one in each), strict=True)]
        return found


def auc(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    """Return the area under the ROC curve. Pairs with equal scores count half. NaN unless both labels occur.

    This is the Mann-Whitney statistic (Hanley & McNeil, Radiology 143, 1982). Pairs are counted in integers, so the
    result is rounded only once.

    Args:
        logits: float32 [N], any monotone score.
        labels: float32 [N], 0 or 1.
    """
    positives, negatives = np.sort(logits[labels != 0]), np.sort(logits[labels == 0])
    return make_auc(twice_above(positives, negatives), len(positives), len(negatives))


def twice_above(positives: npt.NDArray[Any], negatives: npt.NDArray[Any]) -> int:
    """Return a sum over all pairs of a positive and a negative sample.

    A pair counts 2 if the positive sample has the higher score, and 1 if the scores are equal.

    Args:
        positives: Sorted scores of positive samples [P].
        negatives: Sorted scores of negative samples [N], of the same dtype.
    """
    twice = 0
    for start in range(0, len(positives), _AT_ONCE):
        some = positives[start : start + _AT_ONCE]
        twice += sum(int(np.searchsorted(negatives, some, side).sum()) for side in ("left", "right"))
    return twice


def make_auc(twice: int, positives: int, negatives: int) -> float:
    """Return the AUC from the result of `twice_above` and the numbers of samples; NaN unless both labels occur."""
    return twice / (2 * positives * negatives) if positives and negatives else float("nan")


def log_loss(logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> float:
    """Return the mean negative log likelihood, in nats; arguments as for `auc`."""
    return float(np.mean(losses(logits, labels)))


def losses(logits: npt.NDArray[np.float32], labels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return each sample's negative log likelihood, float64 [N]; not finite if its logit is not. Labels may be bool."""
    found = np.empty(len(logits))
    for start, stop in pairwise([*range(0, len(logits), _AT_ONCE), len(logits)]):
        x = logits[start:stop].astype(np.float64)
        with np.errstate(invalid="ignore"):
            found[start:stop] = np.maximum(x, 0) - x * labels[start:stop] + np.log1p(np.exp(-np.abs(x)))
    return found
