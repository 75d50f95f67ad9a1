"""The options of a training run, and defaults that depend on other options."""

from dataclasses import dataclass, replace
from typing import Self

from hostdev.cache.options import AUTO, POLICIES, WINDOW, rows_of
from hostdev.train.options import (
    REFERENCE_BATCH_SIZE,
    CheckpointOptions,
    EmbeddingOptions,
    LengthOptions,
    ModelOptions,
    OutputOptions,
    ProcessOptions,
    ThreadOptions,
)
from hostdev.train.storage_options import CacheOptions, DiskOptions, KeyOptions


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    ModelOptions,
    LengthOptions,
    EmbeddingOptions,
    KeyOptions,
    DiskOptions,
    CacheOptions,
    OutputOptions,
    CheckpointOptions,
    ProcessOptions,
    ThreadOptions,
):
    """The options of a training run. `resolved` fills in the defaults that depend on other options."""

    def resolved(self) -> Self:
        """Return the settings, with defaults that depend on other options filled in."""
        epochs, batch_size = (15, REFERENCE_BATCH_SIZE) if self.data is not None else (2, 1000)
        filled = replace(self, epochs=self.epochs or epochs, batch_size=self.batch_size or batch_size)
        if self.micro_batches > 1:  # results must not depend on the number of processes
            filled = replace(filled, torch_threads=self.torch_threads or 1, gradients=self.gradients or "mean")
        if self.cache_rows == AUTO:
            return filled
        if self.cache_rows is None or not rows_of(self.cache_rows, 1 << 30):
            return replace(filled, cache_rows="0", cache_policy=None, cache_window=None)
        policy = self.cache_policy or POLICIES[0]
        window = WINDOW if self.cache_window is None else self.cache_window
        return replace(filled, cache_policy=policy, cache_window=window if policy == "lookahead" else None)
