"""The quality of a model on a split of the data, for one label or several."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hostdev.train.scores import Figures

NAN = float("nan")


class LabelQuality(NamedTuple):
    """The quality of a label's predictions: AUC and log loss if the label is 0 or 1, RMSE and MAE if it is a number.

    The other two values are NaN.
    """

    auc: float
    logloss: float
    rmse: float
    mae: float


class Evaluation(NamedTuple):
    """The quality of the model on a split. Each metric is the mean over the labels that have it; NaN if none has it."""

    auc: float
    logloss: float
    rows: int
    rmse: float = NAN
    mae: float = NAN
    labels: tuple[LabelQuality, ...] = ()  # by label, if there are several

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
