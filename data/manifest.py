"""A data set's manifest, which describes its shards and their sources. Format versions 1 and 2 are read, 2 is written.

Version 1 has only Criteo's columns and no id ranges, so every column is given the range that covers the ids of all
columns' values. The options and statistics of both versions are validated, and statistics give warnings about
suspicious columns.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core import arrow_files, json_files
from hostdev.core.checksums import checksum, json_checksum
from hostdev.core.errors import UserError, in_words, raise_if_transient
from hostdev.core.json_files import parse
from hostdev.core.names import inside
from hostdev.data.folder import FILE_NAME as FILE_NAME
from hostdev.data.folder import require
from hostdev.data.schema import Column, Schema, Space

_OPTIONS: dict[str, Any] = {
    "preset": str,
    "dense": str,
    "hash_buckets": int | None,
    "positive": str | None,
    "bags": dict[str, str | None],
    "threshold": int | None,
}
_SCALES = ("dense_max", "dense_mean", "dense_deviation")  # each has a value for each numeric column
CLIP = "dense_clip"  # two limits for each column that has them
SCALING_STATISTICS = (*_SCALES, CLIP)
STATISTICS_OF = {"max": _SCALES[:1], "log": _SCALES[:1], "standard": _SCALES[1:]}
BY_COLUMN = "by column"  # numeric columns have different scalings, given by options.scaling
_ALL = {**STATISTICS_OF, BY_COLUMN: SCALING_STATISTICS}
UNKNOWN, APART, SQUEEZED = "out_of_vocabulary_by_column", "apart", "squeezed"  # names of statistics in the manifest
PADDED = "padded"  # statistic: for each bag, a likely padding value and its share of the bag's training values
_MOST_UNKNOWN = 0.5  # warn if the share of unknown values in test rows exceeds this and twice that in training rows
FORMAT = "hostdev-shards"
VERSION = 2
SPLITS = ("train", "test", "validation")
REJECTED_FILE = "rejected.tsv"


def check_values(options: dict[str, Any], statistics: dict[str, Any], dense: tuple[str, ...]) -> None:
    """Raise ValueError if an option or statistic is present but invalid."""
    for name, kind in _OPTIONS.items():
        if name in options:
            parse(kind, options[name], f"options.{name}")
    if "dense" in options and options["dense"] not in STATISTICS_OF:
        raise ValueError("options.dense is not one of " + ", ".join(STATISTICS_OF))
    if not 1 <= (options.get("hash_buckets") or 1) <= 2**62:
        raise ValueError("options.hash_buckets is not in 1..2^62")
    for name in SCALING_STATISTICS:
        if name in statistics:
            _check_scale(name, statistics[name], dense)


def check_scaling(mode: str, statistics: dict[str, Any], dense: tuple[str, ...]) -> None:
    """Raise ValueError unless `statistics` has exactly the entries that scaling `mode` needs, all valid.

    The modes are max, log, standard and "by column".
    """
    if sorted(statistics) != sorted(_ALL[mode]):
        raise ValueError(f"scaling {mode} needs {', '.join(_ALL[mode])}, not {', '.join(statistics) or 'nothing'}")
    for name, values in statistics.items():
        _check_scale(name, values, dense)


def _check_scale(name: str, values: Any, dense: tuple[str, ...]) -> None:
    if name == CLIP:
        limits = parse(dict[str, list[float]], values, f"statistics.{name}")
        if not set(limits) <= set(dense) or any(len(two) != 2 for two in limits.values()):
            raise ValueError(f"statistics.{name} must map names of numeric columns to two limits each")
    elif len(parse(list[float], values, f"statistics.{name}")) != len(dense):
        raise ValueError(f"statistics.{name} must have one value for each of the {len(dense)} numeric columns")


def check_learned(
    options: dict[str, Any], statistics: dict[str, Any], schema: Schema, id_type: str, vocabulary: str | None
) -> None:
    """Raise ValueError unless a validated manifest has all values needed to encode new rows."""
    buckets, bags = options.get("hash_buckets"), options.get("bags") or {}
    mode = BY_COLUMN if options.get("scaling") and "dense" in options else options.get("dense", "")
    for name in _ALL.get(mode, ("dense",)):
        if name not in (statistics if name != "dense" else options):
            raise ValueError(f"{name} is missing")
    for what, right in (
        ("bags", "" not in bags.values()),
        ("vocabulary", (buckets is None) == (vocabulary is not None)),
        (
            "spaces",
            buckets is None
            or all((space.first, space.size) == (schema.first_value, buckets) for space in schema.spaces),
        ),
        ("id_type", id_type == "int64" or schema.rows <= 2**31),
    ):
        if not right:
            raise ValueError(f"an invalid value of {what}")


def warn_of_unknown(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each column with too many out-of-vocabulary values in training or test rows."""
    shares = statistics.get(UNKNOWN, {})
    for name, train in shares.get("train", {}).items():
        test = shares["test"][name]
        if train == 1:
            yield f"{name}: all values are out of vocabulary: each occurs too rarely (--threshold)"
        elif test > max(_MOST_UNKNOWN, 2 * train):
            yield f"{name}: {test:.1%} of the values in test rows are out of vocabulary, {train:.1%} in training rows"


def format_warnings(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each suspicious column."""
    yield from warn_of_unknown(statistics)
    for name in statistics.get(SQUEEZED, ()):
        yield (
            f"{name}: a few numbers are so large that 99.9% of the others are nearly equal when scaled; use --dense "
            "log, or set clip for this column in a --features file"
        )
    for name in statistics.get(APART, ()):
        yield (
            f"{name}: none of its values occurs in the column whose ids it shares (--share); is the spelling the same?"
        )
    for name, (value, share) in statistics.get(PADDED, {}).items():
        yield (
            f"{name}: {share:.1%} of its values are {value!r}; if this value is only padding, give "
            f"--padding {name}={value}"
        )


def shard_schema(schema: Schema, id_type: str) -> pa.Schema:
    """Return the Arrow schema of a shard with ids of type "int32" or "int64".

    The fields are label (a fixed-size list if there are several labels), weight (if the samples have weights), the
    fixed-size lists dense (numbers) and cat (ids), each omitted if it would be empty, and "bag:NAME" for each bag,
    followed by "weights:NAME" if the bag has weights.
    """
    ids = pa.int32() if id_type == "int32" else pa.int64()
    several = len(schema.labels) > 1
    columns = [("label", pa.list_(pa.float32(), len(schema.labels)) if several else pa.float32())]
    if schema.targets.weight is not None:
        columns.append(("weight", pa.float32()))
    if schema.dense:
        columns.append(("dense", pa.list_(pa.float32(), len(schema.dense))))
    if schema.ids:
        columns.append(("cat", pa.list_(ids, len(schema.ids))))
    for name in schema.bags:
        columns.append((f"bag:{name}", pa.list_(ids)))
        if name in schema.weighted_bags:
            columns.append((f"weights:{name}", pa.list_(pa.float32())))
    return pa.schema(columns)


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One Arrow IPC file: its path below the data set's folder, its number of rows, and the SHA-256 of its bytes."""

    file: str
    rows: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Content of manifest.json."""

    schema: Schema
    id_type: str  # "int32" or "int64"
    train: list[Shard]
    test: list[Shard]
    vocabulary: str | None  # Arrow file: column or id space, value and count of each id; None if ids are hashed
    vocabulary_sha256: str | None  # None in older data sets
    rejected_sha256: str | None  # None in older data sets, which have no checksum of the manifest either
    options: dict[str, Any]
    statistics: dict[str, Any]
    sources: list[dict[str, Any]]
    kinds: dict[str, Any] = field(default_factory=dict)  # by column with ids: its values' types and forms
    validation: list[Shard] = field(default_factory=list)  # empty if there are no validation rows

    @property
    def is_table(self) -> bool:
        """Whether the data set was made by `preprocess table` or `query`, not by `criteo` or `synthetic`."""
        return bool(self.options.get("preset") == "table")

    @property
    def vocabulary_size(self) -> int:
        """Total number of ids, including the ids of dense columns and of out-of-vocabulary values."""
        return self.schema.rows

    @property
    def splits(self) -> tuple[str, ...]:
        """The names of the splits: "train", "test", and "validation" if it has rows."""
        return SPLITS if self.validation else SPLITS[:2]

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        return sum(shard.rows for shard in self.shards(split))

    def shards(self, split: str) -> list[Shard]:
        """Return the shards of a split."""
        return {"train": self.train, "test": self.test, "validation": self.validation}[split]

    @property
    def identity(self) -> str:
        """Checksum of everything that training and evaluation depend on: the rows and the schema."""
        content: dict[str, Any] = {"schema": self.schema.as_json(), "id_type": self.id_type}
        content |= {split: [[shard.rows, shard.sha256] for shard in self.shards(split)] for split in self.splits}
        return json_checksum(content)

    def uses(self, split: str) -> int:
        """Return the number of id occurrences in a split, including one in each row for each dense column."""
        each = len(self.schema.dense) + len(self.schema.ids)
        bags = sum(self.statistics["bag_values"][name][split] for name in self.schema.bags)
        return self.rows(split) * each + int(bags)

    def write(self, folder: Path) -> None:
        """Write manifest.json into `folder`; its last field is the checksum of the other fields."""
        content = {"format": FORMAT, "version": VERSION, **asdict(self), "schema": self.schema.as_json()}
        for name in ("kinds", "validation"):
            if not content[name]:
                del content[name]
        content["sha256"] = json_checksum(content)
        (folder / FILE_NAME).write_text(json.dumps(content, indent=2) + "\n")


def read(folder: Path) -> Manifest:
    """Read a data set's manifest; raise UserError if it is missing, damaged or of an unsupported version."""
    require(folder)
    path = folder / FILE_NAME
    try:
        content = json_files.read(path)
        checksum_there = json_checksum({key: value for key, value in content.items() if key != "sha256"})
        found = content.pop("format"), content.pop("version")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if found not in ((FORMAT, VERSION), (FORMAT, 1)):
        raise UserError(
            f"{path} has format {found[0]!r} version {found[1]!r}; this version of hostdev reads "
            f"{FORMAT!r} versions 1 to {VERSION}; preprocess the data again"
        )
    sha256 = content.pop("sha256", None)
    has_checksum = sha256 is not None or "rejected_sha256" in content
    if has_checksum and sha256 != checksum_there:
        raise UserError(
            f"{path} is broken (its checksum is wrong, so the file was damaged or changed); preprocess the data again"
        )
    try:
        content.setdefault("rejected_sha256", None)
        if found[1] == 1:
            content.setdefault("vocabulary_sha256", None)
            content["schema"] = _version_1(content).as_json()
        manifest = json_files.parse(Manifest, content)
        _check(manifest, folder)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is broken ({in_words(error)}); preprocess the data again") from None
    return manifest


def _version_1(content: dict[str, Any]) -> Schema:
    """Remove the fields that describe the schema from a version 1 manifest's content, and return the Schema."""
    rows, dense, names = (content.pop(key) for key in ("vocabulary_size", "dense_names", "categorical_names"))
    fixed = len(dense) + len(names)
    if type(rows) is not int or rows < fixed:
        raise ValueError("an invalid value of vocabulary_size")
    return Schema(
        label="label",
        dense=tuple(dense),
        columns=tuple(Column(name, "id", name) for name in names),
        spaces=tuple(Space(name, len(dense) + i, fixed, rows - fixed) for i, name in enumerate(names)),
        rows=rows,
    )


def read_counts(folder: Path, found: Manifest) -> npt.NDArray[np.int64]:
    """Return a copy of the vocabulary's counts: the training occurrences of each id, int64 [vocabulary_size].

    Raises UserError if the ids are hashed, or the vocabulary is missing, damaged or from another data set.
    """
    if found.vocabulary is None:
        raise UserError(f"{folder} has no vocabulary with counts: its ids are hashed; use another --cache-policy")
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
        raise UserError(
            f"{path} has {len(column)} ids, but the manifest has {found.vocabulary_size}; preprocess the data again"
        )
    wrong = _wrong_counts(column, found.uses("train"))
    if wrong is not None:
        raise UserError(f"{path} is broken ({wrong}); preprocess the data again")
    return np.concatenate([chunk.to_numpy() for chunk in column.chunks])


def _wrong_counts(column: Any, uses: int) -> str | None:
    """Describe what is wrong with a vocabulary's counts, or return None; the counts must add up to `uses`."""
    if column.type != pa.int64():
        return f"its counts are {column.type}, not int64"
    if column.null_count:
        return "a count is missing"
    if pc.min(column).as_py() < 0:
        return "a count is below 0"
    if pc.sum(column).as_py() != uses:
        return f"its counts do not add up to the {uses} ids in the training rows"
    return None


def _check(found: Manifest, folder: Path) -> None:
    """Raise ValueError if a value of the manifest is invalid, or a file name leads outside the data set's folder."""
    shards, statistics = [*found.train, *found.test, *found.validation], found.statistics
    for name in [*(shard.file for shard in shards), *([] if found.vocabulary is None else [found.vocabulary])]:
        inside(folder, name)
    values = json_files.parse(dict[str, dict[str, int]], statistics.get("bag_values", {}), "statistics.bag_values")
    json_files.parse(dict[str, dict[str, float]], statistics.get("missing", {}), "statistics.missing")
    json_files.parse(int, statistics.get("rejected", 0), "statistics.rejected")
    kinds = json_files.parse(dict[str, dict[str, list[str]]], found.kinds, "kinds")
    for what, right in (
        ("id_type", found.id_type in ("int32", "int64")),
        ("train", bool(found.train)),  # the test split may be empty
        ("rows", all(shard.rows >= 1 for shard in shards)),
        ("statistics.bag_values", all(values.get(bag, {}).keys() >= {*found.splits} for bag in found.schema.bags)),
        ("kinds", all(kind.keys() == {"types", "forms"} for kind in kinds.values())),
    ):
        if not right:
            raise ValueError(f"an invalid value of {what}")
    check_values(found.options, statistics, found.schema.dense)
