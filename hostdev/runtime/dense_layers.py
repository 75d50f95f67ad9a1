"""Warns of dense layers and tables that are of different steps, since a module's state dict does not hold the tables.

While a runtime exists, these functions are wrapped:

- `Module.state_dict` adds a stamp to the state of a module that the runtime's loops train: the tables' number of steps.
  The stamp is in the state dict's metadata, which `torch.save` and `copy.deepcopy` keep, and not among its entries.
- `Module.load_state_dict` records the stamp, which is compared with the tables' number of steps. If a module has been
  trained since the tables were last loaded, a state without a stamp must have the module's last values.
- `AveragedModel.update_parameters` and the creation of an `SWALR` show that a program averages dense layers.
- `Accelerator.load_state`, if accelerate is imported, shows that a program has restored states without stamps.

A warning waits for the next use of the tables, because a program may load or write them after the module.
"""

import functools
import hashlib
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, finalize

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel
from torch.utils.weak import WeakIdKeyDictionary

from hostdev.pipeline.pipeline import Pipeline
from hostdev.runtime.ema import averaged_tables
from hostdev.runtime.features import Table
from hostdev.runtime.loss_scaling import Function, Replacement, TorchHooks
from hostdev.runtime.table_optimizer import TableSettings

_STAMP = "hostdev_tables"  # the stamp's key in the metadata of a state dict's root module
_CURE = (
    "A module's state dict does not hold the tables: load those of the same checkpoint, too. runtime.save(path, "
    "extra=...) and runtime.load(path) keep both together, and so does Lightning's Trainer with plugins=[hostdev."
    "frameworks.lightning.checkpoint_io(runtime)], which saves the tables of NAME.ckpt to NAME.ckpt.tables"
)


@dataclass
class _Loaded:
    """A state that was loaded into a module.

    Attributes:
        what: The beginning of the warning.
        steps: The tables' number of steps when the state was made; None if it has no stamp.
        shared: Whether the module may belong to another runtime.
        settled: Whether the state was compared with the tables.
    """

    what: str
    steps: int | None = None
    shared: bool = False
    settled: bool = False


class DenseLayers:
    """The dense parameters that a runtime's loops train, compared with the tables' steps when states are loaded.

    Args:
        tables: The runtime's tables by name.
        pipeline: Counts the steps.
        settings: The tables' settings.

    Attributes:
        has_trained: Whether an optimizer has stepped in a loop.
    """

    def __init__(self, tables: Mapping[str, Table], pipeline: Pipeline, settings: TableSettings) -> None:
        self.tables, self._pipeline, self._settings = tables, pipeline, settings
        self._loop: ReferenceType[Any] | None = None  # the open loop over `train`
        self._taken = 0  # number of steps, including those of the open loop that the tables take later
        self.has_trained = False
        self._parameters: Any = WeakIdKeyDictionary()
        self._optimizers: WeakSet[Optimizer] = WeakSet()
        self._writes = 0  # number of the program's writes to the tables up to their last step or load
        self._is_stepped = False  # whether the tables took steps since they were created or loaded
        self._is_fresh = True  # whether the tables were neither stepped nor loaded, and the program was not warned
        self._digest: bytes | None = None  # of the parameters after the last step, set before a state is loaded
        self._loaded: WeakKeyDictionary[Any, _Loaded] = WeakKeyDictionary()  # by module, optimizer or accelerator
        self._has_warned_of_averages = False
        _watch(self)

    @property
    def steps(self) -> int:
        """The tables' number of steps, including the step of the body's batch once an optimizer has stepped."""
        loop = None if self._loop is None else self._loop()
        return self._pipeline.steps if loop is None else self._taken + loop.is_stepped

    def begin_loop(self, loop: ReferenceType[Any]) -> None:
        """Begin to count the steps of a loop over `train`, which the tables take later; warn as `require_same` does."""
        self.require_same()
        self._loop, self._taken = loop, self._pipeline.steps

    def end_loop(self) -> None:
        """End the count of the loop's steps, which the tables now have."""
        self._loop = None

    def trains(self, module: torch.nn.Module) -> bool:
        """Return whether the runtime's loops have trained parameters of a module."""
        return any(parameter in self._parameters for parameter in module.parameters())

    def note_optimizer(self, optimizer: Optimizer) -> None:
        """Record that an optimizer has stepped with a batch of a loop."""
        if optimizer in self._optimizers:
            return
        self._optimizers.add(optimizer)
        self.has_trained = True
        for parameter in _parameters_of(optimizer):
            self._parameters[parameter] = None
        done = _steps_of(optimizer) - 1
        if done > 0 and self._is_fresh and not self._is_written():
            self._loaded[optimizer] = _Loaded(f"an optimizer with a loaded module continues after its step {done}")
        if optimizer in _averaging:
            self.note_average("an SWALR was made for an optimizer")

    def note_step(self) -> None:
        """Record that the tables have taken a step; warn if the dense layers had been replaced."""
        self.require_same()
        self._taken += 1
        self._writes, self._digest = self._count_writes(), None
        self._is_stepped, self._is_fresh = True, False

    def note_load(self) -> None:
        """Record that the tables were loaded from a checkpoint."""
        self._writes, self._digest = self._count_writes(), None
        self._is_stepped = self._is_fresh = False
        for module, loaded in list(self._loaded.items()):
            if loaded.steps is None:
                del self._loaded[module]

    def require_same(self) -> None:
        """Warn if dense layers of another or an unknown step were loaded, and the tables neither loaded nor written."""
        if not self._loaded:
            return
        steps, found = self.steps, [one for one in self._loaded.values() if not one.settled]
        self._loaded.clear()
        wrong = [one for one in found if one.steps != steps]
        if all(one.shared for one in wrong) and len(wrong) < len(found):  # these states are of other runtimes' modules
            found = [one for one in found if one.steps == steps]
            wrong = []
        for one in found:
            one.settled = True
        if wrong and not self._is_written():
            self._is_fresh = False
            are = f"{_join(list(self.tables))} {'is' if len(self.tables) == 1 else 'are'}"
            warnings.warn(f"{wrong[-1].what}, but {are} at step {steps}. {_CURE}", stacklevel=3)

    def before_load(self, module: torch.nn.Module) -> None:
        """Compute the digest of the parameters, before a state dict replaces those of a module."""
        if self._digest is None and self.trains(module):
            self._digest = self._get_digest()

    def after_load(self, module: torch.nn.Module, loaded: _Loaded) -> None:
        """Record a state that was loaded into a module of this runtime."""
        self._loaded.pop(module, None)
        if self._digest is not None and self._digest == self._get_digest():
            self._loaded.clear()
        elif loaded.steps is not None or self._is_stepped:
            self._loaded[module] = loaded

    def note_state(self, accelerator: Any) -> None:
        """Record that accelerate has restored a state, whose optimizers and modules may be new in this process."""
        if self._is_fresh and not self._is_written():
            self._loaded[accelerator] = _Loaded("accelerate has restored a state")

    def note_average(self, what: str) -> None:
        """Warn once that only the dense layers are averaged, unless the program has an `EMA` of each trained table."""
        trained = [table for table in self.tables.values() if not self._settings.is_frozen(table)]
        left = [table.name for table in trained if table not in averaged_tables]
        if left and not self._has_warned_of_averages:
            self._has_warned_of_averages = True
            warnings.warn(
                f"{what} of dense layers that are trained with tables: it averages the dense layers alone, not "
                f"{_join(left)}. Average the tables with hostdev.EMA(table, decay), and evaluate within its applied()",
                stacklevel=4,
            )

    def _count_writes(self) -> int:
        return sum([table.writes for table in self.tables.values()])

    def _is_written(self) -> bool:
        """Return whether the program has written tables since their last step or load."""
        return self._count_writes() != self._writes

    def _get_digest(self) -> bytes:
        digest = hashlib.blake2b()
        with torch.no_grad():
            for parameter in list(self._parameters):
                if type(parameter.data) is Tensor and parameter.device.type != "meta":
                    digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
        return digest.digest()


_runtimes: WeakSet[DenseLayers] = WeakSet()
_averaging: WeakSet[Optimizer] = WeakSet()  # the optimizers of SWALR schedulers
_unstamped: Any = WeakIdKeyDictionary()  # parameters of modules into which a state dict without a stamp was loaded


def _join(names: list[str]) -> str:
    return ("table " if len(names) == 1 else "tables ") + ", ".join(map(repr, names))


def _parameters_of(optimizer: Optimizer) -> Iterable[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _steps_of(optimizer: Optimizer) -> int:
    """Return an optimizer's number of steps if its parameters were loaded without a stamp, else 0."""
    loaded = next((one for one in _parameters_of(optimizer) if one in _unstamped and one in optimizer.state), None)
    return 0 if loaded is None else int(optimizer.state[loaded].get("step", 0))


def _runtimes_of(module: torch.nn.Module, stamp: Mapping[str, Any] | None) -> list[DenseLayers]:
    """Return the runtimes to which a module may belong: those that trained it, else those with the stamp's tables."""
    trained = [one for one in _runtimes if one.trains(module)]
    if trained or stamp is None:
        return trained
    alike = [one for one in _runtimes if list(one.tables) == stamp["tables"]]
    values = [value for part in module.modules() for value in vars(part).values()]
    held = [
        one for one in alike if any(getattr(getattr(value, "loops", None), "dense", None) is one for value in values)
    ]
    return held or [one for one in alike if not one.has_trained] or alike


def _stamp_states(original: Function) -> Function:
    @functools.wraps(original)
    def state_dict(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        state = original(module, *args, **kwargs)
        if args or kwargs.get("destination") is not None:  # a part of another module's state
            return state
        root = getattr(state, "_metadata", {}).get(kwargs.get("prefix", "")[:-1])
        if root is None:
            return state
        for one in list(_runtimes):
            if one.trains(module):
                root[_STAMP] = {"tables": list(one.tables), "steps": one.steps}
        return state

    return state_dict


def _compare_states(original: Function) -> Function:
    @functools.wraps(original)
    def load_state_dict(module: torch.nn.Module, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        stamp = (getattr(state_dict, "_metadata", None) or {}).get("", {}).get(_STAMP)
        concerned = _runtimes_of(module, stamp)
        for one in concerned:
            one.before_load(module)
        result = original(module, state_dict, *args, **kwargs)
        if stamp is None:
            loaded = _Loaded("load_state_dict has replaced dense layers that were trained with the tables")
        else:
            steps = int(stamp["steps"])
            what = f"dense layers were loaded that were trained up to step {steps} of the tables"
            loaded = _Loaded(what, steps, shared=len(concerned) > 1)
        for one in concerned:
            one.after_load(module, loaded)
        for parameter in module.parameters():
            if stamp is None:
                _unstamped[parameter] = None
            else:
                _unstamped.pop(parameter, None)
        return result

    return load_state_dict


def _watch_averages(original: Function) -> Function:
    @functools.wraps(original)
    def update_parameters(average: AveragedModel, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        for one in list(_runtimes):
            if one.trains(model):
                one.note_average("AveragedModel makes an average")
        return original(average, model, *args, **kwargs)

    return update_parameters


def _watch_schedules(original: Function) -> Function:
    @functools.wraps(original)
    def make(schedule: SWALR, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        original(schedule, optimizer, *args, **kwargs)
        _averaging.add(optimizer)
        for one in list(_runtimes):
            if optimizer in one._optimizers:
                one.note_average("an SWALR was made for an optimizer")

    return make


_hooks = TorchHooks(
    [
        Replacement(torch.nn.Module, "state_dict", _stamp_states, "which step of the tables a state belongs to"),
        Replacement(torch.nn.Module, "load_state_dict", _compare_states, "dense layers of another step"),
        Replacement(AveragedModel, "update_parameters", _watch_averages, "averages without the tables"),
        Replacement(SWALR, "__init__", _watch_schedules, "averages without the tables"),
    ]
)


_accelerate_hooks: list[TorchHooks] = []  # empty as long as accelerate is not imported


def _watch_accelerate(original: Function) -> Function:
    @functools.wraps(original)
    def load_state(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(accelerator, *args, **kwargs)
        for one in list(_runtimes):
            one.note_state(accelerator)
        return result

    return load_state


def _watch(one: DenseLayers) -> None:
    with _hooks.lock:
        _runtimes.add(one)
        if (module := sys.modules.get("accelerate.accelerator")) is not None and not _accelerate_hooks:
            what = Replacement(module.Accelerator, "load_state", _watch_accelerate, "a restored state")
            _accelerate_hooks.append(TorchHooks([what]))
        for hooks in (_hooks, *_accelerate_hooks):
            hooks.place()
    finalize(one, _remove_if_idle).atexit = False


def _remove_if_idle() -> None:
    with _hooks.lock:
        if not [*_runtimes]:  # len() may count an object that is being deleted
            for hooks in (_hooks, *_accelerate_hooks):
                hooks.remove()
