"""Build a data set in two passes: learn from the training rows, then encode all rows into shards.

The source is read once: the first pass parses it into pieces on disk, and the second pass reads the pieces. Between
the passes, the number of rows in each split is checked. The manifest is written last. If the process is interrupted,
finished work is kept, and the same command continues from it. The result depends only on the rows, the options and
the earlier data set.
"""

import json
import math
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostdev.core import json_files
from hostdev.core.checksums import checksum
from hostdev.core.errors import HostdevError, UserError
from hostdev.core.progress import bar
from hostdev.core.workers import Workers
from hostdev.data import schema as schemas
from hostdev.data.manifest import BY_COLUMN, PADDED, REJECTED_FILE, SPLITS, Manifest, Shard, check_scaling
from hostdev.data.preprocess.earlier_vocabulary import KNOWN_SHARES, NO_EARLIER, Earlier
from hostdev.data.preprocess.first_pass import FirstPass
from hostdev.data.preprocess.learning import Learning
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.pieces import Facts, PieceFile, Survey
from hostdev.data.preprocess.raw import InputRange, Source, SourcePosition
from hostdev.data.preprocess.runner import (
    Executor,
    Result,
    Runner,
    Task,
    Workspace,
    piece_name,
    result_name,
)
from hostdev.data.preprocess.second_pass import MemoryCheck, shard_name, shard_statistics, split_shards
from hostdev.data.preprocess.tasks import Threads
from hostdev.data.preprocess.words import VOCABULARY_FILE
from hostdev.data.preprocess.work import WorkFolder, claim
from hostdev.kernels.pool import host_threads


class ManifestWriter:
    """Writes the manifest of a data set from the `Facts` of its pieces, given in the order of the rows."""

    def __init__(self, space: Workspace, facts: Sequence[Facts]) -> None:
        self._source, self._options, self._earlier = space.source, space.options, space.earlier
        self._splits, self._layout, self._facts = space.splits, space.source.layout, facts

    def rows(self) -> dict[str, int]:
        """Return the number of rows of each split.

        Raises UserError if there are no rows; if a split is empty (except "test" with a fraction of 0); or, without an
        earlier data set, if a --positive rule makes no row positive.
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

    def write(self, folder: Path, paths: Sequence[Path], learned: Result, shards: dict[str, list[Result]]) -> Manifest:
        """Write the malformed lines and the manifest into the data set's folder; return the manifest.

        Args:
            paths: The files of the pieces.
            learned: The result of `Learning.run`.
            shards: The results of `second_pass.make_shard` by split, in order.
        """
        rows, schema = self.rows(), schemas.from_json(learned["schema"])
        lines: Counter[int] = Counter()  # by input: number of lines before the piece, whose own numbering starts at 1
        with (folder / REJECTED_FILE).open("w", encoding="utf-8", errors="replace") as file:
            for path, fact in zip(paths, self._facts, strict=True):
                before = lines[fact.end.input]
                for line in PieceFile(path).rejected() if fact.rejected else ():
                    file.write(f"{line.file}\t{before + line.line}\t{line.reason}\t{line.text}\n")
                lines[fact.end.input] += fact.lines
        listed = {
            split: [Shard(file=one["file"], rows=one["rows"], sha256=one["sha256"]) for one in made]
            for split, made in shards.items()
        }
        manifest = Manifest(
            schema=schema,
            id_type=schema.id_type,
            train=listed["train"],
            test=listed["test"],
            validation=listed.get("validation", []),
            vocabulary=None if learned["sha256"] is None else VOCABULARY_FILE,
            vocabulary_sha256=learned["sha256"],
            rejected_sha256=checksum(folder / REJECTED_FILE),
            options={**self._source.options(), **self._options.as_json(), **self._earlier.options()},
            statistics={
                "rows": rows,
                "rejected": sum(fact.rejected for fact in self._facts),
                **self._label_means(rows),
                **learned["scaling"],
                **shard_statistics(shards, [*schema.ids, *schema.bags], hashed=learned["sha256"] is None),
                **self._bag_values(),
                "missing": self._missing(rows),
                **({PADDED: learned["padded"]} if learned["padded"] else {}),
                **({} if learned["known_shares"] is None else {KNOWN_SHARES: learned["known_shares"]}),
            },
            sources=self._source.describe(),
            kinds=self._kinds(),
        )
        manifest.write(folder)
        return manifest

    def _kinds(self) -> dict[str, Any]:
        """Return the manifest's entry `kinds`: types and text forms of columns with ids; empty if none are recorded."""
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
    stays next to `out` for the next call with the same arguments, unless an input can be read only once. After a
    UserError, the finished work is removed.

    Args:
        threads: Number of threads, or None for the number that host kernels use.
        earlier: A data set whose ids and scaling are reused. Values without an id get higher ids, unless it is frozen.

    Raises:
        UserError: `out` exists; `source` and `options` differ from `earlier` in columns, scaling or the kind of ids;
            more than 1% of the lines are malformed; or a split that must have rows is empty.
        TransientError: The vocabulary, or one shard per thread, does not fit into memory; or a read fails.
    """
    earlier, count = earlier or NO_EARLIER, threads or host_threads()
    earlier.require(source, options.dense, options.hash_buckets)
    with claim(out) as work:
        stamp = source.stamp()
        entries = work.begin(None if stamp is None else make_recipe(source, options, earlier))
        space = Workspace(work.folder, source, options, find_splits(source, options), earlier)
        with Workers(count, "hostdev-preprocess") as workers, workers.drop_queued_on_error():
            preparation = Preparation(space, work, Threads(space, workers, count), entries)
            first = preparation.first_pass(earlier.survey())
            if not first.resume():
                first.run(_find_blocks(source, first.end))
            manifest = preparation.finish(first)
        work.finish()
    return manifest


def _find_blocks(source: Source, start: SourcePosition) -> Iterator[InputRange | HostdevError]:
    """Yield each block of a source as a range, then the HostdevError that ends the source, if any."""
    try:
        for block in source.blocks(start):
            yield InputRange(block.end.input, block, block.size)
    except HostdevError as error:  # reported after the errors of in-flight blocks
        yield error


def find_splits(source: Source, options: Options) -> tuple[str, ...]:
    """Return the names of the splits: train, test and, if the source or the options choose rows for it, validation."""
    has_validation = source.has_validation or options.validation_fraction is not None
    return SPLITS if has_validation else SPLITS[:2]


def make_recipe(source: Source, options: Options, earlier: Earlier) -> list[Any]:
    """Return everything that determines a data set, as JSON: the inputs' fingerprint, options, and earlier data set."""
    recipe = [source.stamp(), source.options(), options.as_json(), *earlier.recipe()]
    content: list[Any] = json.loads(json.dumps(recipe))
    return content


class Preparation:
    """The preparation of a data set, by tasks that threads of this process or workers of a cluster run.

    Args:
        space: The workspace that the tasks share.
        work: The work folder, which has the journal.
        executor: Runs the tasks.
        entries: The journal's entries from an interrupted call.
    """

    def __init__(
        self, space: Workspace, work: WorkFolder, executor: Executor, entries: Sequence[dict[str, Any]]
    ) -> None:
        self._source, self._options, self._layout = space.source, space.options, space.source.layout
        self._space, self._work, self._splits = space, work, space.splits
        self.runner = Runner(executor, work, entries, self._is_sound)

    def first_pass(self, survey: Survey | None = None) -> FirstPass:
        """Return the first pass, to be run before `finish`.

        `survey` has estimates of the earlier data set's values. It is None if they will not be in memory together with
        the new values.
        """
        # The vocabulary's size is not known yet, so the memory check assumes the smaller id type.
        id_type = "int32" if self._space.hashed is None else self._space.hashed.schema.id_type
        executor, rows_per_shard = self.runner.executor, self._options.rows_per_shard
        how = self._layout, rows_per_shard, executor.sharing, id_type, len(self._splits), executor.memory, survey
        return FirstPass(self._space, self.runner, MemoryCheck(*how))

    def finish(self, first: FirstPass) -> Manifest:
        """Learn scaling and vocabulary, and write shards and manifest; return the manifest."""
        space, facts = self._space, first.facts
        outcome = ManifestWriter(space, facts)
        rows = outcome.rows()
        index = space.write_json("index.json", {"names": first.names, "rows": [fact.rows for fact in facts]})
        found = Learning(space, self.runner).run(first.names, index, rows["train"])
        shards = self._write_shards(facts, index, found)
        self._collect(shards)
        return outcome.write(self._work.result, [space.path(piece_name(name)) for name in first.names], found, shards)

    def _write_shards(self, facts: Sequence[Facts], index: list[str], found: Result) -> dict[str, list[Result]]:
        """Write all shards; return their entries by split, in order."""
        learned = self._space.write_json("learned.json", {name: found[name] for name in ("schema", "scaling")})
        order: list[tuple[str, str]] = []

        def tasks() -> Iterator[Task]:
            for i, split in enumerate(self._splits):
                self._space.path(result_name(split)).mkdir(exist_ok=True)
                parts = split_shards(facts, i, self._options.rows_per_shard)
                for number, ranges in enumerate(parts):
                    key, name = f"shard-{split}-{number:05d}", shard_name(split, number)
                    order.append((split, key))
                    size = sum(one.stop - one.start for one in ranges)
                    yield Task(key, "shard", (name, i, list(map(list, ranges)), index, learned), size)

        total = sum(sum(fact.rows) for fact in facts)
        with bar(total, "second pass", "rows", unit_scale=True) as progress:
            results = self.runner.map(tasks(), progress.update)
        return {split: [results[key]["shard"] for of, key in order if of == split] for split in self._splits}

    def _collect(self, shards: dict[str, list[Result]]) -> None:
        """Link the vocabulary and the shards into the data set's folder, unless the tasks wrote them there.

        The original files are kept, because a command that is repeated after an interruption needs them. On a file
        system without hard links, the files are copied.
        """
        folder = self._space.path(result_name(""))
        if folder == self._work.result:
            return
        names = [one["file"] for made in shards.values() for one in made]
        for name in [*names, *([VOCABULARY_FILE] if self._options.hash_buckets is None else [])]:
            path = self._work.result / name
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            try:
                path.hardlink_to(folder / name)
            except OSError:
                shutil.copyfile(folder / name, path)

    def _is_sound(self, kind: str, result: Result) -> bool:
        """Return whether a result in the journal is valid for its kind of task; only the kinds below are checked."""
        layout = self._layout
        try:
            if kind == "piece":
                facts = Facts.from_json(result["piece"])
                columns = len(layout.dense) + len(layout.columns)
                return len(facts.rows) == len(self._splits) and (
                    ({*map(len, facts.missing)}, {*map(len, facts.bag_values)}, {*map(len, facts.labels)})
                    == ({columns}, {len(layout.bags)}, {len(layout.labels)})
                )
            if kind == "learned":
                schema = schemas.from_json(result["schema"])
                mode = BY_COLUMN if layout.scaling else self._options.dense
                check_scaling(mode, json_files.parse(dict[str, Any], result["scaling"]), layout.dense)
                json_files.parse(dict[str, list[Any]], result["padded"])
                if result["known_shares"] is not None:
                    json_files.parse(dict[str, float], result["known_shares"])
                if self._space.hashed is None:
                    json_files.parse(str, result["sha256"])
                return (schema.dense, schema.columns) == (layout.dense, layout.columns)
            if kind == "shard":
                made = json_files.parse(_Made, result["shard"])
                return len(made.out) == len(made.uses) == len(layout.columns)
        except (ValueError, TypeError, KeyError, AttributeError):
            return False
        return True


@dataclass(frozen=True, kw_only=True)
class _Made(Shard):
    """The journal's entry of a written shard, a result of `second_pass.make_shard`.

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
