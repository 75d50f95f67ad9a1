"""The files of a folder as they arrive: the model scores each file before it is trained on it."""

import itertools
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from hostdev.core.addresses import shown_place
from hostdev.core.errors import naming
from hostdev.core.outputs import write_json
from hostdev.core.printable import printable
from hostdev.core.progress import bar, note
from hostdev.core.run_events import EpochInfo
from hostdev.core.run_files import NEEDED
from hostdev.data.batch import Batch
from hostdev.ext.streams import report
from hostdev.ext.streams.converting import BatchCutter, Converted, batches_of
from hostdev.ext.streams.example import Example
from hostdev.ext.streams.folder import open_folder
from hostdev.ext.streams.next_file import NextFile
from hostdev.ext.streams.options import POLL_SECONDS, QUIET_SECONDS, WINDOW, FollowOptions, Until, parse_until
from hostdev.ext.streams.progressive import OutputSums, ScoreWindow
from hostdev.ext.streams.report import RecentProgress, RecentQuality, WaitingLine
from hostdev.ext.streams.state import FileLogs, FollowState
from hostdev.ext.streams.watcher import Watcher
from hostdev.train.checkpointing import Progress
from hostdev.train.interrupt import GracefulStop
from hostdev.train.options import TrainConfig
from hostdev.train.session import ENDLESS, BatchSource, Schedule, TrainingData


class FollowedFiles(BatchSource):
    """The files of --follow, once each; the data set describes their columns. See `BatchSource` for the arguments."""

    def __init__(self, config: TrainConfig, data: TrainingData, options: FollowOptions) -> None:
        super().__init__(config, data)
        assert options.follow is not None and config.batch_size is not None
        self._followed = options.follow
        self._example = Example(data.root)
        self._folder = open_folder(options.follow, options.follow_mark)
        self._poll = POLL_SECONDS if options.follow_poll is None else options.follow_poll
        self._quiet = QUIET_SECONDS if options.follow_quiet is None else options.follow_quiet
        self._until: Until | None = None if options.follow_until is None else parse_until(options.follow_until)
        self._takes_grown, self._batch_size = options.follow_grown, config.batch_size
        labels, targets = data.manifest.schema.labels, data.manifest.schema.targets
        self._is_number = tuple(name in targets.numeric for name in labels)
        self.state = FollowState(ScoreWindow(options.follow_window or WINDOW, self._is_number))
        self.schedule = Schedule(1, ENDLESS, config.max_steps, 0)
        self._loss_bytes: int | None = None  # size of loss.log at the checkpoint; None for a new run
        self._key_counts: dict[str, Any] = {}  # state of keys.log at the checkpoint; {} for a new run
        self._saved = 0  # the last step after which saving was tried, or the step of the loaded checkpoint
        self._needed: dict[int, dict[str, Any]] = {}  # contents of needed.json, by step of the checkpoint
        self._recent = RecentQuality()
        self._cutter = BatchCutter(self._batch_size)
        self._waiting = WaitingLine()

    def make_progress(self, values: Mapping[str, Any] | None) -> Progress:
        """Return the progress in a checkpoint, or that of a new run; only the last steps' losses are kept."""
        return RecentProgress() if values is None else RecentProgress.of(values)

    def restore(self, more: Mapping[str, Any]) -> None:
        """Restore the state of the files from a checkpoint's values."""
        follow = more["follow"]
        self.state.restore(follow)
        self._loss_bytes, self._key_counts = follow["loss_bytes"], follow["keys"]

    def begin(self) -> None:
        """Note the number of steps at the beginning of the run, and restore the state of keys.log."""
        self._saved = self.session.steps
        keys = self.session.logs.keys
        if keys is not None:
            keys.by_step = False
            if self._key_counts:
                keys.restore(self._key_counts)

    def rewind_logs(self) -> None:
        """Cut loss.log to its size at the checkpoint that the run resumes from; apply the limit of ops.log."""
        files = self.session.logs.files
        with naming(files.path):
            if self._loss_bytes is not None and _size(files.loss) > self._loss_bytes:
                files.loss.truncate(self._loss_bytes)
            if files.ops is not None:
                files.ops.fit()

    def values(self) -> dict[str, Any]:
        """Return the state of the files as values of a checkpoint."""
        session = self.session
        self._needed[session.steps] = self.state.needed()
        keys = None if session.logs.keys is None else session.logs.keys.state()
        follow = {**self.state.as_values(), "loss_bytes": _size(session.logs.files.loss), "keys": keys}
        return {"follow": follow}

    def train(self, stop: GracefulStop) -> str:
        """Train on files until --follow-until, --max-steps or a signal; return the status for summary.json."""
        if self._folder.has_folders():
            note(
                f"{shown_place(self._followed)} has sub-folders, which are not followed; to follow those that "
                "are complete, give --follow-mark NAME, the name of a file such as _SUCCESS in each of them"
            )
        self._file_logs = FileLogs(self.session.logs.files.path, self.state.seen.taken)
        try:
            about = self._folder, self.state.seen, self._example, self.session.logs.files.path, self._poll
            with Watcher(*about, quiet=self._quiet) as watcher:
                known = self._folder, self.state, self._file_logs
                next_file = NextFile(watcher, *known, self._until, self._waiting.note, takes_grown=self._takes_grown)
                is_over = self._go_on(next_file, stop) and self._follow(next_file, stop)
            if self.session.is_stopped(stop):
                return "interrupted"
            if is_over and self._cutter.waiting and self._until is not None and self._until.trains_rest:
                self._train_on(iter([self._cutter.rest()]), 1, "the last rows", stop)
            return "interrupted" if self.session.is_stopped(stop) else "finished"
        finally:
            self._waiting.end()
            self._file_logs.close()

    def _go_on(self, next_file: NextFile, stop: GracefulStop) -> bool:
        """Train on the remaining rows of files taken before the checkpoint; return False at a signal or --max-steps."""
        for pending in list(self.state.pending):
            start = "" if self.session.loaded_from is None else shown_place(self.session.loaded_from)
            otherwise = f"start a new run from the checkpoint with --start-from {start}"
            file = next_file.find(pending, lambda text: self._wait(text, stop), otherwise)
            self._waiting.end()
            if file is None:
                return False
            with closing(file):
                if not self._train_file(file, pending.done, stop):
                    return False
        return True

    def _follow(self, next_file: NextFile, stop: GracefulStop) -> bool:
        """Score and train on one file after the other; return True at --follow-until, False at an earlier end."""
        while self.session.steps < self.schedule.steps and not self.session.is_stopped(stop):
            file = next_file.take(lambda text: self._wait(text, stop))
            if file is None:
                return not self.session.is_stopped(stop)
            self._waiting.end()
            with closing(file):
                if not (self._score(file, stop) and self._train_file(file, 0, stop)):
                    return False
        return False

    def _wait(self, text: str, stop: GracefulStop) -> bool:
        """Show why the run waits, and save a checkpoint if one is due; return whether to wait."""
        self._waiting.show(text)
        steps = self.session.steps
        if steps and self.session.is_due(steps) and self._saved != steps:
            self.session.save()
            self._saved = steps
        self._write_needed()
        return not self.session.is_stopped(stop)

    def _write_needed(self) -> None:
        """Write needed.json, which says what the newest checkpoint still needs, once that checkpoint is written."""
        saver = self.session.saver
        step = -1 if saver is None or saver.saved_step is None else saver.saved_step
        if step in self._needed:
            content = {"step": step, **self._needed[step]}
            self._needed = {later: needed for later, needed in self._needed.items() if later > step}
            with naming(self.session.logs.files.path):
                write_json(self.session.logs.files.path / NEEDED, content)

    def _score(self, file: Converted, stop: GracefulStop) -> bool:
        """Score a file, record that it is taken, and report its quality; return False at a signal."""
        schema = self.data.manifest.schema
        collector = OutputSums(schema.labels, schema.targets)
        batches = itertools.takewhile(lambda _: not self.session.is_stopped(stop), batches_of(file, self._batch_size))
        title = printable(f"scoring {file.name}")
        with (
            self.session.logs.timeline.span("evaluation", self.state.seen.taken + 1),
            bar(-(-file.rows // self._batch_size), title, "step") as shown,
        ):
            found = self.session.trainer.evaluate(batches, shown.update, self.session.logs.files.path, collector.add)
        if self.session.is_stopped(stop) or found is None:
            return False
        scored = collector.result()
        self.state.take(file.name, file.sha256, file.rows, file.nbytes, file.part.after, file.taken)
        self.state.window.add(scored)
        taken, window = self.state.seen.taken, self.state.window
        line = report.make_line(taken, file, self.session.steps, schema.labels, (found, scored), window)
        self._file_logs.write(line)
        over = window.evaluation()
        self._recent.add(taken, found.metric, found.value, over.value)
        print(report.describe(line, found, over), flush=True)
        if file.rejected:
            note(f"{file.name}: {file.rejected:,} rows cannot be read and are left out; the first is {file.first}")
        if self.session.observer.listens:
            metrics = report.get_metrics(schema.labels, {"file": (found, scored), "window": (over, window.total())})
            info = EpochInfo(epoch=taken, step=self.session.steps, metrics=metrics, file=file.name)
            self.session.observer.epoch(info)
        return not self.session.is_stopped(stop)

    def _train_file(self, file: Converted, first: int, stop: GracefulStop) -> bool:
        """Train on a file's rows from row `first` on; return False at a signal or --max-steps."""
        planned = min(self._cutter.steps(file.rows - first), self.schedule.steps - self.session.steps)
        batches = self._cutter.cut(file, first)
        if planned < self._cutter.steps(file.rows - first):
            batches = itertools.islice(batches, planned)
        self._train_on(batches, planned, printable(file.name), stop)
        self.session.observer.end_training()
        if self.session.logs.keys is not None:
            self.session.logs.keys.write(end=True)
        return not self.session.is_stopped(stop) and self.session.steps < self.schedule.steps

    def _train_on(self, batches: Iterator[Batch], planned: int, title: str, stop: GracefulStop) -> None:
        """Take a step with each batch; `planned` is their number."""
        if not planned:
            for _ in batches:
                raise AssertionError("a file with too few rows has a batch")
            return
        with bar(planned, title, "step") as progress, self.session.logs.timeline.span("epoch", self.state.seen.taken):
            self.session.take_steps(batches, 1, self.session.steps, stop, progress)

    def record(self, step: int, rows: int) -> None:
        """Record that rows are trained on."""
        self.state.advance(rows)
        self._write_needed()
        if self.session.due_step == step:
            self._saved = step  # the session saves a checkpoint after this call

    def summary(self) -> dict[str, Any]:
        """Return the run's own entries of summary.json."""
        if self.session.logs.files.path.is_dir():
            self._write_needed()
        return report.summarize(self.state, self.data.manifest.schema.labels)

    def draw(self) -> None:
        """Write curve.png."""
        report.draw(self.session.logs.files.curve, self.session.progress, self._recent)


def _size(file: Any) -> int:
    """Return the size of an open text file in bytes."""
    file.flush()
    return os.fstat(file.fileno()).st_size
