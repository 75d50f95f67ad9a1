"""Encoding of new files as `preprocess --vocabulary EXAMPLE` does it: raw ids, and numbers scaled as in EXAMPLE."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError
from hostdev.core.keys import is_raw
from hostdev.data import ragged
from hostdev.data.batch import ShardPiece
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import scaling, table_flags
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.delimited import TextFormat
from hostdev.data.preprocess.earlier_vocabulary import read_earlier
from hostdev.data.preprocess.raw import RawRows, Source, SourceLayout
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.preprocess.vocabulary import HashBuckets
from hostdev.data.schema import Targets


class Example:
    """A data set with raw ids, whose manifest says which columns files have, and how their values are read and scaled.

    Its own rows, and how it divided them into training and test rows, have no effect.

    Args:
        folder: The data set.

    Raises:
        UserError: The data set is damaged, or has no raw ids.
    """

    def __init__(self, folder: Path) -> None:
        earlier = read_earlier(folder)
        found = earlier.found
        if not is_raw(found.schema.rows):
            raise UserError(
                f"--follow needs a --data set with raw ids, because new values come, and {folder} has others; prepare "
                "it with --ids raw"
            )
        self.schema, self.is_table = found.schema, found.is_table
        self._options = _table_options(found, table_flags.keep_columns({}, earlier)) if self.is_table else None
        layout: SourceLayout = CriteoText(inputs=()).layout if self._options is None else self._options.layout()
        self._layout, self._hashed = layout, HashBuckets(found.options["hash_buckets"], layout)
        if self._hashed.schema != found.schema:
            raise UserError(f"{folder}: its ids are not those of its columns; preprocess it again")
        how = found.options["dense"], layout.dense, scaling.own(found.options), found.statistics
        self._scaling = scaling.fixed(*how, signed=self.is_table)
        self._kinds = found.kinds

    def open(self, path: Path) -> Source:
        """Open a file; raise UserError if it is not readable or lacks columns, or if a column has another type."""
        if self._options is None:
            return CriteoText([path])
        source = TableSource([path], self._options)
        for file in source.files:
            for column in self._layout.columns:
                self._require_form(shown_place(path), column.name, file.get_type(self._options.column(column.name)))
        return source

    def _require_form(self, path: str, name: str, found: pa.DataType) -> None:
        """Raise UserError for a type whose values would get other ids than equal values in the example."""
        here = arrow.get_written_form(found)
        for shown in self._kinds.get(name, {}).get("types", ()):
            there = _written_form(shown)
            if None not in (here, there) and here != there:
                raise UserError(
                    f"{path}, column {name!r}: it is of type {found}, but was {shown} in the files of --data, so "
                    "equal values would get different ids"
                )

    def encode(self, rows: RawRows) -> ShardPiece:
        """Return rows with ids and scaled numbers; raise UserError for a number that is too large."""
        layout, hashed, n = self._layout, self._hashed, len(rows)
        missing = [rows.missing[column.space] for column in layout.ids]
        ids, _ = hashed.encode(rows.keys, np.arange(n), missing)
        bags, weights = {}, {}
        for i, ((keys, lengths), column) in enumerate(zip(rows.bags, layout.bags, strict=True)):
            values = hashed.ids_of(keys, len(layout.ids) + i).astype(hashed.schema.id_type)
            bags[column.name] = values, ragged.offsets_of(lengths)
            if column.weighted:
                weights[column.name] = rows.bag_weights[i]
        dense = self._scaling.transform(rows.numbers)
        label = np.ascontiguousarray(rows.label, np.float32)
        return ShardPiece(label, dense, ids, bags, rows.weight, weights)


def _table_options(found: Manifest, roles: dict[str, Any]) -> TableOptions:
    """Return the options to read files like those of a data set; all their rows are for training."""
    label, *more = roles.pop("labels")
    targets = Targets(more=tuple(more), numeric=tuple(roles.pop("numeric_labels")), weight=roles.pop("weight"))
    how = vars(TextFormat.of_options(found.options))
    return TableOptions(label=label, targets=targets, **roles, **how)


def _written_form(shown: str) -> str | None:
    """Return the written form of a type that a manifest names; None if it is unknown."""
    if shown == "text":
        return arrow.TEXT_OR_WHOLE
    try:
        return arrow.get_written_form(pa.type_for_alias(shown))
    except ValueError:
        return None
