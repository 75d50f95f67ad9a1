"""Random streams for reading: a loader, `ids` and `send` draw the same numbers at any depth.

A loop reads ahead of its body, and both may draw from the same global generator: torch's, NumPy's, Python's `random`,
or the device's. The order of their draws would depend on how far ahead the loop reads. So each batch is read with its
own streams: each global generator is seeded from its state when the loop began and from the number of the batch, and
its state is restored afterwards. The draws for a batch then depend only on the global seeds and the batch's number, not
on depth, caches, or the process that reads the batch.

The first `next` of a new iterator draws from the global generators directly: a `DataLoader` that shuffles takes its
seed there, the same one as in a plain torch loop.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from hostdev.distributed.world import World
from hostdev.kernels.counter import key64
from hostdev.runtime.generators import get_generators


class Place(NamedTuple):
    """A position in a sequence of batches, and the seeds of the batches' random streams.

    Attributes:
        seeds: Each generator's seed, by name.
        position: Number of batches that were yielded, including those of other processes.
        advanced: Names of the generators that have been advanced since the sequence began.
    """

    seeds: dict[str, int]
    position: int = 0
    advanced: tuple[str, ...] = ()

    def to_state(self) -> dict[str, Any]:
        """Return the position for a checkpoint; seeds are text, because they use all 64 bits."""
        seeds = {name: str(seed) for name, seed in self.seeds.items()}
        return {"seeds": seeds, "position": self.position, "advanced": list(self.advanced)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Place":
        """Return the position from the result of `to_state`."""
        seeds = {name: int(seed) for name, seed in state["seeds"].items()}
        return cls(seeds, state["position"], tuple(state["advanced"]))


class RandomStreams:
    """The random streams of a loader's batches, by batch number.

    Args:
        device: The runtime's device, whose generator counts as a global one.
        place: Where an earlier loop over the same batches ended, or a checkpoint's position; None for a new sequence.
        stride: Number of batches per step, over all processes.
        each: Number of batches per step that this process reads; they are consecutive.
        first: Index, within a step, of this process's first batch.

    Attributes:
        start: Number of batches that this process had yielded when the loop began.
    """

    def __init__(
        self, device: torch.device, place: Place | None = None, *, stride: int = 1, each: int = 1, first: int = 0
    ) -> None:
        self._generators = get_generators(device)
        self.is_new = place is None
        if place is None:
            place = Place({one.name: one.fingerprint() for one in self._generators})
        self._seeds = place.seeds
        self._advanced = set(place.advanced)
        self.start = self._given = place.position // stride * each
        self._first, self._stride, self._each = first, stride, each

    @property
    def place(self) -> Place:
        """The position after the batches that were yielded."""
        position = self._given // self._each * self._stride
        return Place(dict(self._seeds), position, tuple(sorted(self._advanced)))

    @contextmanager
    def reading(self, position: int) -> Iterator[list[str]]:
        """In a `with` block that reads a batch, let the generators draw from the batch's own streams.

        Args:
            position: Number of batches that this process has read before this one, also in earlier loops.

        Yields:
            A list that, after the block, has the names of the generators that were used in it.
        """
        step, place = divmod(position, self._each)
        number = step * self._stride + self._first + place
        drew: list[str] = []
        before = [one.state() for one in self._generators]
        begun: list[Any] = []
        try:
            for one in self._generators:
                one.seed(key64(self._seeds.get(one.name, 0), one.name, number))
                begun.append(one.state())
            yield drew
        finally:
            for one, start in zip(self._generators, begun, strict=False):
                if one.state() != start:
                    drew.append(one.name)
            for one, state in zip(self._generators, before, strict=True):
                one.restore(state)

    def give(self, drew: Sequence[str]) -> None:
        """Count a batch as yielded; `drew`: the names of the generators that were used to read the batch.

        When a batch has used a generator for the first time, the generator is advanced by one number, so that the next
        loop begins from another state.
        """
        self._given += 1
        for one in self._generators:
            if one.name in drew and one.name not in self._advanced:
                self._advanced.add(one.name)
                one.draw()


def make_streams(device: torch.device, world: World, place: Place | None, each: int) -> RandomStreams:
    """Return the streams of a loop's batches.

    Args:
        device: The runtime's device.
        world: The ranks, each of which reads its share of a step's batches.
        place: The position at which the batches continue; None at the beginning.
        each: Number of batches per step that this process reads.
    """
    share, shares = world.share()
    if shares == 1:
        return RandomStreams(device, place)
    return RandomStreams(device, place, stride=each * shares, each=each, first=each * share)
