"""One training run: its parts and its epochs."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch

from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.writer import AsyncWriter
from hostdev.core.cpus import available_cpus
from hostdev.core.errors import UserError, naming
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.primitive import OpLog
from hostdev.core.progress import ProgressBar, TimeLeft, bar, note
from hostdev.core.timeline import Timeline
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.device.clock import make_clock
from hostdev.distributed.process_group import STOP
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.ext.tracking.callback import EpochInfo, RunInfo, StepInfo
from hostdev.kernels.pool import set_host_threads
from hostdev.pipeline.hooks import PipelineHooks
from hostdev.train import checkpointing, curve, report, starting
from hostdev.train.build import estimate_uses, get_layout, make_cache_specs, model_of, seed_torch, warm_up_kernels
from hostdev.train.callbacks import RunCallbacks
from hostdev.train.checkpointing import CheckpointSchedule, Progress
from hostdev.train.config import TrainConfig
from hostdev.train.evaluation import Evaluation
from hostdev.train.interrupt import GracefulStop
from hostdev.train.key_log import make_key_log
from hostdev.train.losses import NonFiniteLossError
from hostdev.train.network import Result
from hostdev.train.processes import ProcessSession, make_run_dir
from hostdev.train.quality import Point, Quality
from hostdev.train.sample import TrainingSample
from hostdev.train.schedule import ENDLESS, Schedule
from hostdev.train.score_counts import ScoreCounts
from hostdev.train.trainer import Trainer

_SAMPLE = 1000  # samples of the batch that is inspected before the first step
_COMPILING = 8  # maximum number of processes that compile kernels


class Run:
    """One training run: model, data, files and progress.

    Args:
        settings: The options, resolved.
        data: The data set's folder.
        found: The data set's manifest.
        start: The checkpoint to resume from; None for a new run.
        session: This process and the other ranks; None for a single process.
        origin: The checkpoint of --start-from; None without --start-from.
    """

    def __init__(
        self,
        settings: TrainConfig,
        data: Path,
        found: manifest.Manifest,
        start: checkpointing.Start | None = None,
        session: ProcessSession | None = None,
        origin: starting.Origin | None = None,
    ) -> None:
        self.world: World = session.ranks if session is not None else ALONE_WORLD
        self._part = self.world.share()
        assert settings.epochs is not None
        assert settings.batch_size is not None
        self.settings, self.data = settings, found
        self.epochs, self.batch_size = settings.epochs, settings.batch_size
        self._order_seed = settings.seed if settings.order == "shuffled" else None
        self.train_rows = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
        self.watched = "validation" if found.validation else "test"  # the split that is evaluated after each epoch
        self.test_rows, self.watched_rows = (ShardReader(data, found, split) for split in ("test", self.watched))
        self.sample = TrainingSample(data, found, self.watched_rows.rows, settings.seed)
        self.schedule = self._make_schedule(data)
        self.device = backend.select(settings.device)
        backend.set_tf32(self.device, settings.tf32)
        if settings.host_threads is not None:
            if not settings.host_device_mix and backend.is_accelerator(self.device):
                raise UserError(
                    "--host-threads has no effect on an accelerator without --host-device-mix; leave out --host-threads"
                )
            set_host_threads(settings.host_threads)
        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        backend.make_deterministic(self.device)
        trace = _get_trace_path(settings.trace, self.world)
        if trace is not None and trace.exists():
            raise UserError(f"--trace {trace} exists; choose another file")
        self.files = make_run_dir(settings, session)
        self.timeline = Timeline()
        self.trace: Path | None = None
        self.clock = make_clock(self.device)
        self.log = OpLog(clocks={"DEVICE": self.clock})
        try:
            if trace is not None:
                self.timeline.write_to(_open_trace(trace), rank=self.world.label)
                self.trace = trace
            sample = next(self.train_rows.batches(min(self.batch_size, _SAMPLE)))
            seed_torch(settings.seed)
            model = model_of(settings, found.schema)
            cache = make_cache_specs(settings, model, data, found, self.train_rows)
            bf16, squares = settings.precision == "bf16", settings.l2 == "table"
            warm_up_kernels(
                model,
                sample,
                found.id_type,
                bf16=bf16,
                cached=bool(cache),
                squares=squares,
                processes=min(_COMPILING, available_cpus()) if self.world.size == 1 else 1,
            )
            self.trainer = Trainer(
                model,
                host_device_mix=settings.host_device_mix,
                device=self.device,
                l2=settings.l2,
                precision=settings.precision,
                seed=settings.seed,
                log=self.log,
                lr=settings.lr,
                most_uses=estimate_uses(model, sample, self.batch_size),
                cache=cache,
                saves=settings.saves,
                depth=settings.pipeline_depth,
                hooks=PipelineHooks(staleness=settings.staleness),
                timeline=self.timeline,
                micro_batches=settings.micro_batches,
                gradients=settings.gradients or "mean",
                world=self.world,
                dense_exchange=settings.dense_exchange or EXCHANGES[0],
                layout=get_layout(settings) if self.world.has_parts else None,
                sample=sample,
                schema=found.schema,
                frozen=settings.frozen_columns,
            )
            self.progress = self._make_progress(None)
            self.quality = Quality(settings.early_stop, self.watched, found.schema.labels)
            start = checkpointing.begin(settings, found, start, self._resume)
            if origin is not None and start is None:
                print("\n".join(starting.load(origin, self.trainer, settings.frozen_vectors)), flush=True)
            self.loaded_from = start.path if start is not None else None
            self.saver: CheckpointSchedule | None = None
            if settings.saves:
                self._data_files = checkpointing.data_files(data, found)
                path = checkpointing.get_folder(settings, session.root if session is not None else self.files.path)
                self.saver = CheckpointSchedule(settings, path, self.trainer.runtime.write_back, self._save, self.world)
                self.saver.start(start.chain if start is not None else None, self.trainer.tables.values())
                if settings.early_stop is not None and self.quality.best is not None:
                    self.saver.manager.best_steps.append(self.quality.best.step)
        except BaseException:
            self.discard()
            raise
        if settings.resume is not None:
            self._rewind_logs()
        self.keys = make_key_log(self.files.path, self.trainer.tables.values())
        if self.files.ops is not None:
            self.log.write_to(self.files.ops)
        self._has_noted_ops = False
        self._due = 0  # a checkpoint is saved after this step
        evaluations = (self.schedule.evaluations - len(self.quality.points)) * self.schedule.evaluation_steps
        self._left = TimeLeft(training=self.schedule.steps - self.steps, evaluation=evaluations)
        self.callbacks: RunCallbacks | None = None
        self.lock = threading.Lock()  # guards counters and logs, which the signal watcher may complete

    def _make_schedule(self, data: Path) -> Schedule:
        """Return the numbers of steps and evaluations; raise UserError if there are too few rows for an option."""
        self.train_rows.require(self.batch_size)
        evaluation_steps = self.watched_rows.steps(self.batch_size) + self.sample.steps(self.batch_size)
        if self.settings.early_stop is not None and not self.watched_rows.rows:
            raise UserError(
                f"--early-stop {self.settings.early_stop} needs validation or test rows, and {data} has none; leave "
                "out --early-stop"
            )
        steps = self.train_rows.steps(self.batch_size)
        return Schedule(self.epochs, steps, self.settings.max_steps, evaluation_steps)

    def _make_progress(self, values: Mapping[str, Any] | None) -> Progress:
        """Return the progress that a checkpoint has, or that of a new run."""
        return Progress() if values is None else Progress.of(values)

    def _rewind_logs(self) -> None:
        """Make the logs what they were at the checkpoint that the run resumes from."""
        self.files.restart(self._lines(), self.quality.points)

    def _resume(self, start: checkpointing.Start) -> None:
        """Load progress, evaluations, rows and layers from a checkpoint."""
        more = start.more
        if more["device"] != self.device.type:
            print(
                f"NOT EXACT: {start.path} was trained on {more['device']}; results on {self.device.type} differ in "
                "some bits"
            )
        self.progress = self._make_progress(more["progress"])
        if self.steps > self.schedule.steps:
            raise UserError(
                f"{start.path} was saved after step {self.steps:,}, and this run ends after step "
                f"{self.schedule.steps:,}; give more --epochs or --max-steps"
            )
        epoch, within = self.schedule.find(self.steps)
        is_unfinished = within < self.schedule.epoch_steps and self.steps < self.schedule.steps
        self.quality = Quality(self.settings.early_stop, self.watched, self.data.schema.labels)
        # if --max-steps ended the epoch early, its evaluation is dropped: the epoch continues and is evaluated again
        self.quality.restore(more["quality"], epoch if is_unfinished else np.inf)
        self.trainer.load(start.chain, check=not start.is_verified)
        for line in report.form_lines(self.trainer.tables):
            print(f"resume   {line}", flush=True)

    def _save(self, to: CheckpointManager, step: int, digest: str | None) -> AsyncWriter:
        return self.trainer.save(to, step, self._values(), self._data_files, state_sha256=digest)

    def _values(self) -> dict[str, Any]:
        """Return the values that a checkpoint holds besides the model."""
        return checkpointing.values(self.settings, self.data, self.device.type, self.progress, self.quality)

    def _lines(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield the arguments of `RunDir.write_losses` for the steps so far."""
        for number, losses in enumerate(zip(self.progress.wide, self.progress.deep, strict=True)):
            yield number // self.schedule.epoch_steps + 1, number % self.schedule.epoch_steps + 1, *losses

    @property
    def steps(self) -> int:
        """Number of steps taken, including those that an earlier process took before the run was resumed."""
        return self.progress.steps

    def summary(self) -> dict[str, Any]:
        """Return the run's own entries of summary.json."""
        return {"epochs": self.steps // self.schedule.epoch_steps, **self.quality.summary()}

    def draw(self) -> None:
        """Write curve.png."""
        curve.draw(self.files.curve, self.progress.wide, self.progress.rows, self.quality)

    def train(self, stop: GracefulStop) -> str:
        """Train and evaluate until the last step, --early-stop or a signal; return the status for summary.json."""
        begin, within = self.schedule.find(self.steps)
        for epoch in range(begin, self.epochs + 1):
            first = self.steps
            with self.timeline.span("epoch", epoch):
                self._train_epoch(epoch, within, stop)
            within = 0
            if self.callbacks:
                self.callbacks.end_training()
            evaluated = not self.watched_rows.rows or any(point.step >= self.steps for point in self.quality.points)
            if not evaluated and not self._is_stopped(stop):
                with self.timeline.span("evaluation", epoch):
                    self._evaluate(epoch, stop)
                self._keep_best()
            if self.callbacks and not self._is_stopped(stop) and (not evaluated or self.steps > first):
                labels, last = self.data.schema.labels, self.quality.points[-1:]
                metrics = last[0].metrics(self.watched, labels) if self.watched_rows.rows else {}
                self.callbacks.epoch(EpochInfo(epoch=epoch, step=self.steps, metrics=metrics))
            if self._is_stopped(stop):
                return "interrupted"
            if self.steps == self.schedule.steps:
                return "finished"
            if self.quality.is_enough:
                print(report.early_stop_line(self.quality, self.settings.early_stop), flush=True)
                if self.saver is not None and self.quality.best is not None:
                    print(
                        f"the best checkpoint, of step {self.quality.best.step:,}, is kept along with the newest; "
                        "predictions use the best one unless --which newest is given",
                        flush=True,
                    )
                return "stopped early"
        raise AssertionError

    def _train_epoch(self, epoch: int, taken: int, stop: GracefulStop) -> None:
        """Take the steps of an epoch that come after its first `taken` steps."""
        planned = min(self.schedule.epoch_steps, self.schedule.steps - self.steps + taken)
        if planned == taken:
            return
        batches = self.train_rows.batches(
            self.batch_size, seed=self._order_seed, epoch=epoch, skip=taken, part=self._part
        )
        with bar(planned, f"epoch {epoch}/{self.epochs}", "step", begin=taken, left=self._left.seconds) as progress:
            self._take_steps(itertools.islice(batches, planned - taken), epoch, taken, stop, progress)

    def _take_steps(
        self, batches: Iterator[Batch], epoch: int, taken: int, stop: GracefulStop, progress: ProgressBar
    ) -> None:
        """Take a step with each batch; the epoch's first `taken` steps are done."""
        results = self.trainer.train(batches)
        start = time.perf_counter()
        self._left.begin()
        first = self.steps
        try:
            with closing(results):  # finishes the updates of queued steps, and may find that a loss is not finite
                for step, result in enumerate(
                    _delay_by_one(results, lambda: self._is_stopped(stop), lambda taken: self._is_due(first + taken)),
                    taken + 1,
                ):
                    self._record(epoch, step, result, progress)
                    if self.saver is not None and self.steps == self._due:
                        with self.timeline.span("checkpoint", self.steps):
                            self.saver.save(self.steps)
        except NonFiniteLossError as error:
            raise UserError(f"epoch {epoch} step {error.step + taken}: {error}") from error
        finally:
            self.progress.seconds += time.perf_counter() - start

    def _is_stopped(self, stop: GracefulStop) -> bool:
        """Return whether a signal has requested the end of training.

        With several ranks, return whether all ranks learned of such a signal in the last step.
        """
        number = self.world.contribute(STOP, int(stop.requested or 0))
        if number and stop.requested is None:
            stop.requested = signal.Signals(number)
        return number > 0

    def _is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step, which has been queued."""
        if self.saver is None or not self.saver.is_due(step):
            return False
        self._due = step
        return True

    def _record(self, epoch: int, step: int, result: Result, progress: ProgressBar) -> None:
        """Write a step's losses and update the progress bar."""
        losses = result.value
        with self.lock, naming(self.files.path):
            self.progress.add(losses.wide, losses.deep, result.rows)
            self.files.write_losses(epoch, step, losses.wide, losses.deep)
            if self.keys is not None:
                self.keys.write()
            self.log.check()
        if self.files.ops is not None and self.files.ops.dropped_bytes and not self._has_noted_ops:
            note(f"the oldest lines of ops.log are removed from now on (--ops-log {self.settings.ops_log})")
            self._has_noted_ops = True
        if self.callbacks:
            self.callbacks.step(self._describe_step(losses.wide, losses.deep, result.rows, epoch))
        self._left.step("training")
        progress.set_postfix_str(f"loss {losses.wide:.4f}", refresh=False)
        progress.update()

    def _describe_step(self, wide: float, deep: float, samples: int, epoch: int) -> StepInfo:
        return StepInfo(step=self.steps, epoch=epoch, losses={"wide_loss": wide, "deep_loss": deep}, samples=samples)

    def start_callbacks(self, callbacks: RunCallbacks, config: dict[str, Any]) -> None:
        """Call `on_start`, and from now on the other methods."""
        if not callbacks:
            return
        self.callbacks, data, most = callbacks, self.data, self.schedule.steps
        info = RunInfo(
            run_dir=self.files.path,
            config=config,
            rows={split: data.rows(split) for split in data.splits},
            steps=most if most < ENDLESS else None,
            first_step=self.steps,
            processes=self.world.size,
        )
        epoch, within = self.schedule.find(self.steps)
        again = within == self.schedule.epoch_steps and self.watched_rows.rows > 0
        again &= not any(point.step >= self.steps for point in self.quality.points)
        last = self._describe_step(self.progress.wide[-1], self.progress.deep[-1], 0, epoch) if again else None
        callbacks.start(info, self.trainer.runtime, last)
        if self.saver is not None:
            self.saver.on_saved = callbacks.checkpoint

    def _evaluate(self, epoch: int, stop: GracefulStop) -> None:
        """Evaluate the validation samples (or else the test samples) and about as many training samples.

        The result is recorded and printed, unless a signal stops the evaluation.
        """
        with bar(
            self.schedule.evaluation_steps, f"epoch {epoch}/{self.epochs}, evaluation", "step", left=self._left.seconds
        ) as progress:

            def count() -> None:
                self._left.step("evaluation")
                progress.update()

            scores = ScoreCounts(self.data.schema.labels, self.data.schema.targets)
            self._left.begin()
            test, training = (
                self.trainer.evaluate(
                    itertools.takewhile(
                        lambda _: not self._is_stopped(stop), rows.batches(self.batch_size, part=self._part)
                    ),
                    count,
                    self.files.path,
                    counted=counted,
                )
                for rows, counted in ((self.watched_rows, scores.add), (self.sample, _count_none))
            )
        if self._is_stopped(stop) or test is None:
            return
        final = None
        is_last = self.steps == self.schedule.steps
        may_be_result = is_last if self.settings.early_stop is None else self.quality.is_better(test)
        if self.watched == "validation" and self.test_rows.rows and may_be_result:
            final = self._evaluate_test_rows(stop)
            if final is None:
                return
        self.quality.add(Point(epoch, self.steps, test, training, final))
        self.files.write_evaluation(self.quality.points[-1])
        if not self.world.rank:
            self.files.write_scores(epoch, self.steps, self.watched, scores.as_lists())
        print(report.evaluation_line(self.quality.points[-1], self.watched, self.data.schema.labels), flush=True)

    def _evaluate_test_rows(self, stop: GracefulStop) -> Evaluation | None:
        """Evaluate the test samples, whose quality does not affect the run; return None after a signal."""
        with bar(self.test_rows.steps(self.batch_size), "test rows", "step") as progress:
            batches = self.test_rows.batches(self.batch_size, part=self._part)
            until = itertools.takewhile(lambda _: not self._is_stopped(stop), batches)
            found = self.trainer.evaluate(until, progress.update, self.files.path)
        return None if self._is_stopped(stop) else found

    def _keep_best(self) -> None:
        """With --early-stop, keep a checkpoint of this step if its evaluation is the best so far."""
        if self.saver is None or self.settings.early_stop is None or self.quality.best is None:
            return
        if self.quality.best is self.quality.points[-1] and self.quality.best.step == self.steps:
            with self.timeline.span("checkpoint", self.steps):
                self.saver.keep_best(self.steps)

    def discard(self) -> None:
        """Remove the run's files after a failure before the first step, so that their names can be used again."""
        with contextlib.suppress(OSError):
            self.log.close()
        self.files.discard()
        self.timeline.close()
        if self.trace is not None:
            self.trace.unlink(missing_ok=True)


def _delay_by_one(
    results: Iterator[Result], is_stopped: Callable[[], bool], is_due: Callable[[int], bool]
) -> Iterator[Result]:
    """Yield each step's result after the next step has been queued, so that reading losses does not stall the device.

    After a signal, before an error is raised, and when a checkpoint is due, the results of all queued steps are
    yielded.

    Args:
        is_due: Called with the number of results taken from `results`; returns whether a checkpoint is due.
    """
    held: list[Result] = []
    error: Exception | None = None
    try:
        for taken, result in enumerate(results, 1):
            held.append(result)
            if is_stopped():
                break
            kept = 0 if is_due(taken) else 1
            while len(held) > kept:
                yield held.pop(0)
    except Exception as caught:
        error = caught
    yield from held
    if error is not None:
        raise error


def _count_none(outputs: Any, labels: Any) -> None:
    """Count no scores."""


def _get_trace_path(path: Path | None, world: World) -> Path | None:
    """Return the file of a rank's trace: `path` for rank 0, and NAME.rank<k>.SUFFIX in the same folder for rank k."""
    if path is None or not world.rank:
        return path
    return path.with_name(f"{path.stem}.rank{world.rank}{path.suffix}")


def _open_trace(path: Path) -> IO[str]:
    """Open the file of --trace; raise UserError if it cannot be created."""
    try:
        return path.open("x")
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}; choose another file") from None
