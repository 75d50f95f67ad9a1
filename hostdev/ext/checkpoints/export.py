"""Export of a checkpoint's tables and dense layers to Parquet, .npy or safetensors, one range of rows at a time.

If the checkpoint's data set has a vocabulary, the export says which column and value each id stands for.
"""

import io
import json
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import BrokenCheckpointError, Table
from hostdev.checkpoint.ranges import WEIGHTS
from hostdev.checkpoint.state import find_file, read_values
from hostdev.core import arrow_files
from hostdev.core.errors import in_words
from hostdev.core.printable import printable
from hostdev.core.progress import ProgressBar, bar

VOCABULARY = "data/vocabulary.arrow"
IDS, DENSE = "ids.parquet", "dense.pt"
KEY, UNKNOWN = "key", "out_of_vocabulary"


def read_vocabulary(layers: Layers) -> pa.Table | None:
    """Return the vocabulary, a memory-mapped table with `field` and `value` of each id; None if there is none.

    Raises:
        BrokenCheckpointError: The file cannot be read, or has other columns.
    """
    path = find_file(layers, VOCABULARY)
    if path is None:
        return None
    try:
        table = arrow_files.read_table(path)
        if table.schema.names[:2] != ["field", "value"]:
            raise ValueError(f"its first columns must be field and value, not {', '.join(table.schema.names[:10])}")
    except ValueError as error:
        raise BrokenCheckpointError(f"{path} is broken ({in_words(error)})") from None
    return table


class ExportOptions(NamedTuple):
    """The options of an export. `slots` adds optimizer state, steps, settings and the `extra` of `Runtime.save`."""

    format: str
    slots: bool
    dtype: str


def export(chain: Chain, out: Path, options: ExportOptions) -> list[str]:
    """Write a checkpoint's tables and dense layers into an empty folder; return a line for each omitted part.

    Raises:
        OSError: A file cannot be written.
    """
    layers = Layers(chain, current=True)
    _write(out, layers, options)
    return list(_describe_left_out(layers, options))


def _write(out: Path, layers: Layers, options: ExportOptions) -> None:
    total = sum(table.rows for table in layers.manifest.tables)
    with bar(total, "exporting", "row", unit_scale=True) as progress:
        for table in layers.manifest.tables:
            _write_table(out, layers, table, options, progress)
    names = read_vocabulary(layers)
    if names is not None and options.format != "parquet":
        with (out / IDS).open("wb") as file:
            pq.write_table(_add_ids(names, 0, len(names)), file)
    _write_dense(out, layers)
    if options.slots:
        write_state(out, layers)


def _describe_left_out(layers: Layers, options: ExportOptions) -> Iterator[str]:
    """Yield a line for each part of the checkpoint that was not exported."""
    newest = layers.manifest
    slots = {table.name: [*table.slots, *table.row_slots] for table in newest.tables}
    if any(slots.values()) and not options.slots:
        named = printable(", ".join(f"{name} ({', '.join(columns)})" for name, columns in slots.items() if columns))
        yield f"not exported: the optimizer slots of {named}; --slots writes them"
    state = newest.state if isinstance(newest.state, dict) else {}
    if state.get("extra") is not None and not options.slots:
        yield "not exported: the `extra` of Runtime.save; --slots writes it, and hostdev.open(...).extra returns it"
    if "more" in state:
        yield "not exported: state that only --resume needs, such as the random generators and the run's progress"
    if options.dtype == "bfloat16":
        yield "not exported: the low 16 bits of each value, which is rounded to bfloat16"


def _columns(table: Table, options: ExportOptions) -> list[str]:
    return [WEIGHTS, *(table.slots if options.slots else ()), *(table.row_slots if options.slots else ())]


def _write_table(out: Path, layers: Layers, table: Table, options: ExportOptions, progress: ProgressBar) -> None:
    columns = _columns(table, options)
    name = quote(table.name, safe=" ")  # a name may contain a slash
    if options.format == "parquet":
        _write_parquet(out / f"{name}.parquet", layers, table, columns, progress)
        if table.keys is not None:
            _write_unknown(out / f"{name}.{UNKNOWN}.parquet", layers, table, columns)
    elif options.format == "npy":
        for tensor in _tensors(layers, table, columns, progress):
            _write_npy(out / f"{name}.{tensor.name}.npy", tensor)
    else:
        tensors = _tensors(layers, table, columns, progress)
        _write_safetensors(out / f"{name}.safetensors", table, tensors, options.dtype)


class _Tensor(NamedTuple):
    """A tensor to write; `pieces` yields its rows in order, in chunks, float32 or, if `is_int`, int64."""

    name: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterator[Any]]
    is_int: bool = False


def _tensors(layers: Layers, table: Table, columns: list[str], progress: ProgressBar) -> list[_Tensor]:
    """Return a table's columns and, for a table by key, its keys and its out-of-vocabulary rows."""
    keys = table.keys
    unknown = 0 if keys is None else len(keys.unknown)

    def read(column: str, first: int, last: int | None) -> Iterator[Any]:
        begin = 0
        for values in layers.column(table.name, column):
            stop = len(values) if last is None else max(0, min(len(values), last - begin))
            part = values[max(0, first - begin) : stop]
            begin += len(values)
            yield part
            progress.update(len(part) if column == WEIGHTS else 0)
            if last is not None and begin >= last:
                return

    def tensor(column: str, prefix: str, rows: int, first: int, last: int | None) -> _Tensor:
        shape = rows, 1 if column in table.row_slots else table.dim
        return _Tensor(prefix + column, shape, partial(read, column, first, last))

    found = [tensor(column, "", table.rows - unknown, unknown, None) for column in columns]
    if keys is None:
        return found
    of_keys = _Tensor(KEY, (keys.count,), lambda: iter([layers.merged(table.name).columns.keys]), is_int=True)
    return [of_keys, *found, *(tensor(column, f"{UNKNOWN}.", unknown, 0, unknown) for column in columns)]


def _write_parquet(path: Path, layers: Layers, table: Table, columns: list[str], progress: ProgressBar) -> None:
    """Write a table to a Parquet file with the columns `id`, `weights` and, if chosen, the optimizer state.

    `weights` and the optimizer state have a list of D numbers per row; `id` and per-row state have one number. If the
    table has a row for each id of the data set, the columns `column` and `value` follow `id`; they say which value of
    which column of the data set has the id. A table by key has the column `key` instead of `id`, and its
    out-of-vocabulary rows are left out.
    """
    names = read_vocabulary(layers)
    named = names is not None and len(names) == table.rows and table.keys is None
    writer: pq.ParquetWriter | None = None
    with path.open("wb") as file, ExitStack() as opened:
        for start, stop in layers.ranges(table.name):
            found = layers.columns_of_ids(table.name, start, stop, columns)
            arrays: dict[str, Any] = {"id": np.arange(start, stop)}
            if table.keys is not None:
                first = max(0, len(table.keys.unknown) - start)
                begin = start - len(table.keys.unknown)
                arrays = {KEY: layers.merged(table.name).columns.keys[begin + first : stop - start + begin]}
                found = {name: values[first:] for name, values in found.items()}
            if named:
                arrays["column"], arrays["value"] = _slice_vocabulary(names, start, stop)
            part = pa.table(arrays | _as_arrow(table, found))
            writer = writer or opened.enter_context(pq.ParquetWriter(file, part.schema))
            writer.write_table(part)
            progress.update(stop - start)


def _as_arrow(table: Table, found: dict[str, Any]) -> dict[str, Any]:
    """Return columns, each [n, width], as Arrow arrays."""
    arrays = {}
    for name, values in found.items():
        flat = pa.array(np.ascontiguousarray(values).ravel())
        arrays[name] = flat if name in table.row_slots else pa.FixedSizeListArray.from_arrays(flat, table.dim)
    return arrays


def _write_unknown(path: Path, layers: Layers, table: Table, columns: list[str]) -> None:
    """Write the out-of-vocabulary rows of a table by key to a Parquet file with their names."""
    assert table.keys is not None
    rows = layers.gather(table.name, np.arange(len(table.keys.unknown)), columns)
    with path.open("wb") as file:
        pq.write_table(pa.table({"name": table.keys.unknown} | _as_arrow(table, rows)), file)


def _write_npy(path: Path, tensor: _Tensor) -> None:
    with path.open("xb") as file:
        dtype = np.dtype("<i8" if tensor.is_int else "<f4")
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": tensor.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for values in tensor.pieces():
            file.write(np.ascontiguousarray(values).data)


def _write_safetensors(path: Path, table: Table, tensors: list[_Tensor], dtype: str) -> None:
    """Write columns as tensors to a file in the format of github.com/huggingface/safetensors."""
    about = {"table": table.name, "optimizer": table.optimizer}
    if table.keys is not None:
        about[UNKNOWN] = json.dumps(table.keys.unknown)
    header: dict[str, Any] = {"__metadata__": about}
    end = 0
    for tensor in tensors:
        size, kind = (8, "I64") if tensor.is_int else (2, "BF16") if dtype == "bfloat16" else (4, "F32")
        begin, end = end, end + math.prod(tensor.shape) * size
        header[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for values in tensor.pieces():
                _write_values(file, values, "int64" if tensor.is_int else dtype)


def _write_values(file: IO[bytes], values: Any, dtype: str) -> None:
    values = np.ascontiguousarray(values)
    if dtype == "bfloat16":
        values = torch.from_numpy(values.copy()).to(torch.bfloat16).view(torch.int16).numpy()
    file.write(values.data)


def _slice_vocabulary(names: pa.Table, start: int, stop: int) -> tuple[Any, Any]:
    part = names.slice(start, stop - start)
    return part["field"].cast(pa.string()), part["value"]


def _add_ids(names: pa.Table, start: int, stop: int) -> pa.Table:
    column, value = _slice_vocabulary(names, start, stop)
    return pa.table({"id": np.arange(start, stop), "column": column, "value": value})


def _write_dense(out: Path, layers: Layers) -> None:
    """Write the dense layers' `state_dict`; `torch.load` reads it without hostdev."""
    state = layers.manifest.state
    dense = state.get("dense") if isinstance(state, dict) else None
    if isinstance(dense, dict) and "model" in dense:
        _save(out / DENSE, read_values(layers, dense["model"]))


STATE, OPTIMIZER, EXTRA = "state.json", "optimizer.pt", "extra.pt"


def write_state(out: Path, layers: Layers) -> None:
    """Write state.json, and optimizer.pt for a checkpoint of hostdev.train, or extra.pt for one of `Runtime.save`.

    state.json has the checkpoint's step, and each table's step, optimizer with hyperparameters, names of optimizer
    state, and training dtypes. `torch.load` reads the other files without hostdev; NumPy arrays in `extra` become
    tensors.
    """
    found = layers.manifest
    names: tuple[str, ...] = ("rows", "dim", "step", "optimizer", "hyperparameters", "slots", "row_slots")
    names += ("dtype", "slots_dtype", "seed")
    content = {
        "step": found.step,
        "tables": {
            table.name: {name: getattr(table, name) for name in names} | {"hyperparameters": table.arguments}
            for table in found.tables
        },
        "state_sha256": found.state_sha256,
        "state_sha256_version": found.version,
        "versions": found.versions,
        "created": found.created,
    }
    (out / STATE).write_text(json.dumps(content, indent=2) + "\n")
    state = found.state if isinstance(found.state, dict) else {}
    dense = state.get("dense")
    if isinstance(dense, dict) and "optimizer" in dense:
        _save(out / OPTIMIZER, _as_tensors(read_values(layers, dense["optimizer"])))
    if "extra" in state:
        _save(out / EXTRA, _as_tensors(read_values(layers, state["extra"])))


def _save(path: Path, values: Any) -> None:
    content = io.BytesIO()  # torch's file writer hides the error of a full disk
    torch.save(values, content)
    path.write_bytes(content.getbuffer())


def _as_tensors(value: Any) -> Any:
    """Convert the NumPy arrays in nested values to tensors: torch.load(..., weights_only=True) rejects arrays."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _as_tensors(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_tensors(each) for each in value)
    return value
