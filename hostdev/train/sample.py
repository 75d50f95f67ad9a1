"""Training samples that are evaluated along with the test samples; a difference in quality shows overfitting."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader


class TrainingSample:
    """Random training samples, drawn evenly from all shards; each evaluation uses the same ones.

    Args:
        root: The data set's folder.
        manifest: The data set's manifest.
        rows: Approximate number of samples. Each shard's number is rounded up, so that its batches have equal sizes.
        seed: Seed of the draw.
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
        """Iterate over batches of at most `batch_size` samples, or a part of each, as `ShardReader.batches` does."""
        for reader, wanted in self._parts:
            steps = -(-wanted // batch_size)
            yield from islice(reader.batches(-(-wanted // steps), seed=self._seed, part=part), steps)
