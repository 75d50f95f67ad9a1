"""The effect of each --admit-count on data with raw ids: keys, their memory, and uses without a row."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.addresses import shown_place
from hostdev.core.memory import format_bytes
from hostdev.core.progress import bar
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess.counting import add_counts
from hostdev.data.schema import Schema
from hostdev.data.shards import ShardReader
from hostdev.host.key_options import KEY_BYTES
from hostdev.train.build import model_of
from hostdev.train.options import TrainConfig

Keys = npt.NDArray[np.int64]

COUNTS = (1, 2, 3, 5, 10, 20)
_ROWS = 1 << 16  # samples read at a time
_MORE = 0.02  # additional share of test uses without a row that the advice accepts


class ColumnUses(NamedTuple):
    """The uses of a column's ids: one figure for each of COUNTS."""

    name: str
    kept: npt.NDArray[np.int64]  # ids with a row
    missed: npt.NDArray[np.int64]  # uses in one pass over the training samples that come before the id has a row
    unknown: npt.NDArray[np.int64]  # uses in test samples of ids without a row
    uses: int  # in training samples
    test_uses: int


def count_column(name: str, keys: Keys, counts: npt.NDArray[np.int64], test: Keys) -> ColumnUses:
    """Return a column's figures.

    Args:
        name: The column.
        keys: Distinct ids of the training samples [K], ascending.
        counts: How often each is used [K].
        test: Ids of the test samples [N].
    """
    at = np.minimum(np.searchsorted(keys, test), max(0, len(keys) - 1))
    seen = np.where(keys[at] == test, counts[at], 0) if len(keys) else np.zeros(len(test), np.int64)
    kept = [np.count_nonzero(counts >= n) for n in COUNTS]
    missed = [np.minimum(counts, n - 1).sum() for n in COUNTS]
    unknown = [np.count_nonzero(seen < n) for n in COUNTS]
    return ColumnUses(name, np.array(kept), np.array(missed), np.array(unknown), int(counts.sum()), len(test))


def _ids_of(schema: Schema, batch: Batch, name: str) -> Keys:
    if name in schema.bags:
        return np.asarray(batch.bags[name][0], np.int64)
    return np.asarray(batch.ids[:, schema.ids.index(name)], np.int64)


def measure(data: Path, found: Manifest) -> list[ColumnUses]:
    """Count the ids of each column, in memory that grows with a column's distinct ids."""
    readers = [ShardReader(data, found, split) for split in ("train", "test")]
    columns = [column.name for column in found.schema.columns]
    steps = sum(reader.steps(_ROWS) for reader in readers if reader.rows)
    result = []
    with bar(steps * len(columns), "counting", "step") as progress:

        def read(reader: ShardReader, name: str) -> Iterator[Keys]:
            for batch in reader.batches(_ROWS) if reader.rows else ():
                yield _ids_of(found.schema, batch, name)
                progress.update()

        for name in columns:
            keys, counts = np.empty(0, np.int64), np.empty(0, np.int64)
            for ids in read(readers[0], name):
                keys, counts = add_counts((keys, counts), np.unique(ids, return_counts=True))
            test = np.concatenate([np.empty(0, np.int64), *read(readers[1], name)])
            result.append(count_column(name, keys, counts, test))
    return result


def advise_admission(settings: TrainConfig, data: Path, found: Manifest) -> None:
    """Print what each --admit-count keeps, takes and loses, in all and by column."""
    model = model_of(replace(settings, tables="dynamic", host_device_mix=True), found.schema)
    each = sum(spec.shape.nbytes(1) + KEY_BYTES for spec in model.tables.values())
    print(
        f"data     {shown_place(data)}: {found.rows('train'):,} training and {found.rows('test'):,} test rows, raw ids"
    )
    print(f"tables   {', '.join(sorted(model.tables))}: a key takes {each} bytes in all")
    print("\n".join(format_advice(measure(data, found), each)))


def format_advice(columns: list[ColumnUses], each: int) -> list[str]:
    """Return the tables and the advice as lines; `each` is the bytes of a key."""
    kept = np.sum([column.kept for column in columns], 0)
    uses, test_uses = sum(column.uses for column in columns), sum(column.test_uses for column in columns)
    missed = np.sum([column.missed for column in columns], 0) / max(1, uses)
    unknown = np.sum([column.unknown for column in columns], 0) / max(1, test_uses)
    lines = ["", f"{'':<12}{'':>14}{'':>12}   uses without a row", f"{'admit-count':<12}{'keys':>14}{'memory':>12}"]
    lines[-1] += f"{'training':>12}{'test':>9}"
    for i, n in enumerate(COUNTS):
        shown = f"{unknown[i]:>9.1%}" if test_uses else f"{'':>9}"
        lines.append(f"{n:<12}{kept[i]:>14,}{format_bytes(int(kept[i]) * each):>12}{missed[i]:>12.1%}{shown}")
    width = max(8, *(len(column.name) + 2 for column in columns))
    lines += ["", f"{'':<{width}}{'':>12}  test uses without a row, by admit-count"]
    lines.append(f"{'column':<{width}}{'ids':>12}" + "".join(f"{n:>9}" for n in COUNTS))
    for column in columns:
        shares = column.unknown / max(1, column.test_uses)
        lines.append(f"{column.name:<{width}}{column.kept[0]:>12,}" + "".join(f"{share:>9.1%}" for share in shares))
    best = max((i for i in range(len(COUNTS)) if unknown[i] - unknown[0] <= _MORE), default=0)
    advice = "no --admit-count: each keeps a row from at least 2% of the test samples' uses"
    if COUNTS[best] > 1:
        advice = (
            f"--admit-count {COUNTS[best]}: {1 - kept[best] / max(1, kept[0]):.0%} fewer keys, and a row less for "
            f"{unknown[best] - unknown[0]:.1%} of the test samples' uses"
        )
    return [*lines, "", f"advice   {advice}" if test_uses else "advice   none, since there are no test rows"]
