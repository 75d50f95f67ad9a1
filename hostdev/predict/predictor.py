"""`Predictor`: probabilities from a checkpoint of `python -m hostdev.train`, for one row or a million."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.checkpoint.folder import newest
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import values_of
from hostdev.checkpoint.lookup import MappedTable
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.state import file_in
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.preprocess.encoding import Encoding, rows_of
from hostdev.device import backend
from hostdev.device.ops import ops_for
from hostdev.models import registry
from hostdev.models.model import Model
from hostdev.predict.rows import as_batch, as_columns, as_mapping, names_of
from hostdev.runtime.features import FeatureIds, read_ids
from hostdev.runtime.spec import Feature

Probabilities = npt.NDArray[np.float32]
_FEW = 64  # rows, for which one dict of Python's values is the quicker way


class Predictor:
    """A trained model that says how probable a positive label is.

    ::

        predict = hostdev.Predictor("runs/20261122-073901/checkpoints")
        predict({"user": ["u1", "u2"], "item": ["m0001", "m0007"], "age": [31, 54], ...})  # float32 [2]

    checkpoint  one of `python -m hostdev.train`, or a folder of them, or its run directory: the newest whole one, with
                a warning where a newer one is not whole
    device      of the dense layers

    Tables are mapped into memory without their slots, so that it begins at once whatever their size, and processes on
    one host share one copy of what is looked up. Several threads may call. Of the checkpoint's files only the manifests
    are checked: `python -m hostdev.checkpoint verify` reads them all.

    Raises UserError for a checkpoint that is not whole, or was not saved by the command.
    """

    def __init__(self, checkpoint: Path | str, *, device: torch.device | str = "cpu") -> None:
        found = newest(Path(checkpoint))
        for line in found.notes():
            warnings.warn(line, stacklevel=2)
        chain = found.chain
        self.path = chain[-1].path
        values = values_of(chain)
        if not isinstance(values, dict) or "more" not in values:
            raise UserError(f"{self.path} was saved by a program of its own; only that knows its model")
        self.settings: dict[str, Any] = values["more"]["settings"]
        layers = Layers(chain)
        of_data = file_in(layers, f"data/{manifest.FILE_NAME}")
        if of_data is None:
            raise BrokenCheckpointError(f"{self.path} is broken (it has no data/{manifest.FILE_NAME})")
        self.data, self.data_folder = manifest.read(of_data.parent), of_data.parent
        vocabulary = None if self.data.vocabulary is None else file_in(layers, f"data/{self.data.vocabulary}")
        self.encoding = Encoding(self.data, vocabulary)
        self._device = backend.require(device)
        self._bf16 = self.settings["precision"] == "bf16"
        dim = self.settings["emb_dim"] or registry.default_dim(self.settings["model"])
        self.model: Model = registry.make(self.settings["model"], self.data.schema, dim, seed=self.settings["seed"])
        try:
            self.model.load_state_dict(values["dense"]["model"])
        except RuntimeError as error:
            raise UserError(f"{self.path} is of another model: {' '.join(str(error).split())}") from None
        self.model.to(self._device).eval()
        self.tables = {name: MappedTable(chain, name) for name in self.model.tables}
        self._ops = ops_for(torch.device("cpu"))

    @property
    def batch_size(self) -> int:
        """Rows that are computed at once: those of a batch in training, so that the bits are the evaluation's."""
        return int(self.settings["batch_size"])

    def __call__(self, rows: Any) -> Probabilities:
        """Return the probability of each row, float32 [n].

        rows  of columns by name, as the data set had them: a dict of lists or arrays (or of single values, for one
              row, in which a bag may have a list), a pandas DataFrame or Series (one row), a pyarrow Table or
              RecordBatch. None and NaN are missing. Other columns, the label too, are not looked at

        UserError for a column that is missing or of another type, and for a value that the column may not have; a value
        that training has not seen is out of vocabulary.
        """
        rows = as_mapping(rows)
        self.encoding.require(names_of(rows))
        batch = None
        if isinstance(rows, Mapping):
            rows = as_columns(rows, self.data.schema)
            if all(type(values) is list and len(values) <= _FEW for values in rows.values()):
                batch = self.encoding.encode_few(rows)
        if batch is None:
            batch = self.encoding.encode(as_batch(rows, self.data.schema))
        logits = self.logits_by_batch(batch)
        self._require_finite(batch, logits)
        return probabilities(logits)

    def _require_finite(self, batch: Batch, logits: Probabilities) -> None:
        """Raise UserError, which says what is likely to blame, unless all logits [n] are finite."""
        if not len(wrong := np.flatnonzero(~np.isfinite(logits))):
            return
        row, names = int(wrong[0]), self.data.schema.dense
        most = f"; the row's largest number is that of column {names[np.abs(batch.dense[row]).argmax()]!r}"
        raise UserError(f"row {row + 1}: the model's result is not a finite number{most if names else ''}")

    def predict(self, batch: Batch) -> Probabilities:
        """Return the probability of each row of a batch, whose ids are those of the data set, float32 [n]."""
        return probabilities(self.logits_by_batch(batch))

    def logits_by_batch(self, batch: Batch) -> Probabilities:
        """Return the logits of any number of rows, float32 [n], computed as many at once as in training."""
        size = self.batch_size
        logits = [self.logits(rows_of(batch, start, start + size)) for start in range(0, len(batch), size)]
        return np.concatenate(logits) if logits else np.empty(0, np.float32)

    def logits(self, batch: Batch) -> Probabilities:
        """Return the model's logits of a batch at once, float32 [n]."""
        with torch.inference_mode():
            rows = dict(self._rows(batch))
            dense = torch.from_numpy(batch.dense).to(self._device)
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16):
                logits: Tensor = self.model(dense, rows)
        found: Probabilities = logits.float().cpu().numpy()
        return found

    def _rows(self, batch: Batch) -> Iterator[tuple[str, Any]]:
        """Yield each feature's rows, as `Runtime.predict` gives them."""
        given = self.model.ids(batch)
        looked_up: dict[tuple[str, int], Tensor] = {}  # features may share ids
        for name, feature in self.model.features.items():
            ids = read_ids(name, feature, given[name])
            names = [feature.tables] if feature.is_single else list(feature.tables)
            outputs = []
            for table in names:
                key = table, id(given[name])
                if key not in looked_up:
                    looked_up[key] = torch.from_numpy(self.tables[table].lookup(ids.values))
                outputs.append(self._values(looked_up[key], feature, ids, self.tables[table].dim).to(self._device))
            yield name, outputs[0] if feature.is_single else tuple(outputs)

    def _values(self, rows: Tensor, feature: Feature, ids: FeatureIds, dim: int) -> Tensor:
        """Return rows [N, D] times their weights, pooled if the feature is, in the dense layers' precision."""
        dtype = torch.bfloat16 if self._bf16 and dim > 1 else torch.float32
        if ids.offsets is None and ids.weights is None:
            found = rows.to(dtype)
        else:
            each = torch.arange(len(rows), dtype=torch.int32)
            if ids.offsets is None:
                found = self._ops.gather(rows, each, ids.weights, dtype)
            else:
                found = self._ops.pool(rows, each, ids.offsets, ids.weights, feature.pooling == "mean", dtype)
        return found if ids.shape is None else found.view(*ids.shape, dim)


def probabilities(logits: Probabilities) -> Probabilities:
    """Return the probabilities of logits, float32 [n]."""
    found: Probabilities = torch.sigmoid(torch.from_numpy(logits)).numpy()
    return found
