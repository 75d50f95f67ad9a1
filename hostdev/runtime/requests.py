"""Requests to the pipeline: a batch's ids by group, and the tensors that are sent to the device with its rows."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from hostdev.pipeline.batch_ids import Request
from hostdev.runtime.features import FeatureBinding, FeatureIds, GroupSpec, check_ranges, describe, read_ids
from hostdev.runtime.reading import Reading
from hostdev.runtime.spec import FeatureInput

B = TypeVar("B")  # a loader's batch
S = TypeVar("S")  # the result of `send`
Send: TypeAlias = Callable[[B], S]
GetIds: TypeAlias = Callable[[B], Mapping[str, FeatureInput]]  # returns a batch's ids by feature
GetCursor: TypeAlias = Callable[[B], Any]  # returns the program's position after a batch, as a tree of values


class TrainKwargs(TypedDict, total=False):
    """Options of a loop over `Runtime.train` that yields one batch at a time."""

    cursor: Callable[[Any], Any] | None
    accumulate: int
    micro_batches: int | None
    reduce_early: bool
    by_step: Literal[False]
    read_ahead: int | bool | None
    background: bool


class PredictKwargs(TypedDict, total=False):
    """Options of a loop over `Runtime.predict` that yields one batch at a time."""

    micro_batches: None
    features: Iterable[str] | None
    read_ahead: int | bool | None
    background: bool


class MicroBatch(NamedTuple):
    """One of the loader's batches in a request."""

    leaves: list[Any]  # leaves of the structure that the loop yields
    structure: TreeSpec | None  # the structure; None if the loop yields the loader's own batch
    ids: list[FeatureIds]
    cursor: Any = None  # the program's position after this batch

    @property
    def samples(self) -> int:
        """The number of samples."""
        return self.ids[0].samples

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that are sent to the device."""
        return [] if self.structure is None else [leaf for leaf in self.leaves if _is_sent(leaf)]

    def batch(self, tensors: Sequence[Tensor]) -> Any:
        """Return the batch that the loop yields, with these tensors in place of those in host memory."""
        if self.structure is None:
            return self.leaves[0]
        there = iter(tensors)
        return tree_unflatten([next(there) if _is_sent(leaf) else leaf for leaf in self.leaves], self.structure)


def _is_sent(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type == "cpu"  # other tensors stay where the caller has put them


def _to_tensor(leaf: Any) -> Any:
    """Return a numeric array as a tensor, copied only if torch cannot use its memory; return other values as given."""
    if not isinstance(leaf, np.ndarray) or leaf.dtype.kind not in "biufc":
        return leaf
    native = leaf.astype(leaf.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(np.require(native, requirements=["C", "W"]))


class Reader:
    """Turns a loader's batches into requests, in the thread that asks for them.

    Args:
        bindings: The bindings of the runtime's features.
        groups: The groups of the runtime's tables.
        ids: Called with a batch; returns its ids by feature. None if batches are dicts that contain the ids.
        send: Called with a batch; returns the parts that the loop yields, in any structure; tensors in it are sent to
            the device. None if the loop yields the batch itself.
        together: Number of batches in a step.
        whole: Whether it is an error if the last step has fewer batches, as with micro-batches.
        asks: Whether to look up the rows; otherwise another rank looks them up for the same samples.
        cursor: Called with a batch; returns the program's position after it. None if the program gives no position.
    """

    def __init__(
        self,
        bindings: Sequence[FeatureBinding],
        groups: Sequence[GroupSpec],
        ids: GetIds[Any] | None,
        send: Callable[[Any], Any] | None,
        together: int = 1,
        *,
        whole: bool = False,
        asks: bool = True,
        cursor: GetCursor[Any] | None = None,
    ) -> None:
        self._asks, self._cursor = asks, cursor
        self.program = ids, send, cursor
        self._bindings, self._groups, self._ids, self._send = bindings, groups, ids, send
        self.together = together
        self._whole = whole
        self._names = [feature.name for feature in bindings]
        keyed = {number for group in groups if group.has_keys for number in group.features}
        self._has_keys = [number in keyed for number in range(len(bindings))]
        self._checks: list[
            tuple[int, list[FeatureIds], Mapping[str, FeatureInput]]
        ] = []  # pending checks of the request's batches

    def requests(self, reading: Reading) -> Iterator[Request]:
        """Read the batches, and yield a request for each step of `together` batches."""
        number = 0
        while True:
            micros: list[MicroBatch] = []
            while len(micros) < self.together:
                held = self._read(reading, number)
                if not held:
                    break
                number += 1
                micros.append(held.pop())
            if not micros:
                return
            if self._whole and len(micros) < self.together:
                raise ValueError(
                    f"the batches end within a step, after {len(micros)} of {self.together} micro-batches; the "
                    f"number of batches must be a multiple of {self.together}"
                )
            checks, self._checks = self._checks, []
            yield self._make_request(micros)._replace(check=partial(self._require_in_range, checks))
            del micros

    def request(self, batch: Any) -> Request:
        """Check the ids of one batch, and return its request."""
        given = self._get_ids(batch, 1)
        micro = self._make_micro(given, batch if self._send is None else self._send(batch), 1, copies=False)
        checks, self._checks = self._checks, []
        self._require_in_range(checks)
        return self._make_request([micro])

    def _read(self, reading: Reading, number: int) -> list[MicroBatch]:
        """Read batch `number`, counted from 0; return it in a list as a micro-batch, or an empty list at the end."""
        with reading.batch(number) as held:
            if not held:
                return []
            batch = held.pop()
            given = self._get_ids(batch, number + 1)
            cursor = None if self._cursor is None else self._cursor(batch)
            sent = batch if self._send is None else self._send(batch)
        micro = self._make_micro(given, sent, number + 1, copies=reading.copies)._replace(cursor=cursor)
        reading.has_read(sent, number + 1)
        return [micro]

    def _make_micro(self, given: Mapping[str, FeatureInput], sent: Any, number: int, *, copies: bool) -> MicroBatch:
        try:
            ids = [
                read_ids(one.name, one.feature, given[one.name], are_keys=has_keys)
                for one, has_keys in zip(self._bindings, self._has_keys, strict=True)
            ]
        except (TypeError, ValueError) as error:
            raise type(error)(f"batch {number}: {error}") from None
        if copies:
            ids = [one.copy() for one in ids]  # before the check: the loader may overwrite its own arrays
        self._checks.append((number, ids, given))
        if self._send is None:
            return MicroBatch([sent], None, ids)
        leaves, structure = tree_flatten(sent)
        return MicroBatch([_to_tensor(leaf) for leaf in leaves], structure, ids)

    def _require_in_range(self, checks: list[tuple[int, list[FeatureIds], Mapping[str, FeatureInput]]]) -> None:
        """Raise UserError for an id outside its table. At depth > 0, the pipeline calls this in another thread."""
        while checks:  # popped, so that nothing keeps the loader's batches alive
            number, ids, given = checks.pop(0)
            try:
                check_ranges(ids, self._groups, self._bindings, given)
            except (TypeError, ValueError) as error:
                checks.insert(0, (number, ids, given))  # the batch may be read again
                raise type(error)(f"batch {number}: {error}") from None

    def _get_ids(self, batch: Any, number: int) -> Mapping[str, FeatureInput]:
        given = batch if self._ids is None else self._ids(batch)
        if not isinstance(given, Mapping):
            what = "without `ids`, a batch must be a dict" if self._ids is None else "`ids` must return a dict"
            raise TypeError(f"batch {number}: {what} from feature names to ids, not {describe(given)}")
        missing = [name for name in self._names if name not in given]
        if missing:
            raise ValueError(f"batch {number}: no ids for the features {', '.join(missing)}")
        unknown = [name for name in given if name not in self._names] if self._ids is not None else []
        if unknown:
            raise ValueError(
                f"batch {number}: `ids` returned ids for {', '.join(map(repr, unknown))}, but the runtime's features "
                f"are {', '.join(self._names)}"
            )
        return given

    def _make_request(self, micros: list[MicroBatch]) -> Request:
        ids = []
        for group in self._groups:
            flat = [micro.ids[feature].values for micro in micros for feature in group.features]
            flat = flat if self._asks else [part[:0] for part in flat]
            is_wide = group.has_keys or any(part.dtype != flat[0].dtype for part in flat[1:])
            ids.append([part.astype(np.int64, copy=False) for part in flat] if is_wide else flat)
        tensors: list[Tensor] = []
        for micro in micros:
            for feature in micro.ids if self._asks else ():
                if feature.offsets is not None:
                    tensors.append(feature.offsets)
                if feature.weights is not None:
                    tensors.append(feature.weights)
            tensors += micro.tensors
        return Request(None, sum(micro.samples for micro in micros), ids, tensors, micros)


class Replay(Iterator[Request]):
    """An iterator over requests that keeps each request until its batch is taken. Several threads may use it.

    The pipeline reads ahead, and may have to read again from the first batch that was not taken; see `rewind`.

    Args:
        source: The requests.
    """

    def __init__(self, source: Iterator[Request]) -> None:
        self._source = source
        self._read: deque[Request] = deque()  # read, but not taken
        self._again: deque[Request] = deque()  # to be read again
        self._rewound = 0
        self._reading = threading.Lock()  # held while the source is read, by a thread of a pass that may be over
        self._changing = threading.Lock()

    def __next__(self) -> Request:
        rewound = self._rewound
        with self._reading:
            with self._changing:
                found = self._again.popleft() if self._again and rewound == self._rewound else None
                if found is not None:
                    self._read.append(found)
                    return found
            request = next(self._source)
            with self._changing:
                (self._read if rewound == self._rewound else self._again).append(request)
            return request

    def take(self) -> None:
        """Forget the oldest kept request, whose batch was taken."""
        with self._changing:
            self._read.popleft()

    def rewind(self) -> None:
        """Begin again with the first request whose batch was not taken."""
        with self._changing:
            self._again.extendleft(reversed(self._read))
            self._read.clear()
            self._rewound += 1
