"""Encoded rows into Arrow IPC shards: one record batch in each, whose columns can be mapped."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data import ragged
from hostdev.data.manifest import shard_schema
from hostdev.data.schema import Schema

from hostdev.core.checksums import Digest, HashedFile
from hostdev.core.errors import naming

MOST_VALUES = 2**31 - 1  # of a bag in a record batch: offsets are int32


@dataclass(frozen=True)
class Rows:
    """n encoded rows."""

    label: npt.NDArray[np.float32]  # [n]
    dense: npt.NDArray[np.float32]  # [n, dense columns]
    ids: npt.NDArray[Any]  # [n, columns with one id]
    bags: list[tuple[Any, ...]]  # of each the ids of all rows end to end [N], and how many each row has [n]

    def out_of_vocabulary(self, first_value: int) -> tuple[int, int]:
        """Return how many ids are below the first that stands for a value, and how many there are."""
        some = [self.ids, *(values for values, _ in self.bags)]
        return sum(int(np.count_nonzero(ids < first_value)) for ids in some), sum(ids.size for ids in some)


def write_shard(path: Path, rows: Rows, schema: Schema, id_type: str) -> str:
    """Write a shard, which appears under its name when it is whole; return its SHA-256."""
    kinds = shard_schema(schema, id_type)
    return write_arrow(path, kinds, _batches(rows, kinds), sha256)


def write_arrow(
    path: Path, schema: pa.Schema, batches: Iterable[pa.RecordBatch], digest: Callable[[], Digest]
) -> str:  # fmt: skip
    """Write an Arrow file, which appears under its name when it is whole; return its checksum."""
    partial = path.with_name(f"{path.name}.partial")
    partial.unlink(missing_ok=True)  # of who was killed
    with naming(path), closing(HashedFile(partial, digest)) as file:
        with pa.ipc.new_file(pa.PythonFile(file, mode="w"), schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        found = file.finish(to_disk=False)
    partial.replace(path)
    return found


def _batches(rows: Rows, kinds: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Iterate over rows: in one batch, but where a bag has more values than that may have."""
    offsets = [ragged.offsets_of(lengths) for _, lengths in rows.bags]
    start, n = 0, len(rows.label)
    while start < n:
        stop = min([n, *(int(np.searchsorted(begin, begin[start] + MOST_VALUES, "right")) - 1 for begin in offsets)])
        columns = [pa.array(rows.label[start:stop])]
        for values in (rows.dense[start:stop], rows.ids[start:stop]):
            if values.shape[1]:
                columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1]))
        for (values, _), begin in zip(rows.bags, offsets, strict=True):
            part = begin[start : stop + 1]
            inside = pa.array(values[part[0] : part[-1]])
            columns.append(pa.ListArray.from_arrays(pa.array(part - part[0], pa.int32()), inside))
        yield pa.record_batch(columns, schema=kinds)
        start = stop
