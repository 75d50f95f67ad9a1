"""The quality of a command's predictions: metrics for each label, also within groups of rows."""

import math
from collections.abc import Iterator

import numpy as np

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.preprocess.unlabelled import EncodedPart
from hostdev.data.schema import Schema, columns_of
from hostdev.ext.predict.groups import By, Groups
from hostdev.ext.predict.predictor import probabilities
from hostdev.kernels.arrays import Values
from hostdev.train.target_scores import TargetScores


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
