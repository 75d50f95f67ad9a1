"""Synthetic Criteo data of any length: Zipf-distributed categoricals, skewed integers, labels from a planted model.

Row i is a pure function of (seed, i), so a longer data set begins with the rows of a shorter one. A small data set for
runs without --data is created once in the user's cache folder.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from hostdev.core.addresses import user_cache
from hostdev.core.errors import HostdevError, UserError
from hostdev.core.outputs import new_file
from hostdev.core.progress import bar
from hostdev.data.manifest import FILE_NAME, VERSION
from hostdev.data.preprocess.build import build
from hostdev.data.preprocess.criteo import CATEGORICAL, COLUMNS, DENSE, LAYOUT, CriteoSource, hex_text
from hostdev.data.preprocess.criteo_lines import EMPTY
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.raw import BEGINNING, InputRange, RawBlock, RawRows, SourcePosition
from hostdev.kernels.counter import key64, mix64

GENERATOR_VERSION = 1  # must change whenever the rows for a given seed change
CHUNK_ROWS = 1 << 16
_SQRT_12 = math.sqrt(12.0)

# Distinct values per categorical field of Criteo's Kaggle data set, and the share of empty fields.
CARDINALITIES = np.array([
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194, 27, 14_992, 5_461_306,
    10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
])  # fmt: skip
EMPTY_RATES = np.array(
    [0, 0, 0.03, 0.03, 0, 0.12, 0, 0, 0, 0, 0, 0.03, 0, 0, 0, 0.03, 0, 0, 0.44, 0.44, 0.03, 0.76, 0, 0.03, 0.44, 0.44]
)
ZIPF_EXPONENT = 1.1
# Integer columns: log-normal with these medians, shifted down, and the share of missing values.
MEDIANS = np.array([2, 8, 7, 5, 3000, 40, 4, 8, 40, 1, 2, 1, 5])
SHIFTS = np.array([0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
MISSING_RATES = np.array([0.45, 0, 0.21, 0.22, 0.03, 0.22, 0.04, 0, 0.04, 0.45, 0.04, 0.77, 0.22])
SPREAD = 1.3
# The planted model, a logit: one effect per categorical value, one slope per standardized log integer.
BIAS = -0.2
VALUE_EFFECT = 0.28
SLOPES = np.array([0.25, 0.05, 0.05, -0.1, -0.2, -0.15, 0.25, 0.05, 0.05, 0.15, 0.15, 0.05, -0.1])
LOOKALIKE_ROWS = 60_000
_SEED = 2020
_OPTIONS = Options(threshold=5, dense="log", seed=_SEED)


class Synthetic(CriteoSource):
    """The first `rows` synthetic rows for this seed."""

    unit = "rows"

    def __init__(self, rows: int, seed: int) -> None:
        self.total = self.most_rows = rows
        self.seed = seed
        self._value_keys = np.array([key64(0, "value", c) for c in range(CATEGORICAL)], np.uint64)
        self._effect_keys = np.array([key64(0, "effect", c) for c in range(CATEGORICAL)], np.uint64)

    def chunks(self) -> Iterator[RawRows]:
        """Iterate over the rows, 65,536 at a time."""
        for block in self.blocks():
            yield self.parse(block)

    def blocks(self, start: SourcePosition = BEGINNING) -> Iterator[RawBlock]:
        """Iterate over blocks, each with the number and the size of a chunk of up to 65,536 rows."""
        for number in range(start.offset, -(-self.total // CHUNK_ROWS)):
            n = min(CHUNK_ROWS, self.total - number * CHUNK_ROWS)
            yield RawBlock((number, n), "synthetic", SourcePosition(0, number + 1), n)

    def ranges(self, number: int, looked: Sequence[Any]) -> tuple[list[InputRange], UserError | None]:
        """See `Source`; each range is one chunk."""
        chunks = range(-(-self.total // CHUNK_ROWS))
        return [InputRange(0, chunk, CHUNK_ROWS, chunk * CHUNK_ROWS) for chunk in chunks], None

    def blocks_of(self, one: InputRange) -> Iterator[RawBlock]:
        """See `Source`."""
        return islice(self.blocks(SourcePosition(0, one.place)), 1)

    def parse(self, block: RawBlock, *, hashed: bool = False) -> RawRows:
        """Return a chunk's rows."""
        number, n = block.content
        rng = np.random.Generator(np.random.Philox(key64(self.seed, "synthetic", number)))
        ranks = zipf_ranks(rng.random((CHUNK_ROWS, CATEGORICAL))[:n], CARDINALITIES, ZIPF_EXPONENT)
        ranks = np.where(rng.random((CHUNK_ROWS, CATEGORICAL))[:n] < EMPTY_RATES, -1, ranks)  # -1: empty
        bits = ranks.astype(np.uint64)
        values = (mix64(bits ^ self._value_keys) >> np.uint64(32)).astype(np.int64)
        logit = BIAS + VALUE_EFFECT * _standard(mix64(bits ^ self._effect_keys)).sum(axis=1)

        normal = rng.standard_normal((CHUNK_ROWS, DENSE))[:n]
        missing = rng.random((CHUNK_ROWS, DENSE))[:n] < MISSING_RATES
        integers = np.floor(MEDIANS * np.exp(SPREAD * normal)).astype(np.int64) - SHIFTS
        logit += (np.where(missing, 0.0, normal) * SLOPES).sum(axis=1)
        label = rng.random(CHUNK_ROWS)[:n] < 1 / (1 + np.exp(-logit))
        return RawRows(
            label.astype(np.float32),
            np.where(missing, np.nan, integers),
            np.where(ranks < 0, EMPTY, values),
            missing=dict.fromkeys(LAYOUT.spaces, EMPTY),
        )

    def describe(self) -> list[dict[str, Any]]:
        """Return the generator's arguments."""
        return [{"synthetic": True, "rows": self.total, "seed": self.seed}]

    def stamp(self) -> list[Any]:
        """Return the generator's version and arguments."""
        return [GENERATOR_VERSION, self.total, self.seed]

    def options(self) -> dict[str, Any]:
        """Return the options that the manifest records for synthetic rows."""
        return {"preset": "synthetic"}


def zipf_ranks(
    u: npt.NDArray[np.float64], cardinality: npt.NDArray[np.int64], exponent: float
) -> npt.NDArray[np.int64]:
    """Map uniform numbers to ranks 0 .. cardinality - 1 with frequency proportional to (rank + 1)^-exponent.

    Inverts the continuous power law's distribution on [1, cardinality + 1) and rounds down. `exponent` must not be 1.
    """
    power = 1.0 - exponent
    x = (1.0 + u * ((cardinality + 1.0) ** power - 1.0)) ** (1.0 / power)
    return np.minimum(x.astype(np.int64), cardinality) - 1


def _standard(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Map random 64-bit words to uniform numbers with mean 0 and variance 1."""
    uniform = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return (uniform - 0.5) * _SQRT_12


def write_text(source: Synthetic, path: Path, *, wait: bool = False) -> None:
    """Write rows as Criteo text, atomically; raise UserError if the file exists.

    If `wait` is true, first wait for another process that is writing the same file.
    """
    if os.path.lexists(path):
        raise UserError(f"{path} exists already; remove it or choose another --tsv")
    options = csv.WriteOptions(include_header=False, delimiter="\t", quoting_style="none")
    columns = pa.schema([(name, pa.string()) for name in COLUMNS])
    path.parent.mkdir(parents=True, exist_ok=True)
    with (
        new_file(path, "--tsv", wait=wait) as partial,
        partial.open("wb") as file,
        csv.CSVWriter(file, columns, write_options=options) as writer,
        bar(source.total, f"writing {path.name}", "rows") as progress,
    ):
        for rows in source.chunks():
            writer.write(_text_table(rows))
            progress.update(len(rows))


def _text_table(rows: RawRows) -> pa.Table:
    integers = np.nan_to_num(rows.numbers).astype(np.int64)
    missing = np.isnan(rows.numbers)
    columns = [pa.array(rows.label.astype(np.int8)).cast(pa.string())]
    for i in range(DENSE):
        columns.append(pc.fill_null(pa.array(integers[:, i], mask=missing[:, i]).cast(pa.string()), ""))
    columns += [hex_text(rows.keys[:, i]) for i in range(CATEGORICAL)]
    return pa.table(columns, names=COLUMNS)


def find_lookalike() -> Path | None:
    """Return the synthetic data set's folder, or None if it does not exist."""
    folder = _folder()
    return folder if (folder / FILE_NAME).is_file() else None


def _folder() -> Path:
    recipe = json.dumps([LOOKALIKE_ROWS, _SEED, asdict(_OPTIONS), GENERATOR_VERSION, VERSION])
    return user_cache() / f"lookalike-{sha256(recipe.encode()).hexdigest()[:8]}"


def ensure_lookalike() -> tuple[Path, bool]:
    """Create the synthetic data set unless it exists; return its folder, and whether it was missing.

    Concurrent processes may call this; all of them get the same folder.
    """
    folder = _folder()
    if (folder / FILE_NAME).is_file():
        return folder, False
    try:
        build(Synthetic(LOOKALIKE_ROWS, _SEED), folder, _OPTIONS)
    except (HostdevError, OSError):
        if not (folder / FILE_NAME).is_file():  # otherwise another process created it first
            raise
    return folder, True
