"""Build a data set in two passes: learn from the training rows, then encode all rows into shards.

The source is read once: the first pass parses it into pieces on disk, which the second pass reads. If the process
is interrupted, finished work is kept, and the same command continues from it. The result depends only on the rows
and the options.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostdev.core import json_files
from hostdev.core.checksums import Crc32, checksum
from hostdev.core.progress import bar
from hostdev.core.workers import Workers
from hostdev.data import schema as schemas
from hostdev.data.manifest import BY_COLUMN, PADDED, SPLITS, Manifest, Shard, check_scaling
from hostdev.data.preprocess import scaling as scalings
from hostdev.data.preprocess import second_pass
from hostdev.data.preprocess.earlier_vocabulary import KNOWN_SHARES, NO_EARLIER, Earlier
from hostdev.data.preprocess.first_pass import FirstPass
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.outcome import VOCABULARY_FILE, Learned, ManifestWriter
from hostdev.data.preprocess.pieces import Facts, PieceFile
from hostdev.data.preprocess.raw import Source, SourceLayout
from hostdev.data.preprocess.scaling import Scaling
from hostdev.data.preprocess.second_pass import ShardMemory, ShardOptions, Shards, make_shard, shard_name
from hostdev.data.preprocess.vocabulary import HashBuckets, Vocabulary
from hostdev.data.preprocess.work import WorkFolder, claim
from hostdev.data.schema import Schema
from hostdev.kernels.pool import host_threads


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
        id_type = (
            "int32" if self._hashed is None else self._hashed.schema.id_type
        )  # the size of a vocabulary is not known yet
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
                    workers.submit(lambda ranges=ranges, name=name: write(ranges, name))  # type: ignore[misc]
                    for ranges, name in ((one, shard_name(split, number)) for number, one in enumerate(parts))
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

    tasks: list[Future[bool]] = [
        workers.submit(lambda one=one: check(*one))  # type: ignore[misc]
        for one in zip(paths, checksums, strict=True)
    ]
    return next((i for i, task in enumerate(tasks) if not task.result()), len(tasks))
