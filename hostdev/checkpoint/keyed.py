"""Tables by key in checkpoints: the files that are saved besides rows, and the loading of keys and rows."""

import io
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.checkpoint.adopting import adopt_files, can_adopt, find_used
from hostdev.checkpoint.folder import Chain, Checkpoint, chain_of_table, check_file, mapped
from hostdev.checkpoint.manifest import BrokenCheckpointError, KeyState, RangeFile, Table
from hostdev.checkpoint.ranges import WEIGHTS, RowChunk, stack_columns
from hostdev.checkpoint.segment_rows import open_segments, read_chunk
from hostdev.core.errors import UserError, raise_if_transient
from hostdev.core.keys import SHARED, FormerIds, KeyColumns
from hostdev.core.progress import bar
from hostdev.kernels.arrays import Keys

WAITING, GONE, SKETCH = "waiting.arrow", "gone.arrow", "sketch.arrow"


_KINDS = ("by row", "HostTable(rows, ...)"), ("by key", "HostTable(None, ...)")


class OtherKeys(NamedTuple):
    """The keys of a checkpoint that have no row in it."""

    waiting: Keys  # int64 [W], keys that wait for a row, in the order of their hashes
    counts: npt.NDArray[np.int64]  # [W], for each waiting key: its last step << 24 | its number of uses
    gone: Keys  # int64 [G], keys that have lost their rows since the parent, in the order of their hashes
    sketch: npt.NDArray[np.uint32]  # [any], the counters of the table's sketch; empty if there is none

    def files(self) -> dict[str, bytes]:
        """Return the content of the files that hold these keys, by name."""
        found = {WAITING: _to_bytes(key=self.waiting, count=self.counts), GONE: _to_bytes(key=self.gone)}
        return found | ({SKETCH: _to_bytes(counter=self.sketch)} if len(self.sketch) else {})


def make_state(table: Any, snapshot: Any, number: int, live: int, waiting: int) -> KeyState:
    """Return the manifest's entry for the keys of a `KeyTable`.

    Args:
        table: The table, or one rank's part of it.
        snapshot: Its snapshot.
        number: The table's index in the checkpoint, from 0.
        live: Number of keys that have a row, over all ranks.
        waiting: Number of keys that are counted and wait for a row, over all ranks.
    """
    found = snapshot.found
    folder = f"tables/{number}"
    return KeyState(
        count=live,
        step=found.step,
        capacity=table.capacity,
        init=repr(table.init),
        unknown=list(snapshot.names),  # only those of the first rank are used: it writes the manifest
        admit=None if table.admit is None else repr(table.admit),
        counting=counting_of(table.admit),
        evict=None if table.evict is None else repr(table.evict),
        unknown_values=table.unknown,
        decay=1.0 if table.evict is None else float(table.evict.decay),
        decays=found.decays,
        waiting_keys=waiting,
        waiting=f"{folder}/{WAITING}",
        gone=f"{folder}/{GONE}",
        sketch=f"{folder}/{SKETCH}" if len(found.sketch) else None,
    )


def require_kind(path: Path, there: Table, table: Any) -> None:
    """Raise UserError unless a checkpoint's table and the program's are both by row, or both by key and compatible.

    Args:
        path: The checkpoint.
        there: The table's entry in its manifest.
        table: The program's table.
    """
    name, state = table.name, there.keys
    (saved, advice), (own, _) = _KINDS[state is not None], _KINDS[table.capabilities.by_key]
    if saved != own:
        raise UserError(
            f"{path}: table {name!r} is {saved} in the checkpoint, but {own} in the program; create it as {advice}"
        )
    if state is None:
        return
    if state.count > table.capacity:
        raise UserError(
            f"{path}: table {name!r} has {state.count:,} keys, but the program's table has a capacity of "
            f"{table.capacity:,}; raise capacity"
        )
    if state.init != repr(table.init):
        raise UserError(
            f"{path}: new rows of table {name!r} begin with {state.init}, but in the program with {table.init!r}; use "
            "the same init"
        )
    if state.unknown_values != table.unknown:
        raise UserError(
            f"{path}: keys without a row of table {name!r} read {state.unknown_values!r} values, but in the program "
            f"{table.unknown!r} ones; use unknown={state.unknown_values!r}"
        )
    if (mine := counting_of(table.admit)) != (theirs := state.counting):
        raise UserError(
            f"{path}: table {name!r} counts keys that have no row {theirs}, but in the program {mine}; use admit="
            f"{state.admit or 'None'}, whose number may differ"
        )


def counting_of(admit: Any) -> str:
    """Return how an admission policy counts the uses of keys that have no row."""
    if admit is None or not admit.counts:
        return "not at all"
    return f"in a sketch of {admit.sketch_bytes:,} bytes, by parts" if admit.sketch_bytes else "exactly"


def load_keys(chain: Chain, name: str, table: Any, *, check: bool) -> None:
    """Load a table by key; see `loading.load_rows`. Each checkpoint's rows overwrite its parent's."""
    decays = 0
    for checkpoint in chain_of_table(chain, name):
        about = checkpoint.manifest.table(name)
        own = keys_of(about)
        others = read_others(checkpoint, own, check=check)
        table.forget(others.gone, own.decay, own.decays - decays)
        decays, files = own.decays, sorted(about.files, key=lambda file: file.start)
        if can_adopt(about, table):
            used = find_used(checkpoint, about, files, check=check)
            adopt_files(checkpoint, about, table, bar_over(files), used, partial(_place, checkpoint, own, table))
            continue
        segments = open_segments(checkpoint, name)
        for file in bar_over(files):
            path = checkpoint.path / file.file
            rows = read_chunk(path, about, file, segments, check=check)
            block, row_slots = stack_columns(about, {**rows.columns, **rows.row_columns})
            try:
                table.load_rows(_list_unknown(own, rows), rows.keys, block, row_slots)
            except ValueError as error:
                raise BrokenCheckpointError(f"{path} cannot be loaded ({error})") from None
    table.restore_keys(own.step, own.decays, others.waiting, others.counts, others.sketch)


def _list_unknown(state: KeyState, rows: RowChunk) -> list[str]:
    """Return the names of the out-of-vocabulary rows in a file, which are its first rows."""
    return state.unknown[rows.start : rows.start + len(rows)]


def _place(checkpoint: Checkpoint, state: KeyState, table: Any, rows: RowChunk) -> Any:
    """Give rows of the table to the keys of a file, and return them as `place` of `adopt_files` does."""
    assert rows.keys is not None and rows.locations is not None
    if not rows.locations.all():
        raise BrokenCheckpointError(f"{checkpoint.path} is broken (keys of table {table.name!r} have no location)")
    return table.place_rows(_list_unknown(state, rows), rows.keys)


def load_ids(layers: Any, name: str, table: Any, former: FormerIds | None = None) -> None:
    """Load the rows of a table by row into a table by key.

    Args:
        layers: The checkpoint's `Layers`.
        name: The table.
        table: A `KeyTable`.
        former: The keys of the rows; None if the ids are the keys.
    """
    about = layers.manifest.table(name)
    columns = [WEIGHTS, *about.slots, *about.row_slots]
    for start, stop in layers.ranges(name):
        found = layers.columns_of_ids(name, start, stop, columns)
        (block, row_slots), ones = stack_columns(about, found), np.ones(stop - start, np.uint32)
        if former is None:
            table.load_rows([], KeyColumns(np.arange(start, stop), ones, ones), block, row_slots)
            continue
        here = former.known[start:stop]
        keys = KeyColumns(former.keys[start:stop], ones, np.maximum(former.uses[start:stop], 1))
        table.load_rows([], keys.at(here), block[here], row_slots[here])
        for unknown, row in former.unknown.items() if table.unknown == SHARED else ():
            if start <= row < stop:
                at = slice(row - start, row - start + 1)
                table.load_rows([unknown], keys.at(at), block[at], row_slots[at])


def bar_over(files: Sequence[RangeFile]) -> Iterator[RangeFile]:
    """Yield files with a progress bar."""
    with bar(sum(file.bytes for file in files), "loading", "B", unit_scale=True) as progress:
        for file in files:
            yield file
            progress.update(file.bytes)


def read_others(checkpoint: Checkpoint, state: KeyState, *, check: bool = False) -> OtherKeys:
    """Return the keys of a checkpoint that have no row in it.

    Args:
        checkpoint: The checkpoint.
        state: The table's entry in its manifest.
        check: Whether to verify the files' checksums.

    Raises:
        BrokenCheckpointError: A file is missing or damaged.
    """

    def read(name: str, **columns: Any) -> list[Any]:
        file = checkpoint.manifest.other(name)
        path = checkpoint.path / name
        if file is None:
            raise BrokenCheckpointError(f"{checkpoint.path} is broken (it does not list {name[:100]!r})")
        if check:
            check_file(path, file)
        return _read_columns(path, columns)

    waiting, counts = read(state.waiting, key=pa.int64(), count=pa.int64())
    [gone] = read(state.gone, key=pa.int64())
    sketch = np.zeros(0, np.uint32) if state.sketch is None else read(state.sketch, counter=pa.uint32())[0]
    return OtherKeys(waiting, counts, gone, sketch)


def _to_bytes(**columns: Any) -> bytes:
    batch = pa.record_batch([pa.array(values) for values in columns.values()], names=list(columns))
    out = io.BytesIO()
    with pa.ipc.new_file(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue()


def _read_columns(path: Path, columns: dict[str, Any]) -> list[Any]:
    """Return the columns of an Arrow file as arrays; `columns` has their names and types."""
    try:
        reader = pa.ipc.open_file(mapped(path))
        if not reader.schema.equals(pa.schema(list(columns.items()))) or reader.num_record_batches != 1:
            raise BrokenCheckpointError(f"{path} is broken (its content does not match the manifest)")
        batch = reader.get_batch(0)
        batch.validate(full=True)
        if any(column.null_count for column in batch.columns):
            raise BrokenCheckpointError(f"{path} is broken (values are missing)")
    except (pa.ArrowException, OSError) as error:
        raise_if_transient(error)
        raise BrokenCheckpointError(f"{path} is broken ({error})") from None
    return [column.to_numpy() for column in batch.columns]


def keys_of(table: Table) -> KeyState:
    """Return the `KeyState` of a table by key; raise BrokenCheckpointError for a table by row."""
    if table.keys is None:
        raise BrokenCheckpointError(f"table {table.name!r} is by key in some checkpoints of a chain, but not in others")
    return table.keys
