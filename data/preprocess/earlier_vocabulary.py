"""An earlier data set whose ids, columns and scaling are kept when new rows are prepared (`--vocabulary FROM`)."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from hostdev.core.checksums import checksum, json_checksum
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.manifest import Manifest
from hostdev.data.manifest_values import check_learned
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess import criteo
from hostdev.data.preprocess.dense import Numbers, Scaling, fixed_scaling
from hostdev.data.preprocess.naming import short
from hostdev.data.preprocess.pieces import Survey
from hostdev.data.preprocess.raw import Layout, Source
from hostdev.data.preprocess.stored import DamagedError
from hostdev.data.preprocess.stored_vocabulary import StoredVocabulary
from hostdev.data.preprocess.vocabulary import HashBuckets, Vocabulary
from hostdev.data.schema import Schema
from hostdev.kernels.cardinality import draw_sample, make_registers
from hostdev.kernels.strings import hash_texts

EARLIER = "earlier"  # the field of a manifest's options that `as_json` fills
KNOWN_SHARES = "known_shares"  # a manifest's statistic: of training uses by space, those of earlier values
_FEW = 0.01  # a share of known uses below this is told of
_AT_ONCE = 1 << 20  # values
_SHOWN = 120  # characters of a list of columns in a message


@dataclass(frozen=True)
class Earlier:
    """An earlier data set.

    folder    where it lies
    found     its manifest
    schema    its columns and their ids, as its vocabulary has them
    frozen    values that it does not know get no ids
    identity  a checksum of all that a later data set takes from it
    """

    folder: Path
    found: Manifest
    schema: Schema
    frozen: bool
    identity: str

    @property
    def buckets(self) -> int | None:
        """Into how many buckets values are hashed; None where there is a vocabulary."""
        return self.found.options.get("hash_buckets")

    @property
    def is_table(self) -> bool:
        """Whether it was made by `preprocess table`, and not from Criteo's columns."""
        return bool(self.found.options.get("preset") == "table")

    def as_json(self) -> dict[str, Any]:
        """Return what the manifest of a later data set records."""
        return {
            "path": str(self.folder.absolute()),
            "identity": self.identity,
            "ids": self.schema.rows,
            "frozen": self.frozen,
        }

    def require(self, source: Source, dense: str, buckets: int | None) -> None:
        """Raise UserError unless new rows have the same columns, the same scaling, and ids of the same kind."""
        mine, theirs = self.schema, source.layout
        for what, here, there in (
            ("label", theirs.label, mine.label),
            ("numeric columns", ", ".join(theirs.dense), ", ".join(mine.dense)),
            ("columns with ids", _listed(theirs.columns), _listed(mine.columns)),
            ("--dense", dense, self.found.options["dense"]),
            ("--hash-buckets", buckets, self.buckets),
        ):
            if here != there:
                one, other = (short(value or "none", _SHOWN) for value in (here, there))
                raise UserError(
                    f"{what}: {one} here, but {other} in {self.folder}, whose columns, ids and scaling "
                    "--vocabulary keeps; give the same"
                )
        if buckets is not None and HashBuckets(buckets, theirs).schema != mine:
            raise UserError(f"{self.folder}: its ids are not those of {buckets:,} hash buckets; preprocess it again")

    def scaling(self, layout: Layout, *, signed: bool) -> Scaling:
        """Return the scaling of the earlier data set, which learns nothing from new rows."""
        mode = self.found.options["dense"]
        return _Kept(fixed_scaling(mode, layout.dense, self.found.statistics, signed=signed))

    def vocabulary(self, threshold: int | None, source: Source) -> Vocabulary:
        """Return a vocabulary that has the earlier values, with their ids; DamagedError where the file is damaged.

        threshold  new values that are used more often get ids
        """
        made = Vocabulary(None if self.frozen else threshold, source.layout, source.text_of, self.schema)
        stored = self._stored()
        for number, space in enumerate(self.schema.spaces):
            for keys in self._keys(stored, number):
                made.count(number, keys, np.zeros(len(keys), np.int64))
            if made.size(number) != space.values:
                raise DamagedError(stored.path, f"a value of {space.name!r} is there twice")
        return made

    def survey(self) -> Survey | None:
        """Return a survey of the earlier values, which are in memory with the new ones; None where ids are hashed."""
        if self.buckets is not None:
            return None
        stored, registers, texts = self._stored(), [], []
        for number in range(len(self.schema.spaces)):
            hashes, lengths = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
            for keys in self._keys(stored, number):
                if isinstance(keys, pa.Array):
                    offsets, data = arrow.bytes_of(keys)
                    hashes.append(hash_texts(offsets, data))
                    lengths.append(np.diff(offsets).astype(np.int64))
                else:
                    hashes.append(keys.view(np.uint64))
            registers.append(make_registers(np.concatenate(hashes)))
            if self.is_table:
                texts.append(draw_sample(np.concatenate(hashes), np.concatenate(lengths)))
        return Survey(np.stack(registers), tuple(texts) or None)

    def _stored(self) -> StoredVocabulary:
        """Open the vocabulary; DamagedError where it is not the one that it was."""
        stored = StoredVocabulary(self.folder, self.found)
        if _identity(self.folder, self.found, _schema_of(self.found, stored)) != self.identity:
            raise DamagedError(stored.path, "it has changed meanwhile")
        return stored

    def _keys(self, stored: StoredVocabulary, number: int) -> Iterator[Any]:
        """Iterate over the values of a space in the order of their ids, as `Vocabulary.count` takes them."""
        for chunk in stored.values(self.schema.spaces[number]).chunks:
            for start in range(0, len(chunk), _AT_ONCE):
                values = chunk.slice(start, _AT_ONCE)
                if values.null_count:
                    raise DamagedError(stored.path, f"missing values of {self.schema.spaces[number].name!r}")
                if self.is_table:
                    yield values
                    continue
                keys, wrong = criteo.hex_values(values.cast(pa.binary()))
                if wrong.any():
                    raise DamagedError(stored.path, "values that are not 8 hexadecimal digits")
                yield keys


class _Kept:
    """A scaling that learns nothing more."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling

    def observe(self, numbers: Numbers) -> None:
        """Nothing to learn."""

    def transform(self, numbers: Numbers) -> Any:
        """Return numbers scaled, float32 [n, columns]."""
        return self._scaling.transform(numbers)

    def statistics(self) -> dict[str, Any]:
        """Return what the manifest records."""
        return self._scaling.statistics()


def read_earlier(folder: Path, *, frozen: bool = False) -> Earlier:
    """Read the data set that --vocabulary names; UserError where it is damaged, or is none."""
    found = manifest.read(folder)
    if found.vocabulary is None and frozen:
        raise UserError(f"--frozen-vocabulary has no effect with {folder}, whose ids are hashed; leave it out")
    _require_whole(folder, found)
    schema = found.schema if found.vocabulary is None else _schema_of(found, StoredVocabulary(folder, found))
    return Earlier(folder, found, schema, frozen, _identity(folder, found, schema))


def _require_whole(folder: Path, found: Manifest) -> None:
    """Raise UserError where the manifest lacks something that a later data set takes from it."""
    options = found.options
    is_table = options.get("preset") == "table"
    try:
        check_learned(options, found.statistics, found.schema, found.id_type, found.vocabulary)
        for what, right in (
            ("threshold", found.vocabulary is None or type(options.get("threshold")) is int),
            ("label", not is_table or isinstance(options.get("label"), str)),
            ("bags", not is_table or set(found.schema.bags) == set(_mapping(options.get("bags")))),
            ("share", not is_table or isinstance(options.get("share", {}), dict)),
            *((name, not is_table or isinstance(options.get(name, []), list)) for name in ("numeric", "categorical")),
        ):
            if not right:
                raise ValueError(f"a wrong value of {what}")
    except ValueError as error:
        path = folder / manifest.FILE_NAME
        raise UserError(f"{path} is broken ({error}); preprocess the data again") from None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _schema_of(found: Manifest, stored: StoredVocabulary) -> Schema:
    """Return the columns with the ids that the vocabulary gives them, which version 1 of the manifest does not say."""
    return replace(found.schema, spaces=tuple(stored.spaces[space.name] for space in found.schema.spaces))


def _identity(folder: Path, found: Manifest, schema: Schema) -> str:
    vocabulary = found.vocabulary_sha256
    if found.vocabulary is not None and vocabulary is None:  # a data set of before its checksum was recorded
        vocabulary = checksum(folder / found.vocabulary)
    names = ("dense_max", "dense_mean", "dense_deviation")
    scaling = {name: found.statistics[name] for name in names if name in found.statistics}
    return json_checksum(
        {
            "schema": schema.as_json(),
            "vocabulary": vocabulary,
            "scaling": [found.options["dense"], scaling],
            "preset": found.options.get("preset") == "table",
        }
    )


def _listed(columns: Any) -> str:
    return ", ".join(
        column.name + " (bag)" * (column.kind == "bag") + f" (ids of {column.space})" * (column.space != column.name)
        for column in columns
    )


def _beside(path: str) -> str:
    """Return a path as it is from the current folder, where it lies in that."""
    with contextlib.suppress(OSError, ValueError):  # the current folder may be gone
        return str(Path(path).relative_to(Path.cwd()))
    return path


def recorded(found: Manifest) -> Mapping[str, Any] | None:
    """Return what a manifest records of the earlier data set, as of `Earlier.as_json`; None where there is none."""
    earlier = found.options.get(EARLIER)
    types = {"path": str, "identity": str, "ids": int, "frozen": bool}
    if isinstance(earlier, dict) and all(type(earlier.get(name)) is kind for name, kind in types.items()):
        return earlier
    return None


def growth(found: Manifest) -> list[str]:
    """Return lines that say what a data set has kept of an earlier one; none where it has kept nothing."""
    earlier = recorded(found)
    if earlier is None:
        return []
    kept, path = earlier["ids"], _beside(earlier["path"])
    new = found.schema.rows - kept
    if found.vocabulary is None:
        line = f"ids      hashed into as many buckets as in {path}"
    elif earlier["frozen"]:
        line = f"ids      {kept:,} kept from {path}, no new ones (--frozen-vocabulary)"
    else:
        line = f"ids      {kept:,} kept from {path}, {new:,} new"
    lines = [line + ("; numbers are scaled as there" if found.schema.dense else "")]
    shares = found.statistics.get(KNOWN_SHARES)
    for name, share in shares.items() if isinstance(shares, dict) else ():
        if isinstance(share, int | float) and share < _FEW:
            lines.append(
                f"ids      {short(name)}: {share:.1%} of its training uses are of values that {path} knows; "
                "are they written in another way there?"
            )
    return lines
