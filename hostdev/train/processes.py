"""Training in several processes: rendezvous, options that must agree, output of each rank, coordinated shutdown."""

import hostdev.core.environment  # isort: skip  # noqa: F401  (before torch)

import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TextIO, TypeVar

from hostdev.cache.options import AUTO
from hostdev.core.addresses import shown_place
from hostdev.core.errors import HostdevError, TableFullError, UserError, in_words, write_stderr
from hostdev.core.memory import share_memory
from hostdev.core.options import OptionError, flag_of
from hostdev.core.run_events import CallbackError
from hostdev.core.run_files import EVAL_LOG, LOSS_LOG, OPS_LOG
from hostdev.data import manifest
from hostdev.distributed.agreement import shown
from hostdev.distributed.monitor import run_within
from hostdev.distributed.process_group import RENDEZVOUS_SECONDS, TIMEOUT, Ranks
from hostdev.distributed.rank_environment import RankEnvironment, find_rank_environment
from hostdev.distributed.session import leave_together, take_host_share
from hostdev.distributed.world import Mesh, parse_mesh
from hostdev.models import registry
from hostdev.train.interrupt import Interrupted
from hostdev.train.options import TrainConfig
from hostdev.train.rundir import RunDir

OUTPUT = "output.log"
C = TypeVar("C", bound=TrainConfig)
_LOG_SECONDS = 5.0  # time to complete the logs when another rank has failed


class _Output(io.TextIOBase):
    """A rank's standard output: kept in memory until `open` is called, and written to a file from then on.

    Args:
        shown: Stream to which the output is also written; None for ranks above 0.
    """

    def __init__(self, shown: TextIO | None) -> None:
        self._buffered: list[str] = []
        self._file: Any = None
        self._shown = shown

    def write(self, text: str) -> int:
        if self._file is None:
            self._buffered.append(text)
        else:
            self._file.write(text)
        return len(text) if self._shown is None else self._shown.write(text)

    def flush(self) -> None:
        for file in (self._file, self._shown):
            if file is not None:
                file.flush()

    def isatty(self) -> bool:
        return self._shown is not None and self._shown.isatty()

    def fileno(self) -> int:
        return super().fileno() if self._shown is None else self._shown.fileno()

    def open(self, path: Path) -> None:
        """Write output to this file from now on, and first the output that was kept in memory."""
        self._file = path.open("a", buffering=1, errors="surrogateescape")  # printed paths may not be UTF-8
        self._file.write("".join(self._buffered))


class ProcessSession(Generic[C]):
    """This process and the other ranks of a training run.

    Attributes:
        ranks: The ranks after the rendezvous.
        settings: The options, with the mesh resolved.
        root: The run directory of all ranks.
        on_fault: Called before this process ends because another rank has failed. The run sets it to complete its logs.
    """

    def __init__(self, environment: RankEnvironment, settings: C) -> None:
        self.on_fault: Callable[[], object] = lambda: None
        self._answer: Callable[[], object] = lambda: None  # used if a rank fails during the rendezvous
        self._environment, self.settings = environment, settings
        self.output = _Output(None if environment.rank else sys.stdout)
        self.ranks = Ranks(
            environment,
            self._fault,
            timeout=settings.dist_timeout or TIMEOUT,
            meeting=min(settings.dist_timeout or RENDEZVOUS_SECONDS, RENDEZVOUS_SECONDS),
            backend=settings.dist_backend,
            mesh=parse_mesh(settings.mesh) if settings.mesh is not None else None,
            values=get_shared_values(settings, environment.ranks),
            levels=settings.exchange_levels,
        )
        self._answer = self.ranks.monitor.answer
        if environment.rank:
            sys.stdout = sys.stderr = self.output

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Write rank 0's output to its file, too, in this context.

        The other ranks write their output only to their files, in this context and afterwards.
        """
        if self._environment.rank:
            yield
            return
        shown, sys.stdout = sys.stdout, self.output
        try:
            yield
        finally:
            sys.stdout = shown

    def _fault(self, rank: int, why: str) -> None:
        """End this process because another rank has failed; runs in the monitor's thread."""
        run_within(_LOG_SECONDS, self.on_fault)  # a thread that holds the locks may wait for a device forever
        if self._environment.rank == (0 if rank else 1):  # only one rank tells the user
            write_stderr(f"hostdev.train: error: rank {rank} of {self._environment.ranks}: {why}")
        else:
            self.output.write(f"rank {rank} of {self._environment.ranks}: {why}\n")
        self._answer()
        os._exit(2)

    def folder(self, made: Path | None) -> Path:
        """Return the folder of this rank's files.

        On rank 0, this is the run directory `made`, whose subfolder rank0 gets links to the logs. On any other rank k,
        this is the run directory's subfolder rank<k>.
        """
        self.root = root = Path(self.ranks.control.share(str(made))[0])
        mine = root / f"rank{self._environment.rank}"
        mine.mkdir(exist_ok=True)
        self.output.open(mine / OUTPUT)
        if self._environment.rank:
            return mine
        for name in (LOSS_LOG, EVAL_LOG, *([OPS_LOG] if self.settings.ops_log_bytes else [])):
            with contextlib.suppress(OSError):  # the link exists, or the file system has no links
                (mine / name).symlink_to(f"../{name}")
        return root


def get_shared_values(settings: TrainConfig, ranks: int) -> dict[str, Any]:
    """Return, by name, the values that must be equal on all ranks: the data set and the options.

    Options that concern only one process are left out, and so are folders, which may differ from host to host.
    """
    mesh = parse_mesh(settings.mesh) if settings.mesh is not None else Mesh(data=ranks)
    given = resolve_batch(settings, mesh.data).resolved()
    found: dict[str, Any] = {"the data set": None if settings.data is None else _identity(settings.data)}
    local = {name for name, item in given.options().items() if item.is_local}
    found |= {flag_of(name): value for name, value in given.as_json().items() if name not in local}
    with contextlib.suppress(UserError):  # raised again after the rendezvous
        found["--emb-dim"] = given.emb_dim or registry.default_dim(given.model)
    found["--pipeline-depth"] = shown(given.pipeline_depth > 0, str(given.pipeline_depth))
    rows = given.cache_rows
    found["--cache-rows"] = shown("some" if rows not in (None, "0", AUTO) else rows, str(rows))
    found["--resume"] = shown(given.resume is not None, "not given" if given.resume is None else "given")
    return found


def _identity(data: Path) -> list[Any]:
    try:
        identity = manifest.read(data).identity
    except (UserError, OSError) as error:  # raised again after the rendezvous
        return shown(None, in_words(error))
    return shown(identity, f"checksum {identity[:12]} ({shown_place(data)})")


def make_run_dir(settings: TrainConfig, session: ProcessSession[Any] | None) -> RunDir:
    """Make the run directory, or on ranks above 0 this rank's folder in it."""
    make = partial(RunDir, again=settings.resume is not None, ops_log=settings.ops_log_bytes)
    if session is None:
        return make(settings.run_dir)
    if session.ranks.rank == 0:
        made = make(settings.run_dir)
        session.folder(made.path)
        return made
    return make(session.folder(None))


@contextmanager
def join_processes(settings: C, resolve: Callable[[C, int], C]) -> Iterator[ProcessSession[C] | None]:
    """Join the other processes that a launcher has started, and yield the session; yield None if there are no others.

    Args:
        resolve: Called with the settings and the number of processes before the rendezvous; returns the settings with
            the mesh, and raises UserError for wrong options.
    """
    environment = find_rank_environment()
    if environment.alone:
        resolve(settings, 1)
        for name, item in settings.options().items():
            if item.is_shared and getattr(settings, name) is not None:
                raise OptionError(
                    name, f" has no effect in one process; leave out {flag_of(name)}, or start several processes"
                )
        yield None
        return
    try:
        settings = resolve(settings, environment.ranks)
    except HostdevError:
        if environment.rank:
            raise SystemExit(2) from None  # rank 0 reports it
        raise
    take_host_share(environment)
    try:
        session = ProcessSession(environment, settings)
    except BaseException:
        share_memory(1)
        raise
    with leave_together(session.ranks, alike=(Interrupted, TableFullError, CallbackError)), session.printing():
        yield session


def resolve_batch(settings: C, shares: int) -> C:
    """Return the settings with --batch-per-rank replaced by the equivalent --batch-size of all ranks."""
    if settings.batch_per_rank is None:
        return settings
    return replace(settings, batch_size=settings.batch_per_rank * shares, batch_per_rank=None)
