"""One training run: what it trains, and its epochs."""

import contextlib
import itertools
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO

import numpy as np
import torch

from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.writer import AsyncWriter
from hostdev.core.errors import UserError, naming
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.primitive import OpLog
from hostdev.core.progress import Progress as Shown
from hostdev.core.progress import TimeLeft, bar, note
from hostdev.core.timeline import Timeline
from hostdev.data import manifest
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.device.clock import make_clock
from hostdev.distributed.process_group import STOP
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.kernels.pool import set_host_threads
from hostdev.pipeline.hooks import PipelineHooks
from hostdev.train import checkpointing, report, starting
from hostdev.train.build import estimate_uses, get_layout, make_cache_specs, model_of, seed_torch, warm_up_kernels
from hostdev.train.checkpointing import CheckpointSchedule, Progress
from hostdev.train.config import TrainConfig
from hostdev.train.interrupt import GracefulStop
from hostdev.train.losses import NonFiniteLossError
from hostdev.train.processes import ProcessSession, make_run_dir
from hostdev.train.quality import Point, Quality
from hostdev.train.sample import TrainingSample
from hostdev.train.schedule import Schedule
from hostdev.train.trainer import Result, Trainer

_SAMPLE = 1000  # rows, of which a batch's ids are looked at before the first step


class Run:
    """One training run: what it trains, where it writes, how far it is."""

    def __init__(
        self, settings: TrainConfig, data: Path, found: manifest.Manifest, start: checkpointing.Start | None = None,
        session: ProcessSession | None = None, origin: starting.Origin | None = None,
    ) -> None:  # fmt: skip
        self.ranks = session.ranks if session is not None else None
        self.world: World = self.ranks or ALONE_WORLD
        self._part = self.world.share()
        assert settings.epochs is not None
        assert settings.batch_size is not None
        self.settings, self.data = settings, found
        self.epochs, self.batch_size = settings.epochs, settings.batch_size
        self.train_rows = ShardReader(data, found, "train", shuffle_window=settings.shuffle_window)
        self.test_rows = ShardReader(data, found, "test")
        self.train_rows.require(self.batch_size)
        self.sample = TrainingSample(data, found, self.test_rows.rows, settings.seed)
        evaluation_steps = self.test_rows.steps(self.batch_size) + self.sample.steps(self.batch_size)
        self.schedule = Schedule(
            self.epochs, self.train_rows.steps(self.batch_size), settings.max_steps, evaluation_steps
        )
        if settings.early_stop is not None and not self.test_rows.rows:
            raise UserError(f"--early-stop {settings.early_stop} needs test rows, and {data} has none; leave it out")
        self.device = backend.select(settings.device)
        backend.set_tf32(self.device, settings.tf32)
        if settings.host_threads is not None:
            if not settings.host_device_mix and backend.is_accelerator(self.device):
                raise UserError(
                    "--host-threads has no effect on an accelerator without --host-device-mix; leave it out"
                )
            set_host_threads(settings.host_threads)
        if settings.torch_threads is not None:
            torch.set_num_threads(settings.torch_threads)
        backend.make_deterministic(self.device)
        trace = _trace_of(settings.trace, self.world)
        if trace is not None and trace.exists():
            raise UserError(f"--trace {trace} exists; choose another file")
        self.files = make_run_dir(settings, session)
        self.timeline = Timeline()
        self.trace: Path | None = None
        self.clock = make_clock(self.device)
        self.log = OpLog(clocks={"DEVICE": self.clock})
        try:
            if trace is not None:
                self.timeline.write_to(_open_trace(trace), rank=None if self.ranks is None else self.ranks.rank)
                self.trace = trace
            sample = next(self.train_rows.batches(min(self.batch_size, _SAMPLE)))
            seed_torch(settings.seed)
            model = model_of(settings, found.schema)
            cache = make_cache_specs(settings, model, data, found, self.train_rows)
            warm_up_kernels(model, sample, found.id_type, bf16=settings.precision == "bf16", cached=cache is not None)
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
                ranks=self.ranks,
                dense_exchange=settings.dense_exchange or EXCHANGES[0],
                layout=get_layout(settings) if self.world.has_parts else None,
                sample=sample,
            )
            self.progress, self.quality = Progress(), Quality(settings.early_stop)
            if self.ranks is None:
                start = checkpointing.begin(settings, found, start, self._go_on)
            elif start is not None:  # the first has checked all of it
                self._go_on(start)
            if origin is not None and start is None:
                print("\n".join(starting.load(origin, self.trainer)), flush=True)
            self.loaded_from = start.path if start is not None else None
            self.saver: CheckpointSchedule | None = None
            if settings.saves:
                self._data_files = checkpointing.data_files(data, found)
                path = checkpointing.get_folder(settings, session.root if session is not None else self.files.path)
                self.saver = CheckpointSchedule(settings, path, self.trainer.runtime.write_back, self._save, self.ranks)
                self.saver.start(start.chain if start is not None else None, self.trainer.tables.values())
                if settings.early_stop is not None and self.quality.best is not None:
                    self.saver.manager.best_steps.append(self.quality.best.step)
        except BaseException:
            self.discard()
            raise
        if settings.resume is not None:
            self.files.restart(self._lines(), self.quality.points)
        if self.files.ops is not None:
            self.log.write_to(self.files.ops)
        self._told_of_ops = False
        self._due = 0  # the step after which a checkpoint is to be saved
        evaluations = self.schedule.evaluations - len(self.quality.points)
        self._left = TimeLeft(training=self.schedule.steps - self.steps, evaluation=evaluations * evaluation_steps)
        self.lock = threading.Lock()  # counters and logs: the watcher of a signal may finish them

    def _go_on(self, start: checkpointing.Start) -> None:
        """Load a checkpoint."""
        more = start.more
        if more["device"] != self.device.type:
            print(f"NOT EXACT: {start.path} was trained on {more['device']}; {self.device.type} has other bits")
        self.progress = Progress.of(more["progress"])
        if self.steps > self.schedule.steps:
            raise UserError(
                f"{start.path} is after step {self.steps:,}, and this run ends after {self.schedule.steps:,}; give "
                "more --epochs or --max-steps"
            )
        epoch, within = self.schedule.find(self.steps)
        goes_on = within < self.schedule.epoch_steps and self.steps < self.schedule.steps
        self.quality = Quality(self.settings.early_stop)
        self.quality.restore(more["quality"], epoch if goes_on else np.inf)  # what a limit has ended is evaluated anew
        self.trainer.load(start.chain, check=self.ranks is None)

    def _save(self, to: CheckpointManager, step: int, digest: str | None) -> AsyncWriter:
        more = checkpointing.values(self.settings, self.data, self.device.type, self.progress, self.quality)
        return self.trainer.save(to, step, more, self._data_files, state_sha256=digest)

    def _lines(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield what loss.log says of the steps so far."""
        for number, losses in enumerate(zip(self.progress.wide, self.progress.deep, strict=True)):
            yield number // self.schedule.epoch_steps + 1, number % self.schedule.epoch_steps + 1, *losses

    @property
    def steps(self) -> int:
        """Steps taken, those before a checkpoint that the run goes on from included."""
        return self.progress.steps

    def train(self, stop: GracefulStop) -> str:
        """Train and evaluate, epoch by epoch, until the end, the step limit, --early-stop or a signal; return which."""
        begin, within = self.schedule.find(self.steps)
        for epoch in range(begin, self.epochs + 1):
            with self.timeline.span("epoch", epoch):
                self._train_epoch(epoch, within, stop)
            within = 0
            evaluated = not self.test_rows.rows or any(point.step >= self.steps for point in self.quality.points)
            if not evaluated and not self._is_stopped(stop):
                with self.timeline.span("evaluation", epoch):
                    self._evaluate(epoch, stop)
                self._keep_best()
            if self._is_stopped(stop):
                return "interrupted"
            if self.steps == self.schedule.steps:
                return "finished"
            if self.quality.is_enough:
                print(report.early_stop_line(self.quality, self.settings.early_stop), flush=True)
                if self.saver is not None and self.quality.best is not None:
                    print(f"the checkpoint of step {self.quality.best.step:,}, the best, is kept beside the newest; "
                          "predictions take it unless told --which newest", flush=True)  # fmt: skip
                return "stopped early"
        raise AssertionError

    def _train_epoch(self, epoch: int, taken: int, stop: GracefulStop) -> None:
        """Take an epoch's steps, of which some have been taken before."""
        planned = min(self.schedule.epoch_steps, self.schedule.steps - self.steps + taken)
        if planned == taken:
            return
        batches = self.train_rows.batches(
            self.batch_size, seed=self.settings.seed, epoch=epoch, skip=taken, part=self._part
        )  # fmt: skip
        results = self.trainer.train(itertools.islice(batches, planned - taken))
        title = f"epoch {epoch}/{self.epochs}"
        with (
            bar(planned, title, "step", begin=taken, left=self._left.seconds) as progress,
            closing(results),
        ):
            start = time.perf_counter()
            self._left.begin()
            first = self.steps
            try:
                for step, result in enumerate(
                    _one_behind(results, lambda: self._is_stopped(stop), lambda taken: self._is_due(first + taken)),
                    taken + 1,
                ):
                    self._note(epoch, step, result, progress)
                    if self.saver is not None and self.steps == self._due:
                        with self.timeline.span("checkpoint", self.steps):
                            self.saver.save(self.steps)
            except NonFiniteLossError as error:
                raise UserError(f"epoch {epoch} step {error.step + taken}: {error}") from error
            finally:
                results.close()  # what has been stepped is updated
                self.progress.seconds += time.perf_counter() - start

    def _is_stopped(self, stop: GracefulStop) -> bool:
        """Tell whether a signal asks for the end; with other ranks, where all knew of it in the last step."""
        if self.ranks is None:
            return stop.requested is not None
        self.ranks.contributed[STOP] = int(stop.requested or 0)
        if self.ranks.reduced[STOP] and stop.requested is None:
            stop.requested = signal.Signals(self.ranks.reduced[STOP])
        return self.ranks.reduced[STOP] > 0

    def _is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is to be saved after this step, which has been queued."""
        if self.saver is None or not self.saver.is_due(step):
            return False
        self._due = step
        return True

    def _note(self, epoch: int, step: int, result: Result, progress: Shown) -> None:
        """Write a step's losses, and show how far the epoch is."""
        losses = result.value
        with self.lock, naming(self.files.path):
            self.progress.add(losses.wide, losses.deep, result.rows)
            self.files.write_losses(epoch, step, losses.wide, losses.deep)
            self.log.check()
        if self.files.ops is not None and self.files.ops.dropped_bytes and not self._told_of_ops:
            note(f"the oldest lines of ops.log are removed from now on (--ops-log {self.settings.ops_log})")
            self._told_of_ops = True
        self._left.step("training")
        progress.set_postfix_str(f"loss {losses.wide:.4f}", refresh=False)
        progress.update()

    def _evaluate(self, epoch: int, stop: GracefulStop) -> None:
        """Evaluate the test rows and as many training rows, and say how good the model is."""
        with bar(
            self.schedule.evaluation_steps, f"epoch {epoch}/{self.epochs}, evaluation", "step", left=self._left.seconds
        ) as progress:

            def count() -> None:
                self._left.step("evaluation")
                progress.update()

            self._left.begin()
            test, training = (
                self.trainer.evaluate(
                    itertools.takewhile(lambda _: not self._is_stopped(stop), batches), count, self.files.path
                )
                for batches in (
                    rows.batches(self.batch_size, part=self._part) for rows in (self.test_rows, self.sample)
                )
            )
        if self._is_stopped(stop) or test is None:
            return
        self.quality.add(Point(epoch, self.steps, test, training))
        self.files.write_evaluation(self.quality.points[-1])
        print(report.evaluation_line(self.quality.points[-1]), flush=True)

    def _keep_best(self) -> None:
        """With --early-stop, keep a checkpoint of now if the evaluation is the best so far."""
        if self.saver is None or self.settings.early_stop is None or self.quality.best is None:
            return
        if self.quality.best is self.quality.points[-1] and self.quality.best.step == self.steps:
            with self.timeline.span("checkpoint", self.steps):
                self.saver.keep_best(self.steps)

    def discard(self) -> None:
        """Remove what the run wrote: nobody wants to choose other names after a failure before the first step."""
        with contextlib.suppress(OSError):
            self.log.close()
        self.files.discard()
        self.timeline.close()
        if self.trace is not None:
            self.trace.unlink(missing_ok=True)


def _one_behind(
    results: Iterator[Result], is_stopped: Callable[[], bool], is_due: Callable[[int], bool]
) -> Iterator[Result]:  # fmt: skip
    """Yield each step when the next one has been queued, by when its losses are there and nobody waits for the device.

    After a signal, before an error is raised, and where a checkpoint is due after a step (they count from 1), what has
    been stepped comes still.
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


def _trace_of(path: Path | None, world: World) -> Path | None:
    """Return where a rank's trace goes: rank 0's to the file named, that of rank k to NAME.rank<k> beside it."""
    if path is None or not world.rank:
        return path
    return path.with_name(f"{path.stem}.rank{world.rank}{path.suffix}")


def _open_trace(path: Path) -> IO[str]:
    """Open the file of --trace; UserError where it cannot be made."""
    try:
        return path.open("x")
    except OSError as error:
        raise UserError(f"--trace {path}: {error.strerror}; choose another file") from None
