"""One step's rows, as the reader hands them on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows. The ids are those of the schema's joint space.

    label  float32 [B], 0 or 1
    dense  float32 [B, dense columns], scaled
    ids    int32 or int64 [B, columns of kind "id"]
    bags   by column of kind "bag": the ids of all rows end to end, as `ids` [N], and how many each row has, int32 [B]
    whole  rows of the step's batch, of which these are a part; None: all
    """

    label: npt.NDArray[np.float32]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[Any]
    bags: dict[str, tuple[npt.NDArray[Any], npt.NDArray[np.int32]]]
    whole: int | None = None

    def __len__(self) -> int:
        """Return B."""
        return len(self.label)

    @property
    def step_rows(self) -> int:
        """Rows of the step's batch."""
        return len(self) if self.whole is None else self.whole

    def split(self, edges: Sequence[int]) -> "Iterator[Batch]":
        """Yield the rows between neighbouring edges, as parts of the step's batch; nothing is copied."""
        ends = {name: np.concatenate([[0], np.cumsum(lengths)]) for name, (_, lengths) in self.bags.items()}
        for start, stop in pairwise(edges):
            bags = {
                name: (values[ends[name][start] : ends[name][stop]], lengths[start:stop])
                for name, (values, lengths) in self.bags.items()
            }
            yield Batch(self.label[start:stop], self.dense[start:stop], self.ids[start:stop], bags, self.step_rows)
