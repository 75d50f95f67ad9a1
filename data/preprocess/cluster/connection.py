"""The connection to Dask's scheduler: one that runs already, or local worker processes."""

import contextlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hostdev.core.errors import TransientError, UserError, in_words
from hostdev.data.preprocess.cluster import tasks
from hostdev.data.preprocess.cluster.job import Reference
from hostdev.data.preprocess.scheduler_flag import parse_scheduler

_CONNECT_SECONDS = 20
_FIRST_WORKER_SECONDS = 60
_CLOSE_SECONDS = 10


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
        """Check all workers that are there.

        Raises TransientError, by its name, for a worker that does not see the work folder or has other versions.
        """
        found = self.client.run(tasks.check, reference, on_error="return")
        threads = self.client.nthreads()
        memory = []
        for worker, answer in found.items():
            if isinstance(answer, BaseException):
                raise TransientError(
                    f"worker {worker} cannot run hostdev's tasks ({in_words(answer)}); install this version of hostdev "
                    "there"
                )
            if answer["error"] is not None:
                raise TransientError(answer["error"]["message"])
            limit = self._limit(worker) or answer["memory"]
            memory.append(min(limit, answer["memory"] or limit) // max(1, threads.get(worker, 1)))
        self.memory = min(memory)

    def _limit(self, worker: str) -> int:
        workers = self.client.scheduler_info(n_workers=-1)["workers"]
        return int(workers.get(worker, {}).get("memory_limit") or 0)


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
    logger = logging.getLogger("distributed")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # what happens is told by this command, in one line
    settings = {"distributed.comm.timeouts.connect": f"{_CONNECT_SECONDS}s", "distributed.admin.log-length": 0}
    try:
        with dask.config.set(settings), contextlib.ExitStack() as stack:
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
    finally:
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
    try:
        cluster = LocalCluster(  # type: ignore[no-untyped-call]
            n_workers=workers,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address=None,
            local_directory=folder,
            silence_logs=logging.CRITICAL,
            preload="hostdev.data.preprocess.cluster.ignoring_interrupts",
            env={"PYTHONWARNINGS": os.environ.get("PYTHONWARNINGS", "")},
        )
        try:
            yield cluster
        finally:
            with contextlib.suppress(Exception):
                cluster.close(timeout=_CLOSE_SECONDS)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
