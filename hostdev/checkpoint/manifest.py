"""checkpoint.json: the content of a checkpoint and the checksums of its files, in formats 1 (read only) to 4."""

import json
import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hostdev.core import json_files
from hostdev.core.checksums import json_checksum
from hostdev.core.errors import UserError, raise_if_transient
from hostdev.core.names import require_name
from hostdev.core.optimizers import complete_arguments
from hostdev.core.table_dtypes import FP32, SLOT_DTYPES, TABLE_DTYPES

FORMAT = "hostdev-checkpoint"
VERSION = 2
KEYED_VERSION = 3  # with tables by key
SEGMENT_VERSION = 4  # with tables whose rows are in segments
_READABLE = (1, VERSION, KEYED_VERSION, SEGMENT_VERSION)  # 1 has another definition of `state_sha256`
FILE_NAME = "checkpoint.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_ORDERS = ("ids", "spread")
KEY_COLUMNS = ("key", "last_use", "uses")
_USUAL = {
    "order": "ids",
    "dtype": FP32,
    "slots_dtype": FP32,
    "seed": None,
    "history": None,
    "keys": None,
    "segments": None,
    "whole": False,
}  # defaults of `Table`, which are not written
_MOST_ROWS, _MOST_VALUES = 1 << 48, 1 << 56  # limits on a table's rows, and on rows times dim
_MOST_BLOCK = 1 << 30  # limit on the bytes of a segment's block


class BrokenCheckpointError(UserError):
    """A checkpoint is damaged or incomplete; the message names the file or the checkpoint.

    Attributes:
        file: The damaged file if `folder.check_entry` found it, or None.
    """

    file: Path | None = None


@dataclass(frozen=True, kw_only=True)
class File:
    """A file of a checkpoint: its path below the checkpoint's folder, its size and its SHA-256."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class RangeFile(File):
    """A file with `rows` rows of a table, all of them in [start, stop)."""

    start: int
    stop: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class SegmentEntry(File):
    """A segment (`host.disk.segments`). `sha256` is that of its blocks' headers, which have checksums of the blocks."""

    number: int  # the segment's number in the tags of its blocks


@dataclass(frozen=True, kw_only=True)
class Numbering:
    """One rank's rows, from `first_row` on: segment 0 in their locations is segment `first_segment` of the table."""

    first_row: int
    first_segment: int


@dataclass(frozen=True, kw_only=True)
class SegmentState:
    """The segments of a table whose files have the locations of rows (`host.snapshot`) in place of their values."""

    files: list[SegmentEntry]
    numbering: list[Numbering]  # for each rank with rows, in the order of `first_row`
    row_bytes: int  # bytes of a row in a record
    record_bytes: int
    block_bytes: int
    seed: int  # seed of the initial values of rows that are in no segment
    init: str  # initializer of the weights, as text


@dataclass(frozen=True, kw_only=True)
class KeyState:
    """The keys of a table by key, and its rules; files are named as in `CheckpointManifest.others`."""

    count: int  # number of keys that have a row
    step: int  # number of finished steps of the keys
    capacity: int
    init: str  # initializer of new rows, as text
    unknown: list[str]  # names of the out-of-vocabulary rows, which are the first rows in the files
    counting: str  # how the uses of keys without a row are counted, as text
    admit: str | None  # rule of admission, as text
    evict: str | None  # rule of eviction, as text
    unknown_values: str  # what keys without a row read: "shared", "zeros" or "initial"
    decay: float  # factor by which uses decay
    decays: int  # how often the uses have decayed
    waiting_keys: int  # number of keys that are counted and wait for a row
    waiting: str  # file of the keys that wait for a row
    gone: str  # file of the keys that have lost their row since the parent
    sketch: str | None  # file of the counters of a sketch


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table's entry in the manifest."""

    name: str
    rows: int  # number of rows of the whole table; of a table by key, the number of rows in this checkpoint's files
    dim: int
    optimizer: str  # such as "LazyAdam"
    hyperparameters: dict[str, Any]
    slots: list[str]  # optimizer state of `dim` values per row, in order
    row_slots: list[str]  # optimizer state of one value per row
    step: int
    files: list[RangeFile] = field(default_factory=list)
    order: str = "ids"  # row order; "spread": by position, as rows are divided among ranks (`kernels.shards`)
    dtype: str = FP32  # dtype of the weights in training; files always have float32
    slots_dtype: str = FP32  # dtype of `slots` in training
    seed: int | None = None  # seed of the rounding, for weights or slots that are not float32; and of a table by key
    keys: KeyState | None = None  # for a table by key; its files have all rows of their ranges, in the order of hashes
    segments: SegmentState | None = None  # set if rows are in segments; all of them then are, even with a parent
    whole: bool = False  # whether all rows are in the files, although the checkpoint has a parent
    history: str | None = None  # step history, if reading a row applies the steps that it has missed (`core.history`)

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the table's optimizer: `hyperparameters`, and those that earlier versions did not write."""
        return complete_arguments(self.optimizer, self.hyperparameters)


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The parent of an incremental checkpoint: its folder's name (next to this folder), and its manifest's checksum."""

    name: str
    sha256: str


@dataclass(frozen=True, kw_only=True)
class CheckpointManifest:
    """The content of checkpoint.json."""

    step: int
    serial: int  # 1 more than the highest serial of the folder's earlier checkpoints
    parent: Parent | None  # None if full; else tables have only rows written since, except with `segments` or `whole`
    tables: list[Table]
    others: list[File]  # dense tensors, the vocabulary, ...
    state: dict[str, Any]  # a tree of values, see `checkpoint.state`
    state_sha256: str | None  # as in summary.json, in the definition of format `version`; None if not computed
    versions: dict[str, str]
    created: str  # UTC, in ISO 8601
    version: int = VERSION

    @property
    def files(self) -> list[File]:
        """All files but checkpoint.json itself."""
        rows: list[File] = [file for table in self.tables for file in table.files]
        return rows + [file for table in self.tables if table.segments for file in table.segments.files] + self.others

    @property
    def nbytes(self) -> int:
        """Total bytes of `files`."""
        return sum(file.bytes for file in self.files)

    def table(self, name: str) -> Table:
        """Return a table by name; raise UserError if it is missing."""
        for table in self.tables:
            if table.name == name:
                return table
        raise UserError(f"the checkpoint has no table {name!r}; it has {', '.join(t.name for t in self.tables)}")

    def other(self, name: str) -> File | None:
        """Return the entry of `others` with this path, or None if it is missing."""
        return next((file for file in self.others if file.file == name), None)

    @property
    def segment_states(self) -> dict[str, SegmentState]:
        """For each segment, by its file's name: its table's `SegmentState`."""
        states = [table.segments for table in self.tables if table.segments is not None]
        return {file.file: state for state in states for file in state.files}

    @cached_property
    def checksum(self) -> str:
        """The last field of checkpoint.json: the checksum of all other fields."""
        return json_checksum(self._content())

    def _content(self) -> dict[str, Any]:
        content = {"format": FORMAT, **asdict(self)}
        for table in content["tables"]:
            for name, usual in _USUAL.items():
                if table[name] == usual:
                    del table[name]
        return content

    def to_text(self) -> str:
        """Return the content of checkpoint.json, whose last field is the checksum of the other fields."""
        return json.dumps({**self._content(), "sha256": self.checksum}, indent=1) + "\n"


def read_serial(path: Path) -> int | None:
    """Return the serial number of the checkpoint at `path`, even from a damaged manifest; None if it cannot be read."""
    try:
        serial = json_files.read(path / FILE_NAME)["serial"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return serial if type(serial) is int else None


def checksum_of(path: Path) -> str:
    """Return the checksum in the manifest of the checkpoint at `path`."""
    return str(json_files.read(path / FILE_NAME)["sha256"])


def read(path: Path) -> CheckpointManifest:
    """Read the manifest of the checkpoint at `path`.

    Raises:
        BrokenCheckpointError: The manifest is damaged or missing.
        UserError: `path` is a file, or the manifest has an unsupported format version.
    """
    file = path / FILE_NAME
    try:
        content = json_files.read(file)
        found = content.pop("format"), content["version"]
    except FileNotFoundError:
        raise BrokenCheckpointError(f"{path} is not a complete checkpoint: it has no {FILE_NAME}") from None
    except NotADirectoryError:
        raise UserError(f"{path} is a file, not a checkpoint; give the checkpoint's folder") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise_if_transient(error)
        raise BrokenCheckpointError(f"{file} is broken ({error or type(error).__name__})") from None
    if found[0] != FORMAT:
        raise BrokenCheckpointError(f"{file} is broken (its format is {found[0]!r}, not {FORMAT!r})")
    checksum = content.pop("sha256", None)
    try:
        is_whole = checksum == json_checksum({"format": found[0], **content})
    except RecursionError:
        raise BrokenCheckpointError(f"{file} is broken (nested too deeply)") from None
    if not is_whole:
        raise BrokenCheckpointError(f"{file} is broken (its checksum is wrong)")
    if found[1] not in _READABLE:
        raise UserError(
            f"{file} has format version {found[1]}, but this hostdev release reads versions 1 to {SEGMENT_VERSION}"
        )
    try:
        made = json_files.parse(CheckpointManifest, content)
        _check(made)
    except ValueError as error:
        raise BrokenCheckpointError(f"{file} is broken ({error})") from None
    return made


def _check(found: CheckpointManifest) -> None:
    """Raise ValueError for values that are not valid in a checkpoint."""
    _require(found.step >= 0 and found.serial >= 0, "step or serial is negative")
    if found.parent is not None:
        _require("/" not in require_name(found.parent.name), f"the parent {found.parent.name[:80]!r} is a path")
    _require_different([table.name for table in found.tables], "table")
    _require_different([file.file for file in found.files], "file")
    for file in found.files:
        require_name(file.file)
        _require(file.file != FILE_NAME, f"{FILE_NAME} lists itself as a file")
        _require(file.bytes >= 0, f"{file.file} has a size of {file.bytes} bytes")
        _require(_SHA256.fullmatch(file.sha256) is not None, f"{file.file} has no valid SHA-256")
    for table in found.tables:
        _check_table(table)
        later = table.keys is not None or table.segments is not None
        _require(found.version > 1 or not later, f"table {table.name[:80]!r} is of a later format than version 1")
    json_files.parse(list[tuple[str, str]], found.state.get("digest", []), "state.digest")


def _check_table(table: Table) -> None:
    name = f"table {table.name[:80]!r}"
    right = 1 <= table.rows <= _MOST_ROWS and 1 <= table.dim <= _MOST_VALUES // table.rows
    _require(right, f"{name} has the invalid size {table.rows} x {table.dim}")
    _require(table.step >= 0, f"{name} is at the negative step {table.step}")
    if (keys := table.keys) is not None:
        right = min(keys.count, keys.step, keys.decays) >= 0 and len(keys.unknown) <= table.rows
        _require(right and table.order == "ids" and 0 < keys.decay <= 1, f"{name} has invalid numbers of keys")
        _require(table.seed is not None, f"{name} is by key and has no seed")
        _require_different(keys.unknown, f"{name}: out-of-vocabulary row")
    _require(table.order in _ORDERS, f"{name} has the unknown row order {table.order[:80]!r}")
    for dtype, known in ((table.dtype, TABLE_DTYPES), (table.slots_dtype, SLOT_DTYPES)):
        _require(dtype in known, f"{name} has the unknown dtype {dtype[:80]!r}")
    _require_different(["weights", "id", *KEY_COLUMNS, *table.slots, *table.row_slots], f"{name}: column")
    if table.segments is not None:
        _check_segments(table, table.segments, name)
    lr = table.hyperparameters.get("lr")
    _require(isinstance(lr, int | float) and not isinstance(lr, bool), f"{name} has no learning rate")
    for file in table.files:
        right = 0 <= file.start < file.stop <= table.rows and 1 <= file.rows <= file.stop - file.start
        _require(right, f"{file.file} cannot have {file.rows} rows in the range {file.start}..{file.stop - 1}")
    end = 0
    for file in sorted(table.files, key=lambda file: file.start):
        _require(end <= file.start, f"{file.file} repeats rows of another file of {name}")
        end = file.stop


def _check_segments(table: Table, state: SegmentState, name: str) -> None:
    right = 0 < state.row_bytes + 24 <= state.record_bytes <= state.block_bytes - 16 <= _MOST_BLOCK
    right = right and state.block_bytes % 4096 == state.record_bytes % 8 == 0 and table.dim <= state.row_bytes
    _require(right, f"{name} has the invalid record size {state.record_bytes}")
    firsts = [(each.first_row, each.first_segment) for each in state.numbering]
    right = len(firsts) > 0 and firsts[0] == (0, 0) and firsts == sorted(firsts)
    _require(right and firsts[-1][1] <= len(state.files), f"{name} has no valid numbering of segments")
    for file in state.files:
        right = 0 <= file.number < 1 << 31 and file.bytes % state.block_bytes == 0 < file.bytes
        _require(right, f"{file.file[:80]} cannot be a segment")
    for rows in table.files:
        _require(rows.rows == rows.stop - rows.start, f"{rows.file[:80]} has only some rows of a range")


def _require_different(names: list[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        _require(name not in seen, f"{what} {name[:80]!r} appears twice")
        seen.add(name)


def _require(right: bool, wrong: str) -> None:
    if not right:
        raise ValueError(wrong)
