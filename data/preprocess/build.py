"""A data set from a source in two passes: learn from the training rows, then encode all rows into shards."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data.manifest import Manifest, checksum
from hostdev.data.preprocess.dense import MODES, scaling_of
from hostdev.data.preprocess.raw import Bags, Layout, RawRows, Rejected, Source
from hostdev.data.preprocess.vocabulary import Encoder, HashBuckets, Vocabulary
from hostdev.data.preprocess.writer import ShardWriter

from hostdev.core.errors import UserError
from hostdev.core.progress import bar
from hostdev.kernels.counter import key64, uniform

MAX_REJECTED = 0.01
REJECTED_FILE = "rejected.tsv"
VOCABULARY_FILE = "vocabulary.arrow"
SPLITS = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How rows become shards."""

    threshold: int | None = 100  # a value seen at most this often in training rows is out of vocabulary; None: hashed
    hash_buckets: int | None = None  # ids by hash into so many buckets, without a vocabulary
    dense: str = "max"  # scaling of the numeric columns: "max", "log" or "standard"
    test_fraction: float | None = 0.1  # of the rows, drawn by seed and row number; None: the source has the split
    seed: int = 2020
    rows_per_shard: int = 1 << 18

    def __post_init__(self) -> None:
        if self.threshold is not None and self.threshold < 0:
            raise UserError(f"--threshold must be at least 0, not {self.threshold}")
        if self.hash_buckets is not None and not 1 <= self.hash_buckets <= 2**62:
            raise UserError(f"--hash-buckets must be from 1 to 2^62, not {self.hash_buckets}")
        if self.dense not in MODES:
            raise UserError(f"--dense must be one of {', '.join(MODES)}, not {self.dense}")
        if self.test_fraction is not None and not 0 < self.test_fraction < 1:
            raise UserError(f"--test-fraction must be between 0 and 1, not {self.test_fraction}")
        if self.rows_per_shard < 1:
            raise UserError(f"--rows-per-shard must be at least 1, not {self.rows_per_shard}")

    def encoder(self, layout: Layout) -> Encoder:
        """Return the encoder that these options ask for, with nothing learned."""
        if self.hash_buckets is not None:
            return HashBuckets(self.hash_buckets, layout)
        assert self.threshold is not None
        return Vocabulary(self.threshold, layout)

    def as_json(self) -> dict[str, Any]:
        """Return what the manifest records: all but what has no effect."""
        drawn = self.test_fraction is not None
        return {name: value for name, value in asdict(self).items() if drawn or name not in ("test_fraction", "seed")}


def build(source: Source, out: Path, options: Options) -> Manifest:
    """Write a data set into the new folder `out` and return its manifest.

    The folder appears under its name when it is whole; after an error or an interruption nothing is left.

    Raises UserError where `out` is taken, where more than 1% of the lines are malformed, or where the training or
    the test split is empty.
    """
    if os.path.lexists(out):  # an empty folder too: it may be a mount point, which nothing can be renamed onto
        raise UserError(f"{out} exists already; remove it or choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        manifest = _build_in(partial, source, options)
        partial.chmod(0o777 & ~_umask())  # mkdtemp's is for its owner alone
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _build_in(folder: Path, source: Source, options: Options) -> Manifest:
    layout = source.layout
    encoder = options.encoder(layout)
    scaling = scaling_of(options.dense, layout.dense, signed=source.signed)
    rejects = _RejectFile(folder / REJECTED_FILE)
    rows_of = dict.fromkeys(SPLITS, 0)
    positives = dict.fromkeys(SPLITS, 0)
    with rejects:
        for rows, test in _split_rows(source, options, "first pass"):
            rejects.write(rows.rejected)
            rejects.check(source.most_rows)  # no need to read on
            training = rows.select(~test)
            encoder.observe(training)
            scaling.observe(training.numbers)
            for split, chosen in (("train", ~test), ("test", test)):
                rows_of[split] += int(chosen.sum())
                positives[split] += int(rows.label[chosen].sum())
    total = sum(rows_of.values())
    rejects.check(total)
    if total == 0:
        raise UserError("the input has no rows")
    for split, count in rows_of.items():
        if count == 0:
            how = "--test-fraction" if options.test_fraction is not None else "--test-column or --test-after"
            raise UserError(f"none of the {total} rows is in the {split} split; give more rows or another {how}")
    encoder.freeze()

    schema = encoder.schema
    id_type = "int32" if schema.rows <= 2**31 else "int64"
    writers = {split: ShardWriter(folder, split, options.rows_per_shard, schema, id_type) for split in SPLITS}
    uses = _Uses(layout, schema.first_value)
    try:
        for rows, test in _split_rows(source, options, "second pass"):
            for split, chosen in (("train", ~test), ("test", test)):
                part = rows.select(chosen)
                ids, bags = encoder.encode(part)
                writers[split].write(part.label, scaling.transform(part.numbers), ids, bags)
                uses.add(split, ids, bags)
        shards = {split: writer.close() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    if sum(shard.rows for split in shards.values() for shard in split) != total:
        raise UserError("the input changed between the first and the second pass; run again once it is still")

    vocabulary = encoder.table(source)
    if vocabulary is not None:
        with pa.ipc.new_file(folder / VOCABULARY_FILE, vocabulary.schema) as file:
            file.write_table(vocabulary)
    manifest = Manifest(
        schema=schema,
        id_type=id_type,
        train=shards["train"],
        test=shards["test"],
        vocabulary=None if vocabulary is None else VOCABULARY_FILE,
        vocabulary_sha256=None if vocabulary is None else checksum(folder / VOCABULARY_FILE),
        options={**source.options(), **options.as_json()},
        statistics={
            "rows": rows_of,
            "rejected": rejects.count,
            "label_mean": {split: positives[split] / rows_of[split] for split in SPLITS},
            **scaling.statistics(),
            **uses.statistics(),
        },
        sources=source.describe(),
    )
    manifest.write(folder)
    return manifest


def _split_rows(source: Source, options: Options, title: str) -> Iterator[tuple[RawRows, npt.NDArray[np.bool_]]]:
    """Iterate over chunks of rows and which of them are test rows: as the source says, or by seed and row number."""
    key = key64(options.seed, "test split")
    number = 0
    with bar(source.total, title, source.unit, unit_scale=True) as progress:
        for rows, size in source.chunks(hashed=options.hash_buckets is not None):
            if options.test_fraction is None:
                assert rows.test is not None
                yield rows, rows.test
            else:
                counters = np.arange(number, number + len(rows), dtype=np.uint64)
                number += len(rows)
                yield rows, uniform(key, counters) < options.test_fraction
            progress.update(size)


class _Uses:
    """How many ids the rows of each split have, and how many of these are out of vocabulary."""

    def __init__(self, layout: Layout, first_value: int) -> None:
        self._first_value = first_value
        self._all, self._out = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
        self._bags = {column.name: dict.fromkeys(SPLITS, 0) for column in layout.bags}

    def add(self, split: str, ids: npt.NDArray[np.int64], bags: Bags) -> None:
        """Count the ids of some rows."""
        for values in (ids, *(values for values, _ in bags)):
            self._all[split] += values.size
            self._out[split] += int((values < self._first_value).sum())
        for (values, _), count in zip(bags, self._bags.values(), strict=True):
            count[split] += len(values)

    def statistics(self) -> dict[str, Any]:
        """Return what the manifest records."""
        share = {split: self._out[split] / max(1, self._all[split]) for split in SPLITS}
        return {"out_of_vocabulary": share, **({"bag_values": self._bags} if self._bags else {})}


class _RejectFile:
    """rejected.tsv: file, line number, reason, and then the line; bytes that no valid line has are replaced."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8", errors="replace")
        self.count = 0
        self._first: Rejected | None = None

    def __enter__(self) -> "_RejectFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def write(self, rejected: list[Rejected]) -> None:
        for line in rejected:
            self._first = self._first or line
            self._file.write(f"{line.file}\t{line.line}\t{line.reason}\t{line.text}\n")
        self.count += len(rejected)

    def check(self, accepted: int) -> None:
        """Raise UserError where more than 1% are malformed of the lines so far and so many well-formed ones."""
        if self._first is not None and self.count > MAX_REJECTED * (accepted + self.count):
            first = self._first
            raise UserError(
                f"{self.count} lines are malformed, more than {MAX_REJECTED:.0%} of all; "
                f"the first is {first.file}:{first.line}: {first.reason}"
            )
