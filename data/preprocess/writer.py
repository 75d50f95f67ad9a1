"""Writer of encoded rows to Arrow IPC shards, normally with one record batch each, so that columns can be mapped."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.checksums import HashedFile
from hostdev.core.errors import naming
from hostdev.core.outputs import replacing
from hostdev.data.manifest import shard_schema
from hostdev.data.rows import Piece
from hostdev.data.schema import Schema

MOST_VALUES = 2**31 - 1  # per bag in a record batch: offsets are int32


def write_shard(path: Path, rows: Piece, schema: Schema) -> str:
    """Write a shard atomically; return its SHA-256."""
    kinds = shard_schema(schema, schema.id_type)
    return write_arrow(path, kinds, _batches(rows, kinds), sha256)


def write_arrow(path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], digest: Callable[[], Any]) -> str:
    """Write an Arrow file atomically; return its checksum."""
    with naming(path), replacing(path) as partial, closing(HashedFile(partial, digest)) as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        return file.finish(to_disk=False)


def _batches(rows: Piece, kinds: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Iterate over batches of rows; there is one batch unless a bag has more than MOST_VALUES values."""
    offsets = [begin for _, begin in rows.bags.values()]
    start, n = 0, len(rows)
    while start < n:
        stop = min([n, *(int(np.searchsorted(begin, begin[start] + MOST_VALUES, "right")) - 1 for begin in offsets)])
        label = rows.label[start:stop]
        columns = [pa.array(label) if label.ndim == 1 else _fixed_size_list(label)]
        if rows.weight is not None:
            columns.append(pa.array(rows.weight[start:stop]))
        for values in (rows.dense[start:stop], rows.ids[start:stop]):
            if values.shape[1]:
                columns.append(_fixed_size_list(values))
        for (name, (values, _)), begin in zip(rows.bags.items(), offsets, strict=True):
            part = begin[start : stop + 1]
            for each in (values, rows.bag_weights.get(name)):
                if each is not None:
                    inside = pa.array(each[part[0] : part[-1]])
                    columns.append(pa.ListArray.from_arrays(pa.array(part - part[0], pa.int32()), inside))
        yield pa.record_batch(columns, schema=kinds)
        start = stop


def _fixed_size_list(values: npt.NDArray[Any]) -> pa.Array:
    """Return the rows of values [n, k] as lists."""
    return pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1])
