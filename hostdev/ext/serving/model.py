"""`ServedModel`: a predictor, and the checks and limits of its requests.

The rows of several requests are encoded together, which takes much less time than one request after the other.
"""

import copy
import re
from collections.abc import Callable, Collection, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from hostdev.core.errors import UserError
from hostdev.data.batch import Batch, concatenate
from hostdev.data.preprocess.encoding import rows_of
from hostdev.data.schema import columns_of
from hostdev.ext.predict.predictor import Predictor, UnknownValues
from hostdev.ext.serving.columns import Columns, RawColumn, describe_inputs, describe_raw_inputs
from hostdev.ext.serving.refused import bad
from hostdev.kernels.arrays import Values

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawPlan
from itertools import accumulate, chain

import pyarrow as pa

from hostdev.data.preprocess.encoding import Encoding
from hostdev.ext.predict.rows import as_array, as_batch

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawPlan

_MOST_INPUTS = 64  # sets of columns of raw rows whose inputs are kept
_WARM_UP_ROWS = (1, 600)  # few and many rows take different ways through the kernels


def complete_together(predictor: Predictor, requests: Sequence[Columns]) -> "list[Columns | Exception]":
    """Return each request's columns with those that a query computes in place of raw ones, or the error of a request.

    Requests with the same columns are computed together, in one call of the query's engine.
    """
    found: list[Columns | Exception] = list(requests)
    groups: dict[RawPlan, list[int]] = {}
    for number, columns in enumerate(requests):
        try:
            is_empty = all(len(values) == 0 for values in columns.values())
            if not is_empty and (plan := predictor.plan(list(columns))) is not None:
                groups.setdefault(plan, []).append(number)
        except UserError as error:
            found[number] = error
    for plan, numbers in groups.items():
        for number, completed in zip(numbers, _complete(plan, [requests[number] for number in numbers]), strict=True):
            found[number] = completed
    return found


def _complete(plan: "RawPlan", requests: Sequence[Columns]) -> "list[Columns | Exception]":
    names = plan.columns()
    if len(requests) > 1 and all(type(columns[name]) is list for columns in requests for name in names):
        joined = {name: list(chain.from_iterable([columns[name] for columns in requests])) for name in names}
        try:
            whole = plan.complete(joined, as_array)
        except Exception:  # whatever it is, it is raised again for the request that has it
            whole = None
        if whole is not None:
            stops = list(accumulate(len(columns[names[0]]) for columns in requests))
            return [
                {name: values[start:stop] for name, values in whole.items()}
                for start, stop in zip([0, *stops[:-1]], stops, strict=True)
            ]
    found: list[Columns | Exception] = []
    for columns in requests:
        try:
            found.append(plan.complete(columns, as_array))
        except Exception as error:
            found.append(error)
    return found


def encode_together(encoding: Encoding, requests: Sequence[Columns]) -> Batch | None:
    """Return all requests' rows, in order, as one batch of what each is encoded to alone.

    The result is None if values of different types must not be put into one column, or if a value is invalid, so that
    each request has to be encoded alone.
    """
    names = encoding.columns()
    try:
        if all(type(columns[name]) is list for columns in requests for name in names):
            joined = {name: list(chain.from_iterable([each[name] for each in requests])) for name in names}
            batch = encoding.encode_few(joined)
            if batch is not None:
                return batch
        parts = [as_batch(columns, encoding) for columns in requests]
        numbers = encoding.numeric_columns
        columns = [_join(name, [part[name] for part in parts], is_number=name in numbers) for name in names]
        if any(column is None for column in columns):
            return None
        return encoding.encode(pa.RecordBatch.from_arrays(columns, names=names))
    except Exception:  # whatever it is, it is raised again for the request that has it
        return None


def _join(name: str, parts: Sequence[pa.Array], *, is_number: bool) -> pa.Array | None:
    """Return the values of several requests as one array, or None if that changed what a value is."""
    if is_number:  # these are converted to float64 in any case
        plain = (pa.types.is_integer, pa.types.is_floating, pa.types.is_null)
        if all(any(test(part.type) for test in plain) for part in parts):
            parts = [part.cast(pa.float64()) for part in parts]
    if any(part.type != parts[0].type for part in parts):
        return None
    return pa.concat_arrays(parts)


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
