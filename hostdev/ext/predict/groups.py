"""Prediction quality within groups of rows, such as the rows of each user, over all predictions of a command."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from hostdev.core.errors import UserError
from hostdev.core.progress import counted
from hostdev.data.preprocess import columns as arrow
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.unlabelled import EncodedPart
from hostdev.data.schema import Schema
from hostdev.kernels.arrays import Mask
from hostdev.kernels.strings import hash_texts
from hostdev.train.ranking import rank

Keys = npt.NDArray[np.uint64]


class By(NamedTuple):
    """The column that groups the rows: its name, how a file's values are read, and a missing value's id in a data set.

    The id is -1 if missing values have none.
    """

    column: str
    reading: ReadSettings
    missing_id: int = -1


class Groups:
    """Collects scores and labels, grouped by the values of a column, in 13 bytes of memory per row.

    Rows without a value are left out.

    Args:
        by: The column. In a data set, it must have one id per row, and rows whose value is out of vocabulary are left
            out.
        schema: The data set's schema.
    """

    def __init__(self, by: By, schema: Schema) -> None:
        self._by, self._column, self._schema = by, by.column, schema
        none = np.zeros(0, np.uint64), np.zeros(0, np.float32), np.zeros(0, np.bool_)
        self._parts: list[tuple[Keys, npt.NDArray[np.float32], npt.NDArray[np.bool_]]] = [none]
        self._rare = self._missing = 0

    def add(
        self,
        logits: npt.NDArray[np.float32],
        label: npt.NDArray[np.float32],
        known: npt.NDArray[np.bool_],
        part: EncodedPart,
    ) -> None:
        """Add the rows of a part that the mask `known` [n] selects: rows with a label and a finite score."""
        keys, missing, rare = self._values(part) if part.more is not None else self._ids(part)
        self._missing += int(np.count_nonzero(known & missing))
        self._rare += int(np.count_nonzero(known & rare))
        known = known & ~missing & ~rare
        self._parts.append((keys[known], logits[known], label[known] != 0))

    def _values(self, part: EncodedPart) -> tuple[Keys, Mask, Mask]:
        """Return a hash of each row's value, and the masks of rows without a value and of no row."""
        assert part.more is not None
        column = arrow.decoded(part.more[self._column])
        if arrow.classify_type(column.type) in ("list", "nested"):
            raise UserError(f"--by {self._column}: the column has lists; name a column with one value per row")
        if pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), pa.scalar(None, column.type), column)
            column = self._by.reading.clean(column).cast(pa.string())
        codes, texts = self._by.reading.values(column)
        keys, missing = hash_texts(*arrow.get_buffers(texts)), pc.equal(texts, "").to_numpy(zero_copy_only=False)
        codes = codes if part.places is None else codes[part.places]
        return keys[codes], missing[codes], np.zeros(len(codes), np.bool_)

    def _ids(self, part: EncodedPart) -> tuple[Keys, Mask, Mask]:
        """Return each row's id, and the masks of rows without a value and of rows whose value is out of vocabulary."""
        if self._column not in self._schema.ids:
            raise UserError(
                f"--by {self._column}: the data set has no such column with one id per row; it has "
                f"{listed(self._schema.ids) or 'none'}"
            )
        ids = part.batch.ids[:, self._schema.ids.index(self._column)]
        return ids.astype(np.uint64), ids == self._by.missing_id, ids < self._schema.first_value

    def lines(self, k: int) -> Iterator[str]:
        """Yield report lines with the metrics; NDCG and recall are at `k`."""
        keys, logits, labels = (np.concatenate(some) for some in zip(*self._parts, strict=True))
        found = rank(keys, logits, labels, k)
        yield (
            f"by {self._column}: GAUC {found.gauc:.4f} over the {found.mixed:,} of {counted(found.groups, 'value')} "
            f"with both labels   NDCG@{k} {found.ndcg:.4f}   recall@{k} {found.recall:.4f} over the "
            f"{found.positive:,} with a positive row"
        )
        if self._missing:
            yield f"         {counted(self._missing, 'row')} left out because {self._column} is missing"
        if self._rare:
            yield f"         {counted(self._rare, 'row')} left out because {self._column} is out of vocabulary"
