"""Completion of a run: last checkpoint, summary.json, picture, and shutdown after a signal."""

import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hostdev.cache.cache import EmbeddingCache
from hostdev.cache.prices import Costs
from hostdev.core.addresses import shown_place
from hostdev.core.errors import FullError, TableFullError
from hostdev.core.memory import TableShape, peak_rss_bytes, row_bytes
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.progress import counted
from hostdev.core.run_events import CallbackError
from hostdev.core.run_files import RotatedFile
from hostdev.core.table_primitives import UPDATES, CacheAdmit, CacheEvict, EmbeddingLookup
from hostdev.data.manifest import Manifest
from hostdev.device import backend
from hostdev.distributed.all_reduce import TwoLevelChannel
from hostdev.distributed.world import World
from hostdev.kernels.pool import host_threads
from hostdev.train.checkpointing import CheckpointError
from hostdev.train.interrupt import Interrupted
from hostdev.train.session import Session
from hostdev.train.trainer import Trainer


def get_caches(caches: Sequence[EmbeddingCache], ops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entry "cache" of summary.json or, for several caches, the entry "caches" by names of tables.

    Args:
        ops: Durations, as `OpLog.summary` returns them.
    """
    found = {
        " and ".join(table.name for table in cache.tables): cache.summary(
            optimum=False, host=get_host_costs(ops, cache.tables)
        )
        for cache in caches
    }
    if not found:
        return {}
    return {"cache": next(iter(found.values()))} if len(found) == 1 else {"caches": found}


def get_disks(tables: Iterable[Any]) -> dict[str, Any]:
    """Return the entry "disk" of summary.json: for each table on disk, its sizes and transfers; may be empty."""
    found = {table.name: table.storage.summary() for table in tables if table.capabilities.on_disk}
    return {"disk": found} if found else {}


def get_host_costs(ops: Mapping[str, Mapping[str, Any]], tables: Sequence[Any]) -> Costs | None:
    """Return the host's time, in nanoseconds, for a row that bypasses the cache, is admitted, or is evicted.

    Tables are processed in parallel, so the slowest table counts. If no row was admitted, or none was evicted, the time
    for such a row is estimated from the lookups' time per byte.

    Args:
        ops: Durations, as `OpLog.summary` returns them.

    Returns:
        The three times, or None if no row was looked up, or none was updated, on the host.
    """
    looked_up, admitted, evicted = (
        max(_per_row(ops, op, table) for table in tables) for op in (EmbeddingLookup, CacheAdmit, CacheEvict)
    )
    updated = max(_per_row(ops, UPDATES[table.optimizer.primitive], table) for table in tables)
    if not looked_up or not updated:
        return None
    passing, whole = row_bytes((table.dim, table.optimizer) for table in tables)
    estimate = looked_up * whole / passing
    return Costs(looked_up + updated, admitted or estimate, evicted or estimate)


def _per_row(ops: Mapping[str, Mapping[str, Any]], op: Any, table: Any) -> float:
    """Return the nanoseconds per row of an op on a table; 0 if the op moved no row."""
    times = ops.get(op.name, {})
    part = times.get("by_scope", {table.name: times}).get(table.name) or {}
    return float(1e3 * part["total_us"] / part["bytes"]) * op.row_bytes(table) if part.get("bytes") else 0.0


def get_ranks(world: World, trainer: Trainer, mesh: str | None, sent: Mapping[str, int]) -> dict[str, Any]:
    """Return the entry "ranks" of summary.json, about the processes and their exchange; empty for a single process.

    Args:
        sent: Bytes that all processes have sent.
    """
    if world.size == 1:
        return {}
    runtime = trainer.runtime
    return {
        "ranks": {
            "size": world.size,
            "mesh": mesh,
            "parts": trainer.cut,
            "dense_exchange": runtime.dense_exchange,
            "backend": runtime.dense_channel.backend,
            "hosts": len(world.control.hosts),
            "exchange_levels": 2 if isinstance(world.control, TwoLevelChannel) else 1,
            "exact": runtime.dense_exchange == EXCHANGES[0],
            "sent_bytes": dict(sent),
        }
    }


def get_memory(trainer: Trainer, *, on_host: bool) -> dict[str, Any]:
    """Return the entry "memory" of summary.json: bytes by part, in host memory and on the device.

    The parts in host memory are the upper bounds that were checked before the first step.

    Args:
        on_host: Whether the tables are in host memory.
    """
    network = [each for group in trainer.adam.param_groups for each in group["params"]]
    states = (each for state in trainer.adam.state.values() for each in state.values() if hasattr(each, "numel"))
    device = {
        "tables": 0
        if on_host
        else sum(TableShape(table.dim, table.optimizer).nbytes(table.rows) for table in trainer.tables.values()),
        "cached rows": sum(cache.nbytes for cache in trainer.caches),
        "dense weights": _count_bytes(network),
        "dense optimizer state": _count_bytes(states),
    }
    if trainer.host_budget.parts.get("cached rows"):
        del device["cached rows"]  # the cache's device is the CPU, so its rows are in host memory
    host = dict(trainer.host_budget.parts)
    return {"memory": {"host": host, "device": {name: size for name, size in device.items() if size}}}


def _count_bytes(tensors: Iterable[Any]) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


def get_data_set(found: Manifest) -> dict[str, Any]:
    """Return the entry "data_set" of config.json: the data set's size, its columns, and statistics of its rows."""
    schema, statistics = found.schema, found.statistics
    return {
        "rows": {split: found.rows(split) for split in found.splits},
        "shards": sum(len(found.shards(split)) for split in found.splits),
        "ids": found.vocabulary_size,
        "vocabulary": found.vocabulary is not None,
        "labels": list(schema.labels),
        "columns": {"numbers": len(schema.dense), "ids": len(schema.ids), "bags": len(schema.bags)},
        **{name: statistics[name] for name in ("rejected", "label_mean", "out_of_vocabulary") if name in statistics},
    }


def get_ops_log(file: RotatedFile | None) -> dict[str, Any]:
    """Return the entry "ops_log" of summary.json: its size limit and removed bytes; empty if none were removed."""
    if file is None or not file.dropped_bytes:
        return {}
    return {"ops_log": {"limit_bytes": file.limit, "dropped_bytes": file.dropped_bytes}}


class Ending:
    """Completes a run's files."""

    def __init__(self, run: Session) -> None:
        self.run = run
        self.is_complete = False
        self._exchanged: dict[str, int] = {}  # bytes that all ranks have sent

    def finish(self, status: str, digest: str | None = None) -> dict[str, Any]:
        """Complete the logs, write summary.json and return its content."""
        run = self.run
        with run.logs.lock:
            if run.logs.clock is not None:
                # A device that waits for a dead rank would never finish.
                run.logs.clock.drain(wait=run.world.size == 1 or status != "failed")
            content = self._write_summary(status, digest)
            self.is_complete = True
        return content

    def end(self, status: str, digest: str | None = None) -> None:
        """Complete the logs, and call the callbacks' `on_end`."""
        content = self.finish(status, digest)
        self.run.observer.end(status, content)

    def count_exchanged(self) -> None:
        """Add up the bytes that all ranks have sent, for summary.json. All ranks must call this."""
        run = self.run
        mine = run.trainer.exchanged_bytes()
        each = run.world.control.gather(np.array(list(mine.values()), np.int64))
        self._exchanged = dict(zip(mine, np.sum(each, axis=0).tolist(), strict=True))

    def draw(self) -> str | None:
        """Draw the run's pictures on rank 0, and return None, or the error as text; return "" on other ranks."""
        run = self.run
        if run.world.rank:
            return ""
        try:
            run.source.draw()
            if run.logs.keys is not None:
                run.logs.keys.draw()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return None

    def abandon(self, status: str = "interrupted") -> str:
        """Complete the logs while the main thread is in a step, and return a message for the user.

        The main thread can write nothing afterwards, so the caller must end the process.
        """
        run = self.run
        run.logs.lock.acquire()  # never released, so that the main thread writes nothing more
        if not self.is_complete:
            self._write_summary(status, None)
        run.observer.abandon(status)
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
            sooner = "--evict-unused" if run.config.evict_unused is None else "a smaller --evict-unused"
            later = f"a larger --capacity or --admit-count, or {sooner}"
        if run.steps == 0:
            self.close_saver(save=False)
            self.end("failed")
            run.logs.discard()
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
        if not run.logs.files.has_logs:
            return f"{counted(run.steps, 'step')} taken; the logs in {run.logs.files.path} were removed"
        return f"{_count_steps(run.steps)} in the logs in {run.logs.files.path}"

    def _write_summary(self, status: str, digest: str | None) -> dict[str, Any]:
        run = self.run
        run.logs.close()
        content = self._summarise(status, digest)
        run.logs.files.close(content)
        return content

    def _summarise(self, status: str, digest: str | None) -> dict[str, Any]:
        run = self.run
        seconds, ops = run.progress.seconds, run.logs.ops.summary()
        return {
            "status": status,
            "steps": min(run.steps, run.trainer.steps),  # an abandoned step may have no update yet
            **run.source.summary(),
            "samples_per_second": round(run.progress.samples / seconds, 1) if seconds else 0.0,
            "state_sha256": digest,
            "device": backend.describe(run.trainer.runtime.device),
            "host_device_mix": run.config.host_device_mix,
            "host_threads": host_threads(),
            "peak_rss_bytes": peak_rss_bytes(),
            **get_memory(run.trainer, on_host=run.config.host_device_mix),
            "pipeline": {
                "depth": run.config.pipeline_depth,
                "staleness": run.config.staleness,
                "exact": not run.config.staleness,
                **run.logs.timeline.summary(),
            },
            **({"keys": run.logs.keys.last} if run.logs.keys is not None and run.logs.keys.last else {}),
            **get_caches(run.trainer.caches, ops),
            **get_disks(run.trainer.tables.values()),
            **get_ranks(run.world, run.trainer, run.config.mesh, self._exchanged),
            **({"checkpoints": run.saver.summary()} if run.saver is not None else {}),
            **get_ops_log(run.logs.files.ops),
            "ops": ops,
        }


def _count_steps(steps: int) -> str:
    return f"{counted(steps, 'step')} {'is' if steps == 1 else 'are'}"
