"""The dense layers of a checkpoint of `train` as a network in ONNX, checked with ONNX Runtime."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hostdev import __version__
from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.layers import Layers
from hostdev.core.errors import HostdevError, UserError, in_words
from hostdev.data.batch import Batch
from hostdev.ext.predict.output import names_of
from hostdev.ext.predict.predictor import Predictor, Probabilities
from hostdev.models.model import Model, Rows
from hostdev.runtime.features import read_ids

FILE, ABOUT = "dense.onnx", "dense.json"
OPSET = 18  # the version of ONNX 1.13, the lowest that torch's exporter writes
BOUND = 1e-5  # a result may differ from its prediction p by at most BOUND * max(1, |p|)
DENSE, ROWS, BATCH = "dense", "rows", "batch"
_CHECKED = 64  # random samples with which the network is checked


class Input(NamedTuple):
    """An input of the network: the dense columns, or the rows of a feature in a table."""

    name: str
    feature: str | None = None  # None for the dense columns
    table: str | None = None


def write(model: str | None, chain: Chain, out: Path) -> list[str]:
    """Write the network and its description into a folder, and check the network; return lines to print."""
    path, state = chain[-1].path, chain[-1].manifest.state
    if not isinstance(state, dict) or "more" not in state:
        raise UserError(
            f"{path} was written by Runtime.save, which does not record the model: export the dense module where your "
            "program has it, by torch.onnx.export(module, (rows, ...), 'dense.onnx'), and the tables with "
            "--format parquet"
        )
    predictor = Predictor(path, model=model, _encodes=False, _in_float32=True)
    batch = _sample(predictor, chain)
    inputs = get_inputs(predictor.model, len(predictor.data.schema.dense))
    outputs = [name for name, _ in names_of(predictor.data.schema)]
    values = get_values(predictor, inputs, batch)
    about = _describe(predictor, inputs, values, outputs, batch)
    about["step"] = chain[-1].manifest.step
    content = _convert(predictor, inputs, values, outputs, json.dumps(about))
    (out / FILE).write_bytes(content)
    (out / ABOUT).write_text(json.dumps(about, indent=2) + "\n")
    for some in (batch, *batch.split([0, 1])):
        found = _compute(content, get_values(predictor, inputs, some))
        _require_equal(found, predictor.predict(some))
    lines = [
        f"{FILE}: {predictor.settings['model']} of step {chain[-1].manifest.step:,}, opset {OPSET}, inputs "
        f"{', '.join(one.name for one in inputs)}, outputs {', '.join(outputs)}; within {BOUND:g} of the predictions"
    ]
    if predictor.settings["precision"] == "bf16":
        own = Predictor(path, model=model, _encodes=False).predict(batch)
        far = np.abs(_compute(content, values) - own).max()
        lines.append(
            f"the run computes in bfloat16, and the network in float32: up to {far:.2g} from the predictions of this "
            f"checkpoint in bfloat16, over {_CHECKED} random samples"
        )
    return lines


def get_inputs(model: Model, dense: int) -> list[Input]:
    """Return the inputs of a model's network: `dense` if there are dense columns, and each feature's rows by table."""
    found = [Input(DENSE)] if dense else []
    for name, feature in model.features.items():
        if feature.is_single:
            found.append(Input(f"{ROWS}.{name}", name, feature.tables))
        else:
            found += [Input(f"{ROWS}.{name}.{table}", name, table) for table in feature.tables]
    return found


def _sample(predictor: Predictor, chain: Chain) -> Batch:
    """Return random samples; with tables by key, their ids are keys of the checkpoint, if it has any."""
    schema, random = predictor.data.schema, np.random.default_rng(0)
    keys = np.arange(0)
    layers = Layers(chain)
    for table in layers.manifest.tables:
        if table.keys is not None:
            keys = layers.merged(table.name).columns.keys
    dtype = np.dtype(predictor.data.id_type)

    def draw(*shape: int) -> npt.NDArray[Any]:
        ids = random.choice(keys, shape) if len(keys) else random.integers(0, schema.rows, shape)
        return ids.astype(dtype)

    lengths = {name: random.integers(0, 4, _CHECKED).astype(np.int32) for name in schema.bags}
    return Batch(
        np.zeros((_CHECKED, len(schema.labels)) if schema.targets.more else _CHECKED, np.float32),
        random.random((_CHECKED, len(schema.dense)), np.float32),
        draw(_CHECKED, len(schema.ids)),
        {name: (draw(int(each.sum())), each) for name, each in lengths.items()},
        bag_weights={name: random.random(int(lengths[name].sum()), np.float32) for name in schema.weighted_bags},
    )


def get_values(predictor: Predictor, inputs: Sequence[Input], batch: Batch) -> dict[str, Tensor]:
    """Return the values of the network's inputs for a batch, float32 [n, ...], by name."""
    rows = predictor.rows(batch)
    found = {}
    for one in inputs:
        if one.feature is None:
            found[one.name] = torch.from_numpy(batch.dense)
        else:
            feature = predictor.model.features[one.feature]
            of_feature = rows[one.feature]
            found[one.name] = of_feature if feature.is_single else of_feature[feature.tables.index(one.table)]
    return found


def _describe(
    predictor: Predictor, inputs: Sequence[Input], values: dict[str, Tensor], outputs: Sequence[str], batch: Batch
) -> dict[str, Any]:
    """Return the description of the network for a server: its inputs, with their columns, and its outputs."""
    schema, given = predictor.data.schema, predictor.model.ids(batch)
    described: list[dict[str, Any]] = []
    for one in inputs:
        shape: list[Any] = [BATCH, *values[one.name].shape[1:]]
        if one.feature is None:
            described.append({"name": one.name, "shape": shape, "columns": list(schema.dense)})
            continue
        feature = predictor.model.features[one.feature]
        ids = read_ids(one.feature, feature, given[one.feature])
        names = [name for name in feature.unknown_names if name]  # in hostdev's own models, the columns of the ids
        about = {"name": one.name, "shape": shape, "table": one.table, "columns": names or None}
        described.append({**about, "pooling": feature.pooling, "weighted": ids.weights is not None})
    return {
        "format": "hostdev-dense",
        "hostdev": __version__,
        "model": predictor.settings["model"],
        "precision": predictor.settings["precision"],
        "opset": OPSET,
        "inputs": described,
        "outputs": [{"name": name, "label": label} for name, label in zip(outputs, schema.labels, strict=True)],
    }


class _Network(nn.Module):
    """A model that takes its inputs as positional arguments, and returns predictions [n], one tensor for each label."""

    def __init__(self, model: Model, inputs: Sequence[Input], numeric: Sequence[bool]) -> None:
        super().__init__()
        self.model, self._inputs, self._numeric = model, inputs, numeric

    def forward(self, *values: Tensor) -> tuple[Tensor, ...]:
        by_feature: dict[str, list[Tensor]] = {}
        dense = values[0].new_zeros((values[0].shape[0], 0))
        for one, value in zip(self._inputs, values, strict=True):
            if one.feature is None:
                dense = value
            else:
                by_feature.setdefault(one.feature, []).append(value)
        rows: Rows = {
            name: by_feature[name][0] if feature.is_single else tuple(by_feature[name])
            for name, feature in self.model.features.items()
        }
        found = self.model(dense, rows).float()
        columns = [found] if len(self._numeric) == 1 else list(found.unbind(1))
        return tuple(
            one if is_number else torch.sigmoid(one) for one, is_number in zip(columns, self._numeric, strict=True)
        )


def _convert(
    predictor: Predictor, inputs: Sequence[Input], values: dict[str, Tensor], outputs: Sequence[str], about: str
) -> bytes:
    """Return the network in ONNX; raise UserError if torch cannot convert it, which may happen for a custom model."""
    schema = predictor.data.schema
    network = _Network(predictor.model, inputs, [name in schema.targets.numeric for name in schema.labels]).eval()
    batch = torch.export.Dim(BATCH, min=1)
    try:
        with _quiet(), torch.no_grad():
            program: Any = torch.onnx.export(
                network,
                tuple(values.values()),
                dynamo=True,
                opset_version=OPSET,
                input_names=[one.name for one in inputs],
                output_names=list(outputs),
                dynamic_shapes={"values": tuple({0: batch} for _ in inputs)},
                verbose=False,
            )
        program.model.metadata_props["hostdev"] = about
        content: bytes = program.model_proto.SerializeToString()
    except Exception as error:  # torch and ONNX raise many classes
        cause: BaseException = error
        while cause.__cause__ is not None:  # the outer errors only name the exporter's steps
            cause = cause.__cause__
        name = predictor.settings["model"]
        raise UserError(f"the network of model {name!r} cannot be written as ONNX: {in_words(cause)[:300]}") from error
    return content


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch, which warns about its own code, packages that are not needed, and ways that it gives up."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _compute(content: bytes, values: dict[str, Tensor]) -> Probabilities:
    """Return the predictions that ONNX Runtime computes, float32 [n], or [n, labels] for several labels."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    wanted = {one.name for one in session.get_inputs()}
    found = session.run(None, {name: value.numpy() for name, value in values.items() if name in wanted})
    columns: Probabilities = found[0] if len(found) == 1 else np.stack(found, 1)
    return columns


def _require_equal(found: Probabilities, expected: Probabilities) -> None:
    """Raise HostdevError unless each result differs from its prediction p by at most BOUND * max(1, |p|)."""
    far = np.abs(found - expected) / np.maximum(1, np.abs(expected))
    if found.shape != expected.shape or not (far <= BOUND).all():
        raise HostdevError(
            f"the network in ONNX differs from the predictions by up to {far.max():.3g}, which is more than {BOUND:g}; "
            "this is a fault of hostdev, of torch or of ONNX Runtime, or the model's forward depends on other values"
        )
