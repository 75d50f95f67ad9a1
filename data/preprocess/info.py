"""The command `preprocess info DIR`: a summary of a data set, from all of its rows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from hostdev.core.errors import UserError
from hostdev.core.keys import is_raw
from hostdev.core.memory import available_bytes
from hostdev.data import manifest
from hostdev.data.manifest import Manifest, Shard
from hostdev.data.preprocess.stored import (
    REMEDY,
    Counter,
    DamagedError,
    StoredRows,
    StoredVocabulary,
    Wrong,
    add_counts,
    count_bytes,
    each_shard,
    get_size,
    read_parts,
    require_room,
    wrong_values,
)
from hostdev.data.schema import Space, columns_of
from hostdev.kernels.arrays import Array, Counts, Mask, Numbers

TOPS = (1, 10, 100, 1000)
PLACES = 50  # number of equal, consecutive parts of a split's rows
_MOST_POINTS = 200  # maximum points of a curve


@dataclass(frozen=True)
class Curve:
    """Distribution of an id space's training occurrences over its ids, except the out-of-vocabulary id.

    Attributes:
        ids: Number of ids used in training rows.
        top: For each n in TOPS, the share of occurrences that belong to the n most frequent ids, float64 [4].
        half: Number of the most frequent ids that make up 50% of the occurrences.
        most: Number of the most frequent ids that make up 90% of the occurrences.
        ranks: Log-spaced sample of ranks from 1, int64 [N].
        shares: The share of occurrences that belong to the id at each rank, float64 [N].
    """

    ids: int
    top: Numbers
    half: int
    most: int
    ranks: Counts
    shares: Numbers


@dataclass
class SplitTotals:
    """Totals over the rows of a split, which has PLACES parts, C dense columns and F columns with ids.

    Attributes:
        labels: Sum of each label's values in each part of the split [labels, PLACES].
        squares: Sum of the squares of each label's values [labels].
        rows: Number of rows in each part of the split [PLACES].
        zeros: Number of zeros in each dense column [C].
        sums: Sum of each dense column's scaled numbers [C].
        low: Minimum of each dense column's scaled numbers [C].
        high: Maximum of each dense column's scaled numbers [C].
        uses: Number of id occurrences in each column [F].
        out: Number of out-of-vocabulary occurrences in each column [F].
        seen: Number of occurrences, in each column, of ids that training rows also use [F].
    """

    labels: Numbers
    squares: Numbers
    rows: Counts
    zeros: Counts
    sums: Numbers
    low: Numbers
    high: Numbers
    uses: Counts
    out: Counts
    seen: Counts

    @staticmethod
    def empty(found: Manifest) -> "SplitTotals":
        """Return the totals for a split without rows."""
        dense, columns = len(found.schema.dense), len(found.schema.columns)

        def zeros(n: int) -> Counts:
            return np.zeros(n, np.int64)

        return SplitTotals(
            labels=np.zeros((len(found.schema.labels), PLACES)),
            squares=np.zeros(len(found.schema.labels)),
            rows=zeros(PLACES),
            zeros=zeros(dense),
            sums=np.zeros(dense),
            low=np.full(dense, np.inf),
            high=np.full(dense, -np.inf),
            uses=zeros(columns),
            out=zeros(columns),
            seen=zeros(columns),
        )

    def add(self, other: "SplitTotals") -> None:
        """Add the totals over other rows."""
        for name, values in vars(other).items():
            combine = {"low": np.minimum, "high": np.maximum}.get(name, np.add)
            setattr(self, name, combine(getattr(self, name), values))

    def add_part(self, part: StoredRows, found: Manifest, begin: int, whole: int, known: Mask | None = None) -> None:
        """Add rows of a shard.

        Args:
            begin: Number of rows before the shard in its split.
            whole: Number of rows of the split.
            known: bool [V], marks the ids that training rows use; None if that is unknown.
        """
        rows = begin + part.start + np.arange(len(part.label))
        place = rows * PLACES // whole
        self.rows += np.bincount(place, minlength=PLACES)
        for i, values in enumerate(columns_of(part.label)):
            self.labels[i] += np.bincount(place, values, minlength=PLACES)
            self.squares[i] += np.square(values, dtype=np.float64).sum()
        if found.schema.dense:
            self.zeros += (part.dense == 0).sum(axis=0)
            self.sums += part.dense.sum(axis=0, dtype=np.float64)
            self.low = np.minimum(self.low, part.dense.min(axis=0))
            self.high = np.maximum(self.high, part.dense.max(axis=0))
        for i, column in enumerate(found.schema.columns):
            ids = part.ids_of(found.schema, column)
            self.uses[i] += len(ids)
            self.out[i] += np.count_nonzero(ids < found.schema.first_value)
            if known is not None:
                self.seen[i] += np.count_nonzero(known[ids])

    def label_mean(self, label: int) -> float:
        """Return the mean of label number `label`: the share of positive labels if all are 0 or 1."""
        return float(self.labels[label].sum() / max(1, self.rows.sum()))

    def label_deviation(self, label: int) -> float:
        """Return the standard deviation of label number `label`."""
        square = self.squares[label] / max(1, self.rows.sum())
        return float(np.sqrt(max(0.0, square - self.label_mean(label) ** 2)))


@dataclass(frozen=True)
class Information:
    """The summary of a data set; `nbytes` (the shards' size) and `totals` are by split, `curves` by id space."""

    folder: Path
    found: Manifest
    nbytes: dict[str, int]
    totals: dict[str, SplitTotals]
    curves: dict[str, Curve]

    @property
    def missing(self) -> dict[str, dict[str, float]]:
        """The share of missing values by split and column; empty if the manifest does not record it."""
        recorded = self.found.statistics.get("missing")
        known = recorded if isinstance(recorded, dict) else {}
        return {split: known[split] for split in self.found.splits if isinstance(known.get(split), dict)}

    @property
    def hashed(self) -> bool:
        """Whether ids are hashed or raw, so that there is no vocabulary."""
        return self.found.vocabulary is None

    def shared(self, space: str) -> list[str]:
        """Return the columns that use an id space's ids."""
        return [column.name for column in self.found.schema.columns if column.space == space]


def gather(folder: Path) -> Information:
    """Summarize all rows of a data set; raise UserError for a damaged file or too little memory."""
    found = manifest.read(folder)
    if found.vocabulary is None:
        totals = {split: _read_valid(folder, found, split, None) for split in found.splits}
        curves = _count_hashed(folder, found, totals["test"])
    else:
        vocabulary = StoredVocabulary(folder, found)
        largest = max((space.values for space in vocabulary.spaces.values()), default=0)
        require_room(folder, found.schema.rows, found.schema.rows + 16 * largest)  # a mask, and a curve's arrays
        known = vocabulary.counts > 0
        known[: found.schema.first_value] = False
        totals = {split: _read_valid(folder, found, split, known) for split in found.splits}
        curves = {name: make_curve(vocabulary.get_counts(space)) for name, space in vocabulary.spaces.items()}
    nbytes = {split: sum(get_size(folder / shard.file) for shard in found.shards(split)) for split in found.splits}
    return Information(folder, found, nbytes, totals, curves)


def make_curve(counts: Array) -> Curve:
    """Return the curve of ids with these counts [V], in any order; takes 16 bytes of memory per id."""
    ordered = np.sort(counts)[::-1]
    used = int(np.count_nonzero(counts))
    sums = np.cumsum(ordered[:used], dtype=np.int64)
    total = int(sums[-1]) if used else 0
    top = np.array([sums[min(n, used) - 1] / total if total else 0.0 for n in TOPS])
    ranks = np.unique(np.geomspace(1, used, _MOST_POINTS).round().astype(np.int64)) if used else np.zeros(0, np.int64)
    half, most = (int(np.searchsorted(sums, -(-total * part // 10))) + 1 if used else 0 for part in (5, 9))
    return Curve(used, top, half, most, ranks, ordered[ranks - 1] / max(1, total))


def read_split(
    folder: Path, found: Manifest, split: str, title: str, *, known: Mask | None = None, counter: Counter | None = None
) -> tuple[SplitTotals, list[str]]:
    """Read a split in one pass; return the totals of its valid parts, and a line for each finding about its shards.

    A part with an invalid value is left out as a whole; the rest of a damaged shard is not read.

    Args:
        title: Title of the progress bar.
        known: bool [V], marks the ids that training rows use; None if that is unknown.
        counter: Counts the ids of valid parts; None to count none.
    """
    shards, whole = found.shards(split), found.rows(split)
    begins = dict(
        zip((shard.file for shard in shards), accumulate((each.rows for each in shards), initial=0), strict=False)
    )

    def look(shard: Shard) -> tuple[SplitTotals, list[str]]:
        totals = SplitTotals.empty(found)
        wrong: dict[str, Wrong] = {}
        try:
            for part in read_parts(folder, found, shard):
                values = wrong_values(part, found.schema)
                for one in values:
                    before = wrong.get(one.what)
                    wrong[one.what] = one if before is None else replace(before, count=before.count + one.count)
                if values:
                    continue
                totals.add_part(part, found, begins[shard.file], whole, known)
                if counter is not None:
                    for ids in (part.ids.ravel(), *(ids for ids, _ in part.bags.values())):
                        counter.add(ids)
        except DamagedError as error:
            return totals, [str(error)]
        return totals, [f"{folder / shard.file}: {one.text()}; {REMEDY}" for one in wrong.values()]

    result, lines = SplitTotals.empty(found), []
    for sums, findings in each_shard(look, folder, shards, title):
        result.add(sums)
        lines += findings
    return result, lines


def _read_valid(folder: Path, found: Manifest, split: str, known: Mask | None) -> SplitTotals:
    """Return the totals of a split, as `read_split` does; raise UserError at the first finding."""
    totals, findings = read_split(folder, found, split, f"reading {split} rows", known=known)
    if findings:
        raise UserError(findings[0])
    return totals


def _count_hashed(folder: Path, found: Manifest, test: SplitTotals) -> dict[str, Curve]:
    """Count the occurrences of each hash bucket or raw id; return each id space's curve, and add to `test.seen`.

    If ids are hashed, each pass handles as many id spaces as fit into memory, at `count_bytes` bytes for each bucket.
    """
    schema = found.schema
    if not schema.spaces:
        return {}
    buckets = schema.spaces[0].size  # the same for all id spaces
    if is_raw(buckets):
        return {space.name: _count_raw(folder, found, test, space) for space in schema.spaces}
    size = buckets * count_bytes(found.uses("train"))
    curve_bytes = size + 8 * buckets  # for a curve: sorted counts and their sums
    require_room(folder, buckets, size + curve_bytes)
    spaces_at_once = max(1, min(len(schema.spaces), (available_bytes() // 2 - curve_bytes) // size))
    curves: dict[str, Curve] = {}
    for start in range(0, len(schema.spaces), spaces_at_once):
        spaces = schema.spaces[start : start + spaces_at_once]
        counter = Counter(buckets * len(spaces), found.uses("train"))

        def count(shard: Shard, spaces: Sequence[Space] = spaces, counter: Counter = counter) -> None:
            for part in read_parts(folder, found, shard, known=True):
                for _, ids in _iterate_columns(part, found, spaces):
                    counter.add(ids)

        for _ in each_shard(count, folder, found.train, f"counting ids of {len(spaces)} columns"):
            pass
        counts = counter.total()
        _count_seen(folder, found, test, spaces, counts.__getitem__, f"{len(spaces)} columns")
        for i, space in enumerate(spaces):
            curves[space.name] = make_curve(counts[i * buckets : (i + 1) * buckets])
    return curves


def _count_raw(folder: Path, found: Manifest, test: SplitTotals, space: Space) -> Curve:
    """Return the curve of an id space of raw ids, and add to `test.seen`; memory grows with the distinct ids."""

    def count(shard: Shard) -> tuple[Counts, Counts]:
        parts = read_parts(folder, found, shard, known=True)
        each = [ids for part in parts for _, ids in _iterate_columns(part, found, [space])]
        return np.unique(np.concatenate(each), return_counts=True)

    known, uses = np.empty(0, np.int64), np.empty(0, np.int64)
    for ids, counts in each_shard(count, folder, found.train, f"counting ids of {space.name}"):
        known, uses = add_counts((known, uses), (ids, counts))

    _count_seen(folder, found, test, [space], lambda ids: np.isin(ids, known), space.name)
    return make_curve(uses)


def _count_seen(
    folder: Path,
    found: Manifest,
    test: SplitTotals,
    spaces: Sequence[Space],
    is_seen: Callable[[Array], Array],
    shown: str,
) -> None:
    """Add to `test.seen` the occurrences, in test rows, of ids of `spaces` that `is_seen` maps to true or nonzero."""

    def look(shard: Shard) -> Counts:
        seen = np.zeros(len(found.schema.columns), np.int64)
        for part in read_parts(folder, found, shard, known=True):
            for i, ids in _iterate_columns(part, found, spaces):
                seen[i] += np.count_nonzero(is_seen(ids))
        return seen

    for seen in each_shard(look, folder, found.test, f"comparing ids of {shown}"):
        test.seen += seen


def _iterate_columns(part: StoredRows, found: Manifest, spaces: Sequence[Space]) -> Iterator[tuple[int, Array]]:
    """Yield, for each column of `spaces`, its index, and its ids as bucket numbers.

    The buckets of all `spaces` are numbered consecutively, from 0.
    """
    places = {space.name: i * space.size - space.first for i, space in enumerate(spaces)}
    for i, column in enumerate(found.schema.columns):
        if column.space in places:
            yield i, part.ids_of(found.schema, column).astype(np.int64) + places[column.space]


def shortened(name: str, most: int) -> str:
    """Shorten a name to `most` characters by cutting its middle, as names often differ at their ends."""
    return name if len(name) <= most else f"{name[: (most - 1) // 2]}…{name[-(most // 2) :]}"
