"""The state of a network and its optimizer, gathered from all ranks when saved and split among them when loaded.

It is saved in a folder, as one file or as one file per rank, and loads on any mesh:

    manifest.json            steps, parameters, the optimizer's options, each tensor's parts, each file's SHA-256
    state.safetensors        the whole state, if saved with integrated=True
    rank<k>.safetensors      otherwise, the part of rank k; a tensor on several ranks is in the first one's file

The folder gets its final name in one rename, when it is complete.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from hostdev.core import json_files
from hostdev.core.checksums import checksum
from hostdev.core.errors import UserError, in_words
from hostdev.core.names import inside
from hostdev.core.outputs import is_text
from hostdev.core.pieces import Piece
from hostdev.distributed.dense import DenseState, get_buffer_names
from hostdev.distributed.world import World
from hostdev.ext.parallel.plan import get_slice_dim
from hostdev.ext.parallel.tied import LocalParameters

MANIFEST, VERSION = "manifest.json", 1
_NO_TEXT = "the name is not UTF-8, and safetensors cannot read such a file"
T = TypeVar("T")


class TensorPart(NamedTuple):
    """A part of a tensor: its file, and the dimension along which parts are concatenated; None for a whole tensor."""

    file: str
    dim: int | None


Own = Mapping[str, tuple[Tensor, int | None]]  # tensors of a rank by name, each with the dimension it is cut along


def save(folder: Path, name: str, own: Own, about: Mapping[str, Any], ranks: World) -> None:
    """Write a network's state to a new folder. All ranks must call this function.

    Args:
        folder: The new folder.
        name: Name of this rank's file, which is written if `own` has tensors.
        own: The tensors that this rank writes, by name.
        about: Additional entries of the manifest.
        ranks: The ranks of this run.

    Raises:
        UserError: The folder exists or cannot be written; raised on all ranks.
    """
    temporary = folder.with_name(f".{folder.name}.part")  # the same name on all ranks, unlike in `outputs.new_folder`
    _require_all(ranks, _make_folder(folder, temporary) if ranks.rank == 0 else "")
    said: dict[str, Any] = {}
    problem = ""
    if own:
        try:
            save_file({key: value.detach().cpu().contiguous() for key, (value, _) in own.items()}, temporary / name)
            parts = {key: dim for key, (_, dim) in own.items()}
            said = {"file": name, "sha256": checksum(temporary / name), "parts": parts}
        except (OSError, SafetensorError) as error:
            problem = f"{temporary / name} cannot be written: {error}"
    written = ranks.control.share(said)
    _require_all(ranks, problem, temporary)
    if ranks.rank == 0:
        tensors: dict[str, list[TensorPart]] = {}
        for each in written:
            for key, dim in each.get("parts", {}).items():
                tensors.setdefault(key, []).append(TensorPart(each["file"], dim))
        files = {each["file"]: each["sha256"] for each in written if each}
        try:
            text = json.dumps({"version": VERSION, **about, "files": files, "tensors": tensors}, indent=1)
            (temporary / MANIFEST).write_text(text + "\n")
            temporary.rename(folder)
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    _require_all(ranks, problem, temporary)


def load(folder: Path, wants: Callable[[str], bool]) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Return a folder's tensors by name and its manifest; raise UserError if the folder is damaged.

    A tensor for whose name `wants` returns False is not loaded, and is None.
    """
    if not is_text(folder):
        raise UserError(f"{folder}: {_NO_TEXT}; rename the folder")
    try:
        manifest = json_files.read(folder / MANIFEST)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} has no saved network ({MANIFEST}: {error}); give a folder that Network.save wrote"
        ) from None
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{folder} has format version {manifest.get('version')}, but this version of hostdev reads "
            f"version {VERSION}; load the folder with the version of hostdev that wrote it"
        )
    try:
        tensors = json_files.parse(dict[str, list[TensorPart]], manifest["tensors"], "tensors")
        files = {part.file for key, parts in tensors.items() if wants(key) for part in parts}
        for name in files:
            inside(folder, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST} is broken ({in_words(error)})") from None
    for name in sorted(files):
        try:
            same = checksum(folder / name) == manifest["files"][name]
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror}; the saved network is incomplete") from None
        if not same:
            raise UserError(f"{folder / name} is damaged: its SHA-256 differs from {MANIFEST}")
    found: dict[str, Tensor | None] = dict.fromkeys(tensors)
    opened: dict[str, Any] = {name: safe_open(folder / name, "pt") for name in files}
    for key, parts in tensors.items():
        if wants(key):
            values = [opened[part.file].get_tensor(key) for part in parts]
            found[key] = values[0] if parts[0].dim is None else torch.cat(values, parts[0].dim)
    return found, manifest


def call_on_all(ranks: World, call: Callable[[], T]) -> T:
    """Run `call` on each rank, and return its result; if it raises UserError on any rank, raise it on all ranks.

    All ranks must call this function.
    """
    found, problem = None, ""
    try:
        found = call()
    except UserError as error:
        problem = str(error)
    _require_all(ranks, problem)
    return cast(T, found)


def _make_folder(folder: Path, temporary: Path) -> str:
    """Create the temporary folder; return an error message, or "" on success."""
    if not is_text(folder):
        return f"{folder}: {_NO_TEXT}; choose another folder"
    if folder.exists():
        return f"{folder} exists; choose another folder"
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        temporary.mkdir(parents=True)
    except OSError as error:
        return f"{folder}: {error.strerror}; choose a folder that can be written"
    return ""


def _require_all(ranks: World, problem: str, temporary: Path | None = None) -> None:
    """Remove the temporary folder and raise UserError on all ranks if any rank has a problem."""
    for one in ranks.control.share(problem):
        if one:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(one)


class NetworkState:
    """Gathers and loads the state of a network whose parts are on several ranks.

    All ranks must make the same calls.

    Args:
        network: The whole network.
        stages: The network's pieces by stage; empty if the network is not cut into stages.
        leaves: Local tensors of the parameters.
        ranks: The ranks that hold the parts.

    Raises:
        UserError: The network has state other than tensors.
    """

    def __init__(
        self, network: nn.Module, stages: Sequence[Sequence[Piece]], leaves: LocalParameters, ranks: World
    ) -> None:
        self._network, self._leaves, self._ranks = network, leaves, ranks
        self._order = [name for name, _ in network.named_parameters()]
        names = {id(parameter): name for name, parameter in network.named_parameters()}
        every = dict(network.named_parameters(remove_duplicate=False))
        self._keys = {key: names[id(every[key])] if key in every else key for key in network.state_dict()}
        self._buffers = get_buffer_names(network)
        if any(key not in every and key not in self._buffers for key in self._keys):
            raise UserError(
                "the network has state other than tensors (get_extra_state), which ranks cannot gather; use buffers "
                "instead"
            )
        self._owners = dict.fromkeys([*self._order, *self._buffers], 0)  # first rank with the tensor or a slice
        self._owners |= _owners(network, stages, ranks)

    def whole(self, optimizer: torch.optim.Optimizer) -> DenseState:
        """Return the whole state in host memory on rank 0, and an empty state on others."""
        _require_one_group(optimizer)
        mine = self._leaves.named()
        state, numbers = optimizer.state_dict()["state"], _numbers(optimizer)
        model: dict[str, Any] = {}
        slots: dict[int, dict[str, Any]] = {}
        for number, name in enumerate(self._order):
            leaf = mine.get(name)
            own: dict[str, Any] = {}
            if leaf is not None:
                mine_of = state.get(numbers.get(id(leaf)), {})
                own = {"": leaf.detach(), **{key: torch.as_tensor(value) for key, value in mine_of.items()}}
            slots[number] = self._gather_value(name, own, None if leaf is None else get_slice_dim(leaf))
            model[name] = slots[number].pop("", None)
        for name in self._buffers:
            model[name] = self._gather_value(name, {"": self._buffer(name)}, None).get("")
        if self._ranks.rank:
            return DenseState({}, {"state": {}, "param_groups": []}, [], [])
        model = {key: model[name] for key, name in self._keys.items() if name in model}
        groups = [{**optimizer.state_dict()["param_groups"][0], "params": list(range(len(self._order)))}]
        return DenseState(model, {"state": slots, "param_groups": groups}, self._order, self._buffers)

    def _buffer(self, name: str) -> Tensor:
        """Return the current tensor of a buffer, which a module may replace."""
        return dict(self._network.named_buffers(remove_duplicate=False))[name]

    def _gather_value(self, name: str, values: dict[str, Any], dim: int | None) -> dict[str, Any]:
        """Gather a parameter's or buffer's values on rank 0, where slices are joined; return {} on other ranks."""
        if self._ranks.size == 1:
            return {key: value.detach().cpu() for key, value in values.items()}
        control, ranks, first = self._ranks.control, self._ranks, self._owners[name]
        owners = range(first, first + ranks.mesh.model)
        mine = ranks.rank in owners
        about = {
            key: [str(value.dtype).removeprefix("torch."), list(value.shape), dim] for key, value in values.items()
        }
        each_rank = control.share(about if mine else None)
        found = {}
        for key, (dtype, shape, along) in each_rank[first].items():
            cut = along is not None and len(shape) > along
            sources = owners if cut else owners[:1]
            sizes = [torch.Size(each_rank[rank][key][1]) for rank in sources]
            has = ranks.rank in sources
            flat = (
                values[key].detach().cpu().contiguous().view(-1) if has else torch.empty(0, dtype=getattr(torch, dtype))
            )
            give = [len(flat) if rank == 0 else 0 for rank in range(ranks.size)]
            take = [0] * ranks.size
            if ranks.rank == 0:
                for rank, size in zip(sources, sizes, strict=True):
                    take[rank] = size.numel()
            received = control.all_to_all(flat, give, take)
            if ranks.rank == 0:
                flats = torch.split(received, [size.numel() for size in sizes])
                parts = [part.view(size) for part, size in zip(flats, sizes, strict=True)]
                found[key] = torch.cat(parts, along) if cut else parts[0]
        return found

    def save(self, folder: Path, optimizer: torch.optim.Optimizer, steps: int, *, integrated: bool) -> None:
        """Write the state to a new folder; see `network.Network.save`."""
        _require_one_group(optimizer)
        group = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
        about = {"steps": steps, "parameters": self._order, "buffers": self._buffers, "optimizer": group}
        name = "state.safetensors" if integrated else f"rank{self._ranks.rank}.safetensors"
        own = self._flatten(self.whole(optimizer)) if integrated else self._own(optimizer)
        save(folder, name, own, about, self._ranks)

    def _own(self, optimizer: torch.optim.Optimizer) -> Own:
        """Return the tensors that this rank writes to its file; a tensor on several ranks is written by one of them."""
        state, numbers = optimizer.state_dict()["state"], _numbers(optimizer)
        found: dict[str, tuple[Tensor, int | None]] = {}
        for name, leaf in self._leaves.named().items():
            dim = get_slice_dim(leaf)
            if self._is_writer(name, dim):
                found[f"model.{name}"] = leaf, dim
                for key, value in state.get(numbers.get(id(leaf)), {}).items():
                    slot = torch.as_tensor(value)
                    found[f"optimizer.{name}.{key}"] = slot, dim if dim is not None and slot.dim() > dim else None
        found |= {f"model.{name}": (self._buffer(name), None) for name in self._buffers if self._is_writer(name, None)}
        return found

    def _flatten(self, state: DenseState) -> Own:
        """Return the tensors of a gathered state under the names that `_own` uses; empty if the state is empty."""
        found = {f"model.{name}": state.model[name] for name in [*state.names, *state.buffers]}
        for number, name in enumerate(state.names):
            slots = state.optimizer["state"].get(number, {})
            found |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in slots.items()}
        return {key: (value, None) for key, value in found.items()}

    def norm(self) -> Tensor:
        """Return the 2-norm of the whole network's gradients, [], on all ranks.

        The parameters' norms are combined in the network's order, as in torch.nn.utils.get_total_norm. The result is
        therefore the same for any number of stages.
        """
        mine = {
            name: float(torch.linalg.vector_norm(leaf.grad))
            for name, leaf in self._leaves.named().items()
            if leaf.grad is not None and self._is_writer(name, get_slice_dim(leaf))
        }
        each_rank = self._ranks.control.share(mine)
        found = [[each[name] for each in each_rank if name in each] for name in self._order]
        each = [torch.tensor(parts) for parts in found if parts]
        of_each = [one[0] if len(one) == 1 else torch.linalg.vector_norm(one) for one in each]
        total: Tensor = torch.linalg.vector_norm(torch.stack(of_each or [torch.zeros(())]))
        return total

    def _is_writer(self, name: str, dim: int | None) -> bool:
        model = self._ranks.at.model if dim is not None else 0
        return self._ranks.rank == self._owners[name] + model

    def restore(self, folder: Path, optimizer: torch.optim.Optimizer) -> int:
        """Load this rank's part from a folder, and return the saved number of steps.

        Raises UserError on all ranks, before any change, if the folder is damaged or belongs to another network.
        """
        fitting, steps = call_on_all(self._ranks, lambda: self._read(folder, optimizer))
        self._take(optimizer, fitting)
        return steps

    def _read(self, folder: Path, optimizer: torch.optim.Optimizer) -> tuple["_LoadedState", int]:
        here = {*self._leaves.named(), *self._buffers}
        tensors, about = load(folder, lambda key: key.split(".", 1)[1] in here or _get_parameter_name(key) in here)
        model = {key: tensors.get(f"model.{name}") for key, name in self._keys.items() if f"model.{name}" in tensors}
        known = {*self._order, *self._buffers}
        model |= {name: None for name in [*about["parameters"], *about["buffers"]] if name not in known}
        state = {
            number: {
                key.rpartition(".")[2]: value
                for key, value in tensors.items()
                if key.startswith("optimizer.") and _get_parameter_name(key) == name and value is not None
            }
            for number, name in enumerate(self._order)
        }
        try:
            group = {key: tuple(one) if isinstance(one, list) else one for key, one in about["optimizer"].items()}
            return self._fitting(model, optimizer, {"state": state, "param_groups": [group]}), int(about["steps"])
        except UserError as error:
            raise UserError(f"{folder} belongs to another network: {error}") from None

    def load(self, model: Mapping[str, Any], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Load this rank's part of a whole state, which `whole` returned.

        Raises UserError on all ranks, before any change, if the state belongs to another network.
        """
        self._take(optimizer, call_on_all(self._ranks, lambda: self._fitting(model, optimizer, state)))

    def _fitting(
        self, model: Mapping[str, Any], optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
    ) -> "_LoadedState":
        """Return this rank's part of the whole state; raise UserError if it belongs to another network or optimizer."""
        _require_one_group(optimizer)
        unknown = sorted(set(model) ^ set(self._keys))
        if unknown:
            raise UserError(f"the state {'has' if unknown[0] in model else 'lacks'} {unknown[0]}, unlike the network")
        mine = self._leaves.named()
        here: dict[str, Tensor] = {**mine, **{name: self._buffer(name) for name in self._buffers}}
        parts = {name: self._slice_for_rank(model[name], value) for name, value in here.items()}
        for name, value in here.items():
            if parts[name].shape != value.shape:
                raise UserError(
                    f"{name} has shape {list(parts[name].shape)} in the state, but {list(value.shape)} in the network"
                )
        lacking = sorted({*optimizer.param_groups[0]} - {"params", *state["param_groups"][0]})
        if mine and lacking:
            raise UserError(f"the saved optimizer lacks the options {', '.join(lacking)}")
        numbers, slots = _numbers(optimizer), {}
        for number, name in enumerate(self._order):
            if name in mine and number in state["state"] and id(mine[name]) in numbers:
                own = state["state"][number]
                slots[numbers[id(mine[name])]] = {
                    key: self._slice_for_rank(value, mine[name]) for key, value in own.items()
                }
        groups = [{**state["param_groups"][0], "params": list(range(len(numbers)))}]
        return _LoadedState(parts, {"state": slots, "param_groups": groups} if mine else None)

    def _take(self, optimizer: torch.optim.Optimizer, found: "_LoadedState") -> None:
        mine = self._leaves.named()
        with torch.no_grad():
            for name, value in found.values.items():
                (mine[name] if name in mine else self._buffer(name)).copy_(value)
        if found.optimizer is not None:
            optimizer.load_state_dict(dict(found.optimizer))

    def _slice_for_rank(self, value: Any, like: Tensor) -> Any:
        """Return this rank's slice of a whole value; a value that is not sliced like `like` is returned whole."""
        dim = get_slice_dim(like)
        if dim is None or value.dim() <= dim:
            return value
        n = like.shape[dim]
        if value.shape[dim] != n * self._ranks.mesh.model:
            return value
        # A copy, because torch's optimizers use other code for a view's strides, which rounds differently.
        return value.narrow(dim, self._ranks.at.model * n, n).clone(memory_format=torch.contiguous_format)


class _LoadedState(NamedTuple):
    """A rank's part of a state: values by name, and the optimizer's state if the rank has parameters."""

    values: dict[str, Any]
    optimizer: dict[str, Any] | None


def _require_one_group(optimizer: torch.optim.Optimizer) -> None:
    if len(optimizer.param_groups) != 1:
        raise UserError("ranks can save and load an optimizer with one parameter group only; merge its groups")


def _get_parameter_name(key: str) -> str:
    """Return the parameter's name from the key of its optimizer state, "optimizer.NAME.STATE"."""
    return key.partition(".")[2].rpartition(".")[0]


def _numbers(optimizer: torch.optim.Optimizer) -> dict[int, int]:
    given = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {id(parameter): number for number, parameter in enumerate(given)}


def _owners(network: nn.Module, stages: Sequence[Sequence[Piece]], ranks: World) -> dict[str, int]:
    """Return, for each parameter and buffer in the stages, the first rank that has it."""
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    found: dict[str, int] = {}
    for number, stage in enumerate(stages):
        rank = ranks.mesh.rank(ranks.at._replace(data=0, model=0, pipe=number % ranks.mesh.pipe))
        for piece in stage:
            for parameter in piece.parameters:
                found.setdefault(names[id(parameter)], rank)
        held = {
            id(value) for piece in stage for one in piece.holds if isinstance(one, nn.Module) for value in one.buffers()
        }
        found |= {name: rank for name, value in network.named_buffers() if id(value) in held and name not in found}
    return found
