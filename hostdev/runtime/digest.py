"""state_sha256: a digest of all that training has learned. Equal digests mean equal models."""

from collections.abc import Iterable
from hashlib import sha256
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

_CHUNK_BYTES = 1 << 24


class _Table(Protocol):
    name: str
    step: int

    @property
    def weights(self) -> Any: ...
    @property
    def slots(self) -> Any: ...


def state_sha256(tables: Iterable[_Table], network: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256, in hexadecimal, of the logical state.

    Tables by name: the number of steps, the weights, then the slots by name; then the dense parameters by name, each
    followed by its optimizer state by name; then the network's persistent buffers by name. Before each array goes a
    line with its name, dtype and shape; arrays are row-major and little-endian. Where a table lies, and how its rows
    are laid out in memory, does not matter.
    """
    digest = sha256()
    for table in sorted(tables, key=lambda table: table.name):
        digest.update(f"table {table.name} step {table.step}\n".encode())
        _add(digest, f"{table.name}/weights", table.weights)
        for name in sorted(table.slots):
            _add(digest, f"{table.name}/{name}", table.slots[name])
    for name, parameter in sorted(network.named_parameters()):
        _add(digest, name, parameter.detach())
        state = optimizer.state.get(parameter, {})
        for key in sorted(state):
            _add(digest, f"{name}/{key}", torch.as_tensor(state[key]))
    parameters = dict(network.named_parameters(remove_duplicate=False))
    for name, value in sorted(network.state_dict().items()):
        if name not in parameters and isinstance(value, torch.Tensor):
            _add(digest, name, value)
    return digest.hexdigest()


def _add(digest: Any, name: str, values: Any) -> None:
    digest.update(f"{name} {str(values.dtype).removeprefix('torch.')} {list(values.shape)}\n".encode())
    rows = values if values.ndim else values.reshape(1)
    row_bytes = max(1, rows[:1].nbytes)
    step = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        if isinstance(chunk, torch.Tensor):
            chunk = chunk.cpu().numpy()
        digest.update(np.ascontiguousarray(chunk).data)
