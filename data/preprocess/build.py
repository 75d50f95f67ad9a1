"""Build a data set in two passes: learn from the training rows, then encode all rows into shards.

The source is read once: the first pass parses it into pieces on disk, which the second pass reads. If the process
is interrupted, finished work is kept, and the same command continues from it. The result depends only on the rows
and the options. In the end, the counts of all pieces are checked, and the manifest is written.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.core import json_files
from hostdev.core.checksums import Crc32, checksum
from hostdev.core.errors import UserError
from hostdev.core.progress import bar
from hostdev.core.workers import Workers
from hostdev.data import schema as schemas
from hostdev.data.manifest import BY_COLUMN, PADDED, REJECTED_FILE, SPLITS, Manifest, Shard, check_scaling
from hostdev.data.preprocess import scaling as scalings
from hostdev.data.preprocess import second_pass
from hostdev.data.preprocess.earlier_vocabulary import KNOWN_SHARES, NO_EARLIER, Earlier
from hostdev.data.preprocess.first_pass import FirstPass
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import Facts, PieceFile
from hostdev.data.preprocess.raw import Source, SourceLayout
from hostdev.data.preprocess.scaling import Scaling
from hostdev.data.preprocess.second_pass import ShardMemory, ShardOptions, Shards, make_shard, shard_name
from hostdev.data.preprocess.vocabulary import HashBuckets, Vocabulary
from hostdev.data.preprocess.work import WorkFolder, claim
from hostdev.data.schema import Schema
from hostdev.kernels.pool import host_threads

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
            options={**self._source.options(), **self._options.as_json(), **self._earlier.options()},
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
        values = {
            bag.name: {
                split: sum(fact.bag_values[i][k] for fact in self._facts) for i, split in enumerate(self._splits)
            }
            for k, bag in enumerate(self._layout.bags)
        }
        return {"bag_values": values} if values else {}

    def _missing(self, rows: dict[str, int]) -> dict[str, dict[str, float]]:
        """Return the share of missing values by split and column. Bags are left out, as they omit missing values."""
        names = [*self._layout.dense, *(column.name for column in self._layout.ids)]
        return {
            split: {name: sum(fact.missing[i][k] for fact in self._facts) / rows[split] for k, name in enumerate(names)}
            for i, split in enumerate(self._splits)
            if rows[split]
        }


def build(
    source: Source, out: Path, options: Options, *, threads: int | None = None, earlier: Earlier | None = None
) -> Manifest:
    """Write a data set into the new folder `out` and return its manifest.

    The folder gets its name only when it is complete. After an interruption or a TransientError, the finished work
    stays next to `out` for the next call with the same arguments; after a UserError, it is removed.

    Args:
        threads: Number of threads, or None for the number that host kernels use.
        earlier: A data set whose ids and scaling are reused; new values get higher ids.

    Raises:
        UserError: `out` exists; `source` and `options` differ from `earlier` in columns, scaling or the kind of ids;
            more than 1% of the lines are malformed; or a split that must have rows is empty.
        TransientError: The vocabulary, or one shard per thread, does not fit into memory; or a read fails.
    """
    earlier = earlier or NO_EARLIER
    earlier.require(source, options.dense, options.hash_buckets)
    with claim(out) as work:
        manifest = _Build(source, work, options, threads or host_threads(), earlier).run()
        work.finish()
    return manifest


class _Build:
    """The state of one build."""

    def __init__(self, source: Source, work: WorkFolder, options: Options, threads: int, earlier: Earlier) -> None:
        self._source, self._work, self._options, self._threads = source, work, options, threads
        self._earlier = earlier
        # By id space, the share of training occurrences that have an id of `earlier`.
        self._known_shares: dict[str, float] | None = None
        # By bag, the value that makes up most of the bag's values, and its share.
        self._padded: dict[str, list[Any]] = {}
        self._layout: SourceLayout = source.layout
        has_validation = source.has_validation or options.validation_fraction is not None
        self._splits = SPLITS if has_validation else SPLITS[:2]
        buckets = options.hash_buckets
        self._hashed = None if buckets is None else HashBuckets(buckets, self._layout)
        self._facts: list[Facts] = []
        self._paths: list[Path] = []

    def run(self) -> Manifest:
        stamp = self._source.stamp()
        recipe = None if stamp is None else [stamp, self._source.options(), self._options.as_json()]
        if recipe is not None:
            recipe += self._earlier.recipe()
        entries = self._work.begin(json.loads(json.dumps(recipe)))
        # The size of a vocabulary is not known yet.
        id_type = "int32" if self._hashed is None else self._hashed.schema.id_type
        shards_held = ShardMemory(self._layout, self._options.rows_per_shard, self._threads, id_type, len(self._splits))
        first = FirstPass(
            self._source,
            self._work,
            fractions=(self._options.test_fraction, self._options.validation_fraction),
            splits=len(self._splits),
            seed=self._options.seed,
            hashed=self._hashed,
            shards=shards_held,
            survey=self._earlier.survey(),
        )
        entries = entries[: _count_sound(entries, self._layout, self._options.dense, len(self._splits))]
        pieces = [entry for entry in entries if "piece" in entry]
        facts = [Facts.from_json(entry["piece"]) for entry in pieces]
        with Workers(self._threads, "hostdev-preprocess") as workers, workers.drop_queued_on_error():
            self._paths = [first.path(i) for i in range(len(facts))]
            intact = _count_intact(self._paths, [fact.checksum for fact in facts], workers)
            same_rows = (
                len(PieceFile(path)) == sum(fact.rows) for path, fact in zip(self._paths[:intact], facts, strict=False)
            )
            intact = next((i for i, same in enumerate(same_rows) if not same), intact)
            later = entries[len(pieces) :] if intact == len(facts) else []
            learned = self._is_learned(later, workers)
            if not learned:
                later = later[:1]  # keeps only the entry "parsed"
            self._work.rewrite(pieces[:intact] + later)
            if learned:
                self._facts = facts
                shards_held.add_pieces(facts)
            else:
                first.resume(facts[:intact])
                if not later:
                    first.run(workers, self._threads)
                    self._work.note(parsed=True)
                self._facts = first.facts
            self._paths = [first.path(i) for i in range(len(self._facts))]
            outcome = ManifestWriter(self._source, self._options, self._earlier, self._splits, self._facts)
            schema, scaling = self._learn(later, outcome.rows(), workers)
            shards = self._write_shards(later, schema, scaling, workers)
        found = Learned(schema, scaling.statistics(), self._padded, self._known_shares)
        return outcome.write(self._work.result, self._paths, found, shards)

    def _is_learned(self, entries: Sequence[dict[str, Any]], workers: Workers) -> bool:
        """Return whether the journal has the learned schema and scaling, and all files written with them are intact."""
        found = next((entry["learned"] for entry in entries if "learned" in entry), None)
        if found is None or self._hashed is not None:
            return found is not None
        paths = [*map(second_pass.ids_path, self._paths), self._work.result / VOCABULARY_FILE]
        return _count_intact(paths, found["checksums"], workers) == len(paths)

    def _learn(
        self, entries: Sequence[dict[str, Any]], rows: dict[str, int], workers: Workers
    ) -> tuple[Schema, Scaling]:
        """Return the schema and the scaling from the journal; if it has none, learn them and write the vocabulary."""
        of, signed = (self._options.dense, self._layout.dense, self._layout.scaling), self._source.signed
        for entry in entries:
            if "learned" in entry:
                found = entry["learned"]
                self._known_shares, self._padded = found.get(KNOWN_SHARES), found[PADDED]
                return schemas.from_json(found["schema"]), scalings.fixed(*of, found["scaling"], signed=signed)
        earlier, checksums = self._earlier, []
        scaling = earlier.scaling(self._options.dense, self._layout, signed=signed)
        vocabulary: Vocabulary | None = None
        if self._hashed is None:
            threshold = self._options.threshold
            assert threshold is not None
            vocabulary = earlier.vocabulary(threshold, self._source)
        second_pass.learn(self._paths, self._facts, self._layout, scaling, vocabulary, workers)
        if vocabulary is None:
            assert self._hashed is not None
            schema = self._hashed.schema
        else:
            schema = vocabulary.freeze()
            checksums = second_pass.number(self._paths, vocabulary, workers)
            vocabulary.write(self._work.result / VOCABULARY_FILE, rows["train"])
            checksums.append(checksum(self._work.result / VOCABULARY_FILE, Crc32))
        self._padded = {} if vocabulary is None else vocabulary.fillers()
        found = {"schema": schema.as_json(), "scaling": scaling.statistics(), "checksums": checksums}
        found[PADDED] = self._padded
        if vocabulary is not None:
            found[KNOWN_SHARES] = self._known_shares = earlier.known_shares(vocabulary.known_uses())
        self._work.note(learned=found)
        return schema, scalings.fixed(*of, scaling.statistics(), signed=signed)

    def _write_shards(
        self, entries: Sequence[dict[str, Any]], schema: Schema, scaling: Scaling, workers: Workers
    ) -> Shards:
        """Write the shards that do not exist yet; return all shards."""
        folder, hashed = self._work.result, self._hashed is not None
        written = {entry["shard"]["file"]: entry["shard"] for entry in entries if "shard" in entry}
        shards = Shards(self._splits, schema, hashed=hashed)
        how = ShardOptions(schema, self._layout, scaling, hashed=hashed, dense=self._options.dense)
        counts = [fact.rows for fact in self._facts]
        with bar(sum(map(sum, counts)), "second pass", "rows", unit_scale=True) as progress:
            for i, split in enumerate(self._splits):
                (folder / split).mkdir(exist_ok=True)

                def write(ranges: Sequence[second_pass.RowRange], name: str, i: int = i) -> dict[str, Any]:
                    done: dict[str, Any] | None = written.get(name)
                    if done is not None and (folder / name).is_file() and checksum(folder / name) == done["sha256"]:
                        return done
                    return make_shard(folder / name, name, ranges, i, self._paths, counts, how)

                parts = second_pass.split_shards(self._facts, i, self._options.rows_per_shard)
                tasks = [
                    workers.submit(partial(write, ranges, shard_name(split, number)))
                    for number, ranges in enumerate(parts)
                ]
                for task in tasks:
                    made = task.result()
                    if made is not written.get(made["file"]):
                        self._work.note(shard=made)
                    shards.add(split, made)
                    progress.update(made["rows"])
        return shards


def _count_sound(entries: Sequence[dict[str, Any]], layout: SourceLayout, mode: str, splits: int) -> int:
    """Return the number of journal entries before the first one that is invalid or out of order."""
    order = ("piece", "parsed", "learned", "shard")
    stage = 0
    for number, entry in enumerate(entries):
        try:
            ((kind, content),) = entry.items()
            if order.index(kind) < stage or (number == 0 and kind != "piece"):
                return number
            stage = order.index(kind)
            if kind == "piece":
                fact = Facts.from_json(content)
                columns = len(layout.dense) + len(layout.columns)
                if len(fact.rows) != splits:
                    return number
                if {*map(len, fact.missing)} != {columns} or {*map(len, fact.bag_values)} != {len(layout.bags)}:
                    return number
                if {*map(len, fact.labels)} != {len(layout.labels)}:
                    return number
            elif kind == "learned":
                schema = schemas.from_json(content["schema"])
                if (schema.dense, schema.columns) != (layout.dense, layout.columns):
                    return number
                list(map(str.lower, content["checksums"]))
                mode = BY_COLUMN if layout.scaling else mode
                check_scaling(mode, json_files.parse(dict[str, Any], content["scaling"]), layout.dense)
                json_files.parse(dict[str, list[Any]], content[PADDED])
                if content.get(KNOWN_SHARES) is not None:
                    json_files.parse(dict[str, float], content[KNOWN_SHARES])
            elif kind == "shard":
                done = json_files.parse(_Done, content)
                if not len(done.out) == len(done.uses) == len(layout.columns):
                    return number
        except (ValueError, TypeError, KeyError, AttributeError):
            return number
    return len(entries)


@dataclass(frozen=True, kw_only=True)
class _Done(Shard):
    """The journal entry of a written shard.

    Attributes:
        out: Number of out-of-vocabulary occurrences in each column with ids.
        uses: Number of id occurrences in each column with ids.
        apart: In the entry of the first training shard, the columns that share another column's ids but have no value
            in common with it; empty in other entries.
        squeezed: In the entry of the first training shard, the numeric columns with a few numbers so large that nearly
            all others are almost equal when scaled; empty in other entries.
    """

    out: list[int]
    uses: list[int]
    apart: list[str]
    squeezed: list[str]


def _count_intact(paths: Sequence[Path], checksums: Sequence[str], workers: Workers) -> int:
    """Return the number of files before the first one that is missing or has an unexpected CRC-32."""

    def check(path: Path, expected: str) -> bool:
        return path.is_file() and checksum(path, Crc32) == expected

    tasks = [workers.submit(partial(check, *one)) for one in zip(paths, checksums, strict=True)]
    return next((i for i, task in enumerate(tasks) if not task.result()), len(tasks))
