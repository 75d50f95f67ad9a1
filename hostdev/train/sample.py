"""Training rows to be evaluated beside the test rows: how much better the model knows what it has been trained on."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader


class TrainingSample:
    """Training rows drawn from every shard alike, the same ones each time.

    root      the data set's folder
    manifest  its manifest
    rows      how many, about: a shard's are rounded up to batches of equal size
    seed      of the drawing
    """

    def __init__(self, root: Path, manifest: Manifest, rows: int, seed: int) -> None:
        self._seed = seed
        self._parts: list[tuple[ShardReader, int]] = []
        share = min(1.0, rows / max(1, manifest.rows("train")))
        before = 0
        for shard in manifest.train:
            after = before + shard.rows
            if wanted := round(after * share) - round(before * share):
                self._parts.append((ShardReader(root, replace(manifest, train=[shard]), "train"), wanted))
            before = after

    def steps(self, batch_size: int) -> int:
        """Return the number of batches."""
        return sum(-(-wanted // batch_size) for _, wanted in self._parts)

    def batches(self, batch_size: int, *, part: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Iterate over the rows, or a part of each batch; none is larger than this. As `ShardReader.batches`."""
        for reader, wanted in self._parts:
            steps = -(-wanted // batch_size)
            yield from islice(reader.batches(-(-wanted // steps), seed=self._seed, part=part), steps)
