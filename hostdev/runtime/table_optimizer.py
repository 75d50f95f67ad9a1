"""The tables' learning rates as a torch optimizer, so that torch's schedulers drive them."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn


class TableOptimizer(torch.optim.Optimizer):
    """A parameter group for each table, with its name and its learning rate; the loop takes the steps.

    ::

        scheduler = torch.optim.lr_scheduler.LinearLR(runtime.optimizer, 0.1, total_iters=1000)
        for batch, rows in runtime.train(loader, ids=ids):
            ...
            optimizer.step()
            scheduler.step()

    As with any optimizer, a rate that is set holds from the next step on: a batch is updated with the rates of the time
    when the optimizer of the dense side takes its step, or in a loop without one, when the batch was given out. The
    same is true of `table.optimizer.lr = 1e-4`.
    """

    def __init__(self, tables: Iterable[Any], drop: Callable[[], None] = lambda: None) -> None:
        self._tables, self._drop = list(tables), drop
        self._rates = [float(table.optimizer.lr) for table in self._tables]  # that they have been given, or had
        groups = [
            {"params": [nn.Parameter(torch.empty(0))], "name": table.name, "lr": table.optimizer.lr}
            for table in self._tables
        ]
        super().__init__(groups, {})
        self._opt_called = True  # so that a scheduler does not miss calls of `step`

    def step(self, closure: Any = None) -> Any:
        """Refuse: the loop over `Runtime.train` takes the tables' steps."""
        raise ValueError("the tables take their steps when the loop comes back for the next batch; leave this call out")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that the rows of the loop's batch have; the next batch's begin without any."""
        self._drop()

    def take_over(self) -> None:
        """Have the rates that the tables have, which a checkpoint has brought."""
        for number, (group, table) in enumerate(zip(self.param_groups, self._tables, strict=True)):
            self._rates[number] = group["lr"] = float(table.optimizer.lr)

    def apply(self) -> None:
        """Set the tables' rates where they have changed here; take over those that were set at the tables.

        ValueError for one that a table's optimizer does not take, and for different ones of tables that share one.
        """
        self._opt_called = True
        wanted = [float(group["lr"]) for group in self.param_groups]
        of_optimizer: dict[int, float] = {}
        for rate, table in zip(wanted, self._tables, strict=True):
            if of_optimizer.setdefault(id(table.optimizer), rate) != rate:
                raise ValueError(
                    f"table {table.name!r} is to have the learning rate {rate}, and another one, with which it shares "
                    f"its optimizer, {of_optimizer[id(table.optimizer)]}; give each an optimizer of its own"
                )
        for number, (group, table) in enumerate(zip(self.param_groups, self._tables, strict=True)):
            if wanted[number] != self._rates[number]:
                table.optimizer.lr = wanted[number]
            self._rates[number] = group["lr"] = float(table.optimizer.lr)
