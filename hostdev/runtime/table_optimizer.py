"""A torch optimizer over the tables, through which schedulers set learning rates and scalers see the rows.

`TableSettings` has what a program may change during training: learning rates and frozen tables.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, overload

import torch
from torch import Tensor, nn

from hostdev.runtime.features import Table


class TableSettings:
    """Learning rates and frozen tables.

    Args:
        tables: The runtime's tables.
    """

    def __init__(self, tables: Iterable[Table]) -> None:
        self._tables = {table.name: table for table in tables}
        self._frozen: set[str] = set()
        self.optimizer: TableOptimizer | None = None  # the tables' torch optimizer, if the program uses it

    def freeze(self, names: Iterable[str]) -> None:
        """Freeze the named tables, or all if no name is given, from the next batch on."""
        self._frozen |= self._check_names(names)

    def unfreeze(self, names: Iterable[str]) -> None:
        """Undo `freeze`."""
        self._frozen -= self._check_names(names)

    def is_frozen(self, table: Table) -> bool:
        """Return whether a table is frozen."""
        return table.name in self._frozen

    def _check_names(self, names: Iterable[str]) -> set[str]:
        given = set(names)
        for name in given - self._tables.keys():
            raise ValueError(f"no table {name!r}; the tables are {', '.join(self._tables)}")
        return given or set(self._tables)

    def learning_rates(self) -> list[float]:
        """Apply the rates that a scheduler has set, and return the tables' learning rates."""
        if self.optimizer is not None:
            self.optimizer.apply()
        return [table.optimizer.lr for table in self._tables.values()]

    def exchange_rates(self, rates: list[float]) -> list[float]:
        """Set the tables' learning rates; return the previous ones."""
        tables = list(self._tables.values())
        before = [table.optimizer.lr for table in tables]  # read all first: tables may share an optimizer
        for table, rate in zip(tables, rates, strict=True):
            if table.optimizer.lr != rate:
                table.optimizer.lr = rate
        return before


# Settings of torch's optimizers that tables ignore, each with the values that a group may have: they change nothing.
_SETTINGS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("weight_decay", "momentum", "dampening", "lr_decay"), (0,)),
    **dict.fromkeys(("maximize", "amsgrad", "centered"), (False,)),
    **dict.fromkeys(("nesterov", "betas", "eps", "alpha", "rho", "initial_accumulator_value"), ()),
    **dict.fromkeys(("momentum_decay", "lambd", "etas", "step_sizes"), ()),
}


class _RowParameters(Sequence[Tensor]):
    """The single parameter of a table's group: the rows of the body's batch, or an empty tensor."""

    def __init__(self, get_rows: Callable[[], Tensor | None]) -> None:
        self._get_rows, self._none = get_rows, nn.Parameter(torch.empty(0))

    @overload
    def __getitem__(self, at: int) -> Tensor: ...
    @overload
    def __getitem__(self, at: slice) -> list[Tensor]: ...
    def __getitem__(self, at: int | slice) -> Tensor | list[Tensor]:
        rows = self._get_rows()
        return [self._none if rows is None else rows][at]

    def __len__(self) -> int:
        return 1


class TableOptimizer(torch.optim.Optimizer):
    """A torch optimizer over the tables; the result of `Runtime.optimizer`.

    There is a parameter group for each table, with its name and learning rate. While a batch is in the loop's body, the
    group's parameter is the batch's rows of the table, as in `Rows.parameters`; otherwise it is empty.

    ::

        scheduler = torch.optim.lr_scheduler.LinearLR(runtime.optimizer, 0.1, total_iters=1000)
        for batch, rows in runtime.train(loader, ids=ids):
            ...
            optimizer.step()
            scheduler.step()

    The tables are updated when the loop goes on to the next batch; `step` marks the batch for this update. A program
    whose dense optimizer steps with each batch need not call `step`. This optimizer may also be passed to a
    `GradScaler`: `unscale_` divides the gradients of the rows once, and an overflow in the gradients of rows or of
    dense parameters skips the steps of both.

    A changed learning rate, also one set by `table.optimizer.lr = 1e-4`, applies from the next step on: a batch's step
    uses the rates at the time of the dense optimizer's step or, in a loop without a dense optimizer, at the time of the
    last `backward` that gave gradients.
    """

    def __init__(
        self,
        tables: Sequence[Table],
        is_open: Callable[[], bool],
        get_rows: Callable[[Table], Tensor | None],
        drop_gradients: Callable[[], None],
    ) -> None:
        self._tables, self._is_open, self._find_rows = list(tables), is_open, get_rows
        self._drop_gradients = drop_gradients
        self._rates = [float(table.optimizer.lr) for table in self._tables]  # the rates that were last set or read
        self._hides_rows = False
        groups = [
            {"params": [nn.Parameter(torch.empty(0))], "name": table.name, "lr": table.optimizer.lr}
            for table in self._tables
        ]
        self._names: list[str] = []  # read by `add_param_group` during construction
        super().__init__(groups, {})
        self._names = [table.name for table in self._tables]
        for group, table in zip(self.param_groups, self._tables, strict=True):
            group["params"] = _RowParameters(lambda table=table: self._get_rows(table))  # type: ignore[misc]
        self._opt_called = True  # so that a scheduler does not warn about a missing `step`

    def _get_rows(self, table: Table) -> Tensor | None:
        return None if self._hides_rows else self._find_rows(table)

    @contextmanager
    def without_rows(self) -> Iterator[None]:
        """Hide the rows in a `with` block, so that a scaler does not divide their gradients twice."""
        self._hides_rows = True
        try:
            yield
        finally:
            self._hides_rows = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: there is exactly one group for each table of the runtime."""
        if self._names:
            raise ValueError(
                f"runtime.optimizer has one group for each of the tables {', '.join(self._names)}, and accepts no "
                "others; create another optimizer for dense parameters, and another Runtime for a new table"
            )
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set each table's learning rate from the group with its name; raise ValueError for wrong names or rates."""
        groups = state_dict["param_groups"]
        by_name = {group.get("name"): group for group in groups}
        if len(groups) != len(by_name) or set(by_name) != set(self._names):
            raise ValueError(
                f"the state has the groups {', '.join(map(str, by_name))}, but runtime.optimizer has one group for "
                f"each of the tables {', '.join(self._names)}"
            )
        ordered = [by_name[name] for name in self._names]
        for group in ordered:
            _require_group(group, group["name"])
        places = {at: number for number, group in enumerate(ordered) for at in group["params"]}
        renumbered = [{**group, "params": [places[at] for at in group["params"]]} for group in ordered]
        super().load_state_dict({"state": state_dict["state"], "param_groups": renumbered})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Record a step for the current batch; the tables are updated when the loop moves on to the next batch.

        Args:
            closure: Computes the loss and its gradients again, as for any optimizer.

        Returns:
            The closure's loss.

        Raises:
            ValueError: No loop over `train` is open.
        """
        if not self._is_open():
            raise ValueError(
                "runtime.optimizer.step() was called without a batch: call it in the body of a loop over "
                "runtime.train(), before the loop is left"
            )
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the batch's rows, unless an optimizer has stepped with them.

        After a loop has ended, forget the gradients that it left without a step, so that no warning mentions them.
        """
        self._drop_gradients()

    def take_over(self) -> None:
        """After a checkpoint was loaded, set each group's rate to that of its table."""
        for number, (group, table) in enumerate(zip(self.param_groups, self._tables, strict=True)):
            self._rates[number] = group["lr"] = float(table.optimizer.lr)

    def apply(self) -> None:
        """Apply changed rates of groups to their tables, and changed rates of tables to their groups.

        Raises:
            ValueError: A table's optimizer rejects a rate, tables that share an optimizer have different rates, or a
                group has settings that the tables do not have.
        """
        self._opt_called = True
        if [group.get("name") for group in self.param_groups] != self._names:
            raise ValueError(
                f"runtime.optimizer must keep its groups, one for each of the tables {', '.join(self._names)}, in "
                "this order"
            )
        for group in self.param_groups:
            _require_group(group, group["name"])
        wanted = [float(group["lr"]) for group in self.param_groups]
        of_optimizer: dict[int, float] = {}
        for rate, table in zip(wanted, self._tables, strict=True):
            if of_optimizer.setdefault(id(table.optimizer), rate) != rate:
                raise ValueError(
                    f"table {table.name!r} has the learning rate {rate} in its group, but another table with the same "
                    f"optimizer has {of_optimizer[id(table.optimizer)]}; give each table its own optimizer"
                )
        for number, (group, table) in enumerate(zip(self.param_groups, self._tables, strict=True)):
            if wanted[number] != self._rates[number]:
                try:
                    table.optimizer.lr = wanted[number]
                except ValueError as error:
                    raise ValueError(f"table {table.name!r}: {error}") from None
            self._rates[number] = group["lr"] = float(table.optimizer.lr)


def _require_group(group: Mapping[str, Any], table: str) -> None:
    """Raise ValueError for settings that have no effect on a table, or for a wrong learning rate."""
    for name, same in _SETTINGS.items():
        if name in group and not any(group[name] == value for value in same):
            raise ValueError(
                f"table {table!r}: its group in runtime.optimizer has {name}={group[name]!r}, which has no effect; "
                "only lr can be set there. Give other settings, such as weight_decay, to the table's own optimizer"
            )
    rate = group.get("lr")
    single = isinstance(rate, torch.Tensor) and rate.numel() == 1
    if isinstance(rate, bool) or not (isinstance(rate, Real) or single) or not math.isfinite(float(rate)):  # type: ignore[arg-type]
        raise ValueError(f"table {table!r}: its rate in runtime.optimizer must be a finite number, not {rate!r}")
    if float(rate) < 0:  # type: ignore[arg-type]
        raise ValueError(f"table {table!r}: its rate in runtime.optimizer must be at least 0, not {rate!r}")
