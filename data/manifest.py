"""A data set's manifest: what its shards hold and how they were made. Format version 1.

Ids: 0..12 the dense columns, 13..38 one out-of-vocabulary id per categorical column, from 39 on the values.
"""

import json
from dataclasses import asdict, dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError

FORMAT = "hostdev-shards"
VERSION = 1
FILE_NAME = "manifest.json"

DENSE = 13
CATEGORICAL = 26
FIELDS = DENSE + CATEGORICAL
FIRST_OOV = DENSE
FIRST_VALUE = FIELDS
DENSE_NAMES = [f"I{i + 1}" for i in range(DENSE)]
CATEGORICAL_NAMES = [f"C{i + 1}" for i in range(CATEGORICAL)]


def schema(id_type: str) -> pa.Schema:
    """Return the Arrow schema of a shard whose ids are "int32" or "int64"."""
    return pa.schema([
        ("label", pa.float32()),
        ("dense", pa.list_(pa.float32(), DENSE)),
        ("cat", pa.list_(pa.int32() if id_type == "int32" else pa.int64(), CATEGORICAL)),
    ])  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Arrow IPC file: its path below the data set's folder, its rows, and the SHA-256 of its bytes."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What manifest.json says."""

    vocabulary_size: int  # rows of the tables, the 39 fixed ids included
    id_type: str  # "int32" or "int64"
    train: list[Shard]
    test: list[Shard]
    vocabulary: str | None  # Arrow file: field, value and count by id; None where ids are hashed
    options: dict[str, Any]
    statistics: dict[str, Any]
    sources: list[dict[str, Any]]
    dense_names: list[str]
    categorical_names: list[str]
    vocabulary_sha256: str | None = None  # of that file; data sets of before it was recorded have none

    def rows(self, split: str) -> int:
        """Return the number of rows of "train" or "test"."""
        return sum(shard.rows for shard in self.shards(split))

    def shards(self, split: str) -> list[Shard]:
        """Return the shards of "train" or "test"."""
        return self.train if split == "train" else self.test

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self)}
        (folder / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> Manifest:
    """Read a data set's manifest; UserError where there is none or it is not one of this version."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError(
            f"{folder} is not a data set: it has no {FILE_NAME}; make one with python -m hostdev.data.preprocess"
        )
    try:
        content = json.loads(path.read_text())
        found = content.pop("format"), content.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None
    if found != (FORMAT, VERSION):
        raise UserError(
            f"{path} is of format {found[0]!r} version {found[1]!r}, and this is hostdev for "
            f"{FORMAT!r} version {VERSION}; preprocess the data again"
        )
    known = {field.name for field in fields(Manifest)}
    content.setdefault("vocabulary_sha256", None)
    if set(content) != known:
        raise UserError(f"{path} is broken (keys {sorted(set(content) ^ known)}); preprocess the data again")
    try:
        for split in ("train", "test"):
            content[split] = [Shard(**shard) for shard in content[split]]
    except TypeError as error:
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None
    found_manifest = Manifest(**content)
    _check(found_manifest, path)
    return found_manifest


def read_counts(folder: Path, found: Manifest) -> npt.NDArray[np.int64]:
    """Return how often the training rows use each id, int64 [vocabulary_size], from the vocabulary.

    Raises UserError where there is none, or not one of this data set, or a damaged one.
    """
    if found.vocabulary is None:
        raise UserError(f"{folder} has no vocabulary with counts, as its ids are hashed; use another --cache-policy")
    path = folder / found.vocabulary
    try:
        if found.vocabulary_sha256 is not None and checksum(path) != found.vocabulary_sha256:
            raise UserError(f"{path} has a wrong checksum: it is damaged or was changed; preprocess the data again")
        column = pa.ipc.open_file(pa.OSFile(str(path))).read_all()["count"]
    except (pa.ArrowException, OSError, KeyError) as error:
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None
    if len(column) != found.vocabulary_size:
        raise UserError(f"{path} has {len(column)} ids, not {found.vocabulary_size}; preprocess the data again")
    wrong = _wrong_counts(column, found.rows("train") * FIELDS)
    if wrong is not None:
        raise UserError(f"{path} is broken ({wrong}); preprocess the data again")
    return np.asarray(column.to_numpy(), np.int64)


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
    for what, right in (
        ("vocabulary_size", type(found.vocabulary_size) is int and found.vocabulary_size >= FIRST_VALUE),
        ("id_type", found.id_type in ("int32", "int64")),
        ("train or test", all(found.shards(split) for split in ("train", "test"))),
        ("rows", all(type(shard.rows) is int and shard.rows >= 1 for shard in shards)),
        ("file", all(type(shard.file) is str and type(shard.sha256) is str for shard in shards)),
        ("options", isinstance(found.options, dict)),
        ("vocabulary_sha256", found.vocabulary_sha256 is None or isinstance(found.vocabulary_sha256, str)),
    ):
        if not right:
            raise UserError(f"{path} is broken (a wrong value of {what}); preprocess the data again")


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal."""
    digest = sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
    return digest.hexdigest()
