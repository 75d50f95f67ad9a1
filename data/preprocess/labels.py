"""Reading of the labels and weights of raw rows."""

from collections.abc import Callable, Container, Mapping

import numpy as np
import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.core.progress import note
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.columns import Positive, WrongValueError
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.targets import Targets
from hostdev.kernels.arrays import Values

GetColumn = Callable[[str], pa.Array]  # from a column's name to the column [n]


class Labels:
    """Reads the labels and weights of rows.

    Args:
        names: Names of all labels.
        targets: Which labels are numbers, and the name of the weight.
        rule: Which values are positive (see `Positive`), for labels that are not in `rules`; None means 1 and true.
        rules: Which values are positive, by label.
        readings: Reading settings by the name of a label or the weight.
        tells: Whether to print a line, once for each label, if a value such as -1 beside 0 and 1 becomes a negative
            label.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        targets: Targets,
        rule: str | None,
        rules: Mapping[str, str],
        readings: Mapping[str, ReadSettings],
        *,
        tells: bool = False,
    ) -> None:
        self._names, self._targets, self._readings = names, targets, readings
        self._rules = {
            name: None if text is None else Positive.parse(text)
            for name in names
            if name not in targets.numeric
            for text in [rules.get(name, rule)]
        }
        self._untold = {name for name, one in self._rules.items() if tells and one is not None and one.op == "="}

    def column(self, name: str) -> str:
        """Return the name of the column from which a label or the weight is read."""
        return self._readings[name].column or name

    def read(self, get: GetColumn, n: int, known: Container[str] | None = None) -> Values:
        """Return the labels of n rows, float32 [n], or [n, labels] if there are several; NaN for unreadable labels.

        Args:
            known: Names of the columns that exist, or None if all do; labels of other columns are NaN.
        """
        each = [
            self._label(name, get) if known is None or self.column(name) in known else np.full(n, np.nan, np.float32)
            for name in self._names
        ]
        return each[0] if len(each) == 1 else np.stack(each, 1)

    def weights(self, get: GetColumn) -> Values | None:
        """Return the weights, float32 [n], or None if there is no weight; NaN for unreadable or negative weights."""
        name = self._targets.weight
        if name is None:
            return None
        return self._numbers(name, get, least=0)

    def require(self, get: GetColumn) -> None:
        """Raise WrongLabelError if a label or the weight of a single row cannot be read; `get` returns columns [1]."""
        for name in self._targets.names(self._names[0]):
            column = self.column(name)
            try:
                if name in self._rules:
                    arrow.as_labels(self._readings[name].label(get(column)), self._rules[name])
                else:
                    self._require_number(name, get)
            except WrongValueError as error:
                raise WrongLabelError(column, error) from None

    def _require_number(self, name: str, get: GetColumn) -> None:
        """Raise WrongValueError unless a numeric label, or the weight, of a single row is a valid number."""
        is_label = name in self._names
        if not np.isnan(self._numbers(name, get, least=-np.inf if is_label else 0)).any():
            return
        self._readings[name].numbers(get(self.column(name)))  # raises for text that is not a number
        raise WrongValueError(
            0, "the value is missing, or too large" if is_label else "the value is missing, negative, or too large"
        )

    def _label(self, name: str, get: GetColumn) -> Values:
        if name not in self._rules:
            return self._numbers(name, get, least=-np.inf)
        found = self._readings[name].label(get(self.column(name)))
        if name in self._untold:
            self._tell(name, found)
        try:
            return arrow.as_labels(found, self._rules[name])
        except WrongValueError:
            return arrow.labels_where_readable(found, self._rules[name])

    def _tell(self, name: str, labels: pa.Array) -> None:
        """Print a note if a number below 0, such as -1, becomes a negative label, and so does 0 or a larger number."""
        rule = self._rules[name]
        assert rule is not None
        values = arrow.decoded(labels)
        if len(values) == 0 or arrow.classify_type(values.type) not in ("text", "number"):
            return
        positive = arrow.parse_exactly(rule.value)
        others = [value for value in arrow.distinct_numbers(values) if value != positive]
        if min(others, default=0) < 0 <= max(others, default=-1) and name in self._untold:
            self._untold.discard(name)
            note(
                f"label {name!r}: --positive {rule.value} makes {min(others):g} a negative label, like "
                f"{max(others):g}; if {min(others):g} means that the label is unknown, give --missing={min(others):g}"
            )

    def _numbers(self, name: str, get: GetColumn, *, least: float) -> Values:
        """Return a column's numbers; NaN where missing, unreadable, less than `least`, or too large for float32."""
        numbers, unread = self._readings[name].numbers_where_readable(get(self.column(name)))
        with np.errstate(over="ignore"):
            found = np.asarray(numbers).astype(np.float32)
        found[unread | ~np.isfinite(found) | (found < least)] = np.nan
        return found


class WrongLabelError(UserError):
    """A label or weight cannot be read."""

    def __init__(self, column: str, error: WrongValueError) -> None:
        self.column = column
        super().__init__(str(error))
