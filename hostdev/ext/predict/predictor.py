"""`Predictor`: predictions from a checkpoint of `python -m hostdev.train`, for one row or many.

`UnknownValues` warns about columns with far more out-of-vocabulary values than in training, which happens if values are
written in another format.
"""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)
import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.checkpoint.layers import SavedRows
from hostdev.core.addresses import checkpoint_path
from hostdev.core.errors import UserError
from hostdev.data.batch import Batch
from hostdev.data.preprocess.naming import listed
from hostdev.data.schema import columns_of
from hostdev.device import backend
from hostdev.device.ops import get_ops
from hostdev.ext.predict.following import SECONDS, FollowingPredictor, list_checkpoints, warn
from hostdev.ext.predict.opening import Opened, choose_model, open_checkpoint, reading
from hostdev.ext.predict.rows import (
    as_array,
    as_batch,
    as_columns,
    as_mapping,
    concatenate_rows,
    get_column_names,
    join_lists,
)
from hostdev.models import registry
from hostdev.models.model import Model, Rows
from hostdev.runtime.features import FeatureIds, read_ids
from hostdev.runtime.spec import Feature

if TYPE_CHECKING:
    from hostdev.data.preprocess.query.raw_rows import RawPlan, RawQuery
from hostdev.data.preprocess.encoding import Encoding

_SOME = 20  # columns with fewer values are not reported
_MOST = 0.5  # a column is reported only if its share of unknown values is above this
_TIMES = 2  # a column is reported only if its share of unknown values is above this many times the share in training
Probabilities = npt.NDArray[np.float32]


class UnknownValues:
    """Counts out-of-vocabulary values by column, and warns once per column if there are far more than in training.

    Several threads may count without a lock; small counting errors do not matter.
    """

    def __init__(self, encoding: Encoding) -> None:
        self._encoding, schema = encoding, encoding.schema
        spaces = {space.name: space for space in schema.spaces}
        ids = [column for column in schema.columns if column.kind == "id"]
        self._columns = [*ids, *(column for column in schema.columns if column.kind == "bag")]
        self._oov = np.array([spaces[column.space].oov for column in self._columns], np.int64)
        self._rates = np.array([encoding.rates.get(column.space, 1.0) for column in self._columns])
        self._has_rates = bool(encoding.rates)
        self._most = np.maximum(_MOST, _TIMES * self._rates)  # a larger share causes a warning
        self._ids = len(ids)
        self._uses = np.zeros(len(self._columns), np.int64)
        self._unknown = np.zeros(len(self._columns), np.int64)
        self._warned: set[str] = set()

    def count(self, batch: Batch) -> None:
        """Count the values of a batch."""
        if not self._has_rates:
            return
        self._uses[: self._ids] += len(batch)
        self._unknown[: self._ids] += np.count_nonzero(batch.ids == self._oov[: self._ids], axis=0)
        for place, column in enumerate(self._columns[self._ids :], self._ids):
            values, _ = batch.bags[column.name]
            self._uses[place] += len(values)
            self._unknown[place] += np.count_nonzero(values == self._oov[place])

    def lines(self) -> Iterator[str]:
        """Yield a warning for each column that needs one and has not been reported before."""
        for place in np.flatnonzero((self._uses >= _SOME) & (self._unknown > self._most * self._uses)).tolist():
            column, uses = self._columns[place], int(self._uses[place])
            if column.name in self._warned:
                continue
            self._warned.add(column.name)
            share, before = self._unknown[place] / uses, self._rates[place]
            shown = self._encoding.written[column.space].shown
            yield (
                f"column {column.name!r}: {share:.1%} of {uses:,} values are out of vocabulary, but only {before:.1%} "
                f"were in training, where values were {shown}; are these values written the same way?"
            )


class _FeatureLookup(NamedTuple):
    """How a feature is looked up."""

    name: str
    feature: Feature
    is_single: bool  # the value of `Feature.is_single`
    tables: list[str]
    unknown: Sequence[str]  # names of the feature's out-of-vocabulary rows in tables by key


class Predictor:
    """A trained model that predicts the probability of a positive label, or the value of a numeric label.

    ::

        predict = hostdev.Predictor("runs/20261122-073901/checkpoints")
        predict({"user": ["u1", "u2"], "item": ["m0001", "m0007"], "age": [31, 54], ...})  # float32 [2]

    Tables are mapped into memory: a table of any size opens instantly, and processes on one host share one copy of the
    rows that are looked up. Several threads may call one predictor. The constructor opens all files; the checkpoint may
    be deleted afterwards. Only the structure of the tables' files is checked; `python -m hostdev.checkpoint verify`
    compares checksums.

    Attributes:
        path: The checkpoint's folder.
        step: The checkpoint's step.
        created: When the checkpoint was written, UTC in ISO 8601.
        batch_size: Rows per computation.
        has_query: Whether a query can compute columns of raw rows.

    Args:
        checkpoint: A checkpoint of `python -m hostdev.train`, a folder of them, or a run directory. For a run with
            --early-stop, the best checkpoint is used (by AUC, or by RMSE if all labels are numbers); for other runs,
            the newest valid one, with a warning if a newer one is damaged.
        device: The device of the dense layers.
        model: A model class or its name. Required if the run had a custom class: a checkpoint must not decide which
            module is imported.
        which: "best" or "newest", to override the default choice.
        query: A SELECT that computes the columns from raw rows, which are its table `rows`. By default, the query that
            made the data set computes the columns that rows lack, if it works row by row (docs/guides/query.md).

    Raises:
        UserError: The checkpoint is damaged, of a different model, or not written by `python -m hostdev.train`; or
            `query` is invalid.
    """

    def __init__(
        self,
        checkpoint: Path | str,
        *,
        device: torch.device | str = "cpu",
        model: str | type[Any] | None = None,  # Any, as classes need not inherit from Model
        which: str | None = None,
        query: str | None = None,
        _encodes: bool = True,  # whether raw rows will be given, not only batches of a data set
        _in_float32: bool = False,  # whether a model that was trained in bfloat16 computes in float32
    ) -> None:
        opened = open_checkpoint(checkpoint_path(checkpoint), which)
        for line in opened.found.notes():
            warnings.warn(line, stacklevel=2)
        self.encoding, self.data, self._vocabulary = opened.encoding, opened.data, opened.vocabulary
        self._device, self._in_float32 = backend.require(device), _in_float32
        chosen = choose_model(opened.settings, model, opened.path)
        dim = opened.settings["emb_dim"] or registry.default_dim(chosen)
        self.model: Model = registry.make(chosen, self.data.schema, dim, seed=opened.settings["seed"])
        self._use(opened)
        self._given_query, self._is_warned = query, False
        with reading(self.path):
            self.has_query = query is not None or any("query" in one for one in self.data.sources)
        if _encodes:
            with reading(self.path):
                self.encoding.prepare()
        if query is not None:
            _ = self.raw_query
        self._ops = get_ops(torch.device("cpu"))

    @classmethod
    def follow(
        cls,
        checkpoint: Path | str,
        *,
        seconds: float = SECONDS,
        on_change: "Callable[[Predictor], object]" = lambda predictor: None,
        on_problem: Callable[[str], object] = warn,
        **options: Any,  # Any: arguments of Predictor, of any type
    ) -> "FollowingPredictor[Predictor]":
        """Return a predictor that switches to newer checkpoints of a folder while it predicts.

        ::

            with hostdev.Predictor.follow("run/checkpoints") as predict:
                predict({"user": ["u1"], ...})  # from the newest checkpoint

        Args:
            checkpoint: A folder of checkpoints or a run directory, here or in a store.
            seconds: Seconds between two checks of the folder for newer checkpoints.
            on_change: Called with the new `Predictor` in the thread that checks the folder, after each change.
            on_problem: Called with a line about a checkpoint that cannot be used; by default, it becomes a warning.
            options: Further arguments of `Predictor`.

        Raises:
            UserError: As for `Predictor`, or `checkpoint` is a single checkpoint.
        """
        path = checkpoint_path(checkpoint)
        list_checkpoints(path)
        return FollowingPredictor(cls(path, **options), path, options.get("which"), seconds, on_change, on_problem)

    def successor(self, opened: Opened) -> "Predictor":
        """Return a predictor of a newer checkpoint of the same run; it shares with this one all that has not changed.

        Raises:
            UserError: The checkpoint is of a different model, or of other data.
        """
        for name in ("model", "emb_dim"):
            if opened.settings[name] != self.settings[name]:
                raise UserError(f"{opened.path} is of a different model: {name} is {opened.settings[name]!r}")
        if (opened.data, opened.vocabulary) != (self.data, self._vocabulary):
            raise UserError(f"{opened.path} was trained on other data, with other columns or ids")
        made = copy.copy(self)
        made.model = copy.deepcopy(self.model)
        made._use(opened)
        return made

    def _use(self, opened: Opened) -> None:
        """Load the dense layers of a checkpoint, and open its tables."""
        self.path, self.why = opened.path, opened.why
        self.settings, self.data_folder = opened.settings, opened.data_folder
        self.checksums = [checkpoint.manifest.checksum for checkpoint in opened.chain]
        self.step, self.created = opened.chain[-1].manifest.step, opened.chain[-1].manifest.created
        self._bf16 = self.settings["precision"] == "bf16" and not self._in_float32
        try:
            self.model.load_state_dict(opened.dense)
        except (RuntimeError, TypeError, AttributeError) as error:
            raise UserError(f"{self.path} is of a different model: {' '.join(str(error).split())[:300]}") from None
        self.model.to(self._device).eval()
        with reading(self.path):
            self.tables = {name: SavedRows(opened.chain, name) for name in self.model.tables}
            self._require_tables()
        self._lookups = [self._lookup_of(name, feature) for name, feature in self.model.features.items()]
        # The training run's batch size, so that results equal its evaluation bit for bit.
        self.batch_size = int(self.settings["batch_size"])

    def _lookup_of(self, name: str, feature: Feature) -> _FeatureLookup:
        tables = [feature.tables] if feature.is_single else list(feature.tables)
        return _FeatureLookup(name, feature, feature.is_single, tables, feature.unknown_names)

    @property
    def checksum(self) -> str:
        """The checksum of the checkpoint's manifest."""
        return self.checksums[-1]

    @cached_property
    def _unknown(self) -> UnknownValues:
        return UnknownValues(self.encoding)  # this loads the vocabulary

    @cached_property
    def raw_query(self) -> "RawQuery | None":
        """Computes columns from raw rows; None if the data set was not made by a query, and no query is given."""
        if not self.has_query:
            return None
        from hostdev.data.preprocess.query.raw_rows import RawQuery, find_source  # imports DuckDB

        return RawQuery(self.encoding, find_source(self.data.sources), self._given_query)

    def plan(self, names: Sequence[object]) -> "RawPlan | None":
        """Return the plan by which a query computes the data set's columns from rows with the columns `names`.

        None if there is no query, or if rows have all columns and the query is the data set's.

        Raises:
            UserError: A column is missing and cannot be computed.
        """
        if not self.has_query or (self._given_query is None and set(self.encoding.columns()) <= set(names)):
            return None
        assert self.raw_query is not None
        return self.raw_query.plan(names)

    @cached_property
    def ambiguity(self) -> str | None:
        """A warning about columns that may have raw values or the results of the query; None if there are none."""
        if self._given_query is not None or not self.has_query:
            return None
        try:
            redefined = [] if self.raw_query is None else self.raw_query.redefined
        except UserError:  # rows that have all columns do not need the query
            return None
        names = [name for name in self.encoding.columns() if name in redefined]
        if not names:
            return None
        return (
            f"the data set's query computes {listed(names)} from raw columns of the same name; rows that have all "
            "columns are taken as computed; give the query with --query (query=) to compute raw ones"
        )

    def _require_tables(self) -> None:
        """Raise UserError unless the tables have the model's shapes."""
        for name, spec in self.model.tables.items():
            table = self.tables[name]
            if not table.is_by_key and (table.rows, table.dim) != (spec.rows, spec.dim):
                raise UserError(
                    f"{self.path} is of a different model: table {name!r} is {table.rows} x {table.dim} in the "
                    f"checkpoint, not {spec.rows} x {spec.dim}"
                )

    def __call__(self, rows: Any) -> Probabilities:  # Any, as pandas may not be installed
        """Return the probability of each row, float32 [n], or [n, labels] if the model has several labels.

        For a numeric label, the value is the predicted number.

        A value matches the same value in training even if its type differs (docs/reference/value-types.md). Unseen
        values are out of vocabulary; a warning names a column in which most values are unseen, unlike in training.

        Args:
            rows: Columns by name, as in the data set, or as in the raw files that its query reads: a dict of lists or
                arrays (or of single values for one row, where a bag may have a list), a pandas DataFrame or Series (one
                row), or a pyarrow Table or RecordBatch. None and NaN are missing values. Other columns, such as the
                label, are ignored.

        Raises:
            UserError: A column is missing or has a wrong type, or a value or a result is invalid.
        """
        rows = as_mapping(rows)
        names = get_column_names(rows)
        plan = self.plan(names)
        if plan is None:
            self.encoding.require(names)
            self._warn_of_ambiguity()
        batch = self.encode(as_columns(rows, plan or self.encoding) if isinstance(rows, Mapping) else rows)
        self._unknown.count(batch)
        for line in self._unknown.lines():
            warnings.warn(line, stacklevel=2)
        logits = self.logits_by_batch(batch)
        self.require_finite(batch, logits)
        return self.to_predictions(logits)

    def encode(self, rows: Any) -> Batch:  # Any, as pandas may not be installed
        """Return rows as a batch with the data set's ids; its labels are NaN.

        Args:
            rows: The required columns, or raw columns that a query computes them from: a dict of lists or arrays with
                one value per row, a pandas DataFrame, or a pyarrow Table or RecordBatch.

        Raises:
            UserError: A column has a wrong type, or a value is invalid.
        """
        plan = self.plan(get_column_names(rows))
        if plan is not None:
            rows = plan.complete(rows, as_array)
        return self.encode_columns(rows)

    def encode_columns(self, *parts: Any) -> Batch:  # Any, as pandas may not be installed
        """Return all sets of rows in `parts`, which have all columns of the data set, as one batch; see `encode`.

        Raises:
            UserError: A value is invalid, or the sets cannot be encoded together, because a column's types differ.
        """
        if (plain := self.encoding.plain) is not None and all(isinstance(rows, Mapping) for rows in parts):
            joined = parts[0] if len(parts) == 1 else join_lists(parts, plain.names)
            if joined is not None and (batch := plain.encode(joined)) is not None:
                return batch
        batches = [as_batch(rows, self.encoding) for rows in parts]
        return self.encoding.encode(batches[0] if len(batches) == 1 else concatenate_rows(batches, self.encoding))

    def _warn_of_ambiguity(self) -> None:
        if self.has_query and not self._is_warned:
            self._is_warned = True
            if self.ambiguity is not None:
                warnings.warn(self.ambiguity, stacklevel=3)

    def to_predictions(self, outputs: Probabilities) -> Probabilities:
        """Return probabilities for labels of 0 or 1, and the model's outputs for numeric labels."""
        schema = self.data.schema
        if not schema.targets.numeric:
            return probabilities(outputs)
        if not schema.targets.more:
            return outputs
        each = zip(schema.labels, columns_of(outputs), strict=True)
        return np.stack([one if name in schema.targets.numeric else probabilities(one) for name, one in each], 1)

    def require_finite(self, batch: Batch, logits: Probabilities) -> None:
        """Raise UserError with the likely cause unless all outputs, [n] or [n, labels], are finite."""
        if not len(wrong := np.flatnonzero(~np.logical_and.reduce(list(map(np.isfinite, columns_of(logits)))))):
            return
        row, names = int(wrong[0]), self.data.schema.dense
        most = f"; the row's largest number is in column {names[np.abs(batch.dense[row]).argmax()]!r}"
        raise UserError(f"row {row + 1}: the model's result is not a finite number{most if names else ''}")

    def predict(self, batch: Batch) -> Probabilities:
        """Return the same predictions as `__call__`, but for a batch that already has the data set's ids."""
        return self.to_predictions(self.logits_by_batch(batch))

    def logits_by_batch(
        self, batch: Batch, most: int | None = None, proceed: Callable[[], object] = lambda: None
    ) -> Probabilities:
        """Return the same as `logits` for any number of rows, computed in batches.

        Args:
            batch: The rows.
            most: The largest number of rows of a batch, if that is less than `batch_size`.
            proceed: Called before each batch; an error that it raises ends the computation.
        """
        n, size = len(batch), min(most or self.batch_size, self.batch_size)
        if not n:
            labels = len(self.data.schema.labels)
            return np.empty((0, labels) if labels > 1 else 0, np.float32)
        edges = [*range(0, n, size), n]
        parts: Iterable[Batch] = [batch] if n <= size else (replace(part, whole=None) for part in batch.split(edges))
        logits = []
        for part in parts:
            proceed()
            logits.append(self.logits(part))
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def logits(self, batch: Batch) -> Probabilities:
        """Return the model's outputs for one batch, float32 [n], or [n, labels] for several labels.

        An output is a logit, or the predicted number for a numeric label.
        """
        with torch.inference_mode():
            rows = self.rows(batch)
            dense = torch.from_numpy(batch.dense).to(self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                logits: Tensor = self.model(dense, rows)
        found: Probabilities = logits.float().cpu().numpy()
        return found

    def rows(self, batch: Batch) -> Rows:
        """Return the looked-up rows of each feature for a batch, equal to those that `Runtime.predict` looks up."""
        given = self.model.ids(batch)
        looked_up: dict[tuple[str, int], Tensor] = {}  # features may share ids
        rows: Rows = {}
        for name, feature, is_single, tables, unknown in self._lookups:
            ids = read_ids(name, feature, given[name])
            is_plain = ids.offsets is None and ids.weights is None
            positions = None if is_plain else torch.arange(len(ids.values), dtype=torch.int32)
            outputs = []
            for table in tables:
                key = table, id(given[name])
                if key not in looked_up:
                    looked_up[key] = torch.from_numpy(self.tables[table].lookup(ids.values, unknown))
                outputs.append(self._values(looked_up[key], feature, ids, positions, self.tables[table].dim))
            rows[name] = outputs[0] if is_single else tuple(outputs)
        return rows

    def _values(self, rows: Tensor, feature: Feature, ids: FeatureIds, positions: Tensor | None, dim: int) -> Tensor:
        """Return a feature's rows as the model needs them: weighted or pooled if required, in the model's precision."""
        dtype = torch.bfloat16 if self._bf16 and dim > 1 else torch.float32
        if positions is None:
            values = rows.to(dtype)
        elif ids.offsets is None:
            values = self._ops.gather(rows, positions, ids.weights, dtype)
        else:
            values = self._ops.pool(rows, positions, ids.offsets, ids.weights, feature.pooling == "mean", dtype)
        return (values if ids.shape is None else values.view(*ids.shape, dim)).to(self._device)


def open_for_command(note: Callable[[str], object], checkpoint: Path, device: str, **options: Any) -> Predictor:
    """Return a predictor whose results are deterministic on a device; `note` gets the text of each warning."""
    chosen = backend.select(device)
    backend.make_deterministic(chosen)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = Predictor(checkpoint, device=chosen, **options)
    for warning in told:
        note(str(warning.message))
    return made


def probabilities(logits: Probabilities) -> Probabilities:
    """Return the probabilities of logits, float32 of the same shape."""
    found: Probabilities = torch.sigmoid(torch.from_numpy(logits)).numpy()
    return found
