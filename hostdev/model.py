"""What a pipeline runs."""

from typing import Any, Protocol

import numpy.typing as npt
from torch import Tensor

from hostdev.batch import Batch
from hostdev.embedding import Positions

Ids = npt.NDArray[Any]


class Model(Protocol):
    """The dense part, and what it needs on the device."""

    reads_whole_tables: bool  # in `step`, which must wait until every earlier batch has been updated

    def unique(self, batch: Batch) -> tuple[Ids, Positions]:
        """Deduplicate the ids: return unique ids [U] and the inverse, as `hostdev.unique`; in the fetcher's thread."""

    def prepare(self, batch: Batch, ids: Ids, inverse: Positions) -> Any:
        """Send what the step needs to the device; in the fetcher's thread, not long before the step.

        The result's `ids` are the unique ids [U] on the device, if the tables are there.
        """

    def await_prepared(self, prepared: Any) -> None:
        """Let the device wait for what `prepare` has sent."""

    def step(self, prepared: Any, rows: list[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return a result and, unless it only predicts, the gradient float32 [U, D] of each table's rows."""
