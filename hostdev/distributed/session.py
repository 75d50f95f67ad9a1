"""The process session: launched processes join, and end together when all are done or one fails."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import TracebackType
from typing import NoReturn

from hostdev.core.errors import RankError, UserError, in_words, write_stderr
from hostdev.core.launched import group_size
from hostdev.core.memory import share_memory
from hostdev.device.backend import assign_device
from hostdev.distributed.agreement import UnlikeError
from hostdev.distributed.channel import PeerLostError
from hostdev.distributed.process_group import RENDEZVOUS_SECONDS, TIMEOUT, Ranks
from hostdev.distributed.rank_environment import RankEnvironment, find_rank_environment
from hostdev.distributed.world import parse_mesh
from hostdev.kernels.pool import host_threads, set_host_threads

_FAULT_SECONDS = 30.0  # longer than the monitor takes to find the rank that is gone


class Joining(AbstractContextManager[Ranks | None]):
    """The result of `join`, for a `with` statement."""

    def __init__(self, joining: AbstractContextManager[Ranks | None]) -> None:
        self._joining = joining

    def __enter__(self) -> Ranks | None:
        return self._joining.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._joining.__exit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UserError(
            f"hostdev.join() is no object with .{name}: the processes meet at the beginning of a `with` statement, and "
            "leave together at its end; write `with hostdev.join() as ranks:`"
        )


def join(
    mesh: str | None = None,
    *,
    timeout: float = TIMEOUT,
    meeting: float = RENDEZVOUS_SECONDS,
    backend: str | None = None,
    levels: int | None = None,
) -> Joining:
    """Join the processes that a launcher has started, in a `with` statement: ::

        with hostdev.join() as ranks:  # the `Ranks`, or None for a single process
            ...

    If a rank fails, all ranks end with exit code 2, and one line on stderr names the rank and the cause.

    Args:
        mesh: How the ranks share a network, such as "data=2,pipe=2"; None means data parallel.
        timeout: Seconds that a rank waits for another within a step.
        meeting: Seconds until the rendezvous must be complete.
        backend: torch.distributed backend between devices; None for the devices' default.
        levels: With 1, every rank exchanges with every other. With 2, the ranks of a host share memory, and one rank of
            each host exchanges with other hosts. None means 2 if there are several hosts and one has several ranks.

    Raises:
        UserError: The mesh has the wrong size, the rendezvous failed, two levels have no effect, or torch.distributed
            is already initialised.
    """
    return Joining(_join(mesh, timeout, meeting, backend, levels))


@contextmanager
def _join(
    mesh: str | None, timeout: float, meeting: float, backend: str | None, levels: int | None
) -> Iterator[Ranks | None]:
    if levels not in (None, 1, 2):
        raise UserError(f"levels must be 1 or 2, not {levels}")
    if group_size() > 1:
        raise UserError(
            "torch.distributed is already initialised; leave out init_process_group(): hostdev.join() creates the "
            "process group from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as launchers set them"
        )
    env = find_rank_environment()
    wanted = None if mesh is None else parse_mesh(mesh)
    if wanted is not None and wanted.size != env.ranks:
        there = "only one was started" if env.alone else f"{env.ranks} were started"
        if env.rank:
            raise SystemExit(2)  # rank 0 reports it
        raise UserError(
            f"the mesh {mesh} needs {wanted.size} processes, but {there}; start {wanted.size}, for example with "
            f"torchrun --nproc-per-node {wanted.size}"
        )
    if env.alone:
        yield None
        return
    take_host_share(env)
    ranks = Ranks(
        env,
        partial(_end_process, env),
        timeout=timeout,
        meeting=meeting,
        backend=backend,
        mesh=wanted,
        values={"levels": levels},
        levels=levels,
    )
    with leave_together(ranks):
        yield ranks


def take_host_share(env: RankEnvironment) -> None:
    """Restrict this process to its share of the host's devices, memory and CPUs."""
    assign_device(env.local_rank if env.device is None else env.device)
    share_memory(env.local_ranks)
    set_host_threads(max(1, host_threads() // env.local_ranks))


@contextmanager
def leave_together(ranks: Ranks, alike: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """A context that reports an error to all other ranks, which then end; without an error, all ranks leave together.

    Args:
        ranks: The ranks of this run.
        alike: Types of exceptions that all ranks raise after the same step. The ranks then leave together.
    """
    try:
        with _leave_at_end(ranks, (UnlikeError, *alike)):
            yield
    except PeerLostError as error:
        ranks.failed = True
        why = ranks.monitor.absent() if ranks.calls.wrong is None else None
        if why is None:
            time.sleep(_FAULT_SECONDS)  # the monitor finds the rank and ends this process
        ranks.monitor.fail(why or in_words(error))
        if why is not None:
            raise RankError(f"rank {ranks.rank} of {ranks.size} {why}") from None
        raise
    except BaseException as error:
        if not ranks.have_left:
            ranks.failed = True
            ranks.monitor.fail(_format_end(error))
        raise


@contextmanager
def _leave_at_end(ranks: Ranks, alike: tuple[type[BaseException], ...]) -> Iterator[None]:
    """Context manager: when the block ends, wait for the other ranks and leave the run with them.

    After an exception, do so only if its type is in `alike`, the exceptions that all ranks raise, or if it is the
    `SystemExit` of a successful `sys.exit()`.
    """
    try:
        yield
    except SystemExit as error:
        if not error.code:
            ranks.leave("sys.exit(0)")
        raise
    except BaseException as error:
        if isinstance(error, alike):
            ranks.leave()
        raise
    ranks.leave()


def _format_end(error: BaseException) -> str:
    """Return text that tells the other ranks how this rank ended."""
    if isinstance(error, SystemExit):
        return f"has called sys.exit({error.code!r})"
    return f"interrupted {error}".strip() if isinstance(error, KeyboardInterrupt) else in_words(error)


def _end_process(env: RankEnvironment, rank: int, why: str) -> None:
    """End this process because another rank has failed; called in a thread of the monitor."""
    if env.rank == (0 if rank else 1):  # only one rank reports it
        write_stderr(f"error: rank {rank} of {env.ranks}: {why}")
    os._exit(2)
