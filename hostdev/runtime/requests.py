"""What a loop wants of each batch: its ids by group, and the tensors that are to be on the device with its rows."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hostdev.pipeline.results import Request
from hostdev.runtime.features import FeatureIds, GroupSpec, Wanted, check_ranges, described, read_ids
from hostdev.runtime.reading import Reading

IdsOf = Callable[[Any], Mapping[str, Any]]


class Micro(NamedTuple):
    """One of the loader's batches in a request."""

    leaves: list[Any]  # of what the loop yields
    structure: TreeSpec | None  # of these, whose tensors are sent; None: it yields the loader's batch as it is
    ids: list[FeatureIds]

    @property
    def samples(self) -> int:
        """How many samples it has."""
        return self.ids[0].samples

    @property
    def tensors(self) -> list[Tensor]:
        """What is sent to the device."""
        return [] if self.structure is None else [leaf for leaf in self.leaves if _is_sent(leaf)]

    def batch(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the loop yields, with these tensors in the places of those that were sent."""
        if self.structure is None:
            return self.leaves[0]
        there = iter(tensors)
        return tree_unflatten([next(there) if _is_sent(leaf) else leaf for leaf in self.leaves], self.structure)


def _is_sent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"  # others are where the caller wants them


def _tensor_of(leaf: Any) -> Any:
    """Return a tensor of an array of numbers, which is copied only if torch cannot use its memory."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    native = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


class Reader:
    """Makes requests of a loader's batches, in the thread that asks for them.

    wanted, groups  of the runtime
    ids             returns a batch's ids by feature; None where the batches are dicts that have them
    send            returns what of a batch is to be on the device, in any structure, with what else the loop needs
    together        batches that make one step
    whole           no step may have fewer: they are micro-batches
    asks            the rows are looked up; else another rank does that, for the same samples
    """

    def __init__(
        self,
        wanted: Sequence[Wanted],
        groups: Sequence[GroupSpec],
        ids: IdsOf | None,
        send: Callable[[Any], Any] | None,
        together: int = 1,
        *,
        whole: bool = False,
        asks: bool = True,
    ) -> None:
        self._asks = asks
        self.program = ids, send
        self._wanted, self._groups, self._ids, self._send, self._together = wanted, groups, ids, send, together
        self.together = together
        self._whole = whole
        self._names = [feature.name for feature in wanted]
        self._checks: list[tuple[int, list[FeatureIds], Mapping[str, Any]]] = []  # to come, of the request's batches

    def requests(self, reading: Reading) -> Iterator[Request]:
        """Yield a request for each batch that is read, or for so many together."""
        number = 0
        while True:
            micros: list[Micro] = []
            while len(micros) < self._together:
                held = self._read(reading, number)
                if not held:
                    break
                number += 1
                micros.append(held.pop())
            if not micros:
                return
            if self._whole and len(micros) < self._together:
                raise ValueError(
                    f"the batches end within a step: {len(micros)} of {self._together} micro-batches are there"
                )
            checks, self._checks = self._checks, []
            yield self._request(micros)._replace(check=partial(self._require_in_range, checks))
            del micros

    def request(self, batch: Any) -> Request:
        """Return the request for one batch, whose ids have been checked."""
        given = self._ids_of(batch, 1)
        micro = self._micro(given, batch if self._send is None else self._send(batch), 1, copies=False)
        checks, self._checks = self._checks, []
        self._require_in_range(checks)
        return self._request([micro])

    def _read(self, reading: Reading, number: int) -> list[Micro]:
        """Return the next batch, or nothing at the end.

        number  of batches that were read before it
        """
        with reading.batch(number) as held:
            if not held:
                return []
            batch = held.pop()
            given = self._ids_of(batch, number + 1)
            sent = batch if self._send is None else self._send(batch)
        micro = self._micro(given, sent, number + 1, copies=reading.copies)
        reading.has_read(sent, number + 1)
        return [micro]

    def _micro(self, given: Mapping[str, Any], sent: Any, number: int, *, copies: bool) -> Micro:
        try:
            ids = [read_ids(feature.name, feature.feature, given[feature.name]) for feature in self._wanted]
        except (TypeError, ValueError) as error:
            raise type(error)(f"batch {number}: {error}") from None
        if copies:
            ids = [one.copy() for one in ids]  # before they are checked: the loader may write to its own again
        self._checks.append((number, ids, given))
        if self._send is None:
            return Micro([sent], None, ids)
        leaves, structure = tree_flatten(sent)
        return Micro([_tensor_of(leaf) for leaf in leaves], structure, ids)

    def _require_in_range(self, checks: list[tuple[int, list[FeatureIds], Mapping[str, Any]]]) -> None:
        """Raise UserError for an id outside its table; not in the loop's thread, as it looks at every id."""
        while checks:  # taken out, so that nothing keeps the loader's batches
            number, ids, given = checks.pop(0)
            try:
                check_ranges(ids, self._groups, self._wanted, given)
            except (TypeError, ValueError) as error:
                raise type(error)(f"batch {number}: {error}") from None

    def _ids_of(self, batch: Any, number: int) -> Mapping[str, Any]:
        given = batch if self._ids is None else self._ids(batch)
        if not isinstance(given, Mapping):
            what = (
                "the batches are to be dicts, or `ids` is to be given" if self._ids is None else "`ids` returns a dict"
            )
            raise TypeError(f"batch {number}: {what}: the ids of each feature by its name, not {described(given)}")
        missing = [name for name in self._names if name not in given]
        if missing:
            raise ValueError(f"batch {number}: no ids for the features {', '.join(missing)}")
        unknown = [name for name in given if name not in self._names] if self._ids is not None else []
        if unknown:
            raise ValueError(
                f"batch {number}: ids for {', '.join(map(repr, unknown))}, but the runtime's features are "
                f"{', '.join(self._names)}"
            )
        return given

    def _request(self, micros: list[Micro]) -> Request:
        ids = []
        for group in self._groups:
            flat = [micro.ids[feature].values for micro in micros for feature in group.features]
            flat = flat if self._asks else [part[:0] for part in flat]
            wide = len({part.dtype for part in flat}) > 1
            ids.append([part.astype(np.int64, copy=False) for part in flat] if wide else flat)
        tensors: list[Tensor] = []
        for micro in micros:
            for feature in micro.ids if self._asks else ():
                tensors += [tensor for tensor in (feature.offsets, feature.weights) if tensor is not None]
            tensors += micro.tensors
        return Request(None, sum(micro.samples for micro in micros), ids, tensors, micros)

    def length(self, batches: Iterable[Any]) -> int:
        """Return how many batches a loop yields; TypeError where the loader does not say."""
        return len(batches)  # type: ignore[arg-type]
