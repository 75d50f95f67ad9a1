"""A training run: its schedule, its data, its steps, and the source of its batches."""

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.writer import AsyncWriter
from hostdev.core.errors import UserError, naming
from hostdev.core.progress import ProgressBar, TimeLeft
from hostdev.core.run_events import RunInfo, RunObserver, StepInfo
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader
from hostdev.distributed.process_group import STOP
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.train import checkpointing, report
from hostdev.train.checkpointing import CheckpointSchedule, Progress
from hostdev.train.interrupt import GracefulStop
from hostdev.train.network import Losses, NonFiniteLossError, Result
from hostdev.train.options import TrainConfig
from hostdev.train.processes import ProcessSession
from hostdev.train.quality import Quality
from hostdev.train.rundir import RunLogs
from hostdev.train.trainer import Trainer

ENDLESS = 1 << 62  # steps of an epoch without a known end


class TrainingSample:
    """Random training samples, drawn evenly from all shards; each evaluation uses the same samples.

    Args:
        root: The data set's folder.
        manifest: The data set's manifest.
        rows: Approximate number of samples. Each shard's number is rounded up, so that its batches have equal sizes.
        seed: Seed of the draw.
    """

    def __init__(self, root: Path, manifest: Manifest, rows: int, seed: int) -> None:
        self._seed = seed
        self._parts: list[tuple[ShardReader, int]] = []
        share = min(1.0, rows / max(1, manifest.rows("train")))
        before = 0
        for shard in manifest.train:
            after = before + shard.rows
            if wanted := round(after * share) - round(before * share):
                self._parts.append((ShardReader(root, replace(manifest, train=[shard]), "train"), wanted))
            before = after

    def steps(self, batch_size: int) -> int:
        """Return the number of batches."""
        return sum(-(-wanted // batch_size) for _, wanted in self._parts)

    def batches(self, batch_size: int, *, part: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """Iterate over batches of at most `batch_size` samples, or a part of each, as `ShardReader.batches` does."""
        for reader, wanted in self._parts:
            steps = -(-wanted // batch_size)
            yield from islice(reader.batches(-(-wanted // steps), seed=self._seed, part=part), steps)


class Schedule(NamedTuple):
    """The steps of a run.

    Attributes:
        epochs: Maximum number of passes over the training samples.
        epoch_steps: Number of steps of an epoch.
        max_steps: Maximum number of steps of the run; None for no limit.
        evaluation_steps: Number of batches of an evaluation.
    """

    epochs: int
    epoch_steps: int
    max_steps: int | None
    evaluation_steps: int

    @property
    def steps(self) -> int:
        """Number of steps if the run is not stopped early."""
        steps = self.epochs * self.epoch_steps
        return min(steps, self.max_steps or steps)

    @property
    def evaluations(self) -> int:
        """Number of evaluations if the run is not stopped early."""
        return -(-self.steps // self.epoch_steps)

    def find(self, steps: int) -> tuple[int, int]:
        """Return the epoch of step number `steps`, and the step's number in that epoch, from 1; (1, 0) for step 0."""
        epoch = max(1, -(-steps // self.epoch_steps))
        return epoch, steps - (epoch - 1) * self.epoch_steps


class TrainingData:
    """A run's data set, with the readers of its splits.

    Attributes:
        root: Its folder.
        manifest: Its manifest.
        train: The training samples.
        test: The test samples.
        watched: The samples that are evaluated after each epoch: the split `split`.
        sample: Training samples that are evaluated along with `watched`.
    """

    def __init__(self, root: Path, manifest: Manifest, config: TrainConfig) -> None:
        self.root, self.manifest = root, manifest
        self.train = ShardReader(root, manifest, "train", shuffle_window=config.shuffle_window)
        self.split = "validation" if manifest.validation else "test"
        self.test, self.watched = (ShardReader(root, manifest, split) for split in ("test", self.split))
        self.sample = TrainingSample(root, manifest, self.watched.rows, config.seed)


class BatchSource:
    """The batches of a run, and the run's work between them, such as evaluations.

    Args:
        config: The options, resolved.
        data: The data set.

    Attributes:
        session: The run, once it is built.
        schedule: The numbers of steps and evaluations.
    """

    session: "Session"
    schedule: Schedule

    def __init__(self, config: TrainConfig, data: TrainingData) -> None:
        self.config, self.data = config, data

    def make_progress(self, values: Mapping[str, Any] | None) -> Progress:
        """Return the progress from a checkpoint's values, or for None the progress of a new run."""
        return Progress() if values is None else Progress.of(values)

    def restore(self, more: Mapping[str, Any]) -> None:
        """Restore the source's own state from a checkpoint's values."""

    def values(self) -> dict[str, Any]:
        """Return the source's own state as values of a checkpoint."""
        return {}

    def begin(self) -> None:
        """Prepare for the first step; tables and logs are already restored from the checkpoint, if there is one."""

    def rewind_logs(self) -> None:
        """Restore the logs to their state at the checkpoint that the run resumes from."""

    def train(self, stop: GracefulStop) -> str:
        """Train until the last step or a signal; return the status for summary.json."""
        raise NotImplementedError

    def record(self, step: int, rows: int) -> None:
        """Note that the epoch's step number `step`, which had `rows` samples, has ended."""

    def summary(self) -> dict[str, Any]:
        """Return the source's own entries of summary.json."""
        return {}

    def draw(self) -> None:
        """Write curve.png."""


class Session:
    """A training run.

    Args:
        config: The options, resolved.
        data: The data set.
        source: The batches.
        logs: The files that the run writes.
        trainer: The model with its tables.
        processes: This process and the other ranks; None for a single process.

    Attributes:
        progress: The steps so far.
        quality: The evaluations so far.
        observer: Receives the run's events.
        saver: Saves checkpoints; None if the run saves none.
        loaded_from: The checkpoint from which the run was resumed.
        time_left: Estimates the rest of the training.
        due_step: The step after which a checkpoint was last due; it is saved after this step.
    """

    saver: CheckpointSchedule | None = None
    loaded_from: Path | None = None
    time_left: TimeLeft

    def __init__(
        self,
        config: TrainConfig,
        data: TrainingData,
        source: BatchSource,
        logs: RunLogs,
        trainer: Trainer,
        processes: ProcessSession[Any] | None,
    ) -> None:
        self.config, self.data, self.source, self.logs, self.trainer = config, data, source, logs, trainer
        self.world: World = ALONE_WORLD if processes is None else processes.ranks
        self._root = logs.files.path if processes is None else processes.root
        source.session = self
        self.progress = source.make_progress(None)
        self.quality = Quality(config.early_stop, data.split, data.manifest.schema.labels)
        self.observer = RunObserver()
        self.due_step = 0

    @property
    def steps(self) -> int:
        """Number of steps taken, including those that an earlier process took before the run was resumed."""
        return self.progress.steps

    def load(self, start: checkpointing.Start | None, load: Callable[[Trainer], list[str]] | None) -> None:
        """Load the checkpoint to resume from, or else call `load`; and prepare the saving of checkpoints."""
        config, data = self.config, self.data.manifest
        start = checkpointing.begin(config, data, start, self._resume)
        if load is not None and start is None:
            print("\n".join(load(self.trainer)), flush=True)
        self.loaded_from = start.path if start is not None else None
        if config.saves:
            self._data_files = checkpointing.data_files(self.data.root, data)
            path = checkpointing.get_folder(config, self._root)
            self.saver = CheckpointSchedule(config, path, self.trainer.runtime.write_back, self._save, self.world)
            self.saver.start(start.chain if start is not None else None, self.trainer.tables.values())
            if config.early_stop is not None and self.quality.best is not None:
                self.saver.manager.best_steps.append(self.quality.best.step)

    def begin(self) -> None:
        """Prepare the logs, the estimate of the time left, and the source for the first step."""
        if self.config.resume is not None:
            self.source.rewind_logs()
        self.logs.begin(self.trainer.tables.values())
        schedule = self.source.schedule
        evaluations = (schedule.evaluations - len(self.quality.points)) * schedule.evaluation_steps
        self.time_left = TimeLeft(training=schedule.steps - self.steps, evaluation=evaluations)
        self.source.begin()

    def _resume(self, start: checkpointing.Start) -> None:
        """Load progress, evaluations, rows and layers from a checkpoint."""
        more, device, schedule = start.more, self.trainer.runtime.device, self.source.schedule
        if more["device"] != device.type:
            print(
                f"NOT EXACT: {start.path} was trained on {more['device']}; results on {device.type} differ in some bits"
            )
        self.progress = self.source.make_progress(more["progress"])
        if self.steps > schedule.steps:
            raise UserError(
                f"{start.path} was saved after step {self.steps:,}, and this run ends after step "
                f"{schedule.steps:,}; give more --epochs or --max-steps"
            )
        epoch, within = schedule.find(self.steps)
        is_unfinished = within < schedule.epoch_steps and self.steps < schedule.steps
        self.quality = Quality(self.config.early_stop, self.data.split, self.data.manifest.schema.labels)
        # if --max-steps ended the epoch early, its evaluation is dropped: the epoch continues and is evaluated again
        self.quality.restore(more["quality"], epoch if is_unfinished else np.inf)
        self.trainer.load(start.chain, check=not start.is_verified)
        for line in report.form_lines(self.trainer.tables):
            print(f"resume   {line}", flush=True)
        self.source.restore(more)

    def _save(self, to: CheckpointManager, step: int, digest: str | None) -> AsyncWriter:
        device = self.trainer.runtime.device.type
        values = checkpointing.values(self.config, self.data.manifest, device, self.progress, self.quality)
        return self.trainer.save(to, step, {**values, **self.source.values()}, self._data_files, state_sha256=digest)

    def save(self) -> None:
        """Save a checkpoint of the state after the last step."""
        assert self.saver is not None
        with self.logs.timeline.span("checkpoint", self.steps):
            self.saver.save(self.steps)

    def take_steps(
        self, batches: Iterator[Batch], epoch: int, taken: int, stop: GracefulStop, progress: ProgressBar
    ) -> None:
        """Take a step with each batch, until a signal; the epoch's first `taken` steps are done."""
        results = self.trainer.train(batches)
        start = time.perf_counter()
        self.time_left.begin()
        first = self.steps
        try:
            with closing(results):  # finishes the updates of queued steps, and may find that a loss is not finite
                for step, result in enumerate(
                    _delay_by_one(results, lambda: self.is_stopped(stop), lambda taken: self.is_due(first + taken)),
                    taken + 1,
                ):
                    self._record(epoch, step, result, progress)
                    if self.saver is not None and self.steps == self.due_step:
                        self.save()
        except NonFiniteLossError as error:
            raise UserError(f"epoch {epoch} step {error.step + taken}: {error}") from error
        finally:
            self.progress.seconds += time.perf_counter() - start

    def is_stopped(self, stop: GracefulStop) -> bool:
        """Return whether a signal has requested the end of training.

        With several ranks, return whether all ranks learned of such a signal in the last step.
        """
        number = self.world.contribute(STOP, int(stop.requested or 0))
        if number and stop.requested is None:
            stop.requested = signal.Signals(number)
        return number > 0

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step, which has been queued."""
        if self.saver is None or not self.saver.is_due(step):
            return False
        self.due_step = step
        return True

    def _record(self, epoch: int, step: int, result: Result, progress: ProgressBar) -> None:
        """Write a step's losses and update the progress bar."""
        losses = result.value
        with self.logs.lock, naming(self.logs.files.path):
            self.progress.add(losses.wide, losses.deep, result.rows)
            self.logs.write_step(epoch, step, losses)
        self.logs.note_dropped(self.config.ops_log)
        if self.observer.listens:
            self.observer.step(self._describe_step(losses, result.rows, epoch))
        self.time_left.step("training")
        progress.set_postfix_str(f"loss {losses.wide:.4f}", refresh=False)
        progress.update()
        self.source.record(step, result.rows)

    def _describe_step(self, losses: Losses, samples: int, epoch: int) -> StepInfo:
        by_name = {"wide_loss": losses.wide, "deep_loss": losses.deep}
        return StepInfo(step=self.steps, epoch=epoch, losses=by_name, samples=samples)

    def start_observer(self, observer: RunObserver, config: dict[str, Any]) -> None:
        """Report the start of the run, and from now on its other events; `config` is the content of config.json."""
        if not observer.listens:
            return
        self.observer, data, schedule = observer, self.data.manifest, self.source.schedule
        info = RunInfo(
            run_dir=self.logs.files.path,
            config=config,
            rows={split: data.rows(split) for split in data.splits},
            steps=schedule.steps if schedule.steps < ENDLESS else None,
            first_step=self.steps,
            processes=self.world.size,
        )
        epoch, within = schedule.find(self.steps)
        again = within == schedule.epoch_steps and self.data.watched.rows > 0
        again &= not any(point.step >= self.steps for point in self.quality.points)
        last = None
        if again:
            last = self._describe_step(Losses(self.progress.wide[-1], self.progress.deep[-1]), 0, epoch)
        observer.start(info, self.trainer.runtime, last)
        if self.saver is not None:
            self.saver.on_saved = observer.checkpoint


def _delay_by_one(
    results: Iterator[Result], is_stopped: Callable[[], bool], is_due: Callable[[int], bool]
) -> Iterator[Result]:
    """Yield each step's result after the next step has been queued, so that reading losses does not stall the device.

    After a signal, before an error is raised, and when a checkpoint is due, the results of all queued steps are
    yielded.

    Args:
        is_due: Called with the number of results taken from `results`; returns whether a checkpoint is due.
    """
    waiting: list[Result] = []
    error: Exception | None = None
    try:
        for taken, result in enumerate(results, 1):
            waiting.append(result)
            if is_stopped():
                break
            kept = 0 if is_due(taken) else 1
            while len(waiting) > kept:
                yield waiting.pop(0)
    except Exception as caught:
        error = caught
    yield from waiting
    if error is not None:
        raise error
