"""Which values of a column match in which other type. `python -m tests.data.pairs` writes the document."""

import copy
import dataclasses
import datetime
import io
import re
import shutil
import tempfile
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.encoding import Encoding
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.preprocess.unlabelled import rows_in
from hostdev.ext.predict.rows import as_batch, as_columns

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/reference/value-types.md"
ROWS = 8
_UTC = datetime.UTC
_NUMBERS = [1, 2, None, 3, 10, 2, 1, 7]
_TRUE = [True, False, None, True, False, True, True, False]
_DAYS = [None if n is None else datetime.date(2024, 1, n) for n in _NUMBERS]
_MIDNIGHTS = [None if day is None else datetime.datetime(day.year, day.month, day.day) for day in _DAYS]
_MOMENTS = [None if day is None else day.replace(hour=12, minute=30, second=day.day) for day in _MIDNIGHTS]
_INSTANTS = [None if day is None else day.replace(tzinfo=_UTC) for day in _MOMENTS]
_TIMES = [None if day is None else day.time() for day in _MOMENTS]
_WORDS = ["a", "b", "", "ä", "c d", "NAB", "a", "1x"]


def _text(values, form):
    return pa.array(["" if value is None else form(value) for value in values])


def _stamps(values, form):
    return _text(values, lambda value: value.strftime(form))


def _berlin(values, unit):
    return pa.array(values, pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit, "Europe/Berlin"))


def groups():
    """Return by group and name the same values as arrays of different types."""
    integers = {
        str(of): pa.array(_NUMBERS, of)
        for of in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
    }
    floats = {str(of): pa.array(_NUMBERS, pa.float64()).cast(of) for of in (pa.float32(), pa.float64())}
    decimals = {
        str(of): pa.array([None if n is None else Decimal(n) for n in _NUMBERS], of)
        for of in (pa.decimal128(5, 0), pa.decimal128(5, 1), pa.decimal128(7, 2))
    }
    texts = {
        "text 1": _text(_NUMBERS, str),
        "text 1.0": _text(_NUMBERS, lambda n: f"{n}.0"),
        "text 1.00": _text(_NUMBERS, lambda n: f"{n}.00"),
        "text 01": _text(_NUMBERS, lambda n: f"{n:02d}"),
    }
    bits = [None if each is None else int(each) for each in _TRUE]
    stamps = {f"timestamp {unit}": unit for unit in ("s", "ms", "us", "ns")}
    return {
        "whole numbers": {
            **integers,
            **floats,
            **decimals,
            **texts,
            "dictionary of int64": pa.array(_NUMBERS, pa.int64()).dictionary_encode(),
        },
        "true and false": {
            "bool": pa.array(_TRUE),
            "int64": pa.array(bits, pa.int64()),
            "double": pa.array(bits, pa.float64()),
            "text True": _text(_TRUE, str),
            "text true": _text(_TRUE, lambda value: str(value).lower()),
            "text TRUE": _text(_TRUE, lambda value: str(value).upper()),
            "text 1": _text(bits, str),
            "text 1.0": _text(bits, lambda value: f"{value}.0"),
        },
        "dates": {
            "date32": pa.array(_DAYS, pa.date32()),
            "date64": pa.array(_DAYS, pa.date64()),
            **{name: pa.array(_MIDNIGHTS, pa.timestamp(unit)) for name, unit in stamps.items()},
            "text 2024-12-31": _text(_DAYS, str),
            "text with 00:00:00": _stamps(_MIDNIGHTS, "%Y-%m-%d %H:%M:%S"),
        },
        "times without a zone": {
            **{name: pa.array(_MOMENTS, pa.timestamp(unit)) for name, unit in stamps.items()},
            "text 2024-12-31 23:59:58": _stamps(_MOMENTS, "%Y-%m-%d %H:%M:%S"),
            "text 2024-12-31T23:59:58": _stamps(_MOMENTS, "%Y-%m-%dT%H:%M:%S"),
            "text .000": _stamps(_MOMENTS, "%Y-%m-%d %H:%M:%S.000"),
        },
        "times with a zone": {
            **{f"{name} UTC": pa.array(_INSTANTS, pa.timestamp(unit, "UTC")) for name, unit in stamps.items()},
            "timestamp us Berlin": _berlin(_INSTANTS, "us"),
            "text Z": _stamps(_INSTANTS, "%Y-%m-%dT%H:%M:%SZ"),
            "text +00:00": _stamps(_INSTANTS, "%Y-%m-%d %H:%M:%S+00:00"),
            "text +01:00": _text(_berlin(_INSTANTS, "s").to_pylist(), lambda value: value.isoformat(" ")),
            "timestamp us, no zone": pa.array(_MOMENTS, pa.timestamp("us")),
        },
        "times of day": {
            "time32 s": pa.array(_TIMES, pa.time32("s")),
            "time64 us": pa.array(_TIMES, pa.time64("us")),
            "time64 ns": pa.array(_TIMES, pa.time64("us")).cast(pa.time64("ns")),
            "text 23:59:58": _text(_TIMES, str),
        },
        "words": {
            "text": pa.array(_WORDS),
            "large_string": pa.array(_WORDS, pa.large_string()),
            "string_view": pa.array(_WORDS, pa.string_view()),
            "binary": pa.array([w.encode() for w in _WORDS]),
            "dictionary of text": pa.array(_WORDS).dictionary_encode(),
        },
    }


def made(folder, columns, write=None, hash_buckets=None):
    """Make a data set of columns, from a Parquet file or the one that `write` makes; return how it encodes rows."""
    folder.mkdir(parents=True)
    path = folder / "t.parquet"
    table = labelled(columns)
    if write is None:
        pq.write_table(table, path)
    else:
        path = write(table, folder)
    # A column of lists for each type that CSV has no text of is not among these.
    options = TableOptions(label="y", categorical=tuple(columns), test_column=("split", "test"))
    build(
        TableSource([path], options),
        folder / "data",
        Options(threshold=None if hash_buckets else 0, hash_buckets=hash_buckets, test_fraction=None),
        threads=1,
    )
    found = manifest.read(folder / "data")
    vocabulary = None if found.vocabulary is None else folder / "data" / found.vocabulary
    return Encoding(found, vocabulary)


def labelled(columns):
    """Return columns twice, for training and for testing, with labels."""
    table = pa.table(columns)
    more = {"y": [0, 1] * (ROWS // 2), "split": ["train"] * ROWS}
    first = pa.table({**more, **{name: table[name] for name in columns}})
    return pa.concat_tables(
        [first, pa.table({**{name: first[name] for name in first.column_names}, "split": ["test"] * ROWS})]
    )


def ids_of(encoding, batch):
    """Return the ids of each column of rows by name, or the message that refuses one."""
    return encoding.encode(batch).ids.T


def cell(encoding, name, expected, array):
    """Return "same" or "refused" for a column that is served as an array, in the place of what training had."""
    try:
        ids = ids_of(encoding, pa.RecordBatch.from_arrays([array], names=[name]))[0]
    except UserError as error:
        assert f"column {name!r}" in str(error), error
        assert "\n" not in str(error)
        assert len(str(error)) <= 500
        return "refused"
    return "same" if (ids == expected).all() else f"OTHER {ids} {expected}"


def matrix(folder, *, hash_buckets=None, forget=False):
    """Return by group, trained type and served type what becomes of the values.

    forget  what the manifest says of the columns, as data sets of before it did
    """
    found = {}
    for number, (group, columns) in enumerate(groups().items()):
        encoding = made(folder / str(number), columns, hash_buckets=hash_buckets)
        if forget:
            encoding = forgetting(encoding)
        whole = pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))
        expected = ids_of(encoding, whole)
        assert (expected == ids_of(encoding, whole.slice(0, ROWS))).all()
        alone = {name: _only(encoding, name) for name in columns}
        own = {name: ids_of(alone[name], pa.table({name: array}).to_batches()[0])[0] for name, array in columns.items()}
        assert hash_buckets or all((own[name] == ids).all() for name, ids in zip(columns, expected, strict=True))
        found[group] = {
            name: {other: cell(alone[name], name, own[name], array) for other, array in columns.items()}
            for name in columns
        }
    return found


def forgetting(encoding):
    """Return the encoding of a data set whose manifest does not say how values were written."""
    return Encoding(dataclasses.replace(encoding._data, kinds={}), encoding._path)


# What carries columns into training, and what carries them into a prediction.


def _pandas_csv(table, folder):
    table.to_pandas().to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def _pandas_parquet(table, folder):
    table.to_pandas().to_parquet(folder / "t.parquet")
    return folder / "t.parquet"


def _arrow_csv(table, folder):
    decoded = [
        column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column
        for column in table.columns
    ]
    decoded = [
        column.cast(pa.string()) if str(column.type) in ("string_view", "binary") else column for column in decoded
    ]
    pyarrow.csv.write_csv(
        pa.table(decoded, table.column_names), folder / "t.csv", pyarrow.csv.WriteOptions(quoting_style="needed")
    )
    return folder / "t.csv"


def _tsv(table, folder):
    table.to_pandas().to_csv(folder / "t.tsv", index=False, sep="\t")
    return folder / "t.tsv"


def _parquet(table, folder):
    pq.write_table(table, folder / "t.parquet")
    return folder / "t.parquet"


def _arrow(table, folder):
    with pa.OSFile(str(folder / "t.arrow"), "wb") as content, pa.ipc.new_file(content, table.schema) as file:
        file.write_table(table)
    return folder / "t.arrow"


FILES = {
    "CSV of pandas": _pandas_csv,
    "TSV of pandas": _tsv,
    "CSV of Arrow": _arrow_csv,
    "Parquet": _parquet,
    "Parquet of pandas": _pandas_parquet,
    "Arrow": _arrow,
}
OBJECTS = {
    "dict": lambda table: {name: table[name].to_pylist() for name in table.column_names},
    "frame": lambda table: table.to_pandas(),
    "frame of read_csv": lambda table: pd.read_csv(io.StringIO(table.to_pandas().to_csv(index=False))),
    "frame of Arrow's types": lambda table: table.to_pandas(types_mapper=pd.ArrowDtype),
    "Arrow table": lambda table: table,
}


_NOT_CARRIED = (
    "timestamp us, no zone",
    "binary",  # of which pandas writes the text b'a'
    "int16",
    "int32",
    "uint8",
    "uint16",
    "uint32",
    "decimal128(5, 0)",
    "decimal128(5, 1)",  # as others of their kind
    "timestamp ms",
    "timestamp ms UTC",
    "timestamp s UTC",
)


def carried():
    """Return the columns that are carried: one of each type, under the name that the document has for it."""
    named = {}
    for group, columns in groups().items():
        for name, array in columns.items():
            if name not in _NOT_CARRIED:
                named[f"{name} ({group})"] = array
    named["int64 from 2^53"] = pa.array([2**53 + 1, 2**53 + 3, None, -(2**60), 2**62, 5, 6, 7], pa.int64())
    named["uint64 to 2^64-1"] = pa.array([2**64 - 1, 2**63, None, 0, 1, 2, 3, 4], pa.uint64())
    named["text 007 and 7"] = pa.array(["007", "7", "", "07", "12", "012", "1", "0"])
    return named


def carriers(folder, columns):
    """Return by what trained and what is served the columns that are refused; all others are the same values."""
    found = {}
    for number, (trained, write) in enumerate(FILES.items()):
        encoding, usable = _trained(folder / f"trained {number}", columns, write)
        own = served(folder / f"own {number}", encoding, trained, usable)
        for kind in [*FILES, *OBJECTS]:
            refused = []
            for name, ids in served(folder / f"served {number} {kind}", encoding, kind, usable).items():
                if isinstance(ids, str):
                    refused.append(name)
                    assert f"column {name!r}" in ids, ids
                    continue
                assert not isinstance(own[name], str), own[name]
                assert (ids == own[name]).all(), (trained, kind, name, ids, own[name])
            found[trained, kind] = refused
    return found


def _trained(folder, columns, write):
    """Return the encoding of a data set of all columns that one can be made of: a line says which cannot, and why."""
    columns = dict(columns)
    while True:
        try:
            return made(folder, columns, write=write), columns
        except UserError as error:
            wrong = re.search("column '(.*?)':", str(error))[1]
            del columns[wrong]
            shutil.rmtree(folder)


def served(folder, encoding, kind, columns):
    """Return each column's ids, or the message that refuses it, of rows that are served in a way."""
    folder.mkdir()
    known = {}
    for number, (name, array) in enumerate(columns.items()):
        alone = _only(encoding, name)
        table = pa.table({name: array, "other": range(ROWS)})
        try:
            if kind in FILES:
                place = folder / str(number)
                place.mkdir()
                rows = rows_in(FILES[kind](table, place), alone, {"preset": "table"})
                known[name] = np.concatenate([part.batch.ids[:, 0] for part in rows.parts()])
            else:
                rows = OBJECTS[kind](table)
                rows = as_columns(rows, alone) if isinstance(rows, dict) else rows
                known[name] = alone.encode(as_batch(rows, alone)).ids[:, 0]
        except UserError as error:
            known[name] = str(error)
    return known


def _only(encoding, name):
    """Return an encoding that needs one column only."""
    made = copy.copy(encoding)
    encoding.prepare()
    columns = tuple(column for column in encoding.schema.columns if column.name == name)
    made.schema = dataclasses.replace(encoding.schema, columns=columns)
    if encoding.schema.spaces[0].first == encoding.schema.spaces[-1].first:  # hashed, by the column's name
        del made.__dict__["_known"]
    return made


def document(found, by_carrier):
    """Return docs/reference/value-types.md."""
    lines = [
        "# Types that match in serving",
        "",
        "A categorical value gets the same id in a prediction as in training, whatever type it has there;",
        "otherwise its column is refused with one line. `tests/data/pairs.py` writes this page, and a test compares",
        "it. In the tables below, training had the type on the left, and the prediction had the same values in the",
        "type at the top. `=` means the same ids, and so the same probabilities; `-` means an error that names the",
        "column. The manifest records each column's type in the files and how its values were written (`kinds`).",
        "For older data sets, the vocabulary shows it.",
    ]
    for group, rows in found.items():
        lines += ["", f"## {group.capitalize()}", ""]
        names = list(rows)
        lines.append("| trained | " + " | ".join(names) + " |")
        lines.append("|---" * (len(names) + 1) + "|")
        for name, cells in rows.items():
            marks = [{"same": "=", "refused": "-"}[cells[other]] for other in names]
            lines.append(f"| {name} | " + " | ".join(marks) + " |")
    kinds = [*FILES, *OBJECTS]
    lines += ["", "## Files, dicts, frames and tables", ""]
    lines += [
        "This table has all columns above. Training read them from the kind of file on the left; the prediction",
        "got them from the kind of file or object at the top. Each cell has the number of refused columns; all",
        "others have the same ids. The list below names the refused columns.",
        "",
        "| trained from | " + " | ".join(kinds) + " |",
        "|---" * (len(kinds) + 1) + "|",
    ]
    for trained in FILES:
        counts = [str(len(by_carrier[trained, kind])) for kind in kinds]
        lines.append(f"| {trained} | " + " | ".join(counts) + " |")
    lines.append("")
    by_columns = {}
    for (trained, kind), refused in by_carrier.items():
        if refused:
            by_columns.setdefault(", ".join(refused), []).append(f"{trained} as {kind}")
    lines += [f"- {'; '.join(pairs)}: {columns}" for columns, pairs in by_columns.items()]
    return "\n".join(lines) + "\n"


def main():
    """Write the document."""
    with tempfile.TemporaryDirectory() as place:
        found, by_carrier = matrix(Path(place) / "a"), carriers(Path(place), carried())
    DOCUMENT.write_text(document(found, by_carrier))


if __name__ == "__main__":
    main()
