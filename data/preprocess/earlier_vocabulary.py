"""The earlier data set whose ids, columns and scaling new rows reuse (`--vocabulary FROM`)."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from hostdev.core.checksums import checksum, json_checksum
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.manifest import SCALING_STATISTICS, Manifest, check_learned
from hostdev.data.preprocess import criteo, scaling
from hostdev.data.preprocess.naming import short
from hostdev.data.preprocess.pieces import Survey, survey_values
from hostdev.data.preprocess.raw import Source, SourceLayout
from hostdev.data.preprocess.scaling import Scaling
from hostdev.data.preprocess.stored import DamagedError, StoredVocabulary
from hostdev.data.preprocess.vocabulary import HashBuckets, KnownIds
from hostdev.data.schema import Schema, Space

EARLIER = "earlier"  # the field of a manifest's options that has `Earlier.as_json`
KNOWN_SHARES = "known_shares"  # the manifest's statistic that has `Earlier.known_shares`
_FEW = 0.01  # `growth` reports an id space whose known share is smaller
_AT_ONCE = 1 << 20  # maximum values in a chunk
_SHOWN = 120  # maximum characters of a list of columns in a message


@dataclass(frozen=True)
class Earlier:
    """An earlier data set.

    Attributes:
        found: The manifest in `folder`.
        schema: The columns, with the id ranges of the vocabulary.
        frozen: Whether new values stay out of vocabulary, instead of getting ids.
        identity: Checksum of everything that a later data set reuses.
    """

    keeps: ClassVar[bool] = True  # whether there is an earlier data set, whose scaling is kept

    folder: Path
    found: Manifest
    schema: Schema
    frozen: bool
    identity: str

    @property
    def buckets(self) -> int | None:
        """The number of hash buckets, or None if there is a vocabulary."""
        return self.found.options.get("hash_buckets")

    def as_json(self) -> dict[str, Any]:
        """Return this data set's entry for the manifest of a later data set."""
        return {
            "path": str(self.folder.absolute()),
            "identity": self.identity,
            "ids": self.schema.rows,
            "frozen": self.frozen,
        }

    def recipe(self) -> list[dict[str, Any]]:
        """Return the entries for the recipe of a later data set."""
        return [self.as_json()]

    def options(self) -> dict[str, Any]:
        """Return the entries of a later data set's manifest options."""
        return {EARLIER: self.as_json()}

    def known_ids(self, layout: SourceLayout) -> KnownIds:
        """Return the ids that a later data set with this layout keeps."""
        return KnownIds(self.schema.spaces, self.schema.rows, Space.grown)

    def known_shares(self, uses: Iterable[tuple[int, int]]) -> dict[str, float] | None:
        """Return, by id space, the share of a later data set's training occurrences whose value has an id in this one.

        Id spaces without values in this data set, or without occurrences in the later one, are left out.

        Args:
            uses: For each id space of the later data set, the number of training occurrences of values that have an id
                in this data set, and of all values.
        """
        spaces = zip(self.schema.spaces, uses, strict=True)
        return {space.name: known / total for space, (known, total) in spaces if total and space.values}

    def require(self, source: Source, dense: str, buckets: int | None) -> None:
        """Raise UserError unless new rows have the same columns, scaling and kind of ids as this data set."""
        mine, theirs = self.schema, source.layout
        for what, here, there in (
            ("labels", ", ".join(theirs.labels), ", ".join(mine.labels)),
            ("labels of --task regression", ", ".join(theirs.targets.numeric), ", ".join(mine.targets.numeric)),
            ("--weight", theirs.targets.weight, mine.targets.weight),
            ("numeric columns", ", ".join(theirs.dense), ", ".join(mine.dense)),
            ("columns with ids", _listed(theirs.columns), _listed(mine.columns)),
            ("--dense", dense, self.found.options["dense"]),
            ("--hash-buckets", buckets, self.buckets),
        ):
            if here != there:
                one, other = (short(value or "none", _SHOWN) for value in (here, there))
                raise UserError(
                    f"{what}: this command has {one}, but {self.folder} has {other}; --vocabulary keeps that data "
                    f"set's columns, ids and scaling, so use {other}"
                )
        if buckets is not None and HashBuckets(buckets, theirs).schema != mine:
            raise UserError(f"{self.folder}: the ids do not match {buckets:,} hash buckets; preprocess it again")

    def scaling(self, dense: str, layout: SourceLayout, *, signed: bool) -> Scaling:
        """Return this data set's scaling, which has the mode `dense`; it does not change with new rows."""
        own = scaling.own(self.found.options)
        return scaling.fixed(dense, layout.dense, own, self.found.statistics, signed=signed)

    def survey(self) -> Survey | None:
        """Return estimates of the number and size of the earlier values; None if ids are hashed.

        The memory check needs them, because the earlier values are in memory together with the new ones.
        """
        if self.buckets is not None:
            return None
        stored = self.open()
        by_space = (self.keys(stored, number) for number in range(len(self.schema.spaces)))
        return survey_values(by_space, texts=self.found.is_table)

    def open(self) -> StoredVocabulary:
        """Open the vocabulary; raise DamagedError if it has changed since `read_earlier`."""
        stored = StoredVocabulary(self.folder, self.found)
        if _identity(self.folder, self.found, _make_schema(self.found, stored)) != self.identity:
            raise DamagedError(stored.path, "it changed while this command was running")
        return stored

    def keys(self, stored: StoredVocabulary, number: int) -> Iterator[Any]:
        """Yield the values of id space `number` in chunks, in the order of their ids.

        A chunk has texts, or int64 keys if the data set has Criteo's columns. Raises DamagedError for an invalid value.
        """
        for chunk in stored.values(self.schema.spaces[number]).chunks:
            for start in range(0, len(chunk), _AT_ONCE):
                values = chunk.slice(start, _AT_ONCE)
                if values.null_count:
                    raise DamagedError(stored.path, f"values of {self.schema.spaces[number].name!r} are missing")
                if self.found.is_table:
                    yield values
                    continue
                keys, wrong = criteo.hex_values(values.cast(pa.binary()))
                if wrong.any():
                    raise DamagedError(stored.path, "some values are not 8 hexadecimal digits")
                yield keys


class NoEarlier(Earlier):
    """The absence of an earlier data set: no ids are kept, and everything is learned from the new rows."""

    frozen, keeps = False, False

    def __init__(self) -> None: ...

    def recipe(self) -> list[dict[str, Any]]:
        """Return no entries."""
        return []

    def options(self) -> dict[str, Any]:
        """Return no entries."""
        return {}

    def known_ids(self, layout: SourceLayout) -> KnownIds:
        """Return `KnownIds` without values."""
        return KnownIds.none(layout)

    def known_shares(self, uses: Iterable[tuple[int, int]]) -> dict[str, float] | None:
        """Return None."""
        return None

    def require(self, source: Source, dense: str, buckets: int | None) -> None:
        """Require nothing."""

    def scaling(self, dense: str, layout: SourceLayout, *, signed: bool) -> Scaling:
        """Return a scaling that learns from the new rows."""
        return scaling.make(dense, layout.dense, layout.scaling, signed=signed)

    def survey(self) -> Survey | None:
        """Return None."""
        return None

    def open(self) -> Any:
        """Return None, because there is no vocabulary."""
        return None

    def keys(self, stored: StoredVocabulary, number: int) -> Iterator[Any]:
        """Yield no values."""
        return iter(())


NO_EARLIER = NoEarlier()


def read_earlier(folder: Path, *, frozen: bool = False) -> Earlier:
    """Read the data set that --vocabulary names.

    Raises UserError if the folder has no data set or a damaged one, or if `frozen` is true but ids are hashed.
    """
    found = manifest.read(folder)
    if found.vocabulary is None and frozen:
        raise UserError(
            f"--frozen-vocabulary has no effect with {folder}, whose ids are hashed; omit --frozen-vocabulary"
        )
    _require_whole(folder, found)
    schema = found.schema if found.vocabulary is None else _make_schema(found, StoredVocabulary(folder, found))
    return Earlier(folder, found, schema, frozen, _identity(folder, found, schema))


def _require_whole(folder: Path, found: Manifest) -> None:
    """Raise UserError if an entry of the manifest that a later data set reuses is missing or invalid."""
    options = found.options
    try:
        check_learned(options, found.statistics, found.schema, found.id_type, found.vocabulary)
        for what, right in (
            ("threshold", found.vocabulary is None or type(options.get("threshold")) is int),
            ("label", not found.is_table or isinstance(options.get("label"), str)),
            ("bags", not found.is_table or set(found.schema.bags) == set(_mapping(options.get("bags")))),
            ("share", not found.is_table or isinstance(options.get("share", {}), dict)),
            *(
                (name, not found.is_table or isinstance(options.get(name, []), list))
                for name in ("numeric", "categorical")
            ),
        ):
            if not right:
                raise ValueError(f"an invalid value of {what}")
    except ValueError as error:
        path = folder / manifest.FILE_NAME
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _make_schema(found: Manifest, stored: StoredVocabulary) -> Schema:
    """Return the schema with the vocabulary's id ranges, which a version 1 manifest lacks."""
    return replace(found.schema, spaces=tuple(stored.spaces[space.name] for space in found.schema.spaces))


def _identity(folder: Path, found: Manifest, schema: Schema) -> str:
    vocabulary = found.vocabulary_sha256
    if found.vocabulary is not None and vocabulary is None:  # an old manifest without the checksum
        vocabulary = checksum(folder / found.vocabulary)
    learned = {name: found.statistics[name] for name in SCALING_STATISTICS if name in found.statistics}
    return json_checksum(
        {
            "schema": schema.as_json(),
            "vocabulary": vocabulary,
            "scaling": [found.options["dense"], learned],
            "preset": found.is_table,
        }
    )


def _listed(columns: Any) -> str:
    return ", ".join(
        column.name + " (bag)" * (column.kind == "bag") + f" (ids of {column.space})" * (column.space != column.name)
        for column in columns
    )


def _shorten_path(path: str) -> str:
    """Return a path inside the current folder relative to that folder; return any other path unchanged."""
    with contextlib.suppress(OSError, ValueError):  # the current folder may have been removed
        return str(Path(path).relative_to(Path.cwd()))
    return path


def recorded(found: Manifest) -> Mapping[str, Any] | None:
    """Return the entry that `Earlier.as_json` made in a manifest, or None if it is absent or invalid."""
    earlier = found.options.get(EARLIER)
    types = {"path": str, "identity": str, "ids": int, "frozen": bool}
    if isinstance(earlier, dict) and all(type(earlier.get(name)) is kind for name, kind in types.items()):
        return earlier
    return None


def growth(found: Manifest) -> list[str]:
    """Return lines that describe what a data set reuses from an earlier one; none if it reuses nothing."""
    earlier = recorded(found)
    if earlier is None:
        return []
    kept, path = earlier["ids"], _shorten_path(earlier["path"])
    new = found.schema.rows - kept
    if found.vocabulary is None:
        line = f"ids      hashed into as many buckets as in {path}"
    elif earlier["frozen"]:
        line = f"ids      {kept:,} kept from {path}, no new ones (--frozen-vocabulary)"
    else:
        line = f"ids      {kept:,} kept from {path}, {new:,} new"
    lines = [line + ("; numbers are scaled as in that data set" if found.schema.dense else "")]
    shares = found.statistics.get(KNOWN_SHARES)
    for name, share in shares.items() if isinstance(shares, dict) else ():
        if isinstance(share, int | float) and share < _FEW:
            lines.append(
                f"ids      {short(name)}: only {share:.1%} of its training occurrences have an id in {path}; "
                "check that both data sets write its values the same way"
            )
    return lines
