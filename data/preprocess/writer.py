"""Encoded rows into Arrow IPC shards of a bounded length."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data import ragged
from hostdev.data.manifest import Shard, checksum, shard_schema
from hostdev.data.preprocess.raw import Bags
from hostdev.data.schema import Schema


class ShardWriter:
    """Writes one split; `close` returns its shards. Rows are on disk in the order in which they came."""

    def __init__(self, root: Path, split: str, rows_per_shard: int, schema: Schema, id_type: str) -> None:
        self._root = root
        self._split = split
        self._rows_per_shard = rows_per_shard
        self._schema = shard_schema(schema, id_type)
        self._id_dtype = np.dtype(id_type)
        self._shards: list[Shard] = []
        self._writer: pa.ipc.RecordBatchFileWriter | None = None
        self._rows = 0
        (root / split).mkdir()

    def write(
        self, label: npt.NDArray[np.float32], dense: npt.NDArray[np.float32], ids: npt.NDArray[np.int64], bags: Bags
    ) -> None:
        """Append rows: label [n], dense [n, columns], ids [n, columns], and each bag's ids [N] with lengths [n]."""
        offsets = [ragged.offsets_of(lengths) for _, lengths in bags]
        start = 0
        while start < len(label):
            stop = min(len(label), start + self._rows_per_shard - self._rows)
            columns = [pa.array(label[start:stop])]
            for values in (dense[start:stop], ids[start:stop].astype(self._id_dtype)):
                if values.shape[1]:
                    columns.append(pa.FixedSizeListArray.from_arrays(pa.array(values.ravel()), values.shape[1]))
            for (values, _), begin in zip(bags, offsets, strict=True):
                part = begin[start : stop + 1]
                inside = pa.array(values[part[0] : part[-1]].astype(self._id_dtype))
                columns.append(pa.ListArray.from_arrays(pa.array(part - part[0], pa.int32()), inside))
            if self._writer is None:
                self._writer = pa.ipc.new_file(self._root / self._name(), self._schema)
            self._writer.write(pa.record_batch(columns, schema=self._schema))
            self._rows += stop - start
            start = stop
            if self._rows == self._rows_per_shard:
                self._finish()

    def close(self) -> list[Shard]:
        """Finish the last shard and return them all."""
        self._finish()
        return self._shards

    def abandon(self) -> None:
        """Let go of an unfinished file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _name(self) -> str:
        return f"{self._split}/part-{len(self._shards):05d}.arrow"

    def _finish(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        self._writer = None
        name = self._name()
        self._shards.append(Shard(file=name, rows=self._rows, sha256=checksum(self._root / name)))
        self._rows = 0
