"""The quality of a command's predictions: metrics for each label, also within groups of rows, such as each user's.

Metrics within groups are GAUC, NDCG and recall at k, in float64.

If samples have equal scores, a metric is the mean over all orders of these samples, so that no result depends on the
order of the samples.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.unlabelled import EncodedPart
from hostdev.data.schema import Schema, columns_of
from hostdev.ext.predict.predictor import probabilities
from hostdev.kernels.arrays import Counts, Mask, Values
from hostdev.kernels.strings import hash_texts
from hostdev.train.target_scores import TargetScores

Keys = npt.NDArray[np.uint64]


class Ranked(NamedTuple):
    """Metrics, as means over groups of samples; NaN if there is no group of the kind that the metric needs.

    Attributes:
        gauc: Mean AUC of the groups with both labels, weighted by their samples (Zhu et al., KDD 2017).
        ndcg: Mean normalized discounted cumulative gain at k of the groups with a positive sample (Jarvelin
            and Kekalainen, TOIS 2002), as in scikit-learn's `ndcg_score`.
        recall: Mean share of a group's positive samples that are among its k highest-scored samples.
        groups: Number of groups.
        mixed: Number of groups with both labels.
        positive: Number of groups with a positive sample.
    """

    gauc: float
    ndcg: float
    recall: float
    groups: int
    mixed: int
    positive: int


class _Runs(NamedTuple):
    """Runs of samples that have the same group and equal scores, ordered by group and by decreasing score.

    The gain of each sample is the mean gain of its run. All arrays are int64.

    Attributes:
        group: Index of each run's group.
        place: Number of samples of the same group before each run.
        sizes: Samples of each run.
        positives: Positive samples of each run.
        group_sizes: Samples of each group.
        group_positives: Positive samples of each group.
    """

    group: Counts
    place: Counts
    sizes: Counts
    positives: Counts
    group_sizes: Counts
    group_positives: Counts


def rank(
    groups: npt.NDArray[np.uint64], scores: npt.NDArray[np.float32], labels: npt.NDArray[np.bool_], k: int
) -> Ranked:
    """Return the metrics at k of samples with these group keys, scores and labels."""
    n = len(scores)
    if n == 0:
        return Ranked(np.nan, np.nan, np.nan, 0, 0, 0)
    order = np.lexsort((-scores, groups))
    groups, scores, labels = groups[order], scores[order], labels[order]
    is_new_group = np.concatenate([[True], groups[1:] != groups[:-1]])
    starts = np.flatnonzero(is_new_group)
    begins = np.flatnonzero(is_new_group | np.concatenate([[True], scores[1:] != scores[:-1]]))
    group = np.searchsorted(starts, begins, "right") - 1
    sizes, run_sizes = np.diff(starts, append=n), np.diff(begins, append=n)
    positives, run_positives = (np.add.reduceat(labels.astype(np.int64), each) for each in (starts, begins))
    runs = _Runs(group, begins - starts[group], run_sizes, run_positives, sizes, positives)
    return Ranked(
        _gauc(runs),
        *_at_k(runs, k),
        groups=len(starts),
        mixed=int(np.count_nonzero((positives > 0) & (positives < sizes))),
        positive=int(np.count_nonzero(positives)),
    )


def _gauc(runs: _Runs) -> float:
    """Return the weighted mean AUC; pairs are counted in integers."""
    negatives, group_negatives = runs.sizes - runs.positives, runs.group_sizes - runs.group_positives
    before = np.concatenate([[0], np.cumsum(group_negatives)])[runs.group]
    below = group_negatives[runs.group] - (np.cumsum(negatives) - before)  # the group's negatives with lower scores
    twice = np.zeros(len(runs.group_sizes), np.int64)
    np.add.at(twice, runs.group, runs.positives * (2 * below + negatives))
    pairs = runs.group_positives * group_negatives
    mixed = pairs > 0
    if not mixed.any():
        return float("nan")
    return float(np.average(twice[mixed] / (2 * pairs[mixed]), weights=runs.group_sizes[mixed]))


def _at_k(runs: _Runs, k: int) -> tuple[float, float]:
    """Return NDCG and recall at k."""
    some = runs.group_positives > 0
    if not some.any():
        return float("nan"), float("nan")
    discounts = np.concatenate([[0.0], np.cumsum(1 / np.log2(np.arange(2, k + 2)))])  # [i]: sum over the first i ranks
    low, high = np.minimum(runs.place, k), np.minimum(runs.place + runs.sizes, k)
    share = runs.positives / runs.sizes
    gain, found = np.zeros(len(some)), np.zeros(len(some))
    np.add.at(gain, runs.group, share * (discounts[high] - discounts[low]))
    np.add.at(found, runs.group, share * (high - low))
    best = discounts[np.minimum(runs.group_positives, k)]
    return float(np.mean(gain[some] / best[some])), float(np.mean(found[some] / runs.group_positives[some]))


class By(NamedTuple):
    """The column that groups the rows: its name, how a file's values are read, and a missing value's id in a data set.

    The id is -1 if missing values have no id.
    """

    column: str
    reading: ReadSettings
    missing_id: int = -1


class Groups:
    """Collects scores and labels, grouped by the values of a column, in 13 bytes of memory per row.

    Rows without a value are left out.

    Args:
        by: The column. In a data set, it must have one id per row, and rows whose value is out of vocabulary are left
            out.
        schema: The data set's schema.
    """

    def __init__(self, by: By, schema: Schema) -> None:
        self._by, self._column, self._schema = by, by.column, schema
        none = np.zeros(0, np.uint64), np.zeros(0, np.float32), np.zeros(0, np.bool_)
        self._parts: list[tuple[Keys, npt.NDArray[np.float32], npt.NDArray[np.bool_]]] = [none]
        self._rare = self._missing = 0

    def add(
        self,
        logits: npt.NDArray[np.float32],
        label: npt.NDArray[np.float32],
        known: npt.NDArray[np.bool_],
        part: EncodedPart,
    ) -> None:
        """Add the rows of a part that the mask `known` [n] selects: rows with a label and a finite score."""
        keys, missing, rare = self._values(part) if part.more is not None else self._ids(part)
        self._missing += int(np.count_nonzero(known & missing))
        self._rare += int(np.count_nonzero(known & rare))
        known = known & ~missing & ~rare
        self._parts.append((keys[known], logits[known], label[known] != 0))

    def _values(self, part: EncodedPart) -> tuple[Keys, Mask, Mask]:
        """Return a hash of each row's value, the mask of rows without a value, and an all-False mask."""
        assert part.more is not None
        column = arrow.decoded(part.more[self._column])
        if arrow.classify_type(column.type) in ("list", "nested"):
            raise UserError(f"--by {self._column}: the column has lists; name a column with one value per row")
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
            column = self._by.reading.clean(column).cast(pa.string())
        codes, texts = self._by.reading.values(column)
        keys, missing = hash_texts(*arrow.get_buffers(texts)), pc.equal(texts, "").to_numpy(zero_copy_only=False)
        codes = codes if part.places is None else codes[part.places]
        return keys[codes], missing[codes], np.zeros(len(codes), np.bool_)

    def _ids(self, part: EncodedPart) -> tuple[Keys, Mask, Mask]:
        """Return each row's id, and the masks of rows without a value and of rows whose value is out of vocabulary."""
        if self._column not in self._schema.ids:
            raise UserError(
                f"--by {self._column}: the data set has no such column with one id per row; it has "
                f"{listed(self._schema.ids) or 'none'}"
            )
        ids = part.batch.ids[:, self._schema.ids.index(self._column)]
        return ids.astype(np.uint64), ids == self._by.missing_id, ids < self._schema.first_value

    def lines(self, k: int) -> Iterator[str]:
        """Yield report lines with the metrics; NDCG and recall are at `k`."""
        keys, logits, labels = (np.concatenate(some) for some in zip(*self._parts, strict=True))
        found = rank(keys, logits, labels, k)
        yield (
            f"by {self._column}: GAUC {found.gauc:.4f} over the {found.mixed:,} of {counted(found.groups, 'value')} "
            f"with both labels   NDCG@{k} {found.ndcg:.4f}   recall@{k} {found.recall:.4f} over the "
            f"{found.positive:,} with a positive row"
        )
        if self._missing:
            yield f"         {counted(self._missing, 'row')} left out because {self._column} is missing"
        if self._rare:
            yield f"         {counted(self._rare, 'row')} left out because {self._column} is out of vocabulary"


class Measures:
    """Collects outputs and labels, and reports metrics.

    Args:
        schema: The data set's schema.
        by: The column whose values group the rows, or None.
        scores: Receives the outputs and labels.

    Raises:
        UserError: `by` is given, but no label is 0 or 1.
    """

    def __init__(self, schema: Schema, by: By | None, scores: TargetScores) -> None:
        self._schema, self._scores = schema, scores
        self._binary = [name not in schema.targets.numeric for name in schema.labels]
        if by is not None and not any(self._binary):
            raise UserError(f"--by {by.column} has no effect on predictions of numbers; leave out --by")
        self._groups = [Groups(by, schema) if by is not None and binary else None for binary in self._binary]
        self._expected: list[list[float]] = [[] for _ in schema.labels]  # sums of the probabilities of labelled rows
        self._positives = [0] * len(schema.labels)
        self.predicted = self.unlabelled = 0

    def add(self, outputs: Values, part: EncodedPart) -> None:
        """Add the outputs of a part's rows, float32 [n] or [n, labels]; non-finite outputs count as missing."""
        masks = self._scores.add_known(outputs, part.batch.label)
        is_finite = np.logical_and.reduce(list(map(np.isfinite, columns_of(outputs))))
        self.predicted += int(np.count_nonzero(is_finite))
        self.unlabelled += int(np.count_nonzero(is_finite & ~np.logical_and.reduce(masks)))
        columns = zip(columns_of(outputs), columns_of(part.batch.label), masks, strict=True)
        for i, (output, label, known) in enumerate(columns):
            if not self._binary[i]:
                continue
            self._expected[i].append(float(probabilities(output[known]).sum(dtype=np.float64)))
            self._positives[i] += int(np.count_nonzero(label[known]))
            if (groups := self._groups[i]) is not None:
                groups.add(output, label, known, part)

    def lines(self, k: int) -> Iterator[str]:
        """Yield report lines with the metrics of each label; NDCG and recall are at `k`."""
        for i, (name, found) in enumerate(zip(self._schema.labels, self._scores.figures(), strict=True)):
            of = f"{name}: " if self._schema.targets.more else ""
            of_these = "" if found.rows == self.predicted else f" of the {counted(found.rows, 'row')} with labels"
            if not found.rows:
                pass
            elif self._binary[i]:
                positives = self._positives[i]
                ratio = f"   calibration {math.fsum(self._expected[i]) / positives:.4f}" if positives else ""
                yield f"{of}AUC {found.auc:.4f}   log loss {found.logloss:.4f}{ratio}{of_these}"
            else:
                yield f"{of}RMSE {found.rmse:.4f}   MAE {found.mae:.4f}{of_these}"
            if (groups := self._groups[i]) is not None:
                yield from (f"{of}{line}" if line.startswith("by ") else line for line in groups.lines(k))
