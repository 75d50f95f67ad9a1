"""`ServedModel`: a predictor, and the checks and limits of its requests.

The rows of several requests are encoded together, which takes much less time than one request after the other.
"""

import copy
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from hostdev.core.errors import UserError
from hostdev.data.batch import Batch, concatenate
from hostdev.ext.predict.predictor import Predictor, UnknownValues
from hostdev.ext.predict.rows import as_array, join_lists
from hostdev.ext.serving.columns import Columns, RawColumn, describe_inputs, describe_raw_inputs
from hostdev.ext.serving.refused import bad
from hostdev.kernels.arrays import Values

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawPlan

_MOST_INPUTS = 64  # maximum number of plans whose inputs are cached; a full cache is cleared
_WARM_UP_ROWS = (1, 600)  # few and many rows take different code paths in the kernels


class _NobodyWaitsError(Exception):
    """All clients of a batch have gone."""


class ServedModel:
    """One checkpoint's model.

    One thread at a time calls `encode` and `predict`. Any thread may read the attributes, and call `inputs_of` and
    `successor`.

    Attributes:
        version: The checkpoint's step, as text.
        written: When the checkpoint was written, seconds since 1970.
        inputs: The columns that the model reads, by name.
        labels: The names of the model's outputs.

    Args:
        predictor: The predictor.
        note: Called with warnings: about `Predictor.ambiguity`, and about columns whose values are mostly unknown,
            unlike in training.
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
        """Return the model of a newer checkpoint, given the `Predictor.successor` of this model's predictor."""
        made = copy.copy(self)
        made._use(predictor)
        return made

    @property
    def default_name(self) -> str:
        """The model's name where the user gives none."""
        name = str(self.predictor.settings["model"]).rpartition(":")[2]
        return re.sub(r"[^A-Za-z0-9._-]", "-", name) or "model"

    def inputs_of(self, names: Sequence[str]) -> dict[str, RawColumn]:
        """Return the columns to read from a request that has the columns `names`: the model's, or the query's raw ones.

        Raises:
            RefusedError: A column is missing, and the query cannot compute it.
        """
        try:
            plan = self.predictor.plan(names)
        except UserError as error:
            raise bad(str(error)) from None
        if plan is None:
            return self.inputs
        inputs = self._inputs_of.get(plan)
        if inputs is None:
            if len(self._inputs_of) >= _MOST_INPUTS:
                self._inputs_of.clear()
            inputs = self._inputs_of[plan] = describe_raw_inputs(plan, self.inputs)
        return inputs

    def predict(
        self, requests: Sequence[Columns], most: int, is_waiting: Callable[[int], bool] = lambda number: True
    ) -> "list[Values | Exception | None]":
        """Return each request's predictions, float32 [n, labels], or its error; None if no client waits any more.

        All rows are encoded and computed together, in pieces of `most` rows, or of `Predictor.batch_size` where that is
        less.

        Args:
            requests: The requests' columns.
            most: The largest number of rows in a piece.
            is_waiting: Returns whether the client of the request with this number still waits. It is called before each
                piece, until one client waits; if none does, nothing more is computed.
        """
        batch, sizes = self.encode(requests)
        outcomes: list[Values | Exception | None] = [size if isinstance(size, Exception) else None for size in sizes]
        if batch is None:
            return outcomes
        numbers = [number for number, size in enumerate(sizes) if not isinstance(size, Exception)]

        def require_clients() -> None:
            if not any(map(is_waiting, numbers)):
                raise _NobodyWaitsError

        try:
            logits = self.predictor.logits_by_batch(batch, most, require_clients)
        except _NobodyWaitsError:
            return outcomes
        values = self.predictor.to_predictions(logits)
        values = values if values.ndim == 2 else values[:, None]
        are_finite = np.isfinite(logits).all()  # usually true: one check for all requests is fast
        start = 0
        for number, size in enumerate(sizes):
            if isinstance(size, Exception):
                continue
            stop = start + size
            try:
                if not are_finite:
                    self.predictor.require_finite(next(batch.split([start, stop])), logits[start:stop])
                outcomes[number] = values[start:stop]
            except UserError as error:
                outcomes[number] = error
            start = stop
        return outcomes

    def encode(self, requests: Sequence[Columns]) -> "tuple[Batch | None, list[int | Exception]]":
        """Return the rows of all requests as one batch, in order, and for each request its number of rows or its error.

        Each request's rows are encoded as if it were alone. If all requests have errors, the batch is None.
        """
        sizes: list[int | Exception] = []
        batch: Batch | None = None
        try:
            batch = self.predictor.encode_columns(*self._complete(requests))
            sizes += [len(next(iter(columns.values()))) for columns in requests]
        except Exception as error:  # a wrong value, or types that differ between the requests
            if len(requests) == 1:
                return None, [error]
            encoded = [self.encode([columns]) for columns in requests]
            sizes += [size for _, [size] in encoded]
            batches = [batch for batch, _ in encoded if batch is not None]
            return (concatenate(batches) if batches else None), sizes
        self._unknown.count(batch)
        for line in self._unknown.lines():
            self._note(f"warning: {line}")
        return batch, sizes

    def _complete(self, requests: Sequence[Columns]) -> Sequence[Columns]:
        """Return the requests' columns, with raw columns replaced by those that the query computes from them.

        Requests with the same columns are computed together, in one call of the query's engine.
        """
        if not self.predictor.has_query:
            return requests
        groups: dict[RawPlan, list[int]] = {}
        completed = list(requests)
        for number, columns in enumerate(requests):
            is_empty = not len(next(iter(columns.values()), ()))
            if not is_empty and (plan := self.predictor.plan(list(columns))) is not None:
                groups.setdefault(plan, []).append(number)
        for plan, numbers in groups.items():
            group = [requests[number] for number in numbers]
            joined = join_lists(group, plan.columns()) if len(group) > 1 else None
            if joined is None:
                for number in numbers:
                    completed[number] = plan.complete(requests[number], as_array)
                continue
            whole, start = plan.complete(joined, as_array), 0
            for number, columns in zip(numbers, group, strict=True):
                stop = start + len(next(iter(columns.values())))
                completed[number] = {name: values[start:stop] for name, values in whole.items()}
                start = stop
        return completed

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
