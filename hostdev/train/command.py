"""A training run from its settings to its summary, in one process or as one of several."""

import hostdev.core.environment  # isort: skip  (before torch)

import platform
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numba
import numpy as np
import torch

import hostdev
from hostdev.core.addresses import shown_place
from hostdev.core.errors import DiskFullError, TableFullError, UserError
from hostdev.core.run_files import REPORT
from hostdev.data import lookalike, manifest
from hostdev.data.remote import describe_place
from hostdev.device import backend
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.ext.advice.cache.auto import choose_cache
from hostdev.kernels.numa import in_words
from hostdev.train import checkpointing, report, starting
from hostdev.train.build import choose_layout, require_layout
from hostdev.train.callbacks import CallbackError, make_run_callbacks
from hostdev.train.config import TrainConfig
from hostdev.train.ending import Ending
from hostdev.train.interrupt import DEADLINE_SECONDS, GracefulStop, Interrupted
from hostdev.train.lean import without_compiler
from hostdev.train.processes import ProcessSession, join_processes, resolve_batch
from hostdev.train.run import Run
from hostdev.train.summary import get_data_set
from hostdev.train.tracking_options import require_tracking

_RANKS_DEADLINE_SECONDS = 10.0


def train(settings: TrainConfig) -> dict[str, Any]:
    """Train with these settings, print the progress, and return the content of summary.json.

    In a process that a launcher started as one of several, train as one of the ranks.

    Raises:
        UserError: The input or the options are wrong.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP ended the run; the logs are complete.
    """
    with join_processes(settings, _require) as session:
        return _train(settings, session)


def _require(settings: TrainConfig) -> None:
    """Raise UserError for wrong options before the rendezvous; those of the layout if the data set exists already."""
    require_tracking(settings)
    data = settings.data or lookalike.there()
    if data is not None:
        require_layout(settings, data)


def _train(settings: TrainConfig, session: ProcessSession | None) -> dict[str, Any]:
    world: World = ALONE_WORLD
    if session is not None:
        world = session.ranks
        settings = resolve_batch(session.settings, world.mesh.data)
    else:
        require_tracking(settings)
    data = settings.data
    if data is None:
        if world.rank:
            world.control.barrier()
        data, made = lookalike.ensure()
        if not world.rank:
            world.control.barrier()
        print(f"no --data: a synthetic data set of {lookalike.ROWS:,} samples, {'made in' if made else 'from'} {data}")
        # the rendezvous has compared a data set given by --data
        world.agree("data", "the synthetic data set", {"the data set": manifest.read(data).identity})
    settings = settings.resolved()
    found = manifest.read(data)
    with _report_memory():
        if session is not None and settings.parallel == "auto":
            settings, why = choose_layout(settings, data, found, world)
            print("\n".join(why), flush=True)
        settings, why = choose_cache(settings, data, found, world)
    for line in why:
        print(line, flush=True)
    ending: Ending | None = None
    digest = None

    def on_deadline() -> str:
        return ending.abandon() if ending is not None else "interrupted before the first step"

    start = None
    stopping = GracefulStop(on_deadline, _deadline(settings, session))
    with stopping as stop, _report_memory(), without_compiler(), ExitStack() as closing:
        if settings.resume is not None:
            start, line = checkpointing.find(settings, found, world)
            print(line, flush=True)
        callbacks = make_run_callbacks(settings, stop, first=world.rank == 0)
        origin = None
        if settings.start_from is not None and start is None:
            origin = starting.find(settings, data, found, world)
        run = _run_class(settings)(settings, data, found, start, session, origin)
        closing.callback(run.trainer.close)
        ending = Ending(run)
        if session is not None:
            session.on_fault = partial(ending.abandon, "failed")
        config = {
            **settings.as_json(),
            "data": shown_place(data),
            "versions": _versions(),
            "preprocess": found.options,
            "data_set": get_data_set(found),
        }
        try:
            run.files.write_config(config)
        except OSError:
            ending.close_saver(save=False)
            run.discard()
            raise
        rows = {split: found.rows(split) for split in found.splits}
        device, trainer = backend.describe(run.device), run.trainer
        memory = trainer.host_budget.describe()
        checkpoints = run.saver.describe() if run.saver is not None else None
        trained = settings.as_json(), describe_place(data), rows, trainer.tables, device, trainer.caches
        print(report.start_lines(*trained, memory, checkpoints, trainer.cut, found.statistics), flush=True)
        try:
            run.start_callbacks(callbacks, config)
            status = run.train(stop)
            if status == "interrupted" and (failed := _get_callback_error(run, settings)) is not None:
                raise ending.callback_failed(failed)
            if (result := report.result_line(run.quality)) is not None and status != "interrupted":
                print(result, flush=True)
            if status != "interrupted":
                digest = run.trainer.state_sha256()
                ending.count_exchanged()
                ending.close_saver(digest, save=True)
            elif run.saver is not None:
                assert stop.requested is not None
                raise ending.interrupted(stop.requested)
        except Interrupted:
            raise
        except TableFullError as error:
            raise ending.full(error) from None
        except DiskFullError as error:
            if session is not None:  # the other ranks go on until they miss this one
                raise
            raise ending.full(error) from None
        except BaseException as error:
            if not (isinstance(error, CallbackError) and ending.is_complete):  # `callback_failed` has done it
                ending.close_saver(save=False)
                ending.end("failed")
                if run.steps == 0:
                    run.discard()
            raise
    if stop.requested and (session is None or status == "interrupted"):
        raise ending.interrupted(stop.requested)
    summary = ending.finish(status, digest)
    has_ops_log, undrawn = run.files.ops is not None, ending.draw()
    if (undone := ending.report()) is not None:
        print(f"no {REPORT}: {undone}", flush=True)
    if run.callbacks:
        run.callbacks.end(status, summary)
    lines = report.summary_lines(
        summary, run.epochs, run.files.path, run.trace, undrawn=undrawn, has_ops_log=has_ops_log
    )
    print(lines)
    if run.saver is not None and run.saver.failed is not None:
        raise ending.make_checkpoint_error()
    if run.callbacks and run.callbacks.error is not None:
        raise run.callbacks.error
    return summary


def _get_callback_error(run: Run, settings: TrainConfig) -> str | None:
    """Return the error of rank 0's callback, or None; all ranks must call this."""
    if settings.callback is None:
        return None
    error = run.callbacks.error if run.callbacks else None
    found: str | None = run.world.control.share(None if error is None else str(error))[0]
    return found


def _run_class(settings: TrainConfig) -> type[Run]:
    if settings.follow is None:
        return Run
    from hostdev.ext.streams.following.run import FollowRun  # with all that reads new files

    return FollowRun


def _deadline(settings: TrainConfig, session: ProcessSession | None) -> float | None:
    """Return how many seconds the current step may take after a signal; None for no limit.

    Several ranks have more time, because they end together.
    """
    if settings.saves:
        return None
    return DEADLINE_SECONDS if session is None else _RANKS_DEADLINE_SECONDS


@contextmanager
def _report_memory() -> Iterator[None]:
    """Convert torch's out-of-memory errors to UserError; on the CPU, only their text identifies them."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise UserError("out of memory; use a smaller --batch-size or --emb-dim") from error
        raise


def _versions() -> dict[str, str | int]:
    return {
        "hostdev": hostdev.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "platform": platform.platform(),
        "memory": in_words() or "as the system places it",
    }
