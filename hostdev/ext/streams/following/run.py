"""A run that trains on the files of a folder as they arrive, scoring each before it is trained on."""

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError, naming
from hostdev.core.outputs import write_json
from hostdev.core.printable import printable
from hostdev.core.progress import bar, note
from hostdev.core.run_files import NEEDED
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.ext.streams.arrivals.converting import Converted
from hostdev.ext.streams.arrivals.cutting import BatchCutter, batches_of
from hostdev.ext.streams.arrivals.example import Example
from hostdev.ext.streams.arrivals.folder import open_folder
from hostdev.ext.streams.arrivals.watcher import Watcher
from hostdev.ext.streams.following import report
from hostdev.ext.streams.following.logs import Expected, FileLogs
from hostdev.ext.streams.following.next_file import NextFile
from hostdev.ext.streams.following.progress import RecentProgress, RecentQuality, WaitingLine
from hostdev.ext.streams.following.progressive import OutputSums, ScoreWindow
from hostdev.ext.streams.following.state import FollowState
from hostdev.ext.tracking.callback import EpochInfo
from hostdev.train import checkpointing, starting
from hostdev.train.checkpointing import Progress
from hostdev.train.config import TrainConfig
from hostdev.train.follow_options import POLL_SECONDS, QUIET_SECONDS, WINDOW, Until, parse_until
from hostdev.train.interrupt import GracefulStop
from hostdev.train.network import Result
from hostdev.train.processes import ProcessSession
from hostdev.train.run import Run
from hostdev.train.schedule import ENDLESS, Schedule


class FollowRun(Run):
    """A run over the files of --follow; the data set describes their columns. See `Run` for the arguments."""

    def __init__(
        self,
        settings: TrainConfig,
        data: Path,
        found: Manifest,
        start: checkpointing.Start | None = None,
        session: ProcessSession | None = None,
        origin: starting.Origin | None = None,
    ) -> None:
        if session is not None:
            raise UserError("--follow trains in one process; start it without a launcher")
        assert settings.follow is not None
        self._example = Example(data)
        self._folder = open_folder(settings.follow, settings.follow_mark)
        self._poll = POLL_SECONDS if settings.follow_poll is None else settings.follow_poll
        self._quiet = QUIET_SECONDS if settings.follow_quiet is None else settings.follow_quiet
        self._until: Until | None = None if settings.follow_until is None else parse_until(settings.follow_until)
        labels, targets = found.schema.labels, found.schema.targets
        self._is_number = tuple(name in targets.numeric for name in labels)
        self.state = FollowState(ScoreWindow(settings.follow_window or WINDOW, self._is_number))
        self._loss_bytes: int | None = None  # of loss.log at the checkpoint
        self._key_counts: dict[str, Any] = {}  # the state of keys.log then; {} for a new run
        self._saved = 0  # the last step with which saving was tried, or that of the checkpoint
        self._needed: dict[int, dict[str, Any]] = {}  # by step of a checkpoint that is being written
        self._recent = RecentQuality()
        super().__init__(settings, data, found, start, session, origin)
        self._saved = self.steps
        self._cutter = BatchCutter(self.batch_size)
        self._waiting = WaitingLine()
        if self.keys is not None:
            self.keys.by_step = False
            if self._key_counts:
                self.keys.restore(self._key_counts)

    def _make_schedule(self, data: Path) -> Schedule:
        return Schedule(1, ENDLESS, self.settings.max_steps, 0)

    def _make_progress(self, values: Mapping[str, Any] | None) -> Progress:
        return RecentProgress() if values is None else RecentProgress.of(values)

    def _resume(self, start: checkpointing.Start) -> None:
        super()._resume(start)
        follow = start.more["follow"]
        self.state.restore(follow)
        self._loss_bytes, self._key_counts = follow["loss_bytes"], follow["keys"]

    def _rewind_logs(self) -> None:
        with naming(self.files.path):
            if self._loss_bytes is not None and _size(self.files.loss) > self._loss_bytes:
                self.files.loss.truncate(self._loss_bytes)
            if self.files.ops is not None:
                self.files.ops.fit()

    def _values(self) -> dict[str, Any]:
        self._needed[self.steps] = self.state.needed()
        keys = None if self.keys is None else self.keys.state()
        follow = {**self.state.as_values(), "loss_bytes": _size(self.files.loss), "keys": keys}
        return {**super()._values(), "follow": follow}

    def train(self, stop: GracefulStop) -> str:
        """Train on files until --follow-until, --max-steps or a signal; return the status for summary.json."""
        assert self.settings.follow is not None
        if self._folder.has_folders():
            note(
                f"{shown_place(self.settings.follow)} has sub-folders, which are not followed; to follow those that "
                "are complete, give --follow-mark NAME, the name of a file such as _SUCCESS in each of them"
            )
        self._file_logs = FileLogs(self.files.path, self.state.seen.taken)
        try:
            about = self._folder, self.state.seen, self._example, self.files.path, self._poll
            with Watcher(*about, quiet=self._quiet) as watcher:
                known = self._folder, self.state, self._file_logs
                grown = self.settings.follow_grown
                next_file = NextFile(watcher, *known, self._until, self._waiting.note, takes_grown=grown)
                is_over = self._go_on(next_file, stop) and self._follow(next_file, stop)
            if self._is_stopped(stop):
                return "interrupted"
            if is_over and self._cutter.waiting and self._until is not None and self._until.trains_rest:
                self._train_on(iter([self._cutter.rest()]), 1, "the last rows", stop)
            return "interrupted" if self._is_stopped(stop) else "finished"
        finally:
            self._waiting.end()
            self._file_logs.close()

    def _shown_start(self) -> str:
        return "" if self.loaded_from is None else shown_place(self.loaded_from)

    def _go_on(self, next_file: NextFile, stop: GracefulStop) -> bool:
        """Train on the rest of the files that the checkpoint had begun; return False at a signal or --max-steps."""
        for pending in list(self.state.pending):
            expected = Expected(pending.name, pending.sha256, pending.nbytes, pending.after)
            otherwise = f"start a new run from the checkpoint with --start-from {self._shown_start()}"
            file = next_file.find(expected, lambda text: self._wait(text, stop), otherwise)
            self._waiting.end()
            if file is None:
                return False
            with closing(file):
                if not self._train_file(file, pending.done, stop):
                    return False
        return True

    def _follow(self, next_file: NextFile, stop: GracefulStop) -> bool:
        """Score and train on one file after the other; return True at --follow-until, False at an earlier end."""
        while self.steps < self.schedule.steps and not self._is_stopped(stop):
            file = next_file.take(lambda text: self._wait(text, stop))
            if file is None:
                return not self._is_stopped(stop)
            self._waiting.end()
            with closing(file):
                if not (self._score(file, stop) and self._train_file(file, 0, stop)):
                    return False
        return False

    def _wait(self, text: str, stop: GracefulStop) -> bool:
        """Say why the run waits, and save a checkpoint if one is due; return whether to wait."""
        self._waiting.show(text)
        if self.saver is not None and self.steps and self._is_due(self.steps) and self._saved != self.steps:
            self._save_now()
        self._write_needed()
        return not self._is_stopped(stop)

    def _save_now(self) -> None:
        assert self.saver is not None
        with self.timeline.span("checkpoint", self.steps):
            self.saver.save(self.steps)
        self._saved = self.steps

    def _write_needed(self) -> None:
        """Write needed.json, which says what the newest checkpoint still needs, once that checkpoint is written."""
        step = -1 if self.saver is None or self.saver.saved_step is None else self.saver.saved_step
        if step in self._needed:
            content = {"step": step, **self._needed[step]}
            self._needed = {later: needed for later, needed in self._needed.items() if later > step}
            with naming(self.files.path):
                write_json(self.files.path / NEEDED, content)

    def _score(self, file: Converted, stop: GracefulStop) -> bool:
        """Score a file, record that it is taken, and report its quality; return False at a signal."""
        schema = self.data.schema
        collector = OutputSums(schema.labels, schema.targets)
        batches = itertools.takewhile(lambda _: not self._is_stopped(stop), batches_of(file, self.batch_size))
        title = printable(f"scoring {file.name}")
        with (
            self.timeline.span("evaluation", self.state.seen.taken + 1),
            bar(-(-file.rows // self.batch_size), title, "step") as shown,
        ):
            found = self.trainer.evaluate(batches, shown.update, self.files.path, collector.add)
        if self._is_stopped(stop) or found is None:
            return False
        scored = collector.result()
        self.state.take(file.name, file.sha256, file.rows, file.nbytes, file.part.after, file.taken)
        self.state.window.add(scored)
        taken, window = self.state.seen.taken, self.state.window
        line = report.make_line(taken, file, self.steps, schema.labels, (found, scored), window)
        self._file_logs.write(line)
        over = window.evaluation()
        self._recent.add(taken, found.metric, found.value, over.value)
        print(report.describe(line, found, over), flush=True)
        if file.rejected:
            note(f"{file.name}: {file.rejected:,} rows cannot be read and are left out; the first is {file.first}")
        if self.callbacks:
            metrics = report.get_metrics(schema.labels, {"file": (found, scored), "window": (over, window.total())})
            self.callbacks.epoch(EpochInfo(epoch=taken, step=self.steps, metrics=metrics, file=file.name))
        return not self._is_stopped(stop)

    def _train_file(self, file: Converted, first: int, stop: GracefulStop) -> bool:
        """Train on a file's rows from row `first` on; return False at a signal or --max-steps."""
        planned = min(self._cutter.steps(file.rows - first), self.schedule.steps - self.steps)
        batches = self._cutter.cut(file, first)
        if planned < self._cutter.steps(file.rows - first):
            batches = itertools.islice(batches, planned)
        self._train_on(batches, planned, printable(file.name), stop)
        if self.callbacks:
            self.callbacks.end_training()
        if self.keys is not None:
            self.keys.write(end=True)
        return not self._is_stopped(stop) and self.steps < self.schedule.steps

    def _train_on(self, batches: Iterator[Batch], planned: int, title: str, stop: GracefulStop) -> None:
        """Take a step with each batch; `planned` is their number."""
        if not planned:
            for _ in batches:
                raise AssertionError("a file with too few rows has a batch")
            return
        with bar(planned, title, "step") as progress, self.timeline.span("epoch", self.state.seen.taken):
            self._take_steps(batches, 1, self.steps, stop, progress)

    def _record(self, epoch: int, step: int, result: Result, progress: Any) -> None:
        super()._record(epoch, step, result, progress)
        self.state.advance(result.rows)
        self._write_needed()
        if self._due == step:
            self._saved = step  # `_take_steps` saves next

    def summary(self) -> dict[str, Any]:
        """Return the run's own entries of summary.json."""
        if self.files.path.is_dir():
            self._write_needed()
        return report.summarize(self.state, self.data.schema.labels)

    def draw(self) -> None:
        """Write curve.png."""
        report.draw(self.files.curve, self.progress, self._recent)


def _size(file: Any) -> int:
    """Return the size of an open text file in bytes."""
    file.flush()
    return os.fstat(file.fileno()).st_size
