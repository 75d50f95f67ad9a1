"""Loaders for frameworks' trainers: they yield batches with their rows, and open a new loop for each epoch."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, Generic, TypeVar, overload
from weakref import WeakSet

from hostdev.core.errors import UserError
from hostdev.runtime.batches import Loop
from hostdev.runtime.requests import GetIds
from hostdev.runtime.rows import Rows

B = TypeVar("B")  # a loader's batch
S = TypeVar("S")  # the result of `send`


class _First:
    """The batches [skip, length) of a loader; each iteration restarts the loader."""

    def __init__(self, loader: Iterable[Any], length: int, skip: int) -> None:
        self.wrapped_loader, self._length, self._skip = loader, length, skip

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.wrapped_loader), self._skip, self._length)

    def __len__(self) -> int:
        return self._length - self._skip


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # also raised by a DataLoader whose dataset has no length
        return None


class RowsLoader(Generic[B]):
    """A loader of batches with their rows, which opens a new loop for each epoch.

    Args:
        open: Called with an iterable of batches; returns a loop over these batches.
        loader: A DataLoader or another iterable.
        length: Number of batches per epoch; None for `len(loader)`.

    Raises:
        ValueError: `length` is not a number of batches, 1 or more.
        TypeError: The loader has no `len`, and no length is given. To find the last batch, a framework would read such
            a loader one batch ahead, and so would request each batch before the previous batch's step.
    """

    def __init__(
        self,
        open: Callable[[Iterable[Any]], Loop[tuple[B, Rows]]],
        loader: Iterable[Any],  # Any: the loop yields B
        length: int | None,
    ) -> None:
        self._open, self._loader, self._length = open, loader, length
        if length is None and _length(loader) is None:
            raise TypeError(
                f"the loader, a {type(loader).__name__}, has no len(): pass length=N, the number of batches per epoch"
            )
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"length must be a number of batches, 1 or more, not {length!r}")
        self._loop: Loop[tuple[B, Rows]] | None = None
        self._given = 0  # batches of the epoch so far, including skipped ones
        self._skip = 0  # batches that the next epoch skips

    def __len__(self) -> int:
        """Return the number of batches per epoch."""
        return len(self._loader) if self._length is None else self._length  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[tuple[B, Rows]]:
        """Yield the (batch, rows) pairs of an epoch. The first `next` closes the previous loop and opens a new one.

        Raises:
            ValueError: The loader has fewer batches than an epoch.
        """
        length, skip = len(self), self._skip
        self.close()
        self._begin()
        is_iterator = iter(self._loader) is self._loader  # if so, batches read beyond this epoch are kept for the next
        loop = self._open(self._loader if is_iterator else _First(self._loader, length, skip))
        self._loop, self._given = loop, skip
        try:
            while self._given < length:
                item = next(loop, None)
                if item is None:
                    raise ValueError(f"the loader ended after {self._given} batches, but an epoch has {length} batches")
                self._given, self._skip = self._given + 1, 0
                yield item  # a trainer may stop asking after the last batch: the next loop closes this one
                del item
            if is_iterator:
                loop.finish()
            else:
                next(loop, None)
        finally:
            self._loop = None
            loop.close()

    def close(self) -> None:
        """Close the epoch's loop if it is open: a framework does not close a loop that it leaves early."""
        if self._loop is not None:
            self._loop.close()

    def _begin(self) -> None:
        """Prepare for an epoch."""


class PredictLoader(RowsLoader[B]):
    """A loader of batches whose rows get no gradients; the result of `Runtime.predict_loader`."""


class TrainLoader(RowsLoader[B]):
    """A loader of batches with their rows for training by a framework; the result of `Runtime.train_loader`."""

    def __init__(
        self,
        runtime: Any,  # a `Runtime`, whose module imports this one
        open: Callable[[Iterable[Any]], Loop[tuple[B, Rows]]],
        loader: Iterable[Any],
        length: int | None,
        accumulate: int,
    ) -> None:
        super().__init__(open, loader, length)
        self._runtime = runtime
        self._has_warned = False
        if length is not None and length % accumulate and iter(loader) is loader:
            raise ValueError(f"with an iterator, length={length} must be a multiple of accumulate={accumulate}")

    def _begin(self) -> None:
        self._runtime.close_loaders()

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch and the tables' number of steps, for a framework's checkpoint.

        Warn once if the program does not save the tables.
        """
        if not self._runtime.is_saved and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "a checkpoint is being saved without the tables; save the tables, too, for example with "
                "Trainer(plugins=[hostdev.frameworks.lightning.checkpoint_io(runtime)]), or with runtime.save(path)",
                stacklevel=2,
            )
        self._runtime.write_back()
        return {"given": self._given % len(self), "steps": self._runtime.pipeline.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Make the next epoch skip the batches that were yielded before the checkpoint.

        Raises:
            UserError: The tables are at another step than the checkpoint.
        """
        steps = self._runtime.pipeline.steps
        if state["steps"] != steps:
            raise UserError(
                f"the checkpoint was saved at step {state['steps']}, but the tables are at step {steps}; save and load "
                "the tables with the checkpoint, for example with "
                "Trainer(plugins=[hostdev.frameworks.lightning.checkpoint_io(runtime)])"
            )
        self._skip = state["given"]


def close_loaders(loaders: Iterable[RowsLoader[Any]], kind: type[RowsLoader[Any]]) -> None:
    """Close the loops of the loaders of type `kind`: frameworks may have left them open."""
    for loader in list(loaders):
        if isinstance(loader, kind):
            loader.close()


class FrameworkLoaders:
    """The methods of `Runtime` for frameworks' trainers."""

    train: Callable[..., Any]  # the method of `Runtime`, whose overloads have the types
    predict: Callable[..., Any]
    loaders: WeakSet[RowsLoader[Any]]

    @overload
    def train_loader(
        self,
        loader: Iterable[B],
        *,
        ids: GetIds[B] | None = None,
        send: None = None,
        accumulate: int = 1,
        length: int | None = None,
        read_ahead: int | bool | None = None,
    ) -> TrainLoader[B]: ...
    @overload
    def train_loader(
        self,
        loader: Iterable[B],
        *,
        ids: GetIds[B] | None = None,
        send: Callable[[B], S],
        accumulate: int = 1,
        length: int | None = None,
        read_ahead: int | bool | None = None,
    ) -> TrainLoader[S]: ...
    def train_loader(
        self,
        loader: Iterable[Any],  # Any: the overloads have the types
        *,
        ids: GetIds[Any] | None = None,
        send: Callable[[Any], Any] | None = None,
        accumulate: int = 1,
        length: int | None = None,
        read_ahead: int | bool | None = None,
    ) -> TrainLoader[Any]:
        """Return a loader of batches with their rows for a framework's trainer, such as Lightning's.

        ::

            trainer.fit(module, runtime.train_loader(loader, ids=ids))  # training_step gets (batch, rows)

        The loader has a `len`, and opens a new loop over `train` for each epoch. The trainer's own clipping
        (`gradient_clip_val`) clips the gradients of the rows with those of the parameters. A trainer that resumes from
        a checkpoint continues after the batch at which the checkpoint was saved.

        Args:
            loader: As `batches` of `train`.
            ids: As for `train`.
            send: As for `train`.
            accumulate: Number of batches per step, as set in the trainer, for example by `accumulate_grad_batches`.
            length: Number of batches per epoch; None for `len(loader)`. If the loader is an iterator, each epoch
                continues where the previous one ended.
            read_ahead: As for `train`.

        Raises:
            TypeError: The loader has no `len`, and no length is given.
            ValueError: `length` is below 1 or, with an iterator, not a multiple of `accumulate`.
        """
        how = {"ids": ids, "send": send, "accumulate": accumulate, "read_ahead": read_ahead}
        made = TrainLoader[Any](
            self, lambda batches: self.train(batches, **how).clipping_rows(), loader, length, accumulate
        )
        self.loaders.add(made)
        return made

    @overload
    def predict_loader(
        self,
        loader: Iterable[B],
        *,
        ids: GetIds[B] | None = None,
        send: None = None,
        length: int | None = None,
        read_ahead: int | bool | None = None,
    ) -> PredictLoader[B]: ...
    @overload
    def predict_loader(
        self,
        loader: Iterable[B],
        *,
        ids: GetIds[B] | None = None,
        send: Callable[[B], S],
        length: int | None = None,
        read_ahead: int | bool | None = None,
    ) -> PredictLoader[S]: ...
    def predict_loader(
        self,
        loader: Iterable[Any],  # Any: the overloads have the types
        *,
        ids: GetIds[Any] | None = None,
        send: Callable[[Any], Any] | None = None,
        length: int | None = None,
        read_ahead: int | bool | None = None,
    ) -> PredictLoader[Any]:
        """Return a loader as `train_loader` does, but rows get no gradients; for validation and predictions."""
        how = {"ids": ids, "send": send, "read_ahead": read_ahead}
        made = PredictLoader[Any](lambda batches: self.predict(batches, **how), loader, length)
        self.loaders.add(made)
        return made

    def close_loaders(self, kind: type[RowsLoader[Any]] = RowsLoader) -> None:  # Any: any batches
        """Close the loops of the loaders of type `kind`, by default of all: frameworks may have left them open."""
        close_loaders(self.loaders, kind)

    def __copy__(self) -> "FrameworkLoaders":
        """Return the runtime itself, so that copies of a module that holds the runtime share the tables."""
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> "FrameworkLoaders":
        """Return the runtime itself, as `__copy__` does."""
        return self

    def __reduce__(self) -> str:
        """Raise TypeError: a runtime cannot be pickled."""
        raise TypeError(
            "a Runtime cannot be pickled, for example by save_hyperparameters() or for another process; leave it out "
            "of pickled objects, and save its tables with runtime.save(path)"
        )
