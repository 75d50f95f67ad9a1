"""Scores of all labels: AUC and log loss of labels that are 0 or 1, RMSE and MAE of labels that are numbers.

An `Evaluation` is the quality of a model on a split of the data, for one label or several.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from hostdev.data.schema import SINGLE_LABEL, Targets, columns_of
from hostdev.distributed.world import World
from hostdev.kernels.arrays import Values
from hostdev.train.scores import BLOCK, Figures, Scores

NAN = float("nan")
_BLOCK = 1 << 20  # samples whose errors are summed at once
_AT_ONCE = 1 << 20  # send samples to rank 0 when all ranks together hold this number


class LabelQuality(NamedTuple):
    """The quality of a label's predictions: AUC and log loss if the label is 0 or 1, RMSE and MAE if it is a number.

    The other two values are NaN.
    """

    auc: float
    logloss: float
    rmse: float
    mae: float


class Evaluation(NamedTuple):
    """The quality of the model on a split. A metric is the mean over the labels that have it, or NaN."""

    auc: float
    logloss: float
    rows: int
    rmse: float = NAN
    mae: float = NAN
    labels: tuple[LabelQuality, ...] = ()  # each label's quality if there are several labels, else empty

    @property
    def metric(self) -> str:
        """The metric by which evaluations are compared: AUC, or RMSE if all labels are numbers."""
        return "AUC" if self.has_binary else "RMSE"

    @property
    def value(self) -> float:
        """The value of `metric`."""
        return self.auc if self.has_binary else self.rmse

    @property
    def score(self) -> float:
        """A number that is higher for a better model: AUC or -RMSE; NaN if this metric is NaN."""
        return self.auc if self.has_binary else -self.rmse

    def figures(self) -> dict[str, float]:
        """Return values by metric: AUC and log loss if a label is 0 or 1; RMSE and MAE if a label is a number."""
        both = {"AUC": self.auc, "log loss": self.logloss} if self.has_binary else {}
        return both | ({} if math.isnan(self.rmse) else {"RMSE": self.rmse, "MAE": self.mae})

    def metrics(self, labels: tuple[str, ...]) -> dict[str, float]:
        """Return values by name, such as "auc", "rows" or, if there are several labels, "LABEL/auc"."""
        found = {name.lower().replace(" ", ""): value for name, value in self.figures().items()} | {"rows": self.rows}
        for label, one in zip(labels, self.labels, strict=False):
            names = ("auc", "logloss") if math.isnan(one.rmse) else ("rmse", "mae")
            found |= {f"{label}/{name}": getattr(one, name) for name in names}
        return found

    @property
    def has_binary(self) -> bool:
        """Whether at least one label is binary (0 or 1) and not numeric."""
        return math.isfinite(self.logloss) or math.isnan(self.rmse)

    def as_values(self) -> list[Any]:
        """Return the evaluation as nested lists of numbers for a checkpoint.

        For a single label of 0 or 1, this is a list of three numbers.
        """
        first = [self.auc, self.logloss, self.rows]
        if math.isnan(self.rmse) and not self.labels:
            return first
        return [*first, self.rmse, self.mae, [list(each) for each in self.labels]]

    @classmethod
    def from_values(cls, values: Sequence[Any]) -> "Evaluation":
        """Return the evaluation that `as_values` converted to these values."""
        if len(values) == 3:
            return cls(*values)
        auc, logloss, rows, rmse, mae, labels = values
        return cls(auc, logloss, rows, rmse, mae, tuple(LabelQuality(*each) for each in labels))


def evaluation_of(figures: Sequence[Figures]) -> Evaluation:
    """Return the evaluation from the figures of each label."""
    each = tuple(LabelQuality(one.auc, one.logloss, one.rmse, one.mae) for one in figures)
    auc, logloss, rmse, mae = (_mean(values) for values in zip(*each, strict=True))
    return Evaluation(auc, logloss, figures[0].rows, rmse, mae, each if len(each) > 1 else ())


def _mean(values: Sequence[float]) -> float:
    some = [value for value in values if not math.isnan(value)]
    return NAN if not some else some[0] if len(some) == 1 else math.fsum(some) / len(some)


class Errors:
    """Sums the errors of predictions in float64.

    The sums do not depend on how many samples each call of `add` adds.

    Args:
        block: Number of samples whose errors are summed at once.
    """

    def __init__(self, block: int = _BLOCK) -> None:
        self._block = np.empty(block)
        self._held = self._rows = self._not_finite = 0
        self._squares: list[float] = []
        self._sizes: list[float] = []

    def add(self, predictions: Values, labels: Values) -> None:
        """Add samples: predictions float32 [n] and labels float32 [n]."""
        errors = predictions.astype(np.float64) - labels
        start = 0
        while start < len(errors):
            n = min(len(errors) - start, len(self._block) - self._held)
            self._block[self._held : self._held + n] = errors[start : start + n]
            self._held, start = self._held + n, start + n
            if self._held == len(self._block):
                self._sum()
        self._rows += len(errors)
        self._not_finite += len(errors) - int(np.count_nonzero(np.isfinite(errors)))

    def _sum(self) -> None:
        errors, self._held = self._block[: self._held], 0
        with np.errstate(invalid="ignore", over="ignore"):
            self._squares.append(float(np.square(errors).sum()))
            self._sizes.append(float(np.abs(errors).sum()))

    def figures(self) -> Figures:
        """Return RMSE and MAE of all samples; nothing may be added afterwards."""
        self._sum()
        if not self._rows or self._not_finite:
            return Figures(NAN, NAN, self._rows, self._not_finite)
        rmse = math.sqrt(math.fsum(self._squares) / self._rows)
        return Figures(NAN, NAN, self._rows, 0, rmse, math.fsum(self._sizes) / self._rows)


class TargetScores:
    """Collects the model's outputs and the labels of samples. A context manager that closes its files at the end.

    Args:
        labels: Names of all labels.
        folder: As for `Scores`.
        block: As for `Scores`.
        counted: Called with the arguments of each `add`.
    """

    def __init__(
        self,
        labels: tuple[str, ...] = ("label",),
        targets: Targets = SINGLE_LABEL,
        folder: Path | None = None,
        block: int = BLOCK,
        counted: Callable[[Values, Values], object] = lambda outputs, labels: None,
    ) -> None:
        self._counted = counted
        self._files = ExitStack()
        self._each: list[Scores | Errors] = [
            Errors() if name in targets.numeric else self._files.enter_context(Scores(folder, block)) for name in labels
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.close()

    def add(self, outputs: Values, labels: Values) -> None:
        """Add samples: outputs and labels, each float32 [n], or [n, labels] if there are several labels."""
        self._counted(outputs, labels)
        for to, each, label in zip(self._each, columns_of(outputs), columns_of(labels), strict=True):
            to.add(each, label)

    def end_batch(self, rows: int) -> None:
        """Do nothing; `Together`, which has the same methods, needs to know where batches end."""

    def add_known(self, outputs: Values, labels: Values) -> list[npt.NDArray[np.bool_]]:
        """Add, for each label, the samples with a finite output and a known label.

        Returns:
            For each label, a mask of the added samples, bool [n].
        """
        masks = []
        for to, each, label in zip(self._each, columns_of(outputs), columns_of(labels), strict=True):
            masks.append(np.isfinite(each) & ~np.isnan(label))
            to.add(each[masks[-1]], label[masks[-1]])
        return masks

    def figures(self) -> list[Figures]:
        """Return the figures of each label; nothing may be added afterwards."""
        return [each.figures() for each in self._each]


class Together:
    """Collects the scores of all ranks on rank 0, in the order of the samples: by batch, then by rank.

    All ranks must make the same calls, except those of `add`. Memory use is bounded.

    Args:
        to: Receives the scores on rank 0.
        labels: Number of labels.
    """

    def __init__(self, ranks: World, to: TargetScores, labels: int = 1) -> None:
        self._ranks, self._to, self._labels = ranks, to, labels
        self._parts: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = []
        self._sizes: list[int] = []  # this rank's samples in each waiting batch
        self._mine = self._all = 0  # this rank's samples in this batch; all ranks' samples in waiting batches

    def add(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Add samples of this rank's part of a batch, as `TargetScores.add` does; the arrays are kept, not copied."""
        self._parts.append((logits, labels))
        self._mine += len(logits)

    def end_batch(self, rows: int) -> None:
        """End a batch that has `rows` samples over all ranks."""
        self._sizes.append(self._mine)
        self._mine, self._all = 0, self._all + rows
        if self._all >= _AT_ONCE:
            self._send()

    def figures(self) -> list[Figures]:
        """Return, on every rank, the figures of each label over the samples of all ranks."""
        self._send()
        found = self._to.figures() if self._ranks.rank == 0 else None
        return [Figures(*each) for each in self._ranks.control.share(found)[0]]

    def _send(self) -> None:
        control = self._ranks.control
        edges = [np.cumsum(each)[:-1] for each in control.gather(np.array(self._sizes, np.int64))]
        mine = zip(*self._parts, strict=True) if self._parts else ([], [])
        by_rank = []
        for values in mine:
            all_of_it = control.gather(np.concatenate([np.empty(0, np.float32), *(each.ravel() for each in values)]))
            shaped = [each if self._labels == 1 else each.reshape(-1, self._labels) for each in all_of_it]
            by_rank.append([np.split(each, edge) for each, edge in zip(shaped, edges, strict=True)])
        if self._ranks.rank == 0:
            logits, labels = by_rank
            for batch in range(len(self._sizes)):
                for rank in range(self._ranks.size):
                    self._to.add(logits[rank][batch], labels[rank][batch])
        self._parts, self._sizes, self._all = [], [], 0


def collect_scores(world: World, to: TargetScores, labels: int = 1) -> TargetScores | Together:
    """Return a `Together` that collects the scores of all ranks in rank 0's `to`; for a single process, return `to`."""
    return Together(world, to, labels) if world.size > 1 else to
