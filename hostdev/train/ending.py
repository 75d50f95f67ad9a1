"""Completion of a run: last checkpoint, summary.json, picture, and shutdown after a signal."""

import signal
from typing import Any

import numpy as np

from hostdev.core.addresses import shown_place
from hostdev.core.errors import FullError, TableFullError, naming
from hostdev.core.memory import peak_rss_bytes
from hostdev.core.progress import counted
from hostdev.core.run_files import REPORT
from hostdev.device import backend
from hostdev.device.clock import EventClock
from hostdev.kernels.pool import host_threads
from hostdev.train import summary
from hostdev.train.callbacks import CallbackError
from hostdev.train.checkpointing import CheckpointError
from hostdev.train.interrupt import Interrupted
from hostdev.train.run import Run


class Ending:
    """Completes a run's files."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.is_complete = False
        self._exchanged: dict[str, int] = {}  # bytes that all ranks have sent

    def finish(self, status: str, digest: str | None = None) -> dict[str, Any]:
        """Complete the logs, write summary.json and return its content."""
        run = self.run
        with run.lock:
            if isinstance(run.clock, EventClock):
                # A device that waits for a dead rank would never finish.
                run.clock.drain(wait=run.world.size == 1 or status != "failed")
            content = self._write_summary(status, digest)
            self.is_complete = True
        return content

    def end(self, status: str, digest: str | None = None) -> None:
        """Complete the logs, and call the callbacks' `on_end`."""
        content = self.finish(status, digest)
        if self.run.callbacks:
            self.run.callbacks.end(status, content)

    def count_exchanged(self) -> None:
        """Add up the bytes that all ranks have sent, for summary.json. All ranks must call this."""
        run = self.run
        mine = run.trainer.exchanged_bytes()
        each = run.world.control.gather(np.array(list(mine.values()), np.int64))
        self._exchanged = dict(zip(mine, np.sum(each, axis=0).tolist(), strict=True))

    def draw(self) -> str | None:
        """Draw the run's picture on rank 0, and return None, or the error as text; return "" on other ranks."""
        run = self.run
        if run.world.rank:
            return ""
        try:
            run.draw()
            if run.keys is not None:
                run.keys.draw()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def report(self) -> str | None:
        """With --report, write the page on rank 0, and return None, or the error as text."""
        run = self.run
        if run.world.rank or not run.settings.report:
            return None
        from hostdev.ext.report.command import write

        try:
            write([run.files.path], run.files.path / REPORT)
        except Exception as error:  # the run itself has succeeded
            return f"{type(error).__name__}: {error}"
        return None

    def abandon(self, status: str = "interrupted") -> str:
        """Complete the logs while the main thread is in a step, and return a message for the user.

        The main thread can write nothing afterwards, so the caller must end the process.
        """
        run = self.run
        run.lock.acquire()  # never released, so that the main thread writes nothing more
        if not self.is_complete:
            self._write_summary(status, None)
        if run.callbacks:
            run.callbacks.abandon(status)
        newest = run.loaded_from if run.saver is None else run.saver.newest or run.loaded_from
        if newest is not None and newest.is_dir():
            how = f"continue with --resume {shown_place(newest)}"
            return f"interrupted in the middle of a step; {self._describe_steps()}; {how}"
        none = "; there is no checkpoint" if run.saver is not None else ""
        return f"interrupted in the middle of a step; {self._describe_steps()}{none}"

    def interrupted(self, number: signal.Signals, status: str = "interrupted") -> Interrupted:
        """Save a checkpoint if the run saves any, complete the logs, and return the exception for this signal."""
        run = self.run
        self.close_saver(save=True)
        self.end(status)
        if run.saver is None:
            return Interrupted(number, self._describe_steps())
        if run.saver.failed is not None:
            raise self.make_checkpoint_error()
        message = f"{_count_steps(run.steps)} saved; continue with --resume {self._newest()}"
        return Interrupted(number, message, saved=True)

    def full(self, error: FullError) -> FullError:
        """Save a checkpoint if the run saves any, complete the logs, and return the error with what to do next."""
        run = self.run
        at_once = later = resumed = "a --table-dir with more space, or a larger --table-memory"
        if isinstance(error, TableFullError):
            at_once, resumed = "a larger --capacity, or a smaller --batch-size", "a larger --capacity"
            sooner = "--evict-unused" if run.settings.evict_unused is None else "a smaller --evict-unused"
            later = f"a larger --capacity or --admit-count, or {sooner}"
        if run.steps == 0:
            self.close_saver(save=False)
            self.end("failed")
            run.discard()
            return type(error)(error.fact, f"give {at_once}")
        self.close_saver(save=True)
        self.end("failed")
        if run.saver is None:
            return type(error)(error.fact, f"{self._describe_steps()}; give {later}")
        if run.saver.failed is not None:
            raise self.make_checkpoint_error()
        saved = f"{_count_steps(run.steps)} saved; continue with --resume {self._newest()} and {resumed}"
        return type(error)(error.fact, saved)

    def callback_failed(self, why: str) -> CallbackError:
        """Do what `interrupted` does after a callback's error, and return the error with what to do next."""
        saved = self.interrupted(signal.SIGTERM, "failed")
        return CallbackError(f"{why}; {saved}")

    def _newest(self) -> str:
        newest = None if self.run.saver is None else self.run.saver.newest
        return "" if newest is None else shown_place(newest)

    def close_saver(self, digest: str | None = None, *, save: bool) -> None:
        """Save a last checkpoint if `save` is true, wait until checkpoints are written, and unlock their folder."""
        run = self.run
        if run.saver is None:
            return
        if save:
            run.saver.save_last(run.steps, digest)
        run.saver.finish()

    def make_checkpoint_error(self) -> CheckpointError:
        """Return the exception to raise if the last checkpoint was not saved."""
        run = self.run
        assert run.saver is not None
        newest = (
            f"the newest checkpoint is {self._newest()}"
            if run.saver.newest is not None
            else "there is no earlier checkpoint"
        )
        return CheckpointError(f"the last checkpoint was not saved: {run.saver.failed}; {newest}")

    def _describe_steps(self) -> str:
        run = self.run
        if not run.files.has_logs:
            return f"{counted(run.steps, 'step')} taken; the logs in {run.files.path} were removed"
        return f"{_count_steps(run.steps)} in the logs in {run.files.path}"

    def _write_summary(self, status: str, digest: str | None) -> dict[str, Any]:
        run = self.run
        try:
            with naming(run.files.path):
                run.log.close()
        except OSError:
            run.files.close()
            raise
        run.timeline.close()
        if run.keys is not None:
            run.keys.close()
        content = self._summarise(status, digest)
        run.files.close(content)
        return content

    def _summarise(self, status: str, digest: str | None) -> dict[str, Any]:
        run = self.run
        seconds, ops = run.progress.seconds, run.log.summary()
        return {
            "status": status,
            "steps": min(run.steps, run.trainer.steps),  # an abandoned step may have no update yet
            **run.summary(),
            "samples_per_second": round(run.progress.samples / seconds, 1) if seconds else 0.0,
            "state_sha256": digest,
            "device": backend.describe(run.device),
            "host_device_mix": run.settings.host_device_mix,
            "host_threads": host_threads(),
            "peak_rss_bytes": peak_rss_bytes(),
            **summary.get_memory(run.trainer, on_host=run.settings.host_device_mix),
            "pipeline": {
                "depth": run.settings.pipeline_depth,
                "staleness": run.settings.staleness,
                "exact": not run.settings.staleness,
                **run.timeline.summary(),
            },
            **({"keys": run.keys.last} if run.keys is not None and run.keys.last else {}),
            **summary.get_caches(run.trainer.caches, ops),
            **summary.get_disks(run.trainer.tables.values()),
            **summary.get_ranks(run.world, run.trainer, run.settings.mesh, self._exchanged),
            **({"checkpoints": run.saver.summary()} if run.saver is not None else {}),
            **summary.get_ops_log(run.files.ops),
            "ops": ops,
        }


def _count_steps(steps: int) -> str:
    return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'}"
