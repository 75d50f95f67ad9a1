"""Encodes the rows of several requests together, which takes much less time than one request after the other."""

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import TYPE_CHECKING

import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.data.batch import Batch
from hostdev.data.preprocess.encoding import Encoding
from hostdev.ext.predict.predictor import Predictor
from hostdev.ext.predict.rows import as_array, as_batch
from hostdev.ext.serving.columns import Columns

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawPlan


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
