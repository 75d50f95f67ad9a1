"""Saves and loads a runtime's tables, with other values that the user's program saves in the same checkpoint."""

import atexit
import sys
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from hostdev.checkpoint.folder import Chain, Found
from hostdev.checkpoint.loading import (
    find_newest_valid,
    fit_tables,
    load_tables,
    require_tables,
    values_of,
    verify_others,
    verify_segments,
)
from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.state import to_tree
from hostdev.checkpoint.writer import AsyncWriter, Content
from hostdev.core.addresses import checkpoint_path
from hostdev.core.errors import UserError, in_words
from hostdev.runtime.random_streams import Place

_unreported: set[AsyncWriter] = set()  # writers whose outcome the program does not know yet


@atexit.register
def _await_all() -> None:
    """When Python exits, wait until all checkpoints are written, and print the errors that were not reported yet."""
    for writer in list(_unreported):
        writer.await_upload()
        if (failure := writer.take_failure()) is not None:
            print(f"hostdev: warning: {failure}", file=sys.stderr)


def _load_unverified(path: Path, tables: dict[str, Any]) -> Found:
    """Load the newest valid checkpoint, verifying its rows while they are loaded; after an error, reset the tables."""

    def load(chain: Chain) -> None:
        require_tables(chain, tables)
        verify_others(chain)
        verify_segments(chain)
        _require_extra(chain)
        load_tables(chain, tables, check=True)

    before = {name: (table.optimizer.lr, table.seed, table.history.renewed()) for name, table in tables.items()}
    try:
        return find_newest_valid(path, load)
    except BaseException:  # including Ctrl-C
        for name, table in tables.items():
            table.optimizer.lr, table.seed, history = before[name]
            if history.how != table.history.how:
                history.hand_over(table, whole=True)
            if not table.stored.untouched:
                table.reset()
        raise


def _require_extra(chain: Chain) -> None:
    """Raise UserError unless `Runtime.save` wrote the checkpoint. Only the manifest is read."""
    state = chain[-1].manifest.state
    if not isinstance(state, dict) or "extra" not in state:
        raise UserError(
            f"{chain[-1].path} was saved by python -m hostdev.train, not by Runtime.save; use "
            "python -m hostdev.train --resume to continue, hostdev.open for the tables, hostdev.Predictor for "
            "probabilities, or python -m hostdev.checkpoint export"
        )


class RuntimeCheckpoints:
    """Saves and loads a runtime's checkpoints, with one `CheckpointManager` per folder.

    Args:
        runtime: A `Runtime`, untyped because its module imports this one. No reference to it is kept.
    """

    def __init__(self, runtime: Any) -> None:
        self._tables, self._pipeline, self._world = runtime.tables, runtime.pipeline, runtime.world
        self._settings, self._loops = runtime.settings, runtime.loops
        self._managers: dict[Path, CheckpointManager] = {}
        self._uploading: list[AsyncWriter] = []  # writers whose checkpoints are written, and are being uploaded

    def save(self, path: Path | str, extra: Any, keep: int, *, wait: bool) -> AsyncWriter:
        """See `Runtime.save`."""
        tensors: dict[str, Tensor] = {}
        place = self._loops.place
        reading = {} if place is None else {"reading": place.to_state()}
        cursor = {} if self._loops.cursor is None else {"cursor": self._loops.cursor}
        state = to_tree({"extra": extra, **reading, **cursor}, tensors)
        self._join()  # a table allows only one snapshot at a time
        manager = self._get_manager(checkpoint_path(path))
        manager.keep = keep
        self._settings.learning_rates()  # applies the rates that a scheduler has set for the next batch

        def begin() -> AsyncWriter:
            content = Content(state, tensors, {}, [])
            return manager.save(self._tables.values(), self._pipeline.steps, content)

        writer = begin()
        if wait and manager.must_repeat():
            if writer.error is not None:
                warnings.warn(in_words(writer.error), stacklevel=3)
            writer = begin()
        _unreported.add(writer)
        if wait:
            writer.wait()
            _unreported.discard(writer)
        return writer

    def load(self, path: Path | str, *, strict: bool = True) -> Any:
        """See `Runtime.load`."""
        self._join()
        path, tables = checkpoint_path(path), self._tables
        if not strict:
            return self._load_shared(path, tables)
        if self._world.size == 1 and all(table.stored and table.stored.untouched for table in tables.values()):
            found = _load_unverified(path, tables)
        else:  # tables change only if a checkpoint is valid; all ranks choose the same one
            found = find_newest_valid(path)
            require_tables(found.chain, tables)
            _require_extra(found.chain)
            load_tables(found.chain, tables)
        chain = found.chain
        for line in found.notes():
            warnings.warn(line, stacklevel=3)
        if self._settings.optimizer is not None:
            self._loops.make_optimizer().take_over()
        self._get_manager(chain[-1].path.parent).start_from(chain, tables.values())
        self._pipeline.steps = chain[-1].manifest.step
        values = values_of(chain)
        self._loops.cursor = values.get("cursor")
        self._loops.iterators.continue_at(Place.from_state(values["reading"]) if "reading" in values else None)
        return values["extra"]

    def close(self) -> None:
        """Wait until all checkpoints are written, and warn about failures that were not reported."""
        self._join()
        for manager in self._managers.values():
            manager.close()
        self._report_uploads()

    def _load_shared(self, path: Path, tables: dict[str, Any]) -> Any:
        """Load the tables that the checkpoint and the runtime both have; the next checkpoint is full."""
        found = find_newest_valid(path)
        fit = fit_tables(found.chain, tables)
        _require_extra(found.chain)
        load_tables(found.chain, {name: tables[name] for name in fit.taken})
        for line in (*found.notes(), *fit.what_is_left()):
            warnings.warn(line, stacklevel=4)
        for table in tables.values():
            if table.stored is not None:
                table.stored.note_changes(anew=True)
        if self._settings.optimizer is not None:
            self._loops.make_optimizer().take_over()
        self._pipeline.steps = found.chain[-1].manifest.step
        values = values_of(found.chain)
        self._loops.cursor = values.get("cursor")
        return values["extra"]

    def _get_manager(self, path: Path) -> CheckpointManager:
        """Return a folder's manager; the folder's path is made absolute, since the working directory may change."""
        where = path.resolve()
        if where not in self._managers:
            self._managers[where] = CheckpointManager(where, world=self._world)
        return self._managers[where]

    def _join(self) -> None:
        """Wait until all checkpoints are written, and warn about failures that were not reported."""
        for manager in self._managers.values():
            manager.join()
            if (writer := manager.take_ended()) is None:
                continue
            self._uploading.append(writer)
        self._report_uploads()

    def _report_uploads(self) -> None:
        for writer in self._uploading:
            if (failure := writer.take_failure()) is not None:
                warnings.warn(failure, stacklevel=5)
            if not writer.is_uploading:
                _unreported.discard(writer)
        self._uploading = [writer for writer in self._uploading if writer.is_uploading]
