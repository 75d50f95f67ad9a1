"""Groups tables by their features, and converts a batch's ids from the caller's form to flat ids without padding.

Features may form a stack: the model gets their rows as one tensor, without a copy.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hostdev.core.checks import BeyondInt64Error, to_int64, to_keys, wrap_padding
from hostdev.core.errors import UserError
from hostdev.device.table import DeviceTable
from hostdev.distributed.world import World
from hostdev.host.table import HostTable
from hostdev.kernels.groups import check_groups, drop_padding, offsets_of
from hostdev.runtime.spec import Bag, Feature, FeatureInput

Table = HostTable | DeviceTable
FeatureTables: TypeAlias = Table | Sequence[Table] | Feature
_PLAIN = (torch.int32, torch.int64)
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class FeatureBinding(NamedTuple):
    """A feature, with the positions of its tables and the dtypes of their rows."""

    name: str
    feature: Feature
    tables: tuple[tuple[int, int], ...]  # for each table: its group's number, and its index in the group
    dtypes: tuple[torch.dtype, ...]  # the dtype of each table's rows


class GroupSpec(NamedTuple):
    """Tables that the same features look up, and that therefore get the same ids. A table by key has its own group."""

    tables: list[Table]
    features: list[int]  # the numbers of these features, in order
    unknown: list[tuple[str, ...]]  # for a table by key, the out-of-vocabulary rows' names, by feature; otherwise empty

    @property
    def has_keys(self) -> bool:
        """Whether the group's table is a table by key."""
        return bool(self.unknown)


def on_host(group: GroupSpec) -> bool:
    """Return whether a group's tables are in host memory."""
    return group.tables[0].primitive_target == "CPU"


def resolve(features: Mapping[str, FeatureTables]) -> tuple[list[FeatureBinding], list[GroupSpec]]:
    """Return the bindings of the features, and the groups of tables.

    Args:
        features: For each feature's name, a table, a tuple of tables, or a `Feature` of these.

    Raises:
        TypeError: A feature is given an object that is not a table.
        ValueError: There are no features, a feature has a table twice, or two tables have the same name.
    """
    if not isinstance(features, Mapping) or not features:
        raise ValueError(
            "features must be a dict from one or more names to a table, a tuple of tables or a hostdev.Feature"
        )
    specs = {str(name): value if isinstance(value, Feature) else Feature(value) for name, value in features.items()}
    users: dict[int, list[int]] = {}  # the numbers of each table's features
    tables: dict[int, Table] = {}
    for number, (name, feature) in enumerate(specs.items()):
        for table in _tables(name, feature):
            tables[id(table)] = table
            if number in users.setdefault(id(table), []):
                raise ValueError(f"feature {name!r} names table {table.name!r} twice")
            users[id(table)].append(number)
    names = [table.name for table in tables.values()]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"several tables are named {twice[0]!r}; give each table a unique name")
    groups: dict[tuple[Any, ...], GroupSpec] = {}
    for key, table in tables.items():
        same: tuple[Any, ...] = (table.primitive_target, table.total_rows, *users[key])
        unknown: list[tuple[str, ...]] = []
        if table.capabilities.by_key:
            given = list(specs.values())
            same, unknown = (key,), [given[number].unknown_names for number in users[key]]
            table.key_rows.use_unknown(name for names in unknown for name in names)
        groups.setdefault(same, GroupSpec([], users[key], unknown)).tables.append(table)
    places = {
        id(table): (number, place)
        for number, group in enumerate(groups.values())
        for place, table in enumerate(group.tables)
    }
    bindings = [
        FeatureBinding(
            name, feature, tuple(places[id(table)] for table in _tables(name, feature)), _dtypes(name, feature)
        )
        for name, feature in specs.items()
    ]
    return bindings, list(groups.values())


def require_seeds(groups: Sequence[GroupSpec], world: World) -> None:
    """Raise UserError, on all ranks, if the ranks' parts of a table have different seeds."""
    seeds = {table.name: table.seed for group in groups for table in group.tables}
    for rank, others in enumerate(world.control.share(seeds)):
        for name, seed in others.items():
            if seeds.get(name, seed) != seed:
                raise UserError(
                    f"table {name!r} has the seed {seed} on rank {rank}, but {seeds[name]} on rank {world.rank}; "
                    "pass the same seed= on all ranks, since the default depends on each rank's torch.manual_seed"
                )


def _tables(name: str, feature: Feature) -> tuple[Table, ...]:
    tables = (feature.tables,) if feature.is_single else tuple(feature.tables)
    for table in tables:
        if not isinstance(table, HostTable | DeviceTable):
            raise TypeError(f"feature {name!r} needs a hostdev.HostTable or a DeviceTable, not {describe(table)}")
    return tables


def _dtypes(name: str, feature: Feature) -> tuple[torch.dtype, ...]:
    given = feature.dtype
    count = 1 if feature.is_single else len(feature.tables)
    names = (given,) * count if isinstance(given, str) else tuple(given)
    if len(names) != count:
        raise ValueError(
            f"feature {name!r} has {count} tables and {len(names)} dtypes; give one dtype, or one for each table"
        )
    return tuple(_DTYPES[one] for one in names)


class FeatureIds(NamedTuple):
    """A batch's ids of one feature."""

    values: npt.NDArray[Any]  # int32 or int64 [N], C-contiguous, without padding
    offsets: Tensor | None  # int32 [B + 1], where each bag begins, and where the last one ends; None: one row per id
    weights: Tensor | None  # float32 [N]
    shape: tuple[int, ...] | None  # shape of the caller's ids; None if their rows are pooled
    samples: int

    def copy(self) -> "FeatureIds":
        """Return a copy whose values and weights have their own memory."""
        weights = None if self.weights is None else self.weights.clone()
        return self._replace(values=self.values.copy(), weights=weights)


def read_ids(name: str, feature: Feature, given: FeatureInput, *, are_keys: bool = False) -> FeatureIds:
    """Convert a feature's ids from the caller's form to flat ids without padding.

    Args:
        name: The feature's name, for messages.
        feature: The feature, which has the pooling and the padding.
        given: An array, a tensor, a `Bag` or (values, lengths[, weights]).
        are_keys: Whether the ids are keys, any integers of 64 bits.

    Raises:
        TypeError: The ids are not integers.
        ValueError: Shapes, lengths or offsets do not match, or an integer is too large.
    """
    plain: Any = given.numpy() if type(given) is Tensor and given.dtype in _PLAIN and given.is_cpu else given
    is_plain = type(plain) is np.ndarray and plain.ndim == 1 and plain.dtype in (np.int32, np.int64)
    if is_plain and feature.padding is None and not are_keys:  # a shortcut for the usual case: a fifth of the time
        return FeatureIds(np.ascontiguousarray(plain), None, None, plain.shape, len(plain))
    bag = _bag(name, given)
    values = _keys(name, bag.values) if are_keys else _integers(name, "ids", bag.values, feature.padding)
    weights = _weights(name, bag.weights, values.shape)
    shape = values.shape
    columns = len(feature.unknown_names)
    if are_keys and columns > 1 and (values.ndim != 2 or values.shape[1] != columns):
        raise ValueError(
            f"feature {name!r}: it has out-of-vocabulary rows for {columns} columns, so keys must be of shape "
            f"[B, {columns}], not {list(values.shape)}"
        )
    if bag.lengths is None and bag.offsets is None:
        if values.ndim not in (1, 2):
            raise ValueError(
                f"feature {name!r}: ids must be of shape [B], [B, k] or, with lengths, [N], not {list(values.shape)}"
            )
        samples, pooled = len(values), feature.pooling is not None and values.ndim == 2
        lengths = np.full(samples, values.shape[1], np.int32) if pooled else None
    else:
        lengths = _lengths(name, bag, values)
        samples, pooled = len(lengths), feature.pooling is not None
        lengths = lengths if pooled else None
    flat = np.ascontiguousarray(values.reshape(-1))
    padding = None if feature.padding is None else wrap_padding(feature.padding)
    if padding is not None and (flat == padding).any():
        each = np.ones(len(flat), np.int32) if lengths is None else lengths
        flat, lengths, weights = drop_padding(flat, each, padding, weights)
    offsets = None if lengths is None else torch.from_numpy(offsets_of(lengths))
    sent = None if weights is None else torch.from_numpy(weights)
    return FeatureIds(flat, offsets, sent, None if pooled else shape, samples)


def _bag(name: str, given: FeatureInput) -> Bag:
    if isinstance(given, Bag):
        return given
    if isinstance(given, tuple):
        if len(given) not in (2, 3):
            raise ValueError(f"feature {name!r}: a tuple of ids must be (values, lengths[, weights])")
        return Bag(given[0], lengths=given[1], weights=given[2] if len(given) == 3 else None)
    return Bag(given)


def _lengths(name: str, bag: Bag, values: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    if values.ndim != 1:
        raise ValueError(
            f"feature {name!r}: ids with lengths or offsets must be of shape [N], not {list(values.shape)}"
        )
    if bag.lengths is not None:
        lengths = _integers(name, "lengths", bag.lengths)
        if lengths.ndim != 1:
            raise ValueError(f"feature {name!r}: lengths must be of shape [B], not {list(lengths.shape)}")
        if len(lengths) and lengths.min() < 0:
            raise ValueError(f"feature {name!r}: lengths must be at least 0, not {lengths.min()}")
        if lengths.sum(dtype=np.int64) != len(values):
            raise ValueError(
                f"feature {name!r}: the lengths add up to {lengths.sum(dtype=np.int64)}, but there are "
                f"{len(values)} ids"
            )
        return np.ascontiguousarray(lengths, np.int32)
    offsets = _integers(name, "offsets", bag.offsets)
    if offsets.ndim != 1 or (len(offsets) and offsets[0] != 0):
        raise ValueError(f"feature {name!r}: offsets must be of shape [B] and begin with 0")
    lengths = np.diff(offsets, append=len(values))
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"feature {name!r}: offsets must not decrease or be above {len(values)}, the number of ids")
    if not len(lengths) and len(values):
        raise ValueError(f"feature {name!r}: the offsets are empty, but there are {len(values)} ids")
    return lengths.astype(np.int32)


def _keys(name: str, given: Any) -> npt.NDArray[np.int64]:
    if isinstance(given, Tensor):
        if given.numel() and (given.dtype.is_floating_point or given.dtype.is_complex):  # NumPy lacks some of these
            raise TypeError(f"feature {name!r}: keys must be integers, not a Tensor of {given.dtype}")
        given = given.cpu().numpy() if given.numel() else np.empty(given.shape, np.int64)
    return to_keys(given, f"feature {name!r}: keys")


def _integers(name: str, what: str, given: Any, padding: int | None = None) -> npt.NDArray[Any]:
    """Return the given integers as an int32 or int64 array; raise TypeError for anything else."""
    if isinstance(given, Tensor):
        if given.numel() and (given.dtype.is_floating_point or given.dtype.is_complex):  # NumPy lacks some of these
            raise TypeError(f"feature {name!r}: {what} must be integers, not a Tensor of {given.dtype}")
        given = given.cpu().numpy() if given.numel() else np.empty(given.shape, np.int64)
    try:
        array = to_int64(given, padding)
    except BeyondInt64Error as error:
        raise ValueError(f"feature {name!r}: {'an id' if what == 'ids' else what}: {error}") from None
    except ValueError as error:
        raise ValueError(f"feature {name!r}: {what} cannot be converted to an array ({error})") from None
    if array.size == 0 and array.dtype == np.float64:
        array = array.astype(np.int64)  # float64 is NumPy's dtype for an empty list
    if array.dtype.kind not in "iu":
        raise TypeError(f"feature {name!r}: {what} must be integers, not {describe(given)} of {array.dtype}")
    if array.dtype in (np.int32, np.int64):
        return array
    return array.astype(np.int32 if array.dtype.itemsize < 4 else np.int64)


def _weights(name: str, given: Any, shape: tuple[int, ...]) -> npt.NDArray[np.float32] | None:
    if given is None:
        return None
    if isinstance(given, Tensor):
        if given.requires_grad:
            raise ValueError(f"feature {name!r}: weights get no gradients; pass weights.detach()")
        if given.dtype.is_complex:
            raise TypeError(f"feature {name!r}: weights must be numbers, not {given.dtype}")
        given = given.cpu().float().numpy() if given.dtype.is_floating_point else given.cpu().numpy()
    array = np.asarray(given)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"feature {name!r}: weights must be numbers, not {array.dtype}")
    if array.shape != shape:
        raise ValueError(f"feature {name!r}: weights have shape {list(array.shape)}, but ids have {list(shape)}")
    return np.require(array, np.float32, ["C", "W"]).reshape(-1)  # writable: torch warns about read-only arrays


def check_ranges(
    ids: Sequence[FeatureIds],
    groups: Sequence[GroupSpec],
    bindings: Sequence[FeatureBinding],
    given: Mapping[str, FeatureInput],
) -> None:
    """Raise UserError for an id outside its table.

    Args:
        ids: Each feature's ids, from `read_ids`.
        groups: The groups of tables.
        bindings: The features' bindings.
        given: The ids as the caller passed them. The position in the message refers to these ids.
    """
    ranged = [group for group in groups if not group.has_keys]
    found = check_groups(
        [([ids[feature].values for feature in group.features], group.tables[0].total_rows) for group in ranged]
    )
    if found is None:
        return
    group, place, position = found
    spec = ranged[group]
    name, table = bindings[spec.features[place]].name, spec.tables[0]
    value = ids[spec.features[place]].values[position]
    padding = bindings[spec.features[place]].feature.padding
    every = _integers(name, "ids", _bag(name, given[name]).values, padding).reshape(-1)  # including padding
    raise UserError(
        f"feature {name!r}: id {value} at position {np.flatnonzero(every == value)[0]} is outside "
        f"0..{table.total_rows - 1}, the rows of table {table.name!r}"
    )


def describe(value: object) -> str:
    """Return the repr of a string, and a description of the type of anything else."""
    kind = type(value).__name__
    return repr(value) if isinstance(value, str) else f"{'an' if kind[0] in 'aeiouAEIOU' else 'a'} {kind}"


class Stack(NamedTuple):
    """Features whose rows the model gets as one tensor [B, F, D]."""

    name: str
    features: tuple[int, ...]  # the features' numbers, in the order of the stack


def resolve_stacks(stacks: Mapping[str, Sequence[str]] | None, bindings: Sequence[FeatureBinding]) -> list[Stack]:
    """Return the stacks, with their features by number.

    Args:
        stacks: For each stack's name, the names of its features.
        bindings: The features.

    Raises:
        TypeError: `stacks` is not a dict of lists.
        ValueError: A stack has no features, or has the name of a feature; a feature of a stack is unknown, is in
            another stack, or has several tables; or the features of a stack differ in dimension or dtype.
    """
    if not isinstance(stacks, Mapping | None):
        raise TypeError(f"stacks must be a dict from names to lists of features, not {describe(stacks)}")
    numbers = {one.name: number for number, one in enumerate(bindings)}
    taken: dict[str, str] = {}
    found = []
    for name, members in (stacks or {}).items():
        if isinstance(members, str) or not isinstance(members, Sequence):
            raise TypeError(f"stack {name!r} must be a list of features' names, not {describe(members)}")
        if name in numbers:
            raise ValueError(f"stack {name!r} has the name of a feature; give the stack another name")
        if not members:
            raise ValueError(f"stack {name!r} has no features")
        for member in members:
            if member not in numbers:
                raise ValueError(f"stack {name!r}: no feature {member!r}; the features are {', '.join(numbers)}")
            if member in taken:
                raise ValueError(f"feature {member!r} is in stack {taken[member]!r} and again in {name!r}")
            taken[member] = name
        chosen = [bindings[numbers[member]] for member in members]
        for one in chosen:
            if not one.feature.is_single:
                raise ValueError(f"stack {name!r}: feature {one.name!r} has several tables, but must have one")
        kinds = {member: (_dim(one), one.dtypes[0]) for member, one in zip(members, chosen, strict=True)}
        for member, kind in kinds.items():
            if kind != kinds[members[0]]:
                raise ValueError(
                    f"stack {name!r}: feature {members[0]!r} has {_kind(kinds[members[0]])}, but {member!r} "
                    f"has {_kind(kind)}; the features of a stack must have the same dim and dtype"
                )
        found.append(Stack(str(name), tuple(numbers[member] for member in members)))
    return found


def _dim(binding: FeatureBinding) -> int:
    dim: int = binding.feature.tables.dim
    return dim


def _kind(kind: tuple[int, torch.dtype]) -> str:
    return f"dim {kind[0]} and dtype {str(kind[1]).removeprefix('torch.')}"


def require_stackable(stacks: Sequence[Stack], bindings: Sequence[FeatureBinding], given: Sequence[FeatureIds]) -> None:
    """Raise ValueError unless each feature of a stack has one row per sample, for the same number of samples.

    Args:
        stacks: The stacks.
        bindings: All features.
        given: A batch's ids of all features.
    """
    for stack in stacks:
        first = stack.features[0]
        for number in stack.features:
            name, shape = bindings[number].name, given[number].shape
            if shape is not None and len(shape) > 1:
                raise ValueError(
                    f"stack {stack.name!r}: feature {name!r} has {shape[1]} rows per sample; give the feature a pooling"
                )
            if given[number].samples != given[first].samples:
                raise ValueError(
                    f"stack {stack.name!r}: feature {bindings[first].name!r} has {given[first].samples} samples in "
                    f"this batch, but {name!r} has {given[number].samples}"
                )
