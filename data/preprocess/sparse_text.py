"""Reader of sparse text, with an index before each value: LIBSVM, libffm, and named slots as in ad logs.

    1 3:1 11:1              LIBSVM: a label, then index:value
    1 0:3:1 1:11:0.5        libffm: a label, then field:index:value
    click:0 1:737395 1:9 2:210498938   slots: name:value, where a name may occur several times

LIBSVM becomes the columns `label` and `features`, a bag of indices, if all values are 1; otherwise each index becomes a
numeric column. libffm becomes `label` and a bag `field N` for each field. The first slot of a line is the label; each
other slot becomes a bag with the slot's name.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from hostdev.core.errors import UserError
from hostdev.core.progress import note
from hostdev.data.preprocess.delimited import LineFile
from hostdev.data.preprocess.files import Chunk, UnparsedRows
from hostdev.data.preprocess.inputs import HEAD_BYTES, AnyInput
from hostdev.data.preprocess.naming import short
from hostdev.data.preprocess.raw import RejectedLines
from hostdev.data.preprocess.text import LONGEST

_BLOCK = 1 << 22  # bytes of a block
_NUMBER = r"[-+]?[0-9.]+(?:[eE][-+]?[0-9]+)?"
_KINDS = {
    "LIBSVM": re.compile(rf"{_NUMBER}(?: qid:\d+)?(?: +\d+:{_NUMBER})+ *(?:#.*)?"),
    "libffm": re.compile(rf"{_NUMBER}(?: +\d+:\d+:{_NUMBER})+ *"),
    "slots": re.compile(r"[A-Za-z_][\w.]*:[01](?: +[\w.]+:[^\s:]+)+ *"),
}
_LOOKED_AT = 50  # number of first lines that must all be of the same kind
_MOST = 4096  # maximum number of numeric columns


class _Row(NamedTuple):
    """A line's label and entries.

    An entry has a column's name, an index (for slots, the value) and a number (for slots, 1).
    """

    label: str
    pairs: list[tuple[str, str, float]]


def find_kind(source: AnyInput) -> str | None:
    """Return "LIBSVM", "libffm" or "slots" if a text's first lines are all of that kind; None for other text."""
    text = source.head(HEAD_BYTES)
    lines = text.decode("utf-8", "replace").split("\n")
    lines = [line.rstrip("\r") for line in (lines[:-1] if len(lines) > 1 else lines) if line.strip()][:_LOOKED_AT]
    return next((kind for kind, form in _KINDS.items() if lines and all(map(form.fullmatch, lines))), None)


class SparseText(LineFile):
    """A file of sparse text. Its columns are those of its first MiB; a line with another column is malformed."""

    def __init__(self, source: AnyInput, kind: str) -> None:
        self.input, self._kind, self.block_bytes = source, kind, _BLOCK
        self.most_rows = source.size // 4 + 1 if source.plain else 2**62
        head = source.head(HEAD_BYTES).decode("utf-8", "replace")
        lines = head.split("\n")[: -1 if len(head) == HEAD_BYTES else None]
        rows = [row for line in lines if (row := self._row(line)) is not None]
        others = any(value != 1 for row in rows for _, _, value in row.pairs)
        self._is_numeric = kind == "LIBSVM" and others
        found = (
            {} if kind == "LIBSVM" and not others else dict.fromkeys(name for row in rows for name, _, _ in row.pairs)
        )
        columns = sorted(found, key=lambda name: (len(name), name))
        if self._is_numeric and len(columns) > _MOST:
            raise UserError(
                f"{source.name}: LIBSVM text with values other than 1 has too many indices ({len(columns):,}); write "
                "it as Parquet with a list of indices in each row"
            )
        if kind == "libffm" and others:
            note(f"{source.name}: nonzero values are read as 1, because lists of ids have no weights")
        label = lines[0].partition(":")[0] if kind == "slots" else "label"
        self._columns = {name: f"field {name}" if kind == "libffm" else name for name in columns} or {"": "features"}
        self.names = (label, *self._columns.values())

    def get_type(self, name: str) -> pa.DataType:
        """Return a column's type: text, or lists of text."""
        return pa.string() if name == self.names[0] or self._is_numeric else pa.list_(pa.string())

    def parse(self, part: UnparsedRows, used: Sequence[str]) -> Chunk:
        """Parse a part into rows and malformed lines."""
        text, offset = part.content
        try:
            lines = text.decode().split("\n")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.input.name}: byte {offset + error.start:,} or a byte near it is not UTF-8; convert the file "
                "to UTF-8"
            ) from None
        lines = [line.rstrip("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
        columns: dict[str, list[Any]] = {name: [] for name in used}
        wrong: list[int] = []
        for number, line in enumerate(lines, 1):
            row = self._row(line)
            values = None if row is None else self._values(row)
            if values is None:
                wrong.append(number)
                continue
            for name, column in columns.items():
                column.append(values.get(name, "0" if self._is_numeric else []))
        arrays = [pa.array(columns[name], self.get_type(name)) for name in used]
        skipped = np.array(wrong, np.int64)

        def look(i: int) -> tuple[str, str]:
            return f"not in {self._kind} format, or has a column that does not occur in the first MiB", short(
                lines[wrong[i] - 1], 200
            )

        batch = pa.RecordBatch.from_arrays(arrays, names=list(used))
        return Chunk(batch, 0, RejectedLines(self.input.name, skipped, look), part.taken, skipped)

    def _row(self, line: str) -> _Row | None:
        """Return a line's label and nonzero entries, or None for a malformed line."""
        if _KINDS[self._kind].fullmatch(line) is None:
            return None
        first, *rest = line.partition("#")[0].split() if self._kind == "LIBSVM" else line.split()
        entries = [one.split(":") for one in rest if not one.startswith("qid:")]
        if self._kind == "slots":
            return _Row(first.partition(":")[2], [(name, value, 1.0) for name, value in entries])
        named = [(one[0], one[-2], float(one[-1])) for one in entries]
        return _Row(first, [entry for entry in named if entry[2] != 0])

    def _values(self, row: _Row) -> dict[str, Any] | None:
        """Return the values of a row's columns by name, or None if the file's columns cannot hold them."""
        found: dict[str, Any] = {self.names[0]: row.label}
        for name, index, value in row.pairs:
            if self._is_numeric:
                if name not in self._columns:
                    return None
                found[self._columns[name]] = repr(value)
                continue
            column = self._columns.get(name if self._kind != "LIBSVM" else "")
            if column is None or (self._kind == "LIBSVM" and value != 1):
                return None
            found.setdefault(column, []).append(index)
        return found

    def too_long(self) -> UserError:
        """See `LineFile`."""
        return UserError(
            f"{self.input.name}: a line is longer than {LONGEST * self.block_bytes} bytes; check its line ends"
        )
