"""Runs `hostdev neighbours`, once its flags are parsed."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

import argparse

import numpy as np
import pyarrow as pa

from hostdev.checkpoint.manifest import Table
from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.printable import printable
from hostdev.core.progress import counted, note
from hostdev.data.preprocess.naming import listed, short
from hostdev.data.schema import Column
from hostdev.ext.neighbours.search import NamedRows, OpenedCheckpoint, find_nearest, open_source

_LONGEST = 80  # maximum number of characters of a printed name


def run(arguments: argparse.Namespace, prog: str) -> None:
    """Print the nearest rows according to the parsed flags; `prog` is the command's name in messages."""
    source = open_source(arguments.checkpoint, arguments.which)
    for line in source.notes:
        note(f"{prog}: {line}")
    table = _choose_table(source, arguments)
    rows, number = _find_row(source, table, arguments)
    if not 1 <= arguments.k < len(rows):
        raise UserError(
            f"--k {arguments.k}: {_describe(rows)} has {counted(len(rows) - 1, 'other row')}; give at most that many"
        )
    query = rows.lookup(np.array([number], np.int64))
    found = find_nearest(rows, query, arguments.k, arguments.metric, np.array([number], np.int64))
    chosen = f" ({source.why})" if source.why else ""
    value = _name(rows, number) if rows.has_names else arguments.of if source.data is not None else None
    name = "" if value is None else f" '{printable(value, _LONGEST)}'"
    print(f"nearest  to{name} ({'key' if rows.is_by_key else 'id'} {number}) by {arguments.metric}")
    print(f"among    {counted(len(rows), 'row')} of {printable(_describe(rows))} of {shown_place(source.path)}{chosen}")
    form = ".6f" if arguments.metric == "cosine" else ".6g"
    for line in _table(rows, found.ids[0].tolist(), [format(score, form) for score in found.scores[0].tolist()]):
        print(line)
    if source.data is not None and source.data.vocabulary is None and len(source.spaces) > 1:
        note(
            f"{prog}: warning: the data's ids are hashed, so rows have no names, and those of all columns are compared"
        )
    if found.not_finite:
        note(f"{prog}: warning: {counted(found.not_finite, 'row')} left out: a value is NaN or infinite")


def _choose_table(source: OpenedCheckpoint, arguments: argparse.Namespace) -> Table:
    if arguments.table is not None:
        return source.find_table(arguments.table)
    first, *more = source.vector_tables()
    if more:
        raise UserError(f"give --table: {source.path} has {listed([first.name, *(each.name for each in more)])}")
    return first


def _find_row(source: OpenedCheckpoint, table: Table, arguments: argparse.Namespace) -> tuple[NamedRows, int]:
    """Return the rows to compare, and the id or key of the row that the options name."""
    column = None if arguments.column is None else source.find_column(arguments.column)
    if column is not None:
        source.require_columns(table, f"--column {column.name}")
    if arguments.of is not None and source.data is not None:
        source.require_columns(table, f"--of {arguments.of}")
        return _find_value(source, table, column or _only_column(source), arguments.of)
    number = arguments.of_id if arguments.of is None else _parse_number(source, table, arguments.of)
    space = None if column is None else source.spaces[column.space]
    if space is None and source.has_columns(table):
        alike = [each for each in source.spaces.values() if each.has(np.array([number], np.int64)).all()]
        if not alike:
            last = table.rows - 1 if table.keys is None else None
            raise UserError(
                f"--of-id {number}: the data has no value with this id; ids below {source.spaces_begin} are those of "
                f"numeric columns and of values out of vocabulary{'' if last is None else f', and {last} is the last'}"
            )
        space = alike[0]
    rows = source.make_rows(table, space)
    if not rows.has(number):
        what = "row of this key" if rows.is_by_key else "row of this number"
        option = "--of-id" if arguments.of is None else "--of"
        raise UserError(f"{option} {number}: {_describe(rows)} has no {what}{_range(rows, table)}")
    return rows, number


def _range(rows: NamedRows, table: Table) -> str:
    return "" if rows.is_by_key or rows.space is not None else f"; give one of 0..{table.rows - 1}"


def _find_value(source: OpenedCheckpoint, table: Table, column: Column, value: str) -> tuple[NamedRows, int]:
    """Return the rows of a column's id space, and the id or key of a value."""
    assert source.encoding is not None
    rows = source.make_rows(table, source.spaces[column.space])
    try:
        text = pa.array([value], pa.string())
    except (pa.ArrowException, UnicodeEncodeError):
        raise UserError(f"--of {value!r}: the value is not text in UTF-8") from None
    [number] = source.encoding.find_ids(column.name, text).tolist()
    shown = f"--of {short(value)!r}: column {column.name!r}"
    if number == source.spaces[column.space].oov and source.vocabulary is not None:
        similar = rows.find_similar(value)
        hint = f"; similar values: {listed([short(each, 40) for each in similar])}" if similar else ""
        raise UserError(f"{shown} has no such value, or it was too rare in training to have a row{hint}")
    if not rows.has(number):
        raise UserError(f"{shown}: the value has no row in table {table.name!r}: it was not admitted, or was evicted")
    return rows, number


def _only_column(source: OpenedCheckpoint) -> Column:
    """Return the data's only column of ids; raise UserError if there are several."""
    assert source.data is not None
    first, *more = source.data.schema.columns
    if more:
        raise UserError(f"give --column: the data has {listed([first.name, *(each.name for each in more)])}")
    return first


def _parse_number(source: OpenedCheckpoint, table: Table, text: str) -> int:
    """Return the row number or key that --of gives for a checkpoint without names."""
    what = "a row number" if table.keys is None else "a key (hostdev.hash_ids returns those of texts)"
    try:
        number = int(text)
    except ValueError:
        raise UserError(
            f"--of {text}: {source.path} was written by Runtime.save, which records no names; give {what}"
        ) from None
    return number


def _describe(rows: NamedRows) -> str:
    return f"table {rows.table!r}" + (f", column {rows.space!r}" if rows.has_names else "")


def _name(rows: NamedRows, number: int) -> str:
    [name] = rows.names(np.array([number], np.int64)).to_pylist()
    return "" if name is None else str(name)


def _table(rows: NamedRows, ids: list[int], scores: list[str]) -> list[str]:
    """Return lines with the rank, the score, the id and, if rows have names, the name of each row."""
    columns = [["rank", *map(str, range(1, len(ids) + 1))], ["score", *scores]]
    columns.append(["key" if rows.is_by_key else "id", *map(str, ids)])
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in zip(*columns, strict=True)
    ]
    if not rows.has_names:
        return lines
    names = [printable(_name(rows, number), _LONGEST) or "(empty)" for number in ids]
    return [f"{line}  {name}" for line, name in zip(lines, [rows.space, *names], strict=True)]
