"""Scores of all labels: AUC and log loss of labels that are 0 or 1, RMSE and MAE of labels that are numbers."""

import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from hostdev.data.schema import SINGLE_LABEL, Targets, columns_of
from hostdev.train.scores import BLOCK, Figures, Scores

_BLOCK = 1 << 20  # samples whose errors are summed at once
_NAN = float("nan")

Values = npt.NDArray[np.float32]


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
            return Figures(_NAN, _NAN, self._rows, self._not_finite)
        rmse = math.sqrt(math.fsum(self._squares) / self._rows)
        return Figures(_NAN, _NAN, self._rows, 0, rmse, math.fsum(self._sizes) / self._rows)


class TargetScores:
    """Collects the model's outputs and the labels of samples. A context manager that closes its files at the end.

    Args:
        labels: Names of all labels.
        folder: As for `Scores`.
        block: As for `Scores`.
        counted: Called with what `add` receives.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.close()

    def add(self, outputs: Values, labels: Values) -> None:
        """Add samples: outputs and labels, each float32 [n], or [n, labels] if there are several labels."""
        self._counted(outputs, labels)
        for to, each, label in zip(self._each, columns_of(outputs), columns_of(labels), strict=True):
            to.add(each, label)

    def end_batch(self, rows: int) -> None:
        """End a batch of this many samples, which is of interest to collectors of several ranks' scores."""

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
