"""The tables' learning rates as a torch optimizer, so that torch's schedulers drive them."""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import nn

# Settings of torch's optimizers, and the values with which they say what the tables' optimizers do anyway.
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "weight_decay": (0,), "momentum": (0,), "dampening": (0,), "lr_decay": (0,), "maximize": (False,),
    "amsgrad": (False,), "nesterov": (), "betas": (), "eps": (), "alpha": (), "rho": (), "centered": (False,),
    "initial_accumulator_value": (), "momentum_decay": (), "lambd": (), "etas": (), "step_sizes": (),
}  # fmt: skip


class TableOptimizer(torch.optim.Optimizer):
    """A parameter group for each table, with its name and its learning rate; the loop takes the steps.

    ::

        scheduler = torch.optim.lr_scheduler.LinearLR(runtime.optimizer, 0.1, total_iters=1000)
        for batch, rows in runtime.train(loader, ids=ids):
            ...
            optimizer.step()
            scheduler.step()

    As with any optimizer, a rate that is set holds from the next step on: a batch is updated with the rates of the time
    when the optimizer of the dense side takes its step, or in a loop without one, when its last `backward` has brought
    the gradients. The same is true of `table.optimizer.lr = 1e-4`.
    """

    def __init__(self, tables: Iterable[Any], drop: Callable[[], None] = lambda: None) -> None:
        self._tables, self._drop = list(tables), drop
        self._rates = [float(table.optimizer.lr) for table in self._tables]  # that they have been given, or had
        groups = [
            {"params": [nn.Parameter(torch.empty(0))], "name": table.name, "lr": table.optimizer.lr}
            for table in self._tables
        ]
        self._names: list[str] = []  # there while it is being made
        super().__init__(groups, {})
        self._names = [table.name for table in self._tables]
        self._opt_called = True  # so that a scheduler does not miss calls of `step`

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: there is one group for each table of the runtime."""
        if self._names:
            raise ValueError(
                f"runtime.optimizer has a group for each of the tables {', '.join(self._names)}, and takes no others; "
                "give the dense parameters an optimizer of their own, and a new table a new Runtime"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the rates of the tables of the same names; ValueError where there are others, or a wrong rate."""
        groups = state_dict["param_groups"]
        by_name = {group.get("name"): group for group in groups}
        if len(groups) != len(by_name) or set(by_name) != set(self._names):
            raise ValueError(
                f"the state is of an optimizer with the groups {', '.join(map(str, by_name))}, and runtime.optimizer "
                f"has those of the tables {', '.join(self._names)}"
            )
        ordered = [by_name[name] for name in self._names]
        for group in ordered:
            _require_group(group, group["name"])
        places = {at: number for number, group in enumerate(ordered) for at in group["params"]}
        super().load_state_dict({
            "state": state_dict["state"],
            "param_groups": [{**group, "params": [places[at] for at in group["params"]]} for group in ordered],
        })  # fmt: skip

    def step(self, closure: Any = None) -> Any:
        """Refuse: the loop over `Runtime.train` takes the tables' steps."""
        raise ValueError("the tables take their steps when the loop comes back for the next batch; leave this call out")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the batch's rows, unless an optimizer has stepped with them."""
        self._drop()

    def take_over(self) -> None:
        """Have the rates that the tables have, which a checkpoint has brought."""
        for number, (group, table) in enumerate(zip(self.param_groups, self._tables, strict=True)):
            self._rates[number] = group["lr"] = float(table.optimizer.lr)

    def apply(self) -> None:
        """Set the tables' rates where they have changed here; take over those that were set at the tables.

        ValueError for one that a table's optimizer does not take, for different ones of tables that share one, and for
        settings of a group that the tables do not have.
        """
        self._opt_called = True
        if [group.get("name") for group in self.param_groups] != self._names:
            raise ValueError(f"the groups of runtime.optimizer are those of the tables {', '.join(self._names)}")
        for group in self.param_groups:
            _require_group(group, group["name"])
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
                try:
                    table.optimizer.lr = wanted[number]
                except ValueError as error:
                    raise ValueError(f"table {table.name!r}: {error}") from None
            self._rates[number] = group["lr"] = float(table.optimizer.lr)


def _require_group(group: Mapping[str, Any], table: str) -> None:
    """Raise ValueError for settings that have no effect on a table, or a learning rate that is none."""
    for name, same in _SETTINGS.items():
        if name in group and not any(group[name] == value for value in same):
            raise ValueError(
                f"table {table!r}: its group in runtime.optimizer has {name}={group[name]!r}, which has no effect; "
                "only lr is set there. Other settings are given to the table's optimizer when it is made; for weight "
                "decay add rows.unique(table)[0].square().sum() to the loss"
            )
    rate = group.get("lr")
    single = isinstance(rate, torch.Tensor) and rate.numel() == 1
    if isinstance(rate, bool) or not (isinstance(rate, Real) or single) or not math.isfinite(float(rate)):  # type: ignore[arg-type]
        raise ValueError(f"table {table!r}: its learning rate in runtime.optimizer is to be a number, not {rate!r}")
    if float(rate) < 0:  # type: ignore[arg-type]
        raise ValueError(f"table {table!r}: its learning rate in runtime.optimizer is to be at least 0, not {rate!r}")
