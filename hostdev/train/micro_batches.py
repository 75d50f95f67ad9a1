"""The micro-batches of this rank: their boundaries, their weights, and the seeds of layers such as dropout."""

from collections.abc import Iterable, Iterator

import torch

from hostdev.core.micro_batches import cut
from hostdev.data.batch import Batch
from hostdev.device.backend import seed_generators
from hostdev.kernels.counter import key64


class MicroBatches:
    """This rank's share of the micro-batches of each batch.

    Args:
        count: Micro-batches per batch, over all ranks.
        gradients: "mean" to weight each micro-batch's mean loss by its number of samples; "sum" to add the mean losses.
        seed: Seed of the training run.
        device: Device whose random generators the layers use.
        share: Index of this rank's share, from 0, and the number of shares.
    """

    def __init__(self, count: int, gradients: str, seed: int, device: torch.device, share: tuple[int, int]) -> None:
        self.count, self._gradients, self._seed, self._device = count, gradients, seed, device
        number, shares = share
        self.here = count // shares
        self._first = number * self.here
        self._begun = 0  # micro-batches started on this rank, over all steps

    def begin(self, count: int = 1) -> None:
        """Record that `count` more micro-batches have started."""
        self._begun += count

    def start_after(self, step: int) -> None:
        """Count as if `step` steps had been taken; used when a training run resumes."""
        self._begun = step * self.here

    @property
    def number(self) -> int:
        """The index of this rank's next micro-batch within its step."""
        return self._begun % self.here

    def divide(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield this rank's micro-batches of each batch."""
        for batch in batches:
            if self.count == 1:
                yield batch
                continue
            mine = cut(batch.step_rows, self.count)[self._first : self._first + self.here]
            begin = mine[0][0]
            yield from batch.split([0, *(stop - begin for _, stop in mine)])

    def shares(self, batch: Batch) -> list[float]:
        """Return each micro-batch's share of the step's samples, for the micro-batches of all ranks."""
        return [(stop - start) / batch.step_rows for start, stop in cut(batch.step_rows, self.count)]

    def weight(self, batch: Batch) -> float | None:
        """Return the weight of a micro-batch's loss, or None if batches are not divided into micro-batches."""
        if self.count == 1:
            return None
        return len(batch) / batch.step_rows if self._gradients == "mean" else 1.0

    def seed_layers(self, number: int) -> None:
        """Seed the generators of layers such as dropout for the step's micro-batch `number`."""
        if self.count > 1:
            step = self._begun // self.here
            key = key64(self._seed, "micro-batch", step * self.count + self._first + number)
            seed_generators(self._device, key >> 1)
