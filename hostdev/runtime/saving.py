"""A runtime's tables to disk and back, with what a user's program wants to keep beside them."""

import atexit
import sys
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor

from hostdev.checkpoint.checkpoints import Checkpoints
from hostdev.checkpoint.fitting import fit_tables
from hostdev.checkpoint.folder import Chain, Found
from hostdev.checkpoint.loading import load_tables, newest_whole, require_tables, values_of, verify_others
from hostdev.checkpoint.saving import Content, Saving
from hostdev.checkpoint.tree import to_tree
from hostdev.core.errors import UserError
from hostdev.runtime.random_streams import Place

_begun: set[Saving] = set()  # of which nobody has heard yet how they have ended


@atexit.register
def _await_all() -> None:
    """Wait for what is being written when Python ends: later its threads stand still, and the checkpoint is lost."""
    for saving in list(_begun):
        saving.join()
        if (told := saving.unheard()) is not None:
            print(f"hostdev: warning: {told}", file=sys.stderr)


def _read_once(path: Path, tables: dict[str, Any]) -> Found:
    """Load the newest whole checkpoint, checked while it is; where there is none tables have initial values again."""

    def load(chain: Chain) -> None:
        require_tables(chain, tables)
        verify_others(chain)
        _require_extra(chain)
        load_tables(chain, tables, check=True)

    before = {name: (table.optimizer.lr, table.seed) for name, table in tables.items()}
    try:
        return newest_whole(path, load)
    except BaseException:  # Ctrl-C, too
        for name, table in tables.items():
            table.optimizer.lr, table.seed = before[name]
            if not table.untouched:
                table.reset()
        raise


def _require_extra(chain: Chain) -> None:
    """Raise UserError unless a checkpoint is one of `Runtime.save`; of its files none is read."""
    state = chain[-1].manifest.state
    if not isinstance(state, dict) or "extra" not in state:
        raise UserError(f"{chain[-1].path} was saved by python -m hostdev.train, not by Runtime.save; use its "
                        "--resume, hostdev.open for its tables, hostdev.Predictor for probabilities, or python -m "
                        "hostdev.checkpoint export")  # fmt: skip


class Keeper:
    """Where a runtime has saved to, so that the next checkpoint there can add to the one before."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._folders: dict[Path, Checkpoints] = {}
        self._last: Saving | None = None

    def save(self, path: Path, extra: Any, keep: int, *, wait: bool) -> Saving:
        """See `Runtime.save`."""
        tensors: dict[str, Tensor] = {}
        place = self._runtime.place
        reading = {} if place is None else {"reading": place.to_state()}
        state = to_tree({"extra": extra, **reading}, tensors)
        self._join()  # a table has one snapshot at a time
        to = self._at(path)
        to.keep = keep
        self._runtime.learning_rates()  # those that a scheduler has set for the next batch
        to.lock()
        saving = to.save(
            self._runtime.tables.values(), self._runtime.pipeline.steps, Content(state, tensors, {}, [])
        )  # fmt: skip
        self._last = saving
        _begun.add(saving)
        if wait:
            saving.wait()
            _begun.discard(saving)
        return saving

    def load(self, path: Path, *, strict: bool = True) -> Any:
        """See `Runtime.load`."""
        self._join()
        tables = self._runtime.tables
        if not strict:
            return self._load_shared(path, tables)
        if self._runtime.ranks is None and all(getattr(table, "untouched", False) for table in tables.values()):
            found = _read_once(path, tables)
        else:  # what they hold stays unless there is a whole one, and all ranks choose the same
            found = newest_whole(path)
            require_tables(found.chain, tables)
            _require_extra(found.chain)
            load_tables(found.chain, tables)
        chain = found.chain
        for line in found.notes():
            warnings.warn(line, stacklevel=3)
        if self._runtime.has_optimizer:
            self._runtime.optimizer.take_over()
        to = self._at(chain[-1].path.parent)
        to.start_from(chain, tables.values())
        self._runtime.pipeline.steps = chain[-1].manifest.step
        values = values_of(chain)
        self._runtime.go_on_at(Place.from_state(values["reading"]) if "reading" in values else None)
        return values["extra"]

    def close(self) -> None:
        """Wait for what is being written; a failure that nobody has waited for is a warning."""
        self._join()

    def _load_shared(self, path: Path, tables: dict[str, Any]) -> Any:
        """Load the rows that a checkpoint has for these tables; the next checkpoint is whole."""
        found = newest_whole(path)
        fit = fit_tables(found.chain, tables)
        _require_extra(found.chain)
        load_tables(found.chain, {name: tables[name] for name in fit.taken})
        for line in (*found.notes(), *fit.what_is_left()):
            warnings.warn(line, stacklevel=4)
        for table in tables.values():
            if hasattr(table, "note_changes"):
                table.note_changes(anew=True)
        if self._runtime.has_optimizer:
            self._runtime.optimizer.take_over()
        self._runtime.pipeline.steps = found.chain[-1].manifest.step
        return values_of(found.chain)["extra"]

    def _at(self, path: Path) -> Checkpoints:
        """Return the checkpoints in a folder, which stay there if the program goes to work in another one."""
        where = path.resolve()
        return self._folders.setdefault(where, Checkpoints(where, ranks=self._runtime.ranks))

    def _join(self) -> None:
        """Wait for what is being written, and warn where it has failed and nobody has waited for it."""
        for each in self._folders.values():
            each.join()
        if self._last is None:
            return
        _begun.discard(self._last)
        if (told := self._last.unheard()) is not None:
            warnings.warn(told, stacklevel=4)
