"""A plugin for Lightning's Trainer that saves the tables with the Trainer's checkpoints."""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from hostdev.core.errors import UserError

_ENTRY = "hostdev_tables"  # key in Lightning's checkpoint; its value is the name of the tables' checkpoint
_PACKAGES = {"lightning": "lightning.fabric.plugins", "pytorch_lightning": "lightning_fabric.plugins"}


def checkpoint_io(runtime: Any) -> Any:
    """Return a plugin that saves, loads and removes a runtime's tables with each checkpoint of a Lightning Trainer.

    ::

        trainer = lightning.Trainer(plugins=[hostdev.ext.frameworks.lightning.checkpoint_io(runtime)])

    With Lightning's checkpoint `epoch=3.ckpt`, the plugin saves a checkpoint of the tables to the folder
    `epoch=3.ckpt.tables` (see `Runtime.save`), and stores the name of the tables' checkpoint in `epoch=3.ckpt`.
    `Trainer.fit`, `validate` and `test` with `ckpt_path` load both checkpoints, and `ModelCheckpoint` removes both. The
    packages `lightning` and `pytorch_lightning` are supported.

    Raises:
        UserError: Neither package is installed; or, when the plugin loads a checkpoint, the checkpoint has no tables.
    """
    runtime.saves_with_framework = True
    loaded = [plugins for package, plugins in _PACKAGES.items() if package in sys.modules]
    bases = tuple(import_module(plugins).TorchCheckpointIO for plugins in loaded or [_installed()])

    class TablesIO(*bases):  # type: ignore[misc]
        def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, *args: Any, **kwargs: Any) -> None:
            folder = _folder(path)
            # Save the tables first: an older checkpoint at `path` refers to its own tables until it is replaced.
            saved = runtime.save(folder, keep=2).wait().path.name
            super().save_checkpoint({**checkpoint, _ENTRY: saved}, path, *args, **kwargs)

        def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
            checkpoint: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
            if _ENTRY not in checkpoint:
                raise UserError(f"{path} has no tables: it was saved by a Trainer without hostdev's checkpoint_io")
            runtime.close_loaders()  # the Trainer may have left loops open, for example after `fit`
            runtime.load(_folder(path) / checkpoint.pop(_ENTRY))
            return checkpoint

        def remove_checkpoint(self, path: Any) -> None:
            super().remove_checkpoint(path)
            shutil.rmtree(_folder(path), ignore_errors=True)

    return TablesIO()


def _installed() -> str:
    for package, plugins in _PACKAGES.items():
        try:
            import_module(package)
        except ModuleNotFoundError:
            continue
        return plugins
    raise UserError("neither lightning nor pytorch_lightning is installed; run: pip install lightning")


def _folder(path: Any) -> Path:
    """Return the folder of the tables that belong to a checkpoint; a link, such as `last.ckpt`, is followed."""
    resolved = os.path.realpath(path)
    return Path(f"{resolved}.tables")
