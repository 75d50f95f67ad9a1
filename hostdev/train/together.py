"""What the ranks of a training do with their predictions."""

import numpy as np
import numpy.typing as npt

from hostdev.distributed.process_group import Ranks
from hostdev.train.scores import Figures, Scores

_AT_ONCE = 1 << 20  # rows of all ranks


class Together:
    """Collects the scores of all ranks on the first one, in the order of the rows: batch by batch, each by rank.

    All ranks call what one calls, but for `add`; what they hold for it is bounded, too.

    to  where the first one's go
    """

    def __init__(self, ranks: Ranks, to: Scores) -> None:
        self._ranks, self._to = ranks, to
        self._parts: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = []
        self._sizes: list[int] = []  # of this rank's parts of the batches
        self._mine = self._all = 0  # rows of the batch, and of those that wait

    def add(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Take in rows of this rank's part of a batch, as `Scores.add`; they are not copied yet."""
        self._parts.append((logits, labels))
        self._mine += len(logits)

    def end_batch(self, rows: int) -> None:
        """Note that a batch of so many rows, on all ranks, is complete."""
        self._sizes.append(self._mine)
        self._mine, self._all = 0, self._all + rows
        if self._all >= _AT_ONCE:
            self._send()

    def figures(self) -> Figures:
        """Return the figures of all rows, on every rank."""
        self._send()
        found = self._to.figures() if self._ranks.rank == 0 else None
        return Figures(*self._ranks.control.share(found)[0])

    def _send(self) -> None:
        control = self._ranks.control
        edges = [np.cumsum(each)[:-1] for each in control.gather(np.array(self._sizes, np.int64))]
        mine = zip(*self._parts, strict=True) if self._parts else ([], [])
        by_rank = []
        for values in mine:
            all_of_it = control.gather(np.concatenate([np.empty(0, np.float32), *values]))
            by_rank.append([np.split(each, edge) for each, edge in zip(all_of_it, edges, strict=True)])
        if self._ranks.rank == 0:
            logits, labels = by_rank
            for batch in range(len(self._sizes)):
                for rank in range(self._ranks.size):
                    self._to.add(logits[rank][batch], labels[rank][batch])
        self._parts, self._sizes, self._all = [], [], 0
