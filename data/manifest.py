"""A data set's manifest: what its shards hold and how they were made. Format version 2; version 1 is read, too.

Version 1 had Criteo's columns only. It lists their names, but not which ids are of which column: there every column has
the whole range of values.
"""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core import arrow_files, json_files
from hostdev.core.checksums import checksum, json_checksum
from hostdev.core.errors import UserError, in_words, raise_if_transient
from hostdev.core.names import inside
from hostdev.data import schema as schemas
from hostdev.data.folder import FILE_NAME as FILE_NAME
from hostdev.data.folder import require
from hostdev.data.manifest_values import check_values
from hostdev.data.schema import Column, Schema, Space

FORMAT = "hostdev-shards"
VERSION = 2
REJECTED_FILE = "rejected.tsv"


def shard_schema(schema: Schema, id_type: str) -> pa.Schema:
    """Return the Arrow schema of a shard whose ids are "int32" or "int64".

    label, then dense and cat, lists of as many values as there are such columns (left out where there is none), then
    for each bag "bag:" and its name.
    """
    ids = pa.int32() if id_type == "int32" else pa.int64()
    columns = [("label", pa.float32())]
    if schema.dense:
        columns.append(("dense", pa.list_(pa.float32(), len(schema.dense))))
    if schema.ids:
        columns.append(("cat", pa.list_(ids, len(schema.ids))))
    columns += [(f"bag:{name}", pa.list_(ids)) for name in schema.bags]
    return pa.schema(columns)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Arrow IPC file: its path below the data set's folder, its rows, and the SHA-256 of its bytes."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What manifest.json says."""

    schema: Schema
    id_type: str  # "int32" or "int64"
    train: list[Shard]
    test: list[Shard]
    vocabulary: str | None  # Arrow file: column or space, value and count by id; None where ids are hashed
    vocabulary_sha256: str | None  # of that file; data sets of before it was recorded have none
    rejected_sha256: str | None  # of rejected.tsv; as above, and then the manifest has none of its own
    options: dict[str, Any]
    statistics: dict[str, Any]
    sources: list[dict[str, Any]]
    kinds: dict[str, Any] = field(default_factory=dict)  # by column with ids: its types in the files, how it is written

    @property
    def vocabulary_size(self) -> int:
        """Rows of a table that all columns share, fixed ids included."""
        return self.schema.rows

    def rows(self, split: str) -> int:
        """Return the number of rows of "train" or "test"."""
        return sum(shard.rows for shard in self.shards(split))

    def shards(self, split: str) -> list[Shard]:
        """Return the shards of "train" or "test"."""
        return self.train if split == "train" else self.test

    @property
    def identity(self) -> str:
        """A checksum of what training and evaluation depend on: the rows, and what their columns are."""
        content: dict[str, Any] = {"schema": self.schema.as_json(), "id_type": self.id_type}
        content |= {split: [[shard.rows, shard.sha256] for shard in self.shards(split)] for split in ("train", "test")}
        return json_checksum(content)

    def uses(self, split: str) -> int:
        """Return how many ids the rows of a split have, those of the dense columns included."""
        each = len(self.schema.dense) + len(self.schema.ids)
        bags = sum(self.statistics["bag_values"][name][split] for name in self.schema.bags)
        return self.rows(split) * each + int(bags)

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`; its last field is the checksum of the others."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self), "schema": self.schema.as_json()}
        if not self.kinds:
            del content["kinds"]
        content["sha256"] = json_checksum(content)
        (folder / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> Manifest:
    """Read a data set's manifest; UserError where there is none or it is not one that this version reads."""
    require(folder)
    path = folder / FILE_NAME
    try:
        content = json_files.read(path)
        found = content.pop("format"), content.pop("version")
        checksum_there = json_checksum({"format": found[0], "version": found[1], **_without_checksum(content)})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if found not in ((FORMAT, VERSION), (FORMAT, 1)):
        raise UserError(
            f"{path} is of format {found[0]!r} version {found[1]!r}, and this is hostdev for "
            f"{FORMAT!r} version {VERSION}; preprocess the data again"
        )
    sha256 = content.pop("sha256", None)
    has_checksum = sha256 is not None or "rejected_sha256" in content
    if has_checksum and sha256 != checksum_there:
        raise UserError(f"{path} is broken (a wrong checksum: it is damaged or was changed); preprocess the data again")
    content.setdefault("rejected_sha256", None)
    content.setdefault("kinds", {})
    known = {field.name for field in fields(Manifest)}
    if found[1] == 1:
        known = known - {"schema"} | {"vocabulary_size", "dense_names", "categorical_names"}
        content.setdefault("vocabulary_sha256", None)
    if set(content) != known:
        raise UserError(f"{path} is broken (keys {sorted(set(content) ^ known)}); preprocess the data again")
    try:
        content["schema"] = _version_1(content) if found[1] == 1 else schemas.from_json(content["schema"])
        for split in ("train", "test"):
            content[split] = json_files.parse(list[Shard], content[split], split)
        _check_names(folder, content)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None
    found_manifest = Manifest(**content)
    _check(found_manifest, path)
    try:
        check_values(found_manifest.options, found_manifest.statistics, found_manifest.schema.dense)
    except ValueError as error:
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None
    return found_manifest


def _without_checksum(content: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in content.items() if key != "sha256"}


def _check_names(folder: Path, content: dict[str, Any]) -> None:
    """Raise ValueError for names of files that are not of files in the data set's folder."""
    for split in ("train", "test"):
        for shard in content[split]:
            inside(folder, shard.file)
    if isinstance(content["vocabulary"], str):
        inside(folder, content["vocabulary"])


def _version_1(content: dict[str, Any]) -> Schema:
    """Return the schema of a manifest of version 1, and take out what stands for it there."""
    rows, dense, names = (content.pop(key) for key in ("vocabulary_size", "dense_names", "categorical_names"))
    fixed = len(dense) + len(names)
    if type(rows) is not int or rows < fixed:
        raise ValueError("a wrong value of vocabulary_size")
    return Schema(
        label="label",
        dense=tuple(dense),
        columns=tuple(Column(name, "id", name) for name in names),
        spaces=tuple(Space(name, len(dense) + i, fixed, rows - fixed) for i, name in enumerate(names)),
        rows=rows,
    )


def read_counts(folder: Path, found: Manifest) -> npt.NDArray[np.int64]:
    """Return how often the training rows use each id, int64 [vocabulary_size], from the vocabulary; memory of its own.

    Raises UserError where there is none, or not one of this data set, or a damaged one.
    """
    if found.vocabulary is None:
        raise UserError(f"{folder} has no vocabulary with counts, as its ids are hashed; use another --cache-policy")
    path = folder / found.vocabulary
    try:
        if found.vocabulary_sha256 is not None and checksum(path) != found.vocabulary_sha256:
            raise UserError(f"{path} has a wrong checksum: it is damaged or was changed; preprocess the data again")
        column = arrow_files.read_table(path, ["count"])["count"]
    except (ValueError, OSError) as error:
        if isinstance(error, UserError):
            raise
        raise_if_transient(error)
        raise UserError(f"{path} is broken ({in_words(error)}); preprocess the data again") from None
    if len(column) != found.vocabulary_size:
        raise UserError(f"{path} has {len(column)} ids, not {found.vocabulary_size}; preprocess the data again")
    wrong = _wrong_counts(column, found.uses("train"))
    if wrong is not None:
        raise UserError(f"{path} is broken ({wrong}); preprocess the data again")
    return np.concatenate([chunk.to_numpy() for chunk in column.chunks])


def _wrong_counts(column: Any, uses: int) -> str | None:
    """Return what is wrong with a vocabulary's column of counts, which add up to so many uses."""
    if column.type != pa.int64():
        return f"counts of uses that are {column.type}, not int64"
    if column.null_count:
        return "counts of uses that are missing"
    if pc.min(column).as_py() < 0:
        return "counts of uses below 0"
    if pc.sum(column).as_py() != uses:
        return f"counts other uses than the {uses} of the training rows"
    return None


def _check(found: Manifest, path: Path) -> None:
    """Raise UserError for values that no data set has."""
    shards = [*found.train, *found.test]
    statistics = found.statistics if isinstance(found.statistics, dict) else {}
    for what, right in (
        ("id_type", found.id_type in ("int32", "int64")),
        ("train", bool(found.train)),  # there may be no test rows
        ("rows", all(type(shard.rows) is int and shard.rows >= 1 for shard in shards)),
        ("file", all(type(shard.file) is str and type(shard.sha256) is str for shard in shards)),
        ("options", isinstance(found.options, dict)),
        ("statistics", isinstance(found.statistics, dict)),
        ("vocabulary", found.vocabulary is None or isinstance(found.vocabulary, str)),
        ("vocabulary_sha256", found.vocabulary_sha256 is None or isinstance(found.vocabulary_sha256, str)),
        ("rejected_sha256", found.rejected_sha256 is None or isinstance(found.rejected_sha256, str)),
        ("statistics", _has_bag_values(found)),
        ("missing", _has_rates(statistics.get("missing", {}))),
        ("rejected", type(statistics.get("rejected", 0)) is int),
        ("kinds", _has_kinds(found.kinds)),
    ):
        if not right:
            raise UserError(f"{path} is broken (a wrong value of {what}); preprocess the data again")


def _has_bag_values(found: Manifest) -> bool:
    """Tell whether the statistics say how many values each bag has."""
    values = found.statistics.get("bag_values", {}) if isinstance(found.statistics, dict) else None
    return isinstance(values, dict) and all(
        isinstance(values.get(bag), dict) and all(type(values[bag].get(split)) is int for split in ("train", "test"))
        for bag in found.schema.bags
    )


def _has_kinds(kinds: Any) -> bool:
    """Tell whether these are types and forms by column."""
    return isinstance(kinds, dict) and all(
        isinstance(kind, dict)
        and set(kind) == {"types", "forms"}
        and all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in kind.values())
        for kind in kinds.values()
    )


def _has_rates(missing: Any) -> bool:
    """Tell whether these are shares of missing values, by split and column."""
    return isinstance(missing, dict) and all(
        isinstance(of_split, dict) and all(isinstance(rate, int | float) for rate in of_split.values())
        for of_split in missing.values()
    )
