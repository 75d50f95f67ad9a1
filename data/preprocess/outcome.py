"""The end of a preparation: what the counts of all pieces must fulfil, and the manifest."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.core.checksums import checksum
from hostdev.core.errors import UserError
from hostdev.data.manifest import PADDED, REJECTED_FILE, Manifest
from hostdev.data.preprocess.earlier_vocabulary import KNOWN_SHARES, Earlier
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import Facts, PieceFile
from hostdev.data.preprocess.raw import Source, SourceLayout
from hostdev.data.preprocess.second_pass import Shards
from hostdev.data.schema import Schema

VOCABULARY_FILE = "vocabulary.arrow"


class Learned(NamedTuple):
    """What was learned from the training rows.

    Attributes:
        scaling: The statistics of the scaling.
        padded: By bag, the value that makes up most of the bag's values, and its share.
        known_shares: By id space, the share of training occurrences that have an id of the earlier data set; None
            without such a data set.
    """

    schema: Schema
    scaling: Mapping[str, Any]
    padded: dict[str, list[Any]]
    known_shares: dict[str, float] | None


class ManifestWriter:
    """Writes the manifest of a data set from the facts of its pieces.

    Args:
        splits: The names of the splits.
        facts: One for each piece, in the order of the rows.
    """

    def __init__(
        self, source: Source, options: Options, earlier: Earlier, splits: Sequence[str], facts: Sequence[Facts]
    ) -> None:
        self._source, self._options, self._earlier, self._splits = source, options, earlier, splits
        self._facts = facts
        self._layout: SourceLayout = source.layout

    def rows(self) -> dict[str, int]:
        """Return the number of rows of each split.

        Raises UserError if a required split is empty, or no label is positive by a --positive rule.
        """
        rows = {split: sum(fact.rows[i] for fact in self._facts) for i, split in enumerate(self._splits)}
        total = sum(rows.values())
        if total == 0:
            raise UserError("the input has no rows")
        options = self._source.options()
        for k, name in enumerate(self._layout.labels):
            rule = options.get("positives", {}).get(name, options.get("positive"))
            if rule is None or self._earlier.keeps or name in self._layout.targets.numeric:
                continue
            if not any(each[k] for fact in self._facts for each in fact.labels):
                of = f" {name!r}" if self._layout.targets.more else ""
                raise UserError(f"none of the {total} labels{of} is positive by --positive {rule}; give another rule")
        for split, count in rows.items():
            if count == 0 and (split != "test" or self._options.test_fraction != 0):
                by_column = "--{0}-column or --{0}-after".format("validation" if split == "validation" else "test")
                how = "--test-fraction" if self._options.test_fraction is not None else by_column
                if split == "validation" and self._options.validation_fraction is not None:
                    how = "--validation-fraction"
                raise UserError(f"none of the {total} rows is in the {split} split; give more rows or another {how}")
        return rows

    def write(
        self,
        folder: Path,
        paths: Sequence[Path],
        learned: Learned,
        shards: Shards,
        vocabulary_sha256: str | None = None,
        lines_before: Sequence[int] | None = None,
    ) -> Manifest:
        """Write the malformed lines and the manifest into the data set's folder; return the manifest.

        Args:
            paths: The files of the pieces.
            vocabulary_sha256: The checksum of the vocabulary's file, if it is known.
            lines_before: For each piece, what is added to the numbers of its malformed lines; None for nothing.
        """
        rows, schema = self.rows(), learned.schema
        with (folder / REJECTED_FILE).open("w", encoding="utf-8", errors="replace") as file:
            for path, fact, before in zip(paths, self._facts, lines_before or [0] * len(paths), strict=True):
                for line in PieceFile(path).rejected() if fact.rejected else ():
                    file.write(f"{line.file}\t{before + line.line}\t{line.reason}\t{line.text}\n")
        vocabulary = folder / VOCABULARY_FILE if self._options.hash_buckets is None else None
        manifest = Manifest(
            schema=schema,
            id_type=schema.id_type,
            train=shards.found["train"],
            test=shards.found["test"],
            validation=shards.found.get("validation", []),
            vocabulary=None if vocabulary is None else vocabulary.name,
            vocabulary_sha256=None if vocabulary is None else vocabulary_sha256 or checksum(vocabulary),
            rejected_sha256=checksum(folder / REJECTED_FILE),
            options={
                **self._source.options(),
                **self._options.as_json(),
                **self._earlier.options(),
            },
            statistics={
                "rows": rows,
                "rejected": sum(fact.rejected for fact in self._facts),
                **self._label_means(rows),
                **learned.scaling,
                **shards.statistics(),
                **self._bag_values(),
                "missing": self._missing(rows),
                **({PADDED: learned.padded} if learned.padded else {}),
                **({} if learned.known_shares is None else {KNOWN_SHARES: learned.known_shares}),
            },
            sources=self._source.describe(),
            kinds=self._kinds(),
        )
        manifest.write(folder)
        return manifest

    def _kinds(self) -> dict[str, Any]:
        """Return the manifest's entry about types and text forms of columns with ids; empty if the source has none."""
        if self._source.kinds is None:
            return {}
        forms: dict[str, dict[int, frozenset[int]]] = {}
        for fact in self._facts:
            for name, found in fact.forms.items():
                by_file = forms.setdefault(name, {})
                by_file[fact.end.input] = by_file.get(fact.end.input, frozenset()) | set(found)
        return self._source.kinds(forms)

    def _by_split(self, of: Callable[[Facts, int], float]) -> dict[str, float]:
        """Return, for each split, the sum of `of(facts, split number)` over the facts of all pieces."""
        return {split: sum(of(fact, i) for fact in self._facts) for i, split in enumerate(self._splits)}

    def _label_means(self, rows: dict[str, int]) -> dict[str, Any]:
        """Return the manifest's entries about label means.

        `label_mean` has the first label's means, by split. If there are other labels, `label_means` has their means, by
        label and then by split.
        """
        means = {}
        for k, name in enumerate(self._layout.labels):
            sums = {split: math.fsum(fact.labels[i][k] for fact in self._facts) for i, split in enumerate(self._splits)}
            means[name] = {split: found / max(1, rows[split]) for split, found in sums.items()}
        first, *more = self._layout.labels
        return {"label_mean": means[first], **({"label_means": {name: means[name] for name in more}} if more else {})}

    def _bag_values(self) -> dict[str, Any]:
        bags = enumerate(self._layout.bags)
        values = {bag.name: self._by_split(lambda fact, i, k=k: fact.bag_values[i][k]) for k, bag in bags}  # type: ignore[misc]
        return {"bag_values": values} if values else {}

    def _missing(self, rows: dict[str, int]) -> dict[str, dict[str, float]]:
        """Return the share of missing values by split and column. Bags are left out, as they omit missing values."""
        names = [*self._layout.dense, *(column.name for column in self._layout.ids)]
        return {
            split: {name: sum(fact.missing[i][k] for fact in self._facts) / rows[split] for k, name in enumerate(names)}
            for i, split in enumerate(self._splits)
            if rows[split]
        }
