"""Table ops: lookups, updates, and copies of whole rows.

An op runs where its table is, and its `primitive_target` must equal the table's.

S and R: number of optimizer state columns of D values per row, and of those with one value per row.
"""

import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from hostdev.core.primitive import Primitive
from hostdev.core.table_dtypes import FP32, slot_bytes, weight_bytes
from hostdev.kernels.pool import Task, run_tasks


class _TablePrimitive(Primitive):
    """An op on a table; the table's `primitive_target` must equal the op's."""

    # Any, below: tables and arrays of NumPy or torch, which this module does not import.

    # the table of the last call, the op's target at that call, and the bytes per row
    _latest: tuple[Callable[[], Any], str, int] = (lambda: None), "", 0

    def _require(self, table: Any) -> int:
        """Check a table, unless the last call has checked it; return the bytes read and written per row."""
        latest, target, row_bytes = self._latest
        if latest() is not table or target != self.attrs["primitive_target"]:
            self._check(table)
            row_bytes = self.row_bytes(table)
            self._latest = weakref.ref(table), self.primitive_target, row_bytes
        return row_bytes

    def _check(self, table: Any) -> None:
        if table.primitive_target != self.attrs["primitive_target"]:
            raise ValueError(
                f"{self._name} has primitive_target {self.primitive_target!r}, "
                f"but table {table.name!r} has {table.primitive_target!r}; they must be equal"
            )

    def nbytes(self, table: Any, ids: Any, *some: Any) -> int:
        """Return the bytes read and written."""
        latest, _, row_bytes = self._latest
        return len(ids) * (row_bytes if latest() is table else self.row_bytes(table))

    @staticmethod
    def row_bytes(table: Any) -> int:
        """Return the bytes read and written per row."""
        raise NotImplementedError


class EmbeddingLookup(_TablePrimitive):
    """Row lookup, called with `(table, ids [U])`: returns float32 [U, D], a NumPy array or, on the device, a tensor.

    Host tables also take `out` and `positions`, as in `HostTable.lookup`.
    """

    name = "EmbeddingLookup"

    def run(self, table: Any, ids: Any, *some: Any) -> Any:
        """Look up rows."""
        self._require(table)
        look_up = table.lookup_now if table.primitive_target == "DEVICE" else table.lookup
        return look_up(ids, *some)

    def tasks(self, table: Any, ids: Any, *some: Any) -> list[Task]:
        """Return tasks that look up rows for a batch while steps of earlier batches may be unfinished.

        If steps change all rows, the tasks copy packed rows, from which `kernels.catch_up.unpack_tasks` later computes
        current weights. Otherwise, they copy weights.

        Args:
            table: A host table.
            ids: As for `HostTable.lookup`; nothing is checked.
            some: The output, float32 [N, `table.fetched_width`], and positions.
        """
        self._require(table)
        rows = table.stored
        tasks: list[Task] = rows.storage.fetch_tasks(ids, *some, rows.history.planes)
        return tasks

    @staticmethod
    def row_bytes(table: Any) -> int:
        """Return the bytes read and written per row: each row is read once and written once."""
        weights, slots = _stored_bytes(table)
        return 4 * int(table.fetched_width) + weights + int(table.capabilities.late) * (slots + 4)


class _Update(_TablePrimitive):
    """An optimizer step on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`.

    Host tables also take `scalars` and `positions`, as in `HostTable.update`.
    """

    def run(self, table: Any, ids: Any, grads: Any, *some: Any) -> None:
        self._require(table)
        update = table.update_now if table.primitive_target == "DEVICE" else table.update
        update(ids, grads, *some)

    def tasks(self, table: Any, ids: Any, grads: Any, *some: Any) -> list[Task]:
        self._require(table)
        tasks: list[Task] = table.update_tasks(ids, grads, *some)
        return tasks

    def _require(self, table: Any) -> int:
        if table.optimizer.primitive != self._name:
            raise ValueError(
                f"{self._name} cannot update table {table.name!r}, whose optimizer is {type(table.optimizer).__name__}"
            )
        return super()._require(table)

    @staticmethod
    def row_bytes(table: Any) -> int:
        """Return the bytes per row: gradients are read, weights and slots are read and written."""
        return 4 * int(table.dim) + 2 * sum(_stored_bytes(table)) + 8 * len(table.optimizer.row_slots)


class _WholeRows(_TablePrimitive):
    """An op that copies rows of a host table with their optimizer state.

    Arguments: `(table, ids [N], block float32 [N, 1 + S, D], row_slots float32 [N, R])`, and optionally `positions`, as
    in `HostTable.read_rows`.
    """

    method: ClassVar[str]  # a method of the table; `<method>_tasks` returns its tasks

    def run(self, table: Any, ids: Any, *some: Any) -> None:
        run_tasks(self.tasks(table, ids, *some))

    def tasks(self, table: Any, ids: Any, *some: Any) -> list[Task]:
        self._require(table)
        tasks: list[Task] = getattr(table, f"{self.method}_tasks")(ids, *some)
        return tasks

    @staticmethod
    def row_bytes(table: Any) -> int:
        sent = 4 * int(table.dim) * (1 + len(table.optimizer.slots))
        return sum(_stored_bytes(table)) + sent + 8 * len(table.optimizer.row_slots)


class CacheAdmit(_WholeRows):
    """An op that reads, from the host table, the rows that a cache admits."""

    name, method = "CacheAdmit", "read_rows"


class CacheEvict(_WholeRows):
    """An op that writes, to the host table, the rows that a cache evicts."""

    name, method = "CacheEvict", "write_rows"


class ForwardRead(_WholeRows):
    """An op that reads rows from the host table; the device then updates them (`pipeline.forwarding`)."""

    name, method = "ForwardRead", "read_rows"


def _stored_bytes(table: Any) -> tuple[int, int]:
    """Return the stored bytes of a row's weights and of its slots; on the device, each value takes 4 bytes."""
    dim, host = int(table.dim), table.primitive_target == "CPU"
    dtype, slots_dtype = (table.dtype, table.slots_dtype) if host else (FP32, FP32)
    return dim * weight_bytes(dtype), len(table.optimizer.slots) * slot_bytes(slots_dtype, dim)


class FusedSparseFtrl(_Update):
    """FTRL on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`."""

    name = "FusedSparseFtrl"


class FusedSparseAdam(_Update):
    """Adam on unique rows, after applying the effect of the steps that each row has missed.

    Arguments: `(table, ids [U], grads float32 [U, D])`.
    """

    name = "FusedSparseAdam"


class FusedSparseLazyAdam(_Update):
    """Lazy Adam on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`."""

    name = "FusedSparseLazyAdam"


class FusedSparseSGD(_Update):
    """SGD on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`."""

    name = "FusedSparseSGD"


class FusedSparseAdagrad(_Update):
    """Adagrad on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`."""

    name = "FusedSparseAdagrad"


class FusedSparseRowWiseAdagrad(_Update):
    """Row-wise Adagrad on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`."""

    name = "FusedSparseRowWiseAdagrad"


class FusedSparseRowWiseAdam(_Update):
    """Row-wise Adam on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`."""

    name = "FusedSparseRowWiseAdam"


class FusedSparseMomentum(_Update):
    """SGD with momentum on unique rows. Arguments: `(table, ids [U], grads float32 [U, D])`."""

    name = "FusedSparseMomentum"


UPDATES: dict[str, type[_Update]] = {op.name: op for op in _Update.__subclasses__()}
