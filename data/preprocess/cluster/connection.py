"""The connection to Dask's scheduler: one that runs already, or local worker processes."""

import contextlib
import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from time import sleep
from typing import Any

from hostdev.core.errors import TransientError, UserError, in_words
from hostdev.core.memory import available_bytes
from hostdev.data.preprocess.cluster import tasks, words
from hostdev.data.preprocess.cluster.job import Reference
from hostdev.data.preprocess.flags import parse_scheduler

_CONNECT_SECONDS = 20
_FIRST_WORKER_SECONDS = 60
_CLOSE_SECONDS = 10
_CHECKS, _CHECK_AGAIN_SECONDS = 10, 0.5
_LOGGERS = ("distributed", "tornado", "asyncio")


class Connection:
    """A client of a scheduler.

    Attributes:
        client: Dask's client.
        address: The scheduler's address, as messages name it.
        memory: Bytes of memory for a task on the worker with the least; set by `check`.
    """

    def __init__(self, client: Any, address: str) -> None:
        self.client, self.address = client, address
        self.memory = 0

    def threads(self) -> int:
        """Return the number of threads of all workers; 0 if there are none."""
        return sum(self.client.nthreads().values())

    def check(self, reference: Reference) -> None:
        """Check all workers that are there; one that is lost meanwhile is left out, as one lost later is.

        Raises TransientError, by its name, for a worker that does not see the work folder or has other versions; and
        if the scheduler is lost, or no worker is left and none comes.
        """
        for _ in range(_CHECKS):
            try:
                self.client.wait_for_workers(1, timeout=_FIRST_WORKER_SECONDS)
                found = self.client.run(tasks.check, reference, on_error="return")
            except TimeoutError:
                break
            except OSError:
                raise TransientError(f"the scheduler at {self.address} no longer answers") from None
            if memory := self._memory(found):
                self.memory = min(memory)
                return
            sleep(_CHECK_AGAIN_SECONDS)  # until the scheduler has noticed that the workers are lost
        raise TransientError(f"{self.address} has no worker any more; run again once there is one")

    def _memory(self, found: dict[str, Any]) -> list[int]:
        """Return the bytes of memory of the workers that have answered; see `check`."""
        memory = []
        for worker, answer in found.items():
            if isinstance(answer, OSError):  # of the connection: the task returns those of the worker's own
                continue
            if isinstance(answer, BaseException):
                raise TransientError(
                    f"worker {worker} cannot run hostdev's tasks ({in_words(answer)}); install this version of hostdev "
                    "there"
                )
            if answer["error"] is not None:
                raise TransientError(answer["error"]["message"])
            memory.append(answer["memory"])
        return memory

    def close_files(self) -> None:
        """Let all workers close the files that tasks have left open; one that is lost has none."""
        with contextlib.suppress(Exception):  # the next task tells if the scheduler is gone
            self.client.run(words.close_files, on_error="ignore")


@contextmanager
def connect(scheduler: str) -> Iterator[Connection]:
    """Connect to the scheduler that --scheduler names, and wait for a worker; close everything in the end.

    Raises:
        UserError: Dask is not installed, or no scheduler answers.
        TransientError: No worker comes.
    """
    local = parse_scheduler(scheduler)
    try:
        import dask
        import distributed
    except ModuleNotFoundError as error:
        raise UserError(
            f"--scheduler needs Dask, and {error.name} is not installed; pip install 'hostdev[dask]'"
        ) from None
    settings = {"distributed.comm.timeouts.connect": f"{_CONNECT_SECONDS}s", "distributed.admin.log-length": 0}
    with _silent(), dask.config.set(settings), contextlib.ExitStack() as stack:
        address = scheduler
        if local is not None:
            cluster = stack.enter_context(_local(local))
            address = cluster.scheduler_address
        client = stack.enter_context(_client(distributed, scheduler, address))
        try:
            client.wait_for_workers(1, timeout=_FIRST_WORKER_SECONDS)
        except TimeoutError:
            raise TransientError(
                f"{scheduler} has no worker, and none came within {_FIRST_WORKER_SECONDS} s; start one with "
                f"dask worker {address}"
            ) from None
        yield Connection(client, scheduler)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the loggers of Dask in this process: the command says in one line what happens."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in _LOGGERS]
    loggers = [logging.getLogger(name) for name in {*names, *_LOGGERS}]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextmanager
def _client(distributed: Any, shown: str, address: str) -> Iterator[Any]:
    try:
        client = distributed.Client(address, timeout=_CONNECT_SECONDS, set_as_default=False, name="hostdev")
    except (OSError, TimeoutError, ValueError) as error:
        raise UserError(
            f"--scheduler {shown}: no scheduler answers there ({in_words(error)[:120]}); start one with "
            "dask scheduler, or use local:N"
        ) from None
    try:
        yield client
    finally:
        with contextlib.suppress(Exception):  # the scheduler may be gone
            client.close(timeout=_CLOSE_SECONDS)


@contextmanager
def _local(workers: int) -> Iterator[Any]:
    """Start worker processes with one thread each; end them and remove their folder in the end."""
    from distributed import LocalCluster

    folder = tempfile.mkdtemp(prefix="hostdev-dask-")
    runner = _loop_without_interrupts()
    try:
        cluster: Any = LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=0,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            loop=runner.loop,
            dashboard_address="127.0.0.1:0",  # any free port
            local_directory=folder,
            memory_limit=available_bytes() // workers,
            silence_logs=logging.CRITICAL,
        )
        try:
            cluster.scale(workers)  # returns at once, so that Ctrl-C finds a cluster to close
            yield cluster
        finally:
            with contextlib.suppress(Exception):
                cluster.close(timeout=_CLOSE_SECONDS)
    finally:
        with contextlib.suppress(Exception):
            runner.stop()
        shutil.rmtree(folder, ignore_errors=True)


def _loop_without_interrupts() -> Any:
    """Start the thread of Dask's event loop with SIGINT blocked.

    The processes that it starts inherit that, so that Ctrl-C in a terminal, which reaches them, too, does not end them:
    the command that started them does.
    """
    from distributed.utils import LoopRunner

    resource_tracker.ensure_running()  # multiprocessing's, which unblocks SIGINT in the thread that starts it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        runner: Any = LoopRunner(asynchronous=False)
        runner.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return runner
