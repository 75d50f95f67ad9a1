"""A runtime's tables to disk and back, with what a user's program wants to keep beside them."""

import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from hostdev.checkpoint.checkpoints import Checkpoints
from hostdev.checkpoint.loading import load_tables, newest_whole, require_tables, values_of
from hostdev.checkpoint.saving import Content, Saving
from hostdev.checkpoint.tree import to_tree


class Keeper:
    """Where a runtime has saved to, so that the next checkpoint there can add to the one before."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._folders: dict[Path, Checkpoints] = {}

    def save(self, path: Path, extra: Any, keep: int, *, wait: bool) -> Saving:
        """See `Runtime.save`."""
        tensors: dict[str, Tensor] = {}
        state = to_tree({"extra": extra}, tensors)
        for each in self._folders.values():
            each.join()  # a table has one snapshot at a time
        to = self._folders.setdefault(path.resolve(), Checkpoints(path))
        to.keep = keep
        self._runtime.learning_rates()  # those that a scheduler has set for the next batch
        to.lock()
        saving = to.save(
            self._runtime.tables.values(), self._runtime.pipeline.steps, Content(state, tensors, {}, [])
        )  # fmt: skip
        if wait:
            saving.wait()
        return saving

    def load(self, path: Path) -> Any:
        """See `Runtime.load`."""
        for each in self._folders.values():
            each.join()
        chain, broken = newest_whole(path)
        for line in broken:
            warnings.warn(f"{line}; {chain[-1].path} is loaded instead", stacklevel=3)
        tables = self._runtime.tables
        require_tables(chain, tables)
        load_tables(chain, tables)
        if self._runtime.has_optimizer:
            self._runtime.optimizer.take_over()
        to = self._folders.setdefault(chain[-1].path.parent.resolve(), Checkpoints(chain[-1].path.parent))
        to.start_from(chain, tables.values())
        self._runtime.pipeline.steps = chain[-1].manifest.step
        return values_of(chain)["extra"]

    def close(self) -> None:
        """Wait for what is being written."""
        for each in self._folders.values():
            each.close()
