"""Batches with their rows as other people's training loops take them: an object with a length, a new loop an epoch."""

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any
from weakref import WeakSet

from hostdev.core.errors import UserError
from hostdev.runtime import clipping
from hostdev.runtime.batches import Loop
from hostdev.runtime.requests import IdsOf


class _First:
    """The first batches of a loader, each time anew."""

    def __init__(self, loader: Iterable[Any], length: int, skip: int) -> None:
        self._loader, self._length, self._skip = loader, length, skip

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._loader), self._skip, self._length)

    def __len__(self) -> int:
        return self._length - self._skip


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:  # a DataLoader's, too, where its dataset has none
        return None


class RowsLoader:
    """Batches with their rows, a new loop for each epoch.

    open    returns a loop over some batches
    loader  a DataLoader or another iterable
    length  batches of an epoch; None: those of the loader, whose `len` says how many

    TypeError for a loader without `len` where no length is given: a framework would read such a loader one batch
    ahead, to know the last batch, and so leave each batch before its step.
    """

    def __init__(self, open: Callable[[Iterable[Any]], Loop], loader: Iterable[Any], length: int | None) -> None:
        self._open, self._loader, self._length = open, loader, length
        if length is None and _length(loader) is None:
            raise TypeError(
                f"the loader, a {type(loader).__name__}, has no len(): say how many batches an epoch has, length=N"
            )
        if length is not None and (isinstance(length, bool) or not isinstance(length, int) or length < 1):
            raise ValueError(f"length is a number of batches, 1 or more, not {length!r}")
        self._loop: Loop | None = None
        self._given = 0  # batches of the epoch, so far
        self._skip = 0  # batches that the next epoch begins after

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self._loader) if self._length is None else self._length  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        """Return an epoch's iterator of (batch, rows). Its loop opens with the first batch, and closes the one before.

        ValueError where the loader ends before the length.
        """
        length, skip = len(self), self._skip
        self.close()
        self._begin()
        goes_on = iter(self._loader) is self._loader  # what is read beyond this epoch is kept for the next one
        loop = self._open(self._loader if goes_on else _First(self._loader, length, skip))
        self._loop, self._given = loop, skip
        try:
            while self._given < length:
                item = next(loop, None)
                if item is None:
                    raise ValueError(f"the loader ended after {self._given} batches; its length is {length}")
                self._given, self._skip = self._given + 1, 0
                yield item  # after the last one a trainer may not come back: the next loop closes this one
                del item
            if goes_on:
                loop.finish()
            else:
                next(loop, None)
        finally:
            self._loop = None
            loop.close()

    def close(self) -> None:
        """Close the epoch's loop, if it is open: a framework leaves loops open that it does not come back to."""
        if self._loop is not None:
            self._loop.close()

    def _begin(self) -> None:
        """Prepare for an epoch."""


class PredictLoader(RowsLoader):
    """Batches with rows that no gradient goes to; what `Runtime.predict_loader` returns."""


class TrainLoader(RowsLoader):
    """Batches with their rows, from which a framework trains; what `Runtime.train_loader` returns."""

    def __init__(
        self, runtime: Any, open: Callable[[Iterable[Any]], Loop], loader: Iterable[Any], length: int | None,
        accumulate: int,
    ) -> None:  # fmt: skip
        super().__init__(open, loader, length)
        self._runtime = runtime
        self._has_warned = False
        if length is not None and length % accumulate and iter(loader) is loader:
            raise ValueError(f"an epoch of {length} batches of an iterator is not whole steps of {accumulate} batches")

    def _begin(self) -> None:
        self._runtime.close_loaders()
        clipping.install()

    def state_dict(self) -> dict[str, int]:
        """Return where the epoch and the tables are, for a framework's checkpoint.

        Warns where nobody has arranged for the tables to be saved with it.
        """
        if not self._runtime.is_saved and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "a checkpoint is being saved without the tables; save them with it, such as by "
                "Trainer(plugins=[hostdev.frameworks.lightning.checkpoint_io(runtime)]), or by runtime.save(path)",
                stacklevel=2,
            )
        self._runtime.write_back()
        return {"given": self._given % len(self), "steps": self._runtime.pipeline.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Begin the next epoch after the batches that were given. UserError where the tables are of another step."""
        steps = self._runtime.pipeline.steps
        if state["steps"] != steps:
            raise UserError(
                f"the checkpoint is of step {state['steps']}, and the tables of step {steps}: save and load them with "
                "the model, such as by Trainer(plugins=[hostdev.frameworks.lightning.checkpoint_io(runtime)])"
            )
        self._skip = state["given"]


class ForFrameworks:
    """What `Runtime` has for the training loops of others."""

    train: Any
    predict: Any
    _loaders: WeakSet[RowsLoader]

    def train_loader(
        self, loader: Iterable[Any], *, ids: IdsOf | None = None, send: Callable[[Any], Any] | None = None,
        accumulate: int = 1, length: int | None = None,
    ) -> TrainLoader:  # fmt: skip
        """Return the batches with their rows for the trainer of a framework, such as Lightning's.

        ::

            trainer.fit(module, runtime.train_loader(loader, ids=ids))  # training_step gets (batch, rows)

        An object with `len`, and a new loop over `train` for each iteration; the arguments are those of `train`. The
        trainer's own clipping (`gradient_clip_val`) clips the rows with the parameters. A resumed trainer goes on after
        the batch at which it saved.

        accumulate  the same number as the trainer's, such as `accumulate_grad_batches`
        length      batches of an epoch; None: `len(loader)`. With an iterator each epoch goes on where the one before
                    ended

        TypeError for a loader without `len` and no length.
        """
        made = TrainLoader(
            self,
            lambda batches: self.train(batches, ids=ids, send=send, accumulate=accumulate).clipping_rows(),
            loader, length, accumulate,
        )  # fmt: skip
        self._loaders.add(made)
        return made

    def predict_loader(
        self, loader: Iterable[Any], *, ids: IdsOf | None = None, send: Callable[[Any], Any] | None = None,
        length: int | None = None,
    ) -> PredictLoader:  # fmt: skip
        """Return the batches with their rows as `train_loader` does, for validation, tests and predictions."""
        made = PredictLoader(lambda batches: self.predict(batches, ids=ids, send=send), loader, length)
        self._loaders.add(made)
        return made

    def close_loaders(self, kind: type[RowsLoader] = RowsLoader) -> None:
        """Close the loops of all loaders, or of one kind, which frameworks leave open."""
        for loader in list(self._loaders):
            if isinstance(loader, kind):
                loader.close()

    def __copy__(self) -> Any:
        """Return itself: a copy of a module that holds a runtime shares it, and so the tables."""
        return self

    def __deepcopy__(self, memo: Any) -> Any:
        """Return itself, as `__copy__` does."""
        return self

    def __reduce__(self) -> Any:
        """Refuse to be pickled."""
        raise TypeError(
            "a Runtime cannot be pickled, such as with save_hyperparameters() or to another process; leave it out of "
            "what is pickled, and save its tables with runtime.save(path)"
        )
