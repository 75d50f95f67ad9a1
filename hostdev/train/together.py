"""Scores of all ranks, collected on rank 0."""

import numpy as np
import numpy.typing as npt

from hostdev.distributed.world import World
from hostdev.train.scores import Figures
from hostdev.train.target_scores import TargetScores

_AT_ONCE = 1 << 20  # send samples to rank 0 when all ranks together hold this number


class Together:
    """Collects the scores of all ranks on rank 0, in the order of the samples: by batch, then by rank.

    All ranks must make the same calls, except those of `add`. Memory use is bounded.

    Args:
        to: Receives the scores on rank 0.
        labels: Number of labels.
    """

    def __init__(self, ranks: World, to: TargetScores, labels: int = 1) -> None:
        self._ranks, self._to, self._labels = ranks, to, labels
        self._parts: list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]] = []
        self._sizes: list[int] = []  # this rank's samples in each waiting batch
        self._mine = self._all = 0  # this rank's samples in this batch; all ranks' samples in waiting batches

    def add(self, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Add samples of this rank's part of a batch, as `TargetScores.add` does; the arrays are kept, not copied."""
        self._parts.append((logits, labels))
        self._mine += len(logits)

    def end_batch(self, rows: int) -> None:
        """End a batch that has `rows` samples over all ranks."""
        self._sizes.append(self._mine)
        self._mine, self._all = 0, self._all + rows
        if self._all >= _AT_ONCE:
            self._send()

    def figures(self) -> list[Figures]:
        """Return, on every rank, the figures of each label over the samples of all ranks."""
        self._send()
        found = self._to.figures() if self._ranks.rank == 0 else None
        return [Figures(*each) for each in self._ranks.control.share(found)[0]]

    def _send(self) -> None:
        control = self._ranks.control
        edges = [np.cumsum(each)[:-1] for each in control.gather(np.array(self._sizes, np.int64))]
        mine = zip(*self._parts, strict=True) if self._parts else ([], [])
        by_rank = []
        for values in mine:
            all_of_it = control.gather(np.concatenate([np.empty(0, np.float32), *(each.ravel() for each in values)]))
            shaped = [each if self._labels == 1 else each.reshape(-1, self._labels) for each in all_of_it]
            by_rank.append([np.split(each, edge) for each, edge in zip(shaped, edges, strict=True)])
        if self._ranks.rank == 0:
            logits, labels = by_rank
            for batch in range(len(self._sizes)):
                for rank in range(self._ranks.size):
                    self._to.add(logits[rank][batch], labels[rank][batch])
        self._parts, self._sizes, self._all = [], [], 0


def collect_scores(world: World, to: TargetScores, labels: int = 1) -> TargetScores | Together:
    """Return what collects the scores of all ranks in `to` of rank 0; one process adds them to `to` itself."""
    return Together(world, to, labels) if world.size > 1 else to
