"""Files that `export --slots` writes in addition to tables: steps and optimizers, dense optimizer state, `extra`."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.state import read_values

STATE, OPTIMIZER, EXTRA = "state.json", "optimizer.pt", "extra.pt"


def write_state(out: Path, layers: Layers) -> None:
    """Write state.json, and optimizer.pt for a checkpoint of hostdev.train, or extra.pt for one of `Runtime.save`.

    state.json has the checkpoint's step, and each table's step, optimizer with hyperparameters, names of optimizer
    state, and training dtypes. `torch.load` reads the other files without hostdev; NumPy arrays in `extra` become
    tensors.
    """
    found = layers.manifest
    names: tuple[str, ...] = ("rows", "dim", "step", "optimizer", "hyperparameters", "slots", "row_slots")
    names += ("dtype", "slots_dtype", "seed")
    content = {
        "step": found.step,
        "tables": {
            table.name: {name: getattr(table, name) for name in names} | {"hyperparameters": table.arguments}
            for table in found.tables
        },
        "state_sha256": found.state_sha256,
        "state_sha256_version": found.version,
        "versions": found.versions,
        "created": found.created,
    }
    (out / STATE).write_text(json.dumps(content, indent=2) + "\n")
    state = found.state if isinstance(found.state, dict) else {}
    dense = state.get("dense")
    if isinstance(dense, dict) and "optimizer" in dense:
        _write(out / OPTIMIZER, dense["optimizer"], layers)
    if "extra" in state:
        _write(out / EXTRA, state["extra"], layers)


def _write(path: Path, tree: Any, layers: Layers) -> None:
    content = io.BytesIO()  # torch's file writer hides the error of a full disk
    torch.save(_as_tensors(read_values(layers, tree)), content)
    path.write_bytes(content.getbuffer())


def _as_tensors(value: Any) -> Any:
    """Convert the NumPy arrays in nested values to tensors: torch.load(..., weights_only=True) rejects arrays."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {key: _as_tensors(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_as_tensors(each) for each in value)
    return value
