"""Which kernel takes an optimizer's step; on the CPU host tables and device tables share it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.kernels.ftrl import ftrl
from hostdev.kernels.lazy_adam import lazy_adam

_KERNELS: dict[str, Callable[..., None]] = {
    "FusedSparseFtrl": ftrl,
    "FusedSparseLazyAdam": lazy_adam,
}


def apply_rows(
    primitive: str,
    block: npt.NDArray[np.float32],
    ids: npt.NDArray[Any],
    grads: npt.NDArray[np.float32],
    scalars: tuple[Any, ...],
) -> None:
    """Take one optimizer step on unique rows, in place.

    primitive  the optimizer's op, such as "FusedSparseFtrl"
    block      float32 [V, 1 + S, D]: weights and slots of a row in one stretch
    ids        int32 or int64 [U], unique, each in [0, V)
    grads      float32 [U, D]
    scalars    the optimizer's scalars at this step
    """
    _KERNELS[primitive](block, ids, grads, *scalars)
