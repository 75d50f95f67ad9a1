"""Loading of checkpoints: finding the newest valid one, verifying it, and writing its rows into tables.

Tables that a checkpoint and a program share can be loaded even if the checkpoint has fewer rows of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostdev.checkpoint.adopting import adopt_rows
from hostdev.checkpoint.folder import (
    SOME_BYTES,
    Chain,
    Found,
    chain_of_table,
    check_entry,
    check_file,
    read_chain,
)
from hostdev.checkpoint.keyed import load_ids, load_keys, require_kind
from hostdev.checkpoint.layers import Layers, history_of
from hostdev.checkpoint.manifest import BrokenCheckpointError, File, RangeFile, SegmentEntry, Table
from hostdev.checkpoint.ranges import has_local_rows, map_rows, stack_columns
from hostdev.checkpoint.remote import candidates
from hostdev.checkpoint.segment_rows import SegmentRows, open_segments, read_chunk
from hostdev.checkpoint.state import read_values
from hostdev.core.errors import UserError
from hostdev.core.keys import FormerIds
from hostdev.core.optimizers import can_continue, hyperparameters
from hostdev.core.progress import bar

_THREADS = 4


def verify(chain: Chain, *, segments: bool | None = None) -> None:
    """Verify the checksums of all files of a chain; raise BrokenCheckpointError for the first damaged file.

    Segments are verified block by block whenever they are read. With `segments`, all segments are also verified now; if
    it is None, only those of the newest checkpoint, and only if they have at most `SOME_BYTES` together.
    """
    for _, error in damaged([chain], segments=bool(segments)):
        raise error
    if segments is None:
        verify_segments(chain)


def verify_segments(chain: Chain) -> None:
    """Verify the segments of a chain's newest checkpoint if they have at most `SOME_BYTES`; see `verify`."""
    newest = chain[-1]
    files = [file for file in newest.manifest.files if isinstance(file, SegmentEntry)]
    for file in files if sum(file.bytes for file in files) <= SOME_BYTES else ():
        check_entry(newest.path, file, newest.manifest.segment_states)


def verify_some(chain: Chain) -> None:
    """Verify the older files that the new, last checkpoint of a chain needs: its segments, and its parents' files.

    If they have more than `SOME_BYTES`, only about so many bytes are verified, and others at the next checkpoint.

    Raises:
        BrokenCheckpointError: A file is damaged.
    """
    files = [
        (checkpoint, file)
        for checkpoint in chain
        for file in checkpoint.manifest.files
        if checkpoint is not chain[-1] or isinstance(file, SegmentEntry)
    ]
    turns = -(-sum(file.bytes for _, file in files) // SOME_BYTES)
    first = chain[-1].manifest.serial % max(1, turns) * SOME_BYTES
    end = 0
    for checkpoint, file in files:
        begin, end = end, end + file.bytes
        if begin < first + SOME_BYTES and first < end:
            check_entry(checkpoint.path, file, checkpoint.manifest.segment_states)


def verify_others(chain: Chain) -> None:
    """Verify a chain's files, except files with table rows, which are verified while they are loaded."""
    for checkpoint in chain:
        for file in checkpoint.manifest.others:
            check_file(checkpoint.path / file.file, file)


def damaged(chains: Sequence[Chain], *, segments: bool = True) -> Iterator[tuple[Path, BrokenCheckpointError]]:
    """Verify the checksums of all files of these chains; yield (checkpoint's folder, error) for each damaged file.

    Without `segments`, segments are left out.
    """
    checkpoints = {checkpoint.path: checkpoint for chain in chains for checkpoint in chain}
    files = [
        (path, file)
        for path, checkpoint in checkpoints.items()
        for file in checkpoint.manifest.files
        if segments or not isinstance(file, SegmentEntry)
    ]
    states = {path: checkpoint.manifest.segment_states for path, checkpoint in checkpoints.items()}

    def look(path: Path, file: File) -> BrokenCheckpointError | None:
        try:
            check_entry(path, file, states[path])
        except BrokenCheckpointError as error:
            return error
        return None

    with _make_pool() as pool, bar(sum(file.bytes for _, file in files), "checking", "B", unit_scale=True) as progress:
        for (path, file), error in zip(files, pool.map(lambda each: look(*each), files), strict=True):
            progress.update(file.bytes)
            if error is not None:
                yield path, error


def find_newest_valid(path: Path, check: Callable[[Chain], None] = verify) -> Found:
    """Return the newest valid checkpoint in a folder, or the one at `path`.

    Args:
        path: A checkpoint, a folder of checkpoints, or a run directory.
        check: Called with a checkpoint and its parents, whose manifests are valid; raises BrokenCheckpointError if a
            file is damaged.

    Raises:
        BrokenCheckpointError: The checkpoint at `path` is damaged, or all checkpoints in the folder are.
        UserError: There is no checkpoint, or one has an unsupported format version.
    """
    broken: dict[str, Path | None] = {}  # by message, the damaged file; checkpoints that share a parent share its error
    found = candidates(path)
    for each in found:
        try:
            chain = read_chain(each)
            if any(file.is_relative_to(one.path) for file in broken.values() if file for one in chain):
                continue
            check(chain)
        except BrokenCheckpointError as error:
            if len(found) == 1:
                raise
            broken[str(error)] = error.file
            continue
        return Found(chain, list(broken))
    raise BrokenCheckpointError(f"no checkpoint in {path} is valid; the newest: {next(iter(broken))}")


def require_tables(chain: Chain, tables: Mapping[str, Any]) -> None:
    """Raise UserError unless a checkpoint has exactly these tables, with equal shapes, optimizers and dtypes."""
    newest = chain[-1]
    held = {table.name: table for table in newest.manifest.tables}
    if set(held) != set(tables):
        raise UserError(
            f"{newest.path} is of a different model: it has the tables {', '.join(sorted(held))}, not "
            f"{', '.join(sorted(tables))}"
        )
    for name, table in tables.items():
        there, here = newest.manifest.table(name), table.optimizer
        require_kind(newest.path, there, table)
        rows = there.rows if table.capabilities.by_key else table.total_rows
        differences: list[tuple[str, Any, Any]] = [("shape", (there.rows, there.dim), (rows, table.dim))]
        if not can_continue(here, there.optimizer, there.arguments):
            theirs, mine = {**there.arguments, "lr": None}, {**hyperparameters(here), "lr": None}
            differences += [("optimizer", there.optimizer, type(here).__name__), ("optimizer", theirs, mine)]
        for what, a, b in differences:
            if a != b:
                raise UserError(f"{newest.path} is of a different model: table {name!r} has {what} {a}, not {b}")
        for kind, field, argument in (("weights", "dtype", "dtype"), ("slots", "slots_dtype", "slots")):
            saved, own = getattr(there, field), getattr(table, field)
            if saved != own:
                raise UserError(
                    f"{newest.path} was trained with {saved} {kind} in table {name!r}, not {own}; create the table "
                    f'with {argument}="{saved}"'
                )


def load_tables(chain: Chain, tables: Mapping[str, Any], *, check: bool = False) -> None:
    """Load tables' rows, steps, learning rates and seeds; call `require_tables` first. Errors are as in `load_rows`."""
    for table in tables.values():
        table.begin_load()
    load_rows(chain, tables, check=check)
    for name, table in tables.items():
        about = chain[-1].manifest.table(name)
        if about.keys is not None:
            assert about.seed is not None
            table.reseed(about.seed)
        table.step = about.step
        table.optimizer.lr = about.hyperparameters["lr"]
        if about.seed is not None:
            table.seed = about.seed


def load_rows(chain: Chain, tables: Mapping[str, Any], *, check: bool = False, former: FormerIds | None = None) -> None:
    """Load a checkpoint's rows into the given tables, by id; other rows of the tables stay unchanged.

    Args:
        chain: The checkpoint, with its parents.
        tables: A subset of the checkpoint's tables, by name.
        check: Whether to verify checksums while reading; needed unless `verify` has done so.
        former: For a table by row in the checkpoint that is by key in the program: the keys of its rows. None if the
            ids are the keys.

    Raises:
        BrokenCheckpointError: A file is damaged; the tables then hold some of the checkpoint's rows.
    """
    layers = Layers(chain)
    by_row: dict[str, Any] = {}
    keyed: dict[str, Any] = {}
    for name, table in tables.items():
        (keyed if table.capabilities.by_key else by_row)[name] = table
    for name in by_row:
        layers.ranges(name)  # raises if there are gaps
    for name, table in tables.items():
        history_of(chain, name).hand_over(table, whole=chain[-1].manifest.table(name).rows == table.total_rows)
    tables = {name: table for name, table in by_row.items() if not adopt_rows(chain[-1], name, table, check=check)}
    chains = {name: chain_of_table(chain, name) for name in tables}
    segments = {name: open_segments(chain[-1], name) for name in tables}
    wanted = [
        [
            (checkpoint.path / file.file, table, file, tables[table.name], segments[table.name])
            for table in checkpoint.manifest.tables
            if table.name in tables and checkpoint in chains[table.name]
            for file in table.files
            if has_local_rows(table, file, tables[table.name])
        ]
        for checkpoint in chain
    ]
    total = sum(file.bytes for work in wanted for _, _, file, *_ in work)
    load = partial(_load, check=check)
    with _make_pool() as pool, bar(total, "loading", "B", unit_scale=True) as progress:
        for work in wanted:  # each checkpoint's rows overwrite its parent's
            for size in pool.map(lambda each: load(*each), work):
                progress.update(size)
    for name, table in keyed.items():
        if chain[-1].manifest.table(name).keys is not None:
            load_keys(chain, name, table, check=check)
            continue
        if check:
            verify(chain)
        load_ids(layers, name, table, former)


def _load(path: Path, about: Table, file: RangeFile, table: Any, segments: SegmentRows | None, *, check: bool) -> int:
    rows = read_chunk(path, about, file, segments, check=check)
    numbers = rows.ids if rows.ids is not None else np.arange(file.start, file.stop)
    numbers, chosen = map_rows(about, numbers, table)
    block, row_slots = stack_columns(about, {**rows.columns, **rows.row_columns}, chosen)
    try:
        table.write_rows(numbers, block, row_slots)
    except ValueError as error:
        raise BrokenCheckpointError(f"{path} cannot be loaded ({error})") from None
    return file.bytes


def values_of(chain: Chain) -> Any:
    """Return a checkpoint's values other than the tables."""
    layers = Layers(chain)
    return read_values(layers, layers.manifest.state)


def _make_pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "hostdev-checkpoint")


class Fit(NamedTuple):
    """The overlap of a checkpoint's and a program's tables.

    Attributes:
        path: The checkpoint.
        taken: For each shared table, by name, its number of rows in the checkpoint and in the program.
        new: Tables that only the program has.
        left: Tables that only the checkpoint has.
    """

    path: Path
    taken: dict[str, tuple[int, int]]
    new: list[str]
    left: list[str]

    def what_is_left(self) -> list[str]:
        """Return a line for each table that only one side has, or of which the program has more rows."""
        found = [f"{self.path} has no table {name!r}; the program's table is unchanged" for name in self.new]
        found += [f"table {name!r} of {self.path} is not loaded: the program has no such table" for name in self.left]
        return found + [
            f"table {name!r} has {there:,} rows in {self.path} and {here:,} in the program; other rows are unchanged"
            for name, (there, here) in self.taken.items()
            if there < here
        ]

    def lines(self) -> list[str]:
        """Return a line for each table: how many rows a new run loads, and how many have initial values."""
        found = []
        for name, (there, here) in self.taken.items():
            more = f"; {here - there:,} new rows have their initial values" if here > there else ""
            found.append(f"table {name}: {there:,} rows with their slots{more}")
        found += [f"table {name}: not in the checkpoint; all rows have their initial values" for name in self.new]
        found += [f"table {name}: only in the checkpoint; not loaded" for name in self.left]
        return found


def fit_tables(chain: Chain, tables: Mapping[str, Any]) -> Fit:
    """Return the overlap of a checkpoint's tables and the program's `tables`, each a HostTable or DeviceTable, by name.

    Raises:
        UserError: No table is shared, or a shared table differs in dim, optimizer or dtype, or has fewer rows
            than in the checkpoint.
    """
    newest = chain[-1]
    held = {table.name: table for table in newest.manifest.tables}
    taken = {}
    for name in sorted(held.keys() & tables.keys()):
        there, table = held[name], tables[name]
        if there.keys is not None:
            require_kind(newest.path, there, table)
        if there.dim != table.dim:
            raise UserError(f"{newest.path}: table {name!r} has dim {there.dim}, but {table.dim} in the program")
        if not can_continue(table.optimizer, there.optimizer, there.arguments):
            mine = type(table.optimizer).__name__, hyperparameters(table.optimizer)
            shown = [f"{kind}{_arguments(values)}" for kind, values in ((there.optimizer, there.arguments), mine)]
            raise UserError(f"{newest.path}: table {name!r} has optimizer {shown[0]}, but {shown[1]} in the program")
        for what, field in (("weights", "dtype"), ("slots", "slots_dtype")):
            saved, own = getattr(there, field), getattr(table, field)
            if saved != own:
                raise UserError(f"{newest.path}: the {what} of table {name!r} are {saved}, but {own} in the program")
        if table.capabilities.by_key:
            rows = there.rows if there.keys is None else there.keys.count
            if rows > table.capacity:
                raise UserError(
                    f"table {name!r} has {rows:,} rows in {newest.path}, but a capacity of only {table.capacity:,} in "
                    "the program"
                )
            taken[name] = rows, rows
            continue
        if there.rows > table.total_rows:
            raise UserError(
                f"table {name!r} has {there.rows:,} rows in {newest.path}, but only {table.total_rows:,} in the program"
            )
        taken[name] = there.rows, table.total_rows
    if not taken:
        raise UserError(
            f"{newest.path} has none of the tables {', '.join(sorted(tables))}; it has {', '.join(sorted(held))}"
        )
    _require_own_optimizers(tables, taken, held, newest.path)
    return Fit(newest.path, taken, sorted(tables.keys() - held.keys()), sorted(held.keys() - tables.keys()))


def _require_own_optimizers(
    tables: Mapping[str, Any], taken: Mapping[str, Any], held: Mapping[str, Table], path: Path
) -> None:
    """Raise UserError if loading changes the form of an optimizer that a table which is not loaded also has."""
    for name in taken:
        optimizer = tables[name].optimizer
        sharing = [other for other in tables.keys() - taken if tables[other].optimizer is optimizer]
        if sharing and {**hyperparameters(optimizer), "lr": None} != {**held[name].arguments, "lr": None}:
            raise UserError(
                f"table {name!r} continues with the optimizer of {path}, Adam(epsilon_hat=True), and table "
                f"{sharing[0]!r}, which is not in it, has the same optimizer object; give each table its own"
            )


def load_shared(chain: Chain, tables: Mapping[str, Any], fit: Fit, *, former: FormerIds | None = None) -> None:
    """Load rows, optimizer state and steps of the shared tables; learning rates and seeds stay unchanged.

    `former` is as for `load_rows`.
    """
    taken = {name: tables[name] for name in fit.taken}
    load_rows(chain, taken, former=former)
    for name, table in taken.items():
        table.step = chain[-1].manifest.table(name).step


def _arguments(values: Mapping[str, Any]) -> str:
    shown = ", ".join(f"{name}={value}" for name, value in values.items() if name != "lr")
    return f"({shown})" if shown else ""
