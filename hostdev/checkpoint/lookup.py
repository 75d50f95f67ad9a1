"""Lookups in a checkpoint's tables, whose files are mapped into memory shared by processes."""

from typing import Any

import numpy as np

from hostdev.checkpoint.files import mapped
from hostdev.checkpoint.folder import Chain, chain_of_table
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.ranges import SPREAD, WEIGHTS, get_column, get_width, parse_range, require_covered
from hostdev.core.ids import checked_ids
from hostdev.kernels.arrays import AnyIds, Rows
from hostdev.kernels.jit import address_of, array_at, kernel
from hostdev.kernels.pool import get_grain, parallel_for
from hostdev.kernels.shards import get_positions

_FEW = 512  # rows; for up to this many, waking other threads costs more than it saves


@kernel
def _copy(start: Any, stop: Any, ids: Any, layers: Any, files: Any, out: Any) -> None:
    """Copy the newest version of the rows ids[start:stop] to out[start:stop].

    Args:
        start: The first index.
        stop: The end of the indices.
        ids: int32 or int64 [N].
        layers: int64 [L + 1]; the files of the l-th newest checkpoint are files[layers[l] : layers[l + 1]].
        files: int64 [F, 5]; for each file: first row, end, number of rows, address of their ids (0: all rows), address
            of their values.
        out: Output, float32 [N, D].
    """
    D = out.shape[1]
    for i in range(np.uint64(start), np.uint64(stop)):
        row = np.int64(ids[i])
        for layer in range(len(layers) - 1):
            low, high = layers[layer], layers[layer + 1]
            while high - low > 1:  # find the last file that begins at or before the row
                middle = (low + high) // 2
                if files[middle, 0] <= row:
                    low = middle
                else:
                    high = middle
            if low == high or row < files[low, 0] or row >= files[low, 1]:
                continue
            count, at = files[low, 2], row - files[low, 0]
            if files[low, 3] != 0:
                rows = array_at(files[low, 3], count, np.int64)
                begin, end = np.int64(0), count
                while begin < end:
                    half = (begin + end) // 2
                    if rows[half] < row:
                        begin = half + 1
                    else:
                        end = half
                if begin == count or rows[begin] != row:
                    continue
                at = begin
            weights, to = array_at(files[low, 4] + at * D * 4, D, np.float32), out[i]
            for j in range(D):
                to[j] = weights[j]
            break


class MappedTable:
    """A column of a table, weights or optimizer state, float32 [rows, dim]. Several threads may call `lookup`.

    Args:
        chain: A full checkpoint and its increments, from `read_chain`.
        name: The table.
        column: "weights", the name of a state column, or "location".
    """

    is_by_key = False

    def __init__(self, chain: Chain, name: str, column: str = WEIGHTS) -> None:
        about, chain = chain[-1].manifest.table(name), chain_of_table(chain, name)
        self.name, self.rows = name, about.rows
        self.dim = get_width(about, column)
        self._spread = about.order == SPREAD
        require_covered(chain, name)
        for checkpoint in chain:
            table = checkpoint.manifest.table(name)
            if (table.dim, table.order) != (about.dim, about.order) or table.rows > about.rows:
                raise BrokenCheckpointError(
                    f"{checkpoint.path} is broken (table {name!r} differs in shape or row order from {chain[-1].path})"
                )
        self._held: list[Any] = []  # keeps alive the memory that `_files` points into
        found: list[list[int]] = []
        layers = [0]
        for checkpoint in reversed(chain):
            table = checkpoint.manifest.table(name)
            for file in sorted(table.files, key=lambda file: file.start):
                path = checkpoint.path / file.file
                rows = parse_range(path, mapped(path), table, file)
                weights = get_column(rows, column)
                self._held += [weights, rows.ids]
                ids = 0 if rows.ids is None else int(address_of(rows.ids))
                found.append([file.start, file.stop, len(rows), ids, int(address_of(weights))])
            layers.append(len(found))
        self._files, self._layers = np.array(found, np.int64).reshape(-1, 5), np.array(layers, np.int64)

    def lookup(self, ids: AnyIds) -> Rows:
        """Return a copy, float32 [N, D], of rows `ids`, int32 or int64 [N]; raise the errors of `HostTable.lookup`."""
        ids = checked_ids(ids, self.rows, self.name)
        out = np.empty((len(ids), self.dim), np.float32)
        if self._spread:
            ids = get_positions(ids, self.rows)
        if len(ids) <= _FEW:
            _copy(0, len(ids), ids, self._layers, self._files, out)
        else:
            parallel_for(_copy, len(ids), ids, self._layers, self._files, out, grain=get_grain(4 * self.dim))
        return out
