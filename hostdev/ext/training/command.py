"""The command that trains, from its settings to its summary, in one process or as one of several; and quickstart."""

import hostdev.core.environment  # isort: skip  (before torch)
import argparse
import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numba
import numpy as np
import torch

import hostdev
from hostdev.core import registry
from hostdev.core.addresses import shown_place
from hostdev.core.checksums import json_checksum
from hostdev.core.errors import DiskFullError, HostdevError, TableFullError, UserError
from hostdev.core.run_events import CallbackError, RunObserver
from hostdev.core.run_files import REPORT
from hostdev.data import manifest
from hostdev.data.folder import describe_place
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import synthetic
from hostdev.data.preprocess.build import build as build_data_set
from hostdev.data.preprocess.command import summary
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.inputs import STANDARD_INPUT
from hostdev.data.preprocess.options import Options
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.device import backend
from hostdev.distributed.rank_environment import find_rank_environment, start_processes, wait_for
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.ext.advice.auto import choose_cache
from hostdev.ext.tracking.options import require_tracking
from hostdev.ext.training import starting
from hostdev.ext.training.config import CommandConfig
from hostdev.ext.training.layouts import choose_layout, get_layout, require_layout, require_shares, resolve_mesh
from hostdev.ext.training.run_callbacks import make_run_callbacks
from hostdev.ext.training.starting import make_model
from hostdev.kernels.arrays import in_words
from hostdev.train import checkpointing, report
from hostdev.train.assembly import RunParts, build
from hostdev.train.ending import Ending, get_data_set
from hostdev.train.epochs import Epochs
from hostdev.train.interrupt import DEADLINE_SECONDS, GracefulStop, Interrupted
from hostdev.train.network import without_compiler
from hostdev.train.processes import ProcessSession, join_processes, resolve_batch
from hostdev.train.session import BatchSource, Session, TrainingData

_RANKS_DEADLINE_SECONDS = 10.0
Processes = ProcessSession[CommandConfig]
SMALL_ROWS, SMALL_BATCH = 1_000_000, 1000


def train(settings: CommandConfig) -> dict[str, Any]:
    """Train with these settings, print the progress, and return the content of summary.json.

    In a process that a launcher started as one of several, train as one of the ranks.

    Raises:
        UserError: The input or the options are wrong.
        Interrupted: Ctrl-C, SIGTERM or SIGHUP ended the run; the logs are complete.
    """
    with join_processes(settings, _resolve) as processes:
        world: World = ALONE_WORLD
        if processes is not None:
            world = processes.ranks
            settings = resolve_batch(processes.settings, world.mesh.data)
        else:
            require_tracking(settings)
        settings, data = _find_data(settings, world)
        with _report_memory():
            settings = _choose(settings, data, world)
        return _Command(settings, data, processes).run()


def spawn(settings: CommandConfig) -> int:
    """Start the processes of --spawn on this host and wait for them.

    Returns:
        The exit code of the first process that failed, or 0.
    """
    assert settings.spawn is not None
    if not find_rank_environment().alone:
        raise UserError(
            "--spawn has no effect in a process that a launcher started as one of several; leave out --spawn"
        )
    require_shares(resolve_mesh(settings, settings.spawn), settings.spawn)
    command = [sys.executable, "-m", "hostdev.train", *replace(settings, spawn=None).to_flags()]
    with TemporaryDirectory() as folder:
        if values := settings.file_values():
            file = Path(folder) / "options.json"
            file.write_text(json.dumps(values))
            command += ["--config", str(file)]
        return wait_for(start_processes(settings.spawn, command))


def _resolve(settings: CommandConfig, ranks: int) -> CommandConfig:
    """Return the settings with the mesh; raise UserError for wrong options before the rendezvous.

    The options of the layout are checked only if the data set exists already.
    """
    settings = resolve_mesh(settings, ranks)
    if ranks > 1:
        require_shares(settings, ranks)
        require_tracking(settings)
        data = settings.data or synthetic.find_lookalike()
        if data is not None:
            require_layout(settings, data)
    return settings


def _find_data(settings: CommandConfig, world: World) -> tuple[CommandConfig, TrainingData]:
    """Return the resolved settings and the data set; without --data, rank 0 makes a synthetic one if it is missing."""
    data = settings.data
    if data is None:
        if world.rank:
            world.control.barrier()
        data, made = synthetic.ensure_lookalike()
        if not world.rank:
            world.control.barrier()
        how = "made in" if made else "from"
        print(f"no --data: a synthetic data set of {synthetic.LOOKALIKE_ROWS:,} samples, {how} {data}")
        # a data set given by --data was compared at the rendezvous
        world.agree("data", "the synthetic data set", {"the data set": manifest.read(data).identity})
    settings = settings.resolved()
    return settings, TrainingData(data, manifest.read(data), settings)


def _choose(settings: CommandConfig, data: TrainingData, world: World) -> CommandConfig:
    """Return the settings; where they say `auto`, choose the layout or the cache by measurement, and print why."""
    if world.size > 1 and settings.parallel == "auto":
        settings, why = choose_layout(settings, data.root, data.manifest, world)
        print("\n".join(why), flush=True)
    settings, why = choose_cache(settings, data.root, data.manifest, world)
    for line in why:
        print(line, flush=True)
    return settings


class _Command:
    """One training command, which prints what it does and ends the run according to its outcome.

    Args:
        settings: The options, resolved.
        data: The data set.
        processes: This process and the other ranks; None for a single process.
    """

    def __init__(self, settings: CommandConfig, data: TrainingData, processes: Processes | None) -> None:
        self._settings, self._data, self._processes = settings, data, processes
        self._world: World = ALONE_WORLD if processes is None else processes.ranks
        self._ending: Ending | None = None

    def run(self) -> dict[str, Any]:
        """Train, and return the content of summary.json."""
        stopping = GracefulStop(self._abandon, _deadline(self._settings, self._processes))
        with stopping as stop, _report_memory(), without_compiler(), ExitStack() as closing:
            start = self._find_start()
            observer = make_run_callbacks(self._settings, stop, first=self._world.rank == 0)
            parts = self._make_parts(is_new=start is None)
            session = build(self._settings, self._data, parts, start, self._processes)
            closing.callback(session.trainer.close)
            self._ending = ending = Ending(session)
            if self._processes is not None:
                self._processes.on_fault = partial(ending.abandon, "failed")
            status, digest = self._train(session, ending, observer, stop)
        if stop.requested and (self._processes is None or status == "interrupted"):
            raise ending.interrupted(stop.requested)
        return self._finish(session, ending, status, digest)

    def _abandon(self) -> str:
        return "interrupted before the first step" if self._ending is None else self._ending.abandon()

    def _find_start(self) -> checkpointing.Start | None:
        """Return the checkpoint to resume from; None for a new run."""
        if self._settings.resume is None:
            return None
        start, line = checkpointing.find(self._settings, self._data.manifest, self._world)
        print(line, flush=True)
        return start

    def _make_parts(self, *, is_new: bool) -> RunParts:
        """Return the parts of the run that extensions provide."""
        settings, data, load = self._settings, self._data, None
        if settings.start_from is not None and is_new:
            origin = starting.find(settings, data.root, data.manifest, self._world)
            load = partial(starting.load, origin, frozen=settings.frozen_vectors)
        network = None
        if self._world.has_parts:
            network = partial(registry.find("network", "parts"), layout=get_layout(settings))
        if settings.follow is not None and self._world.size > 1:
            raise UserError("--follow trains in one process; start it without a launcher")
        return RunParts(_make_source, make_model, network, load)

    def _train(
        self, session: Session, ending: Ending, observer: RunObserver, stop: GracefulStop
    ) -> tuple[str, str | None]:
        """Train, and save the last checkpoint; return the status and, unless interrupted, the state's digest."""
        digest = None
        config = self._write_config(session, ending)
        self._print_start(session)
        try:
            session.start_observer(observer, config)
            status = session.source.train(stop)
            if status == "interrupted" and (failed := self._get_callback_error(session)) is not None:
                raise ending.callback_failed(failed)
            if (result := report.result_line(session.quality)) is not None and status != "interrupted":
                print(result, flush=True)
            if status != "interrupted":
                digest = session.trainer.state_sha256()
                ending.count_exchanged()
                ending.close_saver(digest, save=True)
            elif session.saver is not None:
                assert stop.requested is not None
                raise ending.interrupted(stop.requested)
        except Interrupted:
            raise
        except TableFullError as error:
            raise ending.full(error) from None
        except DiskFullError as error:
            if self._processes is not None:  # the other ranks continue until they notice that this rank is gone
                raise
            raise ending.full(error) from None
        except BaseException as error:
            if not (isinstance(error, CallbackError) and ending.is_complete):  # `callback_failed` has ended the run
                ending.close_saver(save=False)
                ending.end("failed")
                if session.steps == 0:
                    session.logs.discard()
            raise
        return status, digest

    def _write_config(self, session: Session, ending: Ending) -> dict[str, Any]:
        """Write config.json, and return its content."""
        config = {
            **self._settings.as_json(),
            "data": shown_place(self._data.root),
            "versions": _versions(),
            "preprocess": self._data.manifest.options,
            "data_set": get_data_set(self._data.manifest),
        }
        try:
            session.logs.files.write_config(config)
        except OSError:
            ending.close_saver(save=False)
            session.logs.discard()
            raise
        return config

    def _print_start(self, session: Session) -> None:
        found: Manifest = self._data.manifest
        rows = {split: found.rows(split) for split in found.splits}
        trainer = session.trainer
        device = backend.describe(trainer.runtime.device)
        memory = trainer.host_budget.describe()
        checkpoints = session.saver.describe() if session.saver is not None else None
        place = describe_place(self._data.root)
        trained = self._settings.as_json(), place, rows, trainer.tables, device, trainer.caches
        print(report.start_lines(*trained, memory, checkpoints, trainer.cut, found.statistics), flush=True)

    def _get_callback_error(self, session: Session) -> str | None:
        """Return the error of rank 0's callback, or None; all ranks must call this."""
        if self._settings.callback is None:
            return None
        error = session.observer.error
        shared: str | None = session.world.control.share(None if error is None else str(error))[0]
        return shared

    def _finish(self, session: Session, ending: Ending, status: str, digest: str | None) -> dict[str, Any]:
        """Complete the run's files; print and return the summary, or raise the error of a checkpoint or a callback."""
        summary = ending.finish(status, digest)
        files = session.logs.files
        has_ops_log, undrawn = files.ops is not None, ending.draw()
        if self._settings.report and not session.world.rank and (undone := _write_report(files.path)) is not None:
            print(f"no {REPORT}: {undone}", flush=True)
        session.observer.end(status, summary)
        epochs, trace = session.source.schedule.epochs, session.logs.trace
        print(report.summary_lines(summary, epochs, files.path, trace, undrawn=undrawn, has_ops_log=has_ops_log))
        if session.saver is not None and session.saver.failed is not None:
            raise ending.make_checkpoint_error()
        if session.observer.error is not None:
            raise session.observer.error
        return summary


def _make_source(settings: CommandConfig, data: TrainingData) -> BatchSource:
    if settings.follow is None:
        return Epochs(settings, data)
    from hostdev.ext.streams.run import FollowedFiles  # imports everything that reads new files

    return FollowedFiles(settings, data, settings)


def _write_report(run_dir: Path) -> str | None:
    """Write the page of a run, and return None, or the error as text."""
    from hostdev.ext.report.command import write  # its imports take seconds

    try:
        write([run_dir], run_dir / REPORT)
    except Exception as error:  # the run itself has succeeded
        return f"{type(error).__name__}: {error}"
    return None


def _deadline(settings: CommandConfig, session: Processes | None) -> float | None:
    """Return how many seconds the current step may take after a signal; None, no limit, if the run saves checkpoints.

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


def quickstart(arguments: argparse.Namespace, options: Options, rows: int) -> None:
    """Prepare the data and train.

    Args:
        arguments: Parsed flags of the training.
        options: Options of the preprocessing.
        rows: Number of synthetic samples to create if no file is given.
    """
    text = arguments.criteo
    if text is None:
        text = arguments.datasets / f"lookalike-{rows}-{options.seed}.tsv"
        if not text.exists():
            _announce("hostdev.data.preprocess", "synthetic", "--rows", rows, "--tsv", text, "--seed", options.seed)
            try:
                write_text(Synthetic(rows, options.seed), text, wait=True)
            except HostdevError:  # another process may have made it first
                if not text.exists():
                    raise
    data = prepare(text, arguments.datasets, options)

    training = manifest.read(data).rows("train")
    if arguments.batch_size is None and training < SMALL_ROWS:
        arguments.batch_size = min(SMALL_BATCH, training)
    arguments.data = data
    settings = CommandConfig.from_flags(arguments)
    _announce("hostdev.train", *settings.to_flags())
    train(settings)


def prepare(text: Path, datasets: Path, options: Options) -> Path:
    """Return the data set prepared from a text file; reuse an existing one if the text has not changed."""
    if text == STANDARD_INPUT:
        raise UserError(
            "--criteo must be a file, because later calls reuse its data set; for standard input use "
            "python -m hostdev.data.preprocess criteo - --out DIR"
        )
    source = CriteoText([text])
    stamp = [*source.describe(), text.stat().st_mtime_ns, vars(options), manifest.VERSION]
    out = datasets / f"{text.stem}-{json_checksum(stamp)[:8]}"
    if (out / manifest.FILE_NAME).is_file():
        print(f"using {out}, made earlier from {text}")
        return out
    flags = {name: value for name, value in vars(options).items() if value is not None}
    pairs = (("--" + name.replace("_", "-"), value) for name, value in flags.items())
    _announce("hostdev.data.preprocess", "criteo", text, "--out", out, *chain.from_iterable(pairs))
    start = time.monotonic()
    try:
        print(summary(build_data_set(source, out, options), out, time.monotonic() - start))
    except HostdevError:
        if not (out / manifest.FILE_NAME).is_file():
            raise
        print(f"using {out}, which another process has just made from {text}")
    return out


def _announce(module: str, *arguments: object) -> None:
    """Print the command that runs only the next step."""
    print(f"$ python -m {module} {shlex.join(map(str, arguments))}", flush=True)
