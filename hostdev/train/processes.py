"""A training of many processes: each finds its place, meets the others, and ends when one of them fails."""

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
from typing import Any, TextIO

from hostdev.cache.options import AUTO
from hostdev.core.errors import HostdevError, UserError, in_words, write_stderr
from hostdev.core.memory import share_memory
from hostdev.data import manifest
from hostdev.distributed.agreement import shown
from hostdev.distributed.mesh import Mesh, parse_mesh
from hostdev.distributed.monitor import run_within
from hostdev.distributed.process_group import RENDEZVOUS_SECONDS, TIMEOUT, Ranks
from hostdev.distributed.rank_environment import RankEnvironment, find_rank_environment
from hostdev.distributed.session import leave_together, take_host_share
from hostdev.distributed.start import start_processes, wait_for
from hostdev.models import registry
from hostdev.train.config import TrainConfig, to_flags
from hostdev.train.interrupt import Interrupted
from hostdev.train.layouts import meshed
from hostdev.train.rundir import EVAL_LOG, LOSS_LOG, OPS_LOG, RunDir

OUTPUT = "output.log"
_OWN = ("data", "run_dir", "checkpoint_dir", "trace", "host_threads", "ops_log", "dist_timeout", "dist_url",
        "dist_backend", "batch_per_rank", "cache_policy", "cache_window", "device")  # fmt: skip
_BOOKS_SECONDS = 5.0  # for the logs of a rank that is ended


class _Output(io.TextIOBase):
    """What a rank prints, for a file in its folder: kept until there is one; of the first one shown, too.

    shown  where
    """

    def __init__(self, shown: TextIO | None) -> None:
        self._kept: list[str] = []
        self._file: Any = None
        self._shown = shown

    def write(self, text: str) -> int:
        if self._file is None:
            self._kept.append(text)
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

    def go_to(self, path: Path) -> None:
        """Write to this file from now on."""
        self._file = path.open("a", buffering=1, errors="surrogateescape")  # a path may be in no encoding
        self._file.write("".join(self._kept))


class Company:
    """The ranks of a training run, as the command sees them.

    ranks    that have met; root: the run directory of all
    settings with the mesh that these mean
    on_fault completes what must not be lost before the process ends for another's failure; set by the run
    """

    def __init__(self, place: RankEnvironment, settings: TrainConfig) -> None:
        self.on_fault: Callable[[], object] = lambda: None
        self._answer: Callable[[], object] = lambda: None  # a rank may fail before all have been here
        self._place, self.settings = place, settings
        self.output = _Output(None if place.rank else sys.stdout)
        self.ranks = Ranks(
            place,
            self._fault,
            timeout=settings.dist_timeout or TIMEOUT,
            meeting=min(settings.dist_timeout or RENDEZVOUS_SECONDS, RENDEZVOUS_SECONDS),
            backend=settings.dist_backend,
            mesh=parse_mesh(settings.mesh) if settings.mesh is not None else None,
            values=alike(settings, place.ranks),
        )
        self._answer = self.ranks.monitor.answer
        if place.rank:
            sys.stdout = sys.stderr = self.output

    @contextmanager
    def printing(self) -> Iterator[None]:
        """Let what rank 0 prints go to a file, too; what others print goes there only, to their end."""
        if self._place.rank:
            yield
            return
        shown, sys.stdout = sys.stdout, self.output
        try:
            yield
        finally:
            sys.stdout = shown

    def _fault(self, rank: int, why: str) -> None:
        """End this process, in the watching thread: another rank has failed."""
        run_within(
            _BOOKS_SECONDS, self.on_fault
        )  # a thread that has its locks may wait for a device that does not answer
        if self._place.rank == (0 if rank else 1):  # one of all tells the user
            write_stderr(f"hostdev.train: error: rank {rank} of {self._place.ranks}: {why}")
        else:
            self.output.write(f"rank {rank} of {self._place.ranks}: {why}\n")
        self._answer()
        os._exit(2)

    def folder(self, made: Path | None) -> Path:
        """Return where this rank's files go: `made` by rank 0, whose own folder has links to them; or one in it."""
        self.root = root = Path(self.ranks.control.share(str(made))[0])
        mine = root / f"rank{self._place.rank}"
        mine.mkdir(exist_ok=True)
        self.output.go_to(mine / OUTPUT)
        if self._place.rank:
            return mine
        for name in (LOSS_LOG, EVAL_LOG, *([OPS_LOG] if self.settings.ops_log_bytes else [])):
            with contextlib.suppress(OSError):  # there already, or no links here
                (mine / name).symlink_to(f"../{name}")
        return root


def alike(settings: TrainConfig, ranks: int) -> dict[str, Any]:
    """Return what all ranks must have alike: the data set, and the options by their names.

    Options that concern one process alone may differ, and so may folders, of which each host may have its own.
    """
    mesh = parse_mesh(settings.mesh) if settings.mesh is not None else Mesh(data=ranks)
    given = resolved(settings, mesh.data).resolved()
    found: dict[str, Any] = {"the data set": None if settings.data is None else _identity(settings.data)}
    found |= {f"--{name.replace('_', '-')}": value for name, value in given.as_json().items() if name not in _OWN}
    with contextlib.suppress(UserError):  # said again when all have met
        found["--emb-dim"] = given.emb_dim or registry.default_dim(given.model)
    found["--pipeline-depth"] = shown(given.pipeline_depth > 0, str(given.pipeline_depth))
    rows = given.cache_rows
    found["--cache-rows"] = shown("some" if rows not in (None, "0", AUTO) else rows, str(rows))
    found["--resume"] = shown(given.resume is not None, "not given" if given.resume is None else "given")
    return found


def _identity(data: Path) -> list[Any]:
    try:
        identity = manifest.read(data).identity
    except (UserError, OSError) as error:  # said again when all have met
        return shown(None, in_words(error))
    return shown(identity, f"checksum {identity[:12]} ({data})")


def run_dir(settings: TrainConfig, company: Company | None) -> RunDir:
    """Return the run directory, or with other ranks this one's place in it."""
    make = partial(RunDir, again=settings.resume is not None, ops_log=settings.ops_log_bytes)
    if company is None:
        return make(settings.run_dir)
    if company.ranks.rank == 0:
        made = make(settings.run_dir)
        company.folder(made.path)
        return made
    return make(company.folder(None))


@contextmanager
def joined(settings: TrainConfig, require: Callable[[TrainConfig], object]) -> Iterator[Company | None]:
    """Meet the other processes that a launcher has started; None where there are none.

    require  raises UserError where there is no use in meeting them
    """
    place = find_rank_environment()
    if place.alone:
        meshed(settings, 1)
        for name in ("dist_timeout", "dist_backend", "dist_url", "batch_per_rank", "dense_exchange", "mesh"):
            if getattr(settings, name) is not None:
                option = "--" + name.replace("_", "-")
                raise UserError(f"{option} has no effect in one process; leave it out, or start several")
        yield None
        return
    try:
        settings = meshed(settings, place.ranks)
        require_shares(settings, place.ranks)
        require(settings)
    except HostdevError:
        if place.rank:
            raise SystemExit(2) from None  # rank 0 says it
        raise
    take_host_share(place)
    try:
        company = Company(place, settings)
    except BaseException:
        share_memory(1)
        raise
    with leave_together(company.ranks, alike=(Interrupted,)), company.printing():
        yield company


def require_shares(settings: TrainConfig, ranks: int) -> None:
    """Raise UserError unless so many processes can share out the work that the settings name."""
    if not settings.host_device_mix:
        raise UserError(f"{ranks} processes share the tables in host memory; give --host-device-mix")
    if settings.mesh is None and settings.parallel == "auto":  # it will be one that fits
        return
    mesh = Mesh(data=ranks) if settings.mesh is None else parse_mesh(settings.mesh)
    if mesh.size != ranks:
        raise UserError(
            f"--mesh {settings.mesh} is of {mesh.size} processes, and {ranks} were started; the sizes of its axes "
            "multiply to their number"
        )
    if settings.dense_exchange is not None and mesh.data == 1:
        raise UserError(
            f"--dense-exchange {settings.dense_exchange} has no effect with --mesh {settings.mesh}, where each process "
            "has layers of its own; leave it out"
        )
    M = settings.micro_batches
    if M % mesh.data:
        up = -(-M // mesh.data) * mesh.data
        who = f"{ranks} processes" if mesh.data == ranks else f"the {mesh.data} shares of --mesh {settings.mesh}"
        raise UserError(
            f"--micro-batches {M} cannot be shared out equally by {who}; give --micro-batches {up}, or another "
            f"multiple of {mesh.data}"
        )
    count = M // mesh.data
    if settings.schedule == "interleaved" and count % max(1, count // mesh.pipe):
        up = -(-count // mesh.pipe) * mesh.pipe * mesh.data
        raise UserError(
            f"--schedule interleaved takes micro-batches in rounds of {mesh.pipe}, and --micro-batches {M} gives each "
            f"process {count}; give --micro-batches {up}, or another schedule"
        )
    if mesh.data * mesh.pipe > M:
        raise UserError(
            f"--mesh {settings.mesh} has {mesh.pipe} stages, which want at least as many micro-batches; give "
            f"--micro-batches {mesh.data * mesh.pipe} or more"
        )


def resolved(settings: TrainConfig, shares: int) -> TrainConfig:
    """Return the settings with the batch of all ranks where that of each was given."""
    if settings.batch_per_rank is None:
        return settings
    return replace(settings, batch_size=settings.batch_per_rank * shares, batch_per_rank=None)


def spawn(settings: TrainConfig) -> int:
    """Start the processes of --spawn on this host, wait for them, and return the exit code of the first that failed."""
    assert settings.spawn is not None
    if not find_rank_environment().alone:
        raise UserError("--spawn starts processes, but a launcher has started this one as one of several; leave it out")
    require_shares(meshed(settings, settings.spawn), settings.spawn)
    command = [sys.executable, "-m", "hostdev.train", *to_flags(replace(settings, spawn=None))]
    return wait_for(start_processes(settings.spawn, command))
