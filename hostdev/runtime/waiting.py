"""Finds out whether a dense optimizer has yet to step with a batch; if so, the batch is unfinished.

This search runs only for a loop's first batch with gradients, and only if the loop leaves that batch, or a table is
read, before any optimizer has stepped. For later batches it is known whether optimizers step in the loop.
"""

import gc
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from hostdev.runtime.table_optimizer import TableOptimizer


def leaves_of(roots: Iterable[Any]) -> list[Tensor]:
    """Return the leaf tensors that get gradients in a backward pass from these tensors or graph edges."""
    found = [root.grad_fn if isinstance(root, Tensor) else root.node for root in roots]
    nodes = [node for node in found if node is not None]
    seen: set[Any] = set(nodes)
    leaves = []
    while nodes:
        node = nodes.pop()
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            leaves.append(leaf)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return leaves


def optimizers_of(parameters: Sequence[Tensor]) -> list[Optimizer]:
    """Return the dense optimizers that have one of these parameters."""
    if not parameters:
        return []
    gc.collect()  # deletes unreferenced optimizers, which do not count
    wanted = {id(parameter) for parameter in parameters}
    optimizers = [found for found in gc.get_objects() if _is_dense(type(found))]
    return [one for one in optimizers if any(id(parameter) in wanted for parameter in _parameters(one))]


def _is_dense(kind: type) -> bool:
    return issubclass(kind, Optimizer) and not issubclass(kind, TableOptimizer)


def first_parameter(optimizer: Optimizer) -> Tensor | None:
    """Return an optimizer's first parameter that has a gradient, or None."""
    return next((parameter for parameter in _parameters(optimizer) if parameter.grad is not None), None)


def _parameters(optimizer: Optimizer) -> Iterable[Tensor]:
    groups: list[dict[str, Any]] = getattr(optimizer, "param_groups", [])  # missing during construction
    return (parameter for group in groups for parameter in group["params"])
