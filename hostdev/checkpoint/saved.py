"""`hostdev.open`: lookups in a saved model's tables, without optimizer state and without torch."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.layers import SavedRows
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.remote import newest
from hostdev.core.addresses import checkpoint_path
from hostdev.core.checks import to_keys
from hostdev.core.errors import UserError
from hostdev.kernels.arrays import Rows

_LONGEST = 480  # maximum characters of a message, since names in a damaged file may have any length


class SavedTable:
    """The weights of a table, float32 [rows, dim], read-only and memory-mapped. Several threads may use it.

    Attributes:
        name: The table's name.
        rows: Number of rows or, for a table by key, of keys.
        is_by_key: Whether this is a table by key.
        dim: Number of values per row.
        optimizer: The optimizer's name, such as "LazyAdam".
        hyperparameters: The optimizer's hyperparameters by name.
    """

    def __init__(self, chain: Chain, name: str) -> None:
        self._stored = stored = SavedRows(chain, name)
        self.name, self.rows, self.dim, self.is_by_key = name, stored.rows, stored.dim, stored.is_by_key
        self.optimizer, self.hyperparameters = stored.table.optimizer, stored.table.arguments

    def __len__(self) -> int:
        return self.rows

    def lookup(self, ids: npt.ArrayLike, *, unknown: str | None = None) -> Rows:
        """Return a copy, float32 [..., dim], of the rows `ids`, integers of any shape [...].

        Args:
            ids: Row numbers or, for a table by key, keys. A key without a row reads an out-of-vocabulary row, zeros or
                its own initial values, as in training.
            unknown: For a table by key, the name of this row, as in `Feature.unknown`; None for the one without a name.

        Raises:
            UserError: An id is outside 0..rows - 1, or there is no out-of-vocabulary row of this name.
            TypeError: The ids are not integers.
        """
        if unknown is not None and not self.is_by_key:
            raise UserError(f"table {self.name!r} is not a table by key, and has no out-of-vocabulary rows")
        array = to_keys(ids, f"table {self.name!r}: keys") if self.is_by_key else np.asarray(ids)
        found = self._stored.lookup(array.reshape(-1), unknown)
        return found if array.ndim == 1 else found.reshape(*array.shape, self.dim)

    def __repr__(self) -> str:
        return f"<table {self.name!r}, {self.rows:,} x {self.dim}>"


class SavedModel(Mapping[str, SavedTable]):
    """A saved model, returned by `hostdev.open`: its tables by name, and the values saved with them.

    Attributes:
        path: The checkpoint's folder.
        step: The training step.
        tables: The opened tables by name.
    """

    def __init__(self, chain: Chain, names: Sequence[str] | None) -> None:
        self._chain, self.path, self.step = chain, chain[-1].path, chain[-1].manifest.step
        for checkpoint in chain:
            for file in checkpoint.manifest.files:
                _require_inside(checkpoint.path, file.file)
        there = [table.name for table in chain[-1].manifest.tables]
        for name in names or ():
            if name not in there:
                raise UserError(f"{self.path} has no table {name!r}; it has {', '.join(there)}")
        self.tables = {name: SavedTable(chain, name) for name in (there if names is None else names)}

    def __getitem__(self, name: str) -> SavedTable:
        if name not in self.tables:
            raise KeyError(f"no table {name!r} is open; the open tables are {', '.join(self.tables)}")
        return self.tables[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    def lookup(self, ids: Mapping[str, npt.ArrayLike]) -> dict[str, Rows]:
        """Return, for each named table, the rows of its ids; see `SavedTable.lookup`."""
        return {name: self[name].lookup(values) for name, values in ids.items()}

    @cached_property
    def extra(self) -> Any:
        """The `extra` given to `Runtime.save`; for the command `train`, a dict with `dense`, `random` and `more`.

        It is read on first access, which needs torch and (unlike the tables) the checkpoint's folder.

        Raises:
            BrokenCheckpointError: The file is damaged.
        """
        from hostdev.checkpoint.folder import check_file
        from hostdev.checkpoint.loading import values_of
        from hostdev.checkpoint.state import DENSE

        if (file := self._chain[-1].manifest.other(DENSE)) is not None:
            check_file(self.path / DENSE, file)
        try:
            values = values_of(self._chain)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise BrokenCheckpointError(f"{self.path} is broken (values other than the tables: {error})") from None
        return values["extra"] if isinstance(values, dict) and "extra" in values else values

    def verify(self) -> None:
        """Verify the checksums of all files; raise BrokenCheckpointError for the first damaged file."""
        from hostdev.checkpoint.loading import verify

        verify(self._chain, segments=True)

    def __repr__(self) -> str:
        return f"<{self.path}, step {self.step:,}: {', '.join(map(repr, self.tables.values()))}>"


def open(path: Path | str, *, tables: Sequence[str] | None = None, verify: bool = False) -> SavedModel:
    """Open a model saved by `Runtime.save` or the command `train`, to look up rows.

    ::

        model = hostdev.open("saved")
        rows = model["users"].lookup(ids)  # float32 [N, dim]

    Files are mapped into memory: a table of any size opens instantly, only rows that are looked up are read, and
    processes on one host share one copy. The checkpoint's folder may be deleted while the model is open; only `extra`
    and `verify` need it. Incremental checkpoints, and checkpoints of several ranks or bfloat16 tables, work the same
    way. Lookups return single rows; features and pooling are up to the caller.

    Args:
        path: A checkpoint, a folder of checkpoints, or a run directory, here or in a store. A folder's newest valid
            checkpoint is opened, with a warning if a newer one is damaged.
        tables: Names of tables to open, or None for all.
        verify: Whether to verify all checksums now. Otherwise only manifests, sizes and file structures are checked.

    Raises:
        UserError: There is no checkpoint, or a named table is missing.
        BrokenCheckpointError: The checkpoint is damaged.
    """
    try:
        found = newest(checkpoint_path(path))
        for line in found.notes():
            warnings.warn(line, stacklevel=2)
        model = SavedModel(found.chain, tables)
    except (TypeError, ValueError, AttributeError, OverflowError, KeyError) as error:
        if isinstance(error, UserError) and len(str(error)) <= _LONGEST:
            raise
        raise BrokenCheckpointError(f"{path} is broken ({type(error).__name__}: {error})"[:_LONGEST]) from None
    if verify:
        model.verify()
    return model


def _require_inside(path: Path, name: str) -> None:
    """Raise BrokenCheckpointError if a file name leads outside the checkpoint's folder."""
    place = PurePosixPath(name)
    if place.is_absolute() or ".." in place.parts or not place.parts:
        raise BrokenCheckpointError(f"{path} is broken (it names the file {name[:100]!r} outside its folder)")
