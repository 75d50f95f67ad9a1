"""Epochs over a data set, with evaluations in between."""

import itertools
from collections.abc import Iterator
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.progress import bar
from hostdev.core.run_events import EpochInfo
from hostdev.train import quality as curve
from hostdev.train import report
from hostdev.train.interrupt import GracefulStop
from hostdev.train.options import TrainConfig
from hostdev.train.quality import Point
from hostdev.train.scores import ScoreCounts
from hostdev.train.session import BatchSource, Schedule, TrainingData
from hostdev.train.target_scores import Evaluation


class Epochs(BatchSource):
    """Passes over the training samples; each is followed by an evaluation. See `BatchSource` for the arguments.

    Raises:
        UserError: There are too few rows for an option.
    """

    def __init__(self, config: TrainConfig, data: TrainingData) -> None:
        super().__init__(config, data)
        assert config.epochs is not None and config.batch_size is not None
        self._batch_size = config.batch_size
        self._order_seed = config.seed if config.order == "shuffled" else None
        data.train.require(self._batch_size)
        evaluation_steps = data.watched.steps(self._batch_size) + data.sample.steps(self._batch_size)
        if config.early_stop is not None and not data.watched.rows:
            raise UserError(
                f"--early-stop {config.early_stop} needs validation or test rows, and {data.root} has none; leave out "
                "--early-stop"
            )
        steps = data.train.steps(self._batch_size)
        self.schedule = Schedule(config.epochs, steps, config.max_steps, evaluation_steps)

    def rewind_logs(self) -> None:
        """Restore the logs to their state at the checkpoint that the run resumes from."""
        self.session.logs.files.restart(self._lines(), self.session.quality.points)

    def _lines(self) -> Iterator[tuple[int, int, float, float]]:
        """Yield the arguments of `RunDir.write_losses` for the steps so far."""
        progress, epoch_steps = self.session.progress, self.schedule.epoch_steps
        for number, losses in enumerate(zip(progress.wide, progress.deep, strict=True)):
            yield number // epoch_steps + 1, number % epoch_steps + 1, *losses

    def summary(self) -> dict[str, Any]:
        """Return the entries of summary.json about epochs and quality."""
        return {"epochs": self.session.steps // self.schedule.epoch_steps, **self.session.quality.summary()}

    def draw(self) -> None:
        """Write curve.png."""
        progress = self.session.progress
        curve.draw(self.session.logs.files.curve, progress.wide, progress.rows, self.session.quality)

    def train(self, stop: GracefulStop) -> str:
        """Train and evaluate until the last step, --early-stop or a signal; return the status for summary.json."""
        session, quality = self.session, self.session.quality
        begin, within = self.schedule.find(session.steps)
        for epoch in range(begin, self.schedule.epochs + 1):
            first = session.steps
            with session.logs.timeline.span("epoch", epoch):
                self._train_epoch(epoch, within, stop)
            within = 0
            session.observer.end_training()
            evaluated = not self.data.watched.rows or any(point.step >= session.steps for point in quality.points)
            if not evaluated and not session.is_stopped(stop):
                with session.logs.timeline.span("evaluation", epoch):
                    self._evaluate(epoch, stop)
                self._keep_best()
            if session.observer.listens and not session.is_stopped(stop) and (not evaluated or session.steps > first):
                self._report(epoch)
            if session.is_stopped(stop):
                return "interrupted"
            if session.steps == self.schedule.steps:
                return "finished"
            if quality.is_enough:
                self._print_early_stop()
                return "stopped early"
        raise AssertionError

    def _report(self, epoch: int) -> None:
        """Report the epoch's evaluation, if there is one, to the observer."""
        labels, last = self.data.manifest.schema.labels, self.session.quality.points[-1:]
        metrics = last[0].metrics(self.data.split, labels) if self.data.watched.rows else {}
        self.session.observer.epoch(EpochInfo(epoch=epoch, step=self.session.steps, metrics=metrics))

    def _print_early_stop(self) -> None:
        quality, saver = self.session.quality, self.session.saver
        print(report.early_stop_line(quality, self.config.early_stop), flush=True)
        if saver is not None and quality.best is not None:
            print(
                f"the best checkpoint, of step {quality.best.step:,}, is kept along with the newest; predictions use "
                "the best one unless --which newest is given",
                flush=True,
            )

    def _train_epoch(self, epoch: int, taken: int, stop: GracefulStop) -> None:
        """Take the steps of an epoch that come after its first `taken` steps."""
        session = self.session
        planned = min(self.schedule.epoch_steps, self.schedule.steps - session.steps + taken)
        if planned == taken:
            return
        batches = self.data.train.batches(
            self._batch_size, seed=self._order_seed, epoch=epoch, skip=taken, part=session.world.share()
        )
        title = f"epoch {epoch}/{self.schedule.epochs}"
        with bar(planned, title, "step", begin=taken, left=session.time_left.seconds) as progress:
            session.take_steps(itertools.islice(batches, planned - taken), epoch, taken, stop, progress)

    def _evaluate(self, epoch: int, stop: GracefulStop) -> None:
        """Evaluate the validation samples (or else the test samples) and about as many training samples.

        The result is recorded and printed, unless a signal stops the evaluation.
        """
        session, data = self.session, self.data
        title = f"epoch {epoch}/{self.schedule.epochs}, evaluation"
        with bar(self.schedule.evaluation_steps, title, "step", left=session.time_left.seconds) as progress:

            def count() -> None:
                session.time_left.step("evaluation")
                progress.update()

            scores = ScoreCounts(data.manifest.schema.labels, data.manifest.schema.targets)
            session.time_left.begin()
            evaluate, path = session.trainer.evaluate, session.logs.files.path
            test = evaluate(self._until(data.watched, stop), count, path, counted=scores.add)
            training = evaluate(self._until(data.sample, stop), count, path)
        if session.is_stopped(stop) or test is None:
            return
        final = None
        is_last = session.steps == self.schedule.steps
        may_be_result = is_last if self.config.early_stop is None else session.quality.is_better(test)
        if data.split == "validation" and data.test.rows and may_be_result:
            final = self._evaluate_test_rows(stop)
            if final is None:
                return
        session.quality.add(Point(epoch, session.steps, test, training, final))
        session.logs.files.write_evaluation(session.quality.points[-1])
        if not session.world.rank:
            session.logs.files.write_scores(epoch, session.steps, data.split, scores.as_lists())
        print(report.evaluation_line(session.quality.points[-1], data.split, data.manifest.schema.labels), flush=True)

    def _until(self, rows: Any, stop: GracefulStop) -> Any:
        """Return an iterator over this rank's parts of the rows' batches, which ends after a signal."""
        batches = rows.batches(self._batch_size, part=self.session.world.share())
        return itertools.takewhile(lambda _: not self.session.is_stopped(stop), batches)

    def _evaluate_test_rows(self, stop: GracefulStop) -> Evaluation | None:
        """Evaluate the test samples, whose quality does not affect the run; return None after a signal."""
        session = self.session
        with bar(self.data.test.steps(self._batch_size), "test rows", "step") as progress:
            batches = self._until(self.data.test, stop)
            quality = session.trainer.evaluate(batches, progress.update, session.logs.files.path)
        return None if session.is_stopped(stop) else quality

    def _keep_best(self) -> None:
        """With --early-stop, keep a checkpoint of this step if its evaluation is the best so far."""
        session, quality = self.session, self.session.quality
        if session.saver is None or self.config.early_stop is None or quality.best is None:
            return
        if quality.best is quality.points[-1] and quality.best.step == session.steps:
            with session.logs.timeline.span("checkpoint", session.steps):
                session.saver.keep_best(session.steps)
