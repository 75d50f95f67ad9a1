"""A data set from a source in two passes: learn from the training rows, then encode all rows into shards."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from hostdev.data.manifest import CATEGORICAL, CATEGORICAL_NAMES, DENSE_NAMES, FIRST_VALUE, Manifest, checksum
from hostdev.data.preprocess.dense import DenseScaling
from hostdev.data.preprocess.raw import RawRows, Rejected, Source
from hostdev.data.preprocess.vocabulary import Encoder, HashBuckets, Vocabulary
from hostdev.data.preprocess.writer import ShardWriter

from hostdev.core.errors import UserError
from hostdev.core.progress import bar
from hostdev.kernels.counter import key64, uniform

MAX_REJECTED = 0.01
REJECTED_FILE = "rejected.tsv"
VOCABULARY_FILE = "vocabulary.arrow"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How rows become shards."""

    threshold: int | None = 100  # a value seen at most this often in training rows is out of vocabulary; None: hashed
    hash_buckets: int | None = None  # ids by hash into so many buckets, without a vocabulary
    dense: str = "max"  # scaling of the integer columns: "max" or "log"
    test_fraction: float = 0.1  # of the rows, drawn by seed and row number
    seed: int = 2020
    rows_per_shard: int = 1 << 18

    def __post_init__(self) -> None:
        if self.threshold is not None and self.threshold < 0:
            raise UserError(f"--threshold must be at least 0, not {self.threshold}")
        if self.hash_buckets is not None and not 1 <= self.hash_buckets <= 2**62:
            raise UserError(f"--hash-buckets must be from 1 to 2^62, not {self.hash_buckets}")
        if not 0 < self.test_fraction < 1:
            raise UserError(f"--test-fraction must be between 0 and 1, not {self.test_fraction}")
        if self.rows_per_shard < 1:
            raise UserError(f"--rows-per-shard must be at least 1, not {self.rows_per_shard}")

    def encoder(self) -> Encoder:
        """Return the encoder that these options ask for, with nothing learned."""
        if self.hash_buckets is not None:
            return HashBuckets(self.hash_buckets)
        assert self.threshold is not None
        return Vocabulary(self.threshold)


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
    encoder, scaling = options.encoder(), DenseScaling(options.dense)
    rejects = _RejectFile(folder / REJECTED_FILE)
    rows_of = {"train": 0, "test": 0}
    positives = {"train": 0, "test": 0}
    with rejects:
        for rows, test in _split_rows(source, options, "first pass"):
            rejects.write(rows.rejected)
            rejects.check(source.most_rows)  # no need to read on
            training = _select(rows, ~test)
            encoder.observe(training)
            scaling.observe(training)
            for split, chosen in (("train", ~test), ("test", test)):
                rows_of[split] += int(chosen.sum())
                positives[split] += int(rows.label[chosen].sum())
    total = sum(rows_of.values())
    rejects.check(total)
    for split, count in rows_of.items():
        if count == 0:
            raise UserError(
                f"none of the {total} rows is in the {split} split; give more rows or another --test-fraction"
            )
    encoder.freeze()

    id_type = "int32" if encoder.size <= 2**31 else "int64"
    writers = {split: ShardWriter(folder, split, options.rows_per_shard, id_type) for split in rows_of}
    out_of_vocabulary = {"train": 0, "test": 0}
    try:
        for rows, test in _split_rows(source, options, "second pass"):
            dense, cat = scaling.transform(rows), encoder.encode(rows)
            for split, chosen in (("train", ~test), ("test", test)):
                writers[split].write(rows.label[chosen], dense[chosen], cat[chosen])
                out_of_vocabulary[split] += int((cat[chosen] < FIRST_VALUE).sum())
        shards = {split: writer.close() for split, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.abandon()
    if sum(shard.rows for split in shards.values() for shard in split) != total:
        raise UserError("the input changed between the first and the second pass; run again once it is still")

    vocabulary = encoder.table()
    if vocabulary is not None:
        with pa.ipc.new_file(folder / VOCABULARY_FILE, vocabulary.schema) as file:
            file.write_table(vocabulary)
    manifest = Manifest(
        vocabulary_size=encoder.size,
        id_type=id_type,
        train=shards["train"],
        test=shards["test"],
        vocabulary=None if vocabulary is None else VOCABULARY_FILE,
        options=asdict(options),
        statistics={
            "rows": rows_of,
            "rejected": rejects.count,
            "label_mean": {split: positives[split] / rows_of[split] for split in rows_of},
            "dense_max": scaling.maximum.tolist(),
            "out_of_vocabulary": {split: n / (rows_of[split] * CATEGORICAL) for split, n in out_of_vocabulary.items()},
        },
        sources=source.describe(),
        dense_names=DENSE_NAMES,
        categorical_names=CATEGORICAL_NAMES,
        vocabulary_sha256=None if vocabulary is None else checksum(folder / VOCABULARY_FILE),
    )
    manifest.write(folder)
    return manifest


def _split_rows(source: Source, options: Options, title: str) -> Iterator[tuple[RawRows, npt.NDArray[np.bool_]]]:
    """Iterate over chunks of rows and which of them are test rows: a function of the seed and the row's number."""
    key = key64(options.seed, "test split")
    number = 0
    with bar(source.total, title, source.unit, unit_scale=True) as progress:
        for rows, size in source.chunks():
            counters = np.arange(number, number + len(rows), dtype=np.uint64)
            number += len(rows)
            yield rows, uniform(key, counters) < options.test_fraction
            progress.update(size)


def _select(rows: RawRows, chosen: npt.NDArray[np.bool_]) -> RawRows:
    return RawRows(rows.label[chosen], rows.integers[chosen], rows.missing[chosen], rows.categories[chosen])


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
