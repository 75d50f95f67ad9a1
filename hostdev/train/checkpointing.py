"""A run's checkpoints: their schedule, their content, and how a run resumes from one."""

import time
from array import array
from collections.abc import Callable, Mapping, MutableSequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from hostdev.checkpoint.folder import (
    FOLDER,
    Chain,
    Checkpoint,
    FolderInUseError,
    Found,
    is_checkpoint,
    names_in,
    read_chain,
    still_exists,
)
from hostdev.checkpoint.loading import find_newest_valid, values_of, verify, verify_others
from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.remote import fetch
from hostdev.checkpoint.writer import AsyncWriter
from hostdev.core import json_files
from hostdev.core.addresses import checkpoint_path, shown_place
from hostdev.core.errors import HostdevError, StoreError, UserError, in_words
from hostdev.core.options import flag_of
from hostdev.core.progress import note
from hostdev.core.run_files import CONFIG, SUMMARY
from hostdev.data.folder import pin
from hostdev.data.manifest import FILE_NAME as DATA_MANIFEST
from hostdev.data.manifest import Manifest
from hostdev.data.manifest import read as read_data
from hostdev.distributed.process_group import SAVE
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.train.build import model_of
from hostdev.train.options import TrainConfig
from hostdev.train.quality import Quality

KEEP = 3


class CheckpointError(UserError):
    """The last checkpoint of a run was not saved."""

    exit_code = 3


class Progress:
    """A run's progress, as stored in a checkpoint."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0  # time spent in training
        self.wide: MutableSequence[float] = array("d")  # wide_loss of each step
        self.deep: MutableSequence[float] = array("d")  # deep_loss of each step
        self.rows: MutableSequence[int] = array("q")  # samples in each step's batch

    def add(self, wide: float, deep: float, rows: int) -> None:
        """Record a step."""
        self.steps += 1
        self.wide.append(wide)
        self.deep.append(deep)
        self.rows.append(rows)

    @property
    def samples(self) -> int:
        """The number of samples in all steps."""
        return sum(self.rows)

    def as_values(self) -> dict[str, Any]:
        """Return the progress as values for a checkpoint."""
        arrays = {name: np.array(getattr(self, name)) for name in ("wide", "deep", "rows")}
        return {"steps": self.steps, "seconds": self.seconds, **arrays}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Return the progress that `as_values` converted to these values."""
        made = cls()
        made.steps, made.seconds = values["steps"], values["seconds"]
        for name in ("wide", "deep", "rows"):
            getattr(made, name).extend(values[name].tolist())
        return made


class Start(NamedTuple):
    """The checkpoint that a run resumes from."""

    chain: Chain
    more: dict[str, Any]  # values that the functions `values` and `BatchSource.values` returned when it was saved
    is_verified: bool = False  # whether its rows are verified already; if not, they are verified while they are loaded

    @property
    def path(self) -> Path:
        """The checkpoint's folder."""
        return self.chain[-1].path


def get_folder(settings: TrainConfig, run_dir: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return settings.checkpoint_dir or run_dir / FOLDER


def find(settings: TrainConfig, data: Manifest, world: World) -> tuple[Start | None, str]:
    """Return the checkpoint to resume from, or None for a new run, and a message about the choice.

    Rank 0 chooses for all ranks, and verifies rows, too; a single process verifies them in `begin`.

    Raises:
        UserError: The checkpoint is missing or damaged, it is from another model or other data, or there is no
            checkpoint and --run-dir holds a different or finished run.
    """
    is_verified = world.size > 1

    def unpack(packed: list[Any]) -> tuple[Start | None, str]:
        chain = read_chain(Path(packed[0])) if packed[0] else None
        return None if chain is None else Start(chain, values_of(chain)["more"], is_verified), packed[1]

    return world.find_together(
        lambda: _find(settings, data, is_verified=is_verified),
        lambda choice: [choice[0] and str(choice[0].path.resolve()), choice[1]],
        unpack,
    )


def _find(settings: TrainConfig, data: Manifest, *, is_verified: bool) -> tuple[Start | None, str]:
    path = _get_search_path(settings)
    fetch(path)
    if settings.resume:
        if not path.exists():
            raise UserError(f"--resume {shown_place(path)}: there is no such checkpoint")
    elif not is_checkpoint(path) and not names_in(path):
        _require_unfinished(settings, data)
        return None, f"resume   there is no checkpoint in {shown_place(path)} yet: the run begins at step 0"
    found = find_newest_valid(path, verify if is_verified else verify_others)
    start = _make_start(settings, data, found.chain)._replace(is_verified=is_verified)
    return start, _describe_start(found, start)


def _get_search_path(settings: TrainConfig) -> Path:
    """Return the path given to --resume or, without a path, the folder of the run's checkpoints."""
    return checkpoint_path(settings.resume) if settings.resume else get_folder(settings, settings.run_dir or Path())


def _make_start(settings: TrainConfig, data: Manifest, chain: Chain) -> Start:
    """Return the `Start` for a checkpoint; raise UserError if its model or data differ from the run's."""
    values = values_of(chain)
    if not isinstance(values, dict) or "more" not in values:
        raise UserError(
            f"{shown_place(chain[-1].path)} was written by Runtime.save, which does not record the model; use "
            "Runtime.load in the program that saved it"
        )
    start = Start(chain, values["more"])
    _require_same(settings, data, start)
    return start


def _describe_start(found: Found, start: Start) -> str:
    """Return lines that name the checkpoint that a run resumes from, and newer checkpoints that are damaged."""
    lines = [f"resume   {line}" for line in found.notes()]
    return "\n".join([*lines, f"resume   {shown_place(start.path)}, after step {start.more['progress']['steps']:,}"])


def begin(settings: TrainConfig, data: Manifest, start: Start | None, load: Callable[[Start], None]) -> Start | None:
    """Load and verify the checkpoint `start`, and return the checkpoint that was loaded; None if `start` is None.

    If rows of `start` are damaged, and --resume does not name this checkpoint, an older one is loaded instead, and its
    name is printed. Raises the same errors as `find`.
    """
    if start is None:
        return None
    if start.is_verified:
        load(start)
        return start
    begun = start

    def check(chain: Chain) -> None:
        nonlocal begun
        if chain[-1].path != start.path:  # `find` has checked `start`
            verify_others(chain)
            begun = _make_start(settings, data, chain)
        load(begun)

    found = find_newest_valid(_get_search_path(settings), check)
    if begun.path != start.path:
        print(_describe_start(found, begun), flush=True)
    return begun


def _require_same(settings: TrainConfig, data: Manifest, start: Start) -> None:
    then = settings.defaults() | start.more["settings"]
    if (name := _find_difference(settings, then, data)) is not None:
        raise UserError(
            f"{shown_place(start.path)} was trained with {_format_option(name, then[name])}, not "
            f"{_format_option(name, getattr(settings, name))}; use the checkpoint's value, or start a new run "
            "without --resume"
        )
    for name, item in settings.options().items():
        if item.is_kind and (getattr(settings, name) is None) != (then[name] is None):
            how = f"{'without' if then[name] is None else 'with'} {flag_of(name)}"
            raise UserError(
                f"{start.path} was trained {how}; resume it likewise, or start a new run from it with --start-from "
                "instead of --resume"
            )
    if start.more["data"] != data.identity:
        raise UserError(
            f"{shown_place(start.path)} was trained on a data set other than {settings.data}: the samples or their "
            "order differ; to start a new run with the checkpoint's tables and layers, give --start-from "
            f"{shown_place(start.path)} instead of "
            "--resume"
        )


def _find_difference(settings: TrainConfig, then: Mapping[str, Any], data: Manifest) -> str | None:
    """Return the first fixed option whose value differs from its value in `then`, or None if all are equal.

    Options with `has_effect` count as equal if they lead to an equal model: a model's default may be given or left out.
    """
    options = settings.options()
    names = [name for name, item in options.items() if item.is_fixed and getattr(settings, name) != then[name]]
    if not names or any(not options[name].has_effect for name in names):
        return next((name for name in names if not options[name].has_effect), None)
    effect = _get_effect(settings, data)
    if _get_effect(replace(settings, **{name: then[name] for name in names}), data) == effect:
        return None
    alone = (name for name in names if _get_effect(replace(settings, **{name: then[name]}), data) != effect)
    return next(alone, names[0])


def _get_effect(settings: TrainConfig, data: Manifest) -> tuple[Any, ...]:
    """Return what options with `has_effect` determine: tables with optimizers, and the dense layers' learning rate."""
    model = model_of(settings, data.schema)
    tables = {name: (spec.rows, spec.dim, spec.optimizer) for name, spec in model.tables.items()}
    return tables, model.lr if settings.lr is None else settings.lr


def _require_unfinished(settings: TrainConfig, data: Manifest) -> None:
    """Raise UserError if the run directory holds a run with other options or data, or a finished run."""
    if settings.run_dir is None or not (settings.run_dir / CONFIG).exists():
        return
    try:
        then = settings.defaults() | json_files.read(settings.run_dir / CONFIG)
        summary = settings.run_dir / SUMMARY
        status = json_files.read(summary)["status"] if summary.exists() else "killed"
        same = _find_difference(settings, then, data) is None and then["preprocess"] == data.options
    except (OSError, ValueError, KeyError, TypeError):
        return
    if status in ("finished", "stopped early") or not same:
        what = "another run" if not same else "a finished run"
        raise UserError(
            f"--run-dir {settings.run_dir} holds {what}, but no checkpoint to resume from; choose another --run-dir"
        )


def _format_option(name: str, value: Any) -> str:
    option = flag_of(name)
    if value is None or value is False:
        return f"no {option}"
    return option if value is True else f"{option} {value}"


def values(settings: TrainConfig, data: Manifest, device: str, progress: Progress, quality: Quality) -> dict[str, Any]:
    """Return the values that a checkpoint holds besides the model."""
    return {
        "settings": {**settings.as_json(), "resume": None},
        "data": data.identity,
        "device": device,
        "progress": progress.as_values(),
        "quality": quality.as_values(),
    }


def data_files(root: Path, data: Manifest) -> dict[str, Path]:
    """Return the data set's files that convert raw text to ids, by their names in a checkpoint.

    Raises:
        UserError: The data set is in a store, and has been replaced since `data` was read.
    """
    pinned = pin(root)
    if pinned != root:
        if read_data(pinned) != data:
            raise UserError(f"{shown_place(root)} has changed while the run began; repeat the command")
        root = pinned
    files = {f"data/{DATA_MANIFEST}": root / DATA_MANIFEST}
    if data.vocabulary is not None:
        files[f"data/{data.vocabulary}"] = root / data.vocabulary
    return files


class CheckpointSchedule:
    """Saves a run's checkpoints when they are due. After a failure it prints a warning, and training continues.

    Args:
        settings: The run's options: when to save, and how many checkpoints to keep.
        path: The folder of checkpoints.
        prepare: Called before each save; writes all cached rows back to the tables. Its errors end the training.
        save: Called with the manager, the step, and the state's digest or None; starts saving.
        world: The processes that save together. All of them must make the same calls.
    """

    on_saved: Callable[[int, Path, float], object] | None = None  # gets step, path and seconds of a saved checkpoint

    def __init__(
        self,
        settings: TrainConfig,
        path: Path,
        prepare: Callable[[], None],
        save: Callable[[CheckpointManager, int, str | None], AsyncWriter],
        world: World = ALONE_WORLD,
    ) -> None:
        self._world = world
        self._every = settings.checkpoint_every
        self._seconds = settings.checkpoint_minutes and settings.checkpoint_minutes * 60
        self._prepare, self._save = prepare, save
        self.manager = CheckpointManager(path, keep=settings.keep_checkpoints or KEEP, hold=True, world=world)
        self._last_began = time.monotonic()
        self._step = 0  # the step of the last attempt to save
        self.saved_step: int | None = None
        self._loaded: Checkpoint | None = None  # the checkpoint that the run resumed from, if it is in the folder
        self._failing: str | None = None  # why the last attempt failed
        self._not_uploaded: str | None = None  # why the last upload to a store failed
        self._count = self._failed = 0
        self._stalled = 0.0

    def describe(self) -> str:
        """Return the schedule and the folder as text."""
        when = [f"{self._every:,} steps"] if self._every is not None else []
        when += [f"{self._seconds / 60:g} minutes"] if self._seconds is not None else []
        return (
            f"a checkpoint every {' and every '.join(when)} to {shown_place(self.manager.path)}; "
            f"the newest {self.manager.keep} are kept"
        )

    def start(self, chain: Chain | None, tables: Any) -> None:
        """Lock the folder; if `chain` was loaded, record which rows change from now on, for incremental checkpoints."""
        try:
            self.manager.lock()
        except (FolderInUseError, StoreError):
            raise
        except UserError as error:
            self._failing = str(error)
            note(
                f"warning: checkpoints cannot be saved: {error}; training continues, and saving is tried again when a "
                "checkpoint is due"
            )
        if chain is not None:
            self.manager.start_from(chain, tables)
            self._loaded = self.manager.last

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step."""
        self._record_outcome()
        due = self._every is not None and step % self._every == 0
        late = self._seconds is not None and (
            time.monotonic() - self._last_began >= self._seconds and not self.manager.is_saving
        )
        return self._world.request(SAVE, late and not due) or due

    def save(self, step: int, state_sha256: str | None = None) -> None:
        """Start saving a checkpoint of this step; a failure to save is recorded, not raised."""
        start = time.monotonic()
        self.manager.join()
        self._record_outcome()
        self._last_began, self._step = start, step
        if self.newest is not None and not self.newest.is_dir():
            note(f"warning: {self.newest} was removed, so the checkpoint of step {step:,} is saved with all rows")
        self._prepare()
        try:
            self._save(self.manager, step, state_sha256)
        except (HostdevError, OSError) as error:
            self._fail(in_words(error))
        self._stalled += time.monotonic() - start

    def keep_best(self, step: int) -> None:
        """Keep this step's checkpoint, the best so far, besides the newest ones; save it if it is not saved yet."""
        self._record_outcome()
        self.manager.best_steps.insert(0, step)
        if self._step != step or self._failing is not None:
            self.save(step)

    def save_last(self, step: int, state_sha256: str | None = None) -> None:
        """Save the run's last checkpoint, unless the run has resumed from it in this folder, and it still exists."""
        loaded = self._loaded
        same = loaded is not None and loaded is self.manager.last and loaded.manifest.step == step
        due = loaded is None or not same or not still_exists(loaded)
        if self._world.control.share(due)[0]:  # ranks may see different files on a shared disk
            self.save(step, state_sha256)
            if self.manager.must_repeat():
                self.save(step, state_sha256)
        else:
            self.saved_step, self._failing = step, None

    def _record_outcome(self) -> None:
        """Record whether the last attempt to save succeeded, if this attempt has ended."""
        self._record_upload()
        writer = self.manager.take_ended()
        if writer is None:
            return
        if writer.error is not None:
            self._fail(in_words(writer.error))
            return
        if self._failing is not None:
            note(f"the checkpoint of step {self._step:,} was saved")
        self._failing, self.saved_step = None, self._step
        self._count += 1
        if self.on_saved is not None and self.newest is not None:
            self.on_saved(self._step, self.newest, time.monotonic() - self._last_began)

    def _record_upload(self) -> None:
        why = None if self.manager.uploads is None else self.manager.uploads.failure
        if why is not None and self._not_uploaded is None:
            note(f"warning: {why}; training continues, and uploading is tried again after the next checkpoint")
        elif why is None and self._not_uploaded is not None:
            note(f"checkpoints are in {shown_place(self.manager.path)} again")
        self._not_uploaded = why

    def _fail(self, why: str) -> None:
        self._failed += 1
        if self._failing is None:
            message = f"the checkpoint of step {self._step:,} was not saved: {why}"
            note(f"warning: {message}; training continues, and saving is tried again when a checkpoint is due")
        self._failing = why

    def finish(self) -> None:
        """Wait until the last checkpoint is written, and unlock the folder."""
        self.manager.close()
        self._record_outcome()

    @property
    def newest(self) -> Path | None:
        """The checkpoint that was last saved to the folder or loaded from it; None if there is none."""
        return self.manager.last.path if self.manager.last is not None else None

    @property
    def failed(self) -> str | None:
        """The reason why the last attempt to save, or the last upload, failed; None if both succeeded."""
        return self._failing or self._not_uploaded

    def summary(self) -> dict[str, Any]:
        """Return the entry on checkpoints for summary.json."""
        return {
            "path": shown_place(self.manager.path),
            "saved": self._count,
            "failed": self._failed,
            **self.manager.upload_counts(),
            "last_step": self.saved_step,
            **({"best_step": self.manager.best_steps[0]} if self.manager.best_steps else {}),
            "stall_us": round((self._stalled + self.manager.copying_seconds) * 1e6),
        }
