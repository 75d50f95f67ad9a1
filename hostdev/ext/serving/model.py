"""`ServedModel`: a predictor, and the checks and limits of its requests."""

import copy
import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import UserError
from hostdev.data.batch import Batch, concatenate
from hostdev.data.preprocess.encoding import rows_of
from hostdev.data.schema import columns_of
from hostdev.ext.predict.predictor import Predictor
from hostdev.ext.predict.unknown import UnknownValues
from hostdev.ext.serving.columns import Columns, RawColumn, describe_inputs, describe_raw_inputs
from hostdev.ext.serving.refused import bad
from hostdev.ext.serving.together import complete_together, encode_together

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawPlan

Values = npt.NDArray[np.float32]
_MOST_INPUTS = 64  # sets of columns of raw rows whose inputs are kept
_WARM_UP_ROWS = (1, 600)  # few and many rows take different ways through the kernels


class ServedModel:
    """One checkpoint's model. Its methods are called by one thread at a time, except that attributes are read by all.

    Attributes:
        version: The checkpoint's step, as text.
        written: When the checkpoint was written, seconds since 1970.
        inputs: The columns that it reads, by name.
        labels: The names of its outputs.

    Args:
        predictor: The predictor.
        note: Called with a line about columns whose values are mostly unknown, unlike in training.
    """

    def __init__(self, predictor: Predictor, note: Callable[[str], None]) -> None:
        self._note = note
        self._use(predictor)
        self.inputs = describe_inputs(predictor)
        self._inputs_of: dict[RawPlan, dict[str, RawColumn]] = {}
        if predictor.ambiguity is not None:
            note(f"warning: {predictor.ambiguity}")
        self.labels = predictor.data.schema.labels
        self._unknown = UnknownValues(predictor.encoding)

    def _use(self, predictor: Predictor) -> None:
        self.predictor = predictor
        self.step, self.version = predictor.step, str(predictor.step)
        self.written = datetime.fromisoformat(predictor.created).timestamp()

    def successor(self, predictor: Predictor) -> "ServedModel":
        """Return the model of a newer checkpoint, whose predictor is a successor of this one's."""
        made = copy.copy(self)
        made._use(predictor)
        return made

    @property
    def default_name(self) -> str:
        """The model's name where the user gives none."""
        name = str(self.predictor.settings["model"]).rpartition(":")[2]
        return re.sub(r"[^A-Za-z0-9._-]", "-", name) or "model"

    def inputs_of(self, names: Collection[str]) -> dict[str, RawColumn]:
        """Return the columns that are read from a request with the columns `names`: the model's, or raw ones.

        Raises:
            RefusedError: A column is not there, and the query cannot compute it.
        """
        try:
            plan = self.predictor.plan(list(names))
        except UserError as error:
            raise bad(str(error)) from None
        if plan is None:
            return self.inputs
        if plan not in self._inputs_of:
            if len(self._inputs_of) >= _MOST_INPUTS:
                self._inputs_of.clear()
            self._inputs_of[plan] = describe_raw_inputs(plan, self.inputs)
        return self._inputs_of[plan]

    def encode(self, requests: Sequence[Columns]) -> "list[Batch | Exception]":
        """Return each request's columns as a batch, as `Predictor` encodes them, or the error that it raises."""
        found: list[Batch | Exception] = []
        completed = complete_together(self.predictor, requests)
        right = [columns for columns in completed if not isinstance(columns, Exception)]
        is_right = len(right) == len(completed) > 1
        if is_right and (whole := encode_together(self.predictor.encoding, right)) is not None:
            start = 0
            for columns in right:
                stop = start + len(next(iter(columns.values())))
                found.append(rows_of(whole, start, stop))
                start = stop
        else:
            for each in completed:
                try:
                    found.append(each if isinstance(each, Exception) else self.predictor.encode_columns(each))
                except Exception as error:
                    found.append(error)
        for batch in found:
            if not isinstance(batch, Exception):
                self._unknown.count(batch)
        for line in self._unknown.lines():
            self._note(f"warning: {line}")
        return found

    def predict(
        self, batches: Sequence[Batch], most: int, go_on: Callable[[], bool] = lambda: True
    ) -> "list[Values | UserError] | None":
        """Return each batch's predictions, float32 [n, labels], or the error that says which row has none.

        All rows are computed together, in pieces of `most` rows, or of `Predictor.batch_size` where that is less.

        Args:
            batches: The requests' rows.
            most: The largest number of rows in a piece.
            go_on: Called before each piece; if it returns false, nothing more is computed and the result is None.
        """
        whole = concatenate(batches)
        size = min(most, self.predictor.batch_size)
        pieces = []
        for start in range(0, len(whole), size):
            if not go_on():
                return None
            pieces.append(self.predictor.logits(rows_of(whole, start, start + size)))
        labels = len(self.labels)
        logits = np.concatenate(pieces) if pieces else np.empty((0, labels) if labels > 1 else 0, np.float32)
        values = np.stack(list(columns_of(self.predictor.to_predictions(logits))), 1)
        found: list[Values | UserError] = []
        are_finite = np.isfinite(logits).all()  # the usual case
        start = 0
        for batch in batches:
            stop = start + len(batch)
            try:
                if not are_finite:
                    self.predictor.require_finite(batch, logits[start:stop])
                found.append(values[start:stop])
            except UserError as error:
                found.append(error)
            start = stop
        return found

    def warm_up(self) -> None:
        """Run the kernels once, on unknown values, so that the first request does not wait for their compilation."""
        schema = self.predictor.data.schema
        spaces = {space.name: space.oov for space in schema.spaces}
        oov = [spaces[column.space] for column in schema.columns if column.kind == "id"]
        dtype = self.predictor.data.id_type
        for n in _WARM_UP_ROWS:
            label = np.full((n, len(self.labels)) if schema.targets.more else n, np.nan, np.float32)
            dense = np.zeros((n, len(schema.dense)), np.float32)
            ids = np.tile(np.array(oov, dtype), (n, 1)).reshape(n, len(oov))
            bags: dict[str, Any] = {
                column.name: (np.full(n, spaces[column.space], dtype), np.ones(n, np.int32))
                for column in schema.columns
                if column.kind == "bag"
            }
            weights = {name: np.ones(n, np.float32) for name in schema.weighted_bags}
            self.predictor.logits(Batch(label, dense, ids, bags, bag_weights=weights))
