"""The client's part of a preparation on a cluster: it finds workers, describes the work to them, and submits tasks.

The cluster's scheduler is already running, or is started here with local worker processes.
"""

import contextlib
import io
import json
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from multiprocessing import resource_tracker
from pathlib import Path
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any
from uuid import uuid4

from hostdev.core.errors import HostdevError, TransientError, UserError, in_words
from hostdev.core.memory import available_bytes
from hostdev.core.progress import counted, note
from hostdev.data.manifest import Manifest
from hostdev.data.preprocess import words
from hostdev.data.preprocess.build import Preparation, find_splits, make_recipe
from hostdev.data.preprocess.cluster import job
from hostdev.data.preprocess.cluster.job import FOLDERS, Job, JobPickler, Reference, WorkerJob, get_versions
from hostdev.data.preprocess.earlier_vocabulary import NO_EARLIER, Earlier
from hostdev.data.preprocess.options import Options, parse_scheduler
from hostdev.data.preprocess.raw import InputRange, Source
from hostdev.data.preprocess.runner import Files, Runner, Task
from hostdev.data.preprocess.work import claim

_FORMAT = 2  # version of the formats of the job's folder and of the journal's entries
_CONNECT_SECONDS = 20
_FIRST_WORKER_SECONDS = 60
_CLOSE_SECONDS = 10
_CHECKS, _CHECK_AGAIN_SECONDS = 10, 0.5
_LOGGERS = ("distributed", "tornado", "asyncio")
_POLLED = 1.0  # seconds of waiting for results before the scheduler is checked
_THREADS_SECONDS = 5.0
_GATHER_SECONDS = 20
_LONELY_SECONDS = 30.0  # after this time without a worker, a note says so
_AHEAD, _LEAST_AHEAD = 4, 16  # maximum submitted tasks per thread; more are allowed up to _LEAST_AHEAD in all


def prepare(source: Source, out: Path, options: Options, scheduler: str, earlier: Earlier | None = None) -> Manifest:
    """Write a data set into the new folder `out` with the workers of a Dask scheduler; return its manifest.

    `source`, `out`, `options` and `earlier` are as for `build.build`, and the data set has the same bytes.

    Args:
        scheduler: tcp://HOST:PORT or tls://HOST:PORT of a scheduler, or local:N for N processes on this machine.

    Raises:
        UserError: `build.build` would raise it; the source can be read only by this machine; Dask is missing; or no
            scheduler answers.
        TransientError: A worker does not see the same files or has other versions; the scheduler is gone; a task ended
            several workers; or a read or write fails. Finished work is kept, and the same call continues from it.
    """
    if source.stamp() is None or any(str(one.path) == "-" for one in source.inputs):
        raise UserError(
            "--scheduler: standard input, pipes and queries can be read only on this machine; give files that all "
            "workers see, or leave out --scheduler"
        )
    earlier = earlier or NO_EARLIER
    earlier.require(source, options.dense, options.hash_buckets)
    with connect(scheduler) as workers, claim(out) as work:
        recipe = ["cluster", _FORMAT, *make_recipe(source, options, earlier)]
        entries = work.begin(recipe)
        # The job's folder is named after the recipe, so that a task of another recipe that is still running on a worker
        # writes elsewhere.
        folder = Path(os.path.abspath(work.pieces)) / sha256(json.dumps(recipe).encode()).hexdigest()[:12]  # noqa: PTH100
        splits = find_splits(source, options)
        for name in (*FOLDERS, *(f"result/{split}" for split in splits)):
            (folder / name).mkdir(parents=True, exist_ok=True)
        content = Job(str(folder), source, stamps(source), options, splits, earlier)
        reference = _write_job(content, folder / "job.pickle")
        workers.check(reference)
        preparation = Preparation(WorkerJob(content), work, workers, entries)
        first = preparation.first_pass()
        first.run(_find_ranges(source, preparation.runner))
        manifest = preparation.finish(first)
        work.finish()
    return manifest


def _find_ranges(source: Source, runner: Runner) -> Iterator[InputRange | HostdevError]:
    """Yield the ranges of all inputs, up to the first error; then yield that error."""
    inputs = range(len(source.inputs) or 1)
    tasks = {
        number: [
            Task(f"look-{number:06d}-{windows.start:06d}", "look", (number, windows.start, windows.stop))
            for windows in source.looks(number)
        ]
        for number in inputs
    }
    results = runner.map(task for some in tasks.values() for task in some)
    for number in inputs:
        looked = [one for task in tasks[number] for one in results[task.key]["looked"]]
        ranges, error = source.ranges(number, looked)
        yield from ranges
        if error is not None:
            yield error
            return


def stamps(source: Source) -> list[tuple[int, Any]] | None:
    """Return size and modification time of each input of a source; None if it has no files."""
    found = [one.stamp() for one in source.inputs]
    return [(int(stamp[1]), stamp[2]) for stamp in found if stamp is not None] or None


def _write_job(job: Job, path: Path) -> Reference:
    """Write a job's file, and return the reference to it.

    The file has a random mark, so that by its checksum a worker can tell whether it sees the same folder.
    """
    content = io.BytesIO()
    JobPickler(content).dump((uuid4().hex, job))
    path.write_bytes(content.getvalue())
    checksum = sha256(content.getvalue()).hexdigest()
    return str(path), checksum, socket.gethostname(), tuple(get_versions().items())


@contextmanager
def connect(scheduler: str) -> "Iterator[DaskWorkers]":
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
        yield DaskWorkers(client, scheduler)


@contextmanager
def _silent() -> Iterator[None]:
    """Silence the loggers of Dask in this process, because the command itself reports an error in one line."""
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

    The worker processes, which this thread starts, inherit the blocked signal. Ctrl-C in a terminal reaches them, too,
    but does not end them; the command that started them does.
    """
    from distributed.utils import LoopRunner

    resource_tracker.ensure_running()  # first, because starting multiprocessing's tracker unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        runner: Any = LoopRunner(asynchronous=False)
        runner.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return runner


class DaskWorkers:
    """Runs tasks on the workers of a cluster: a `runner.Executor`.

    Args:
        client: Dask's client.
        address: The scheduler's address, as messages name it.
    """

    sharing = 1

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        self.memory: int | None = None
        self._running: dict[str, tuple[Task, Any]] = {}
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._threads, self._looked, self._lonely = 0, -_THREADS_SECONDS, monotonic()

    def check(self, reference: Reference) -> None:
        """Check all present workers, and set the job whose tasks `submit` runs.

        Sets `memory` to the smallest number of bytes per thread on any of the workers. A worker that is lost during the
        check is left out.

        Raises TransientError, which names the worker, if a worker does not see the work folder or has other versions;
        also if the scheduler is lost, or if no worker is left and none comes.
        """
        # The checksum makes this run's task keys differ from those of an interrupted run, which the scheduler may still
        # have.
        self._reference, self._mark = reference, reference[1][:8]
        for _ in range(_CHECKS):
            try:
                self._client.wait_for_workers(1, timeout=_FIRST_WORKER_SECONDS)
                found = self._client.run(job.check, reference, on_error="return")
            except TimeoutError:
                break
            except OSError:
                raise TransientError(f"the scheduler at {self._address} no longer answers") from None
            if memory := self._memory(found):
                self.memory = min(memory)
                return
            sleep(_CHECK_AGAIN_SECONDS)  # until the scheduler has noticed that the workers are lost
        raise TransientError(f"{self._address} has no worker any more; run again once there is one")

    def _memory(self, found: dict[str, Any]) -> list[int]:
        """Return each worker's bytes of memory per thread, from answers to `job.check`; raise their errors."""
        memory = []
        for worker, answer in found.items():
            if isinstance(answer, OSError):  # the connection failed; errors on the worker are in its answer
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
        """Let all workers close the files that tasks have left open; lost workers are skipped."""
        with contextlib.suppress(Exception):  # if the scheduler is gone, the next task fails
            self._client.run(words.close_files, on_error="ignore")

    def has_room(self, running: int, parsing: int, pieces: int) -> bool:
        """See `runner.Executor`; a few tasks are queued for each thread."""
        return running < max(_LEAST_AHEAD, _AHEAD * self._count_threads())

    def submit(self, task: Task, known: Files | None) -> None:
        """See `runner.Executor`."""
        future = self._client.submit(
            job.run,
            self._reference,
            task.kind,
            task.arguments,
            known,
            key=f"{task.key}-{self._mark}" + "-again" * task.again,
            priority=task.priority,
            pure=False,
        )
        self._running[future.key] = task, future
        future.add_done_callback(self._done.put)

    def gather(self) -> list[tuple[Task, dict[str, Any]]]:
        """See `runner.Executor`.

        Raises TransientError if the scheduler is gone, or a task has ended several workers.
        """
        return list(self._gather())

    def stop(self) -> None:
        """Do nothing, because no task of a worker is long; see `runner.Executor`."""

    def _gather(self) -> Iterator[tuple[Task, dict[str, Any]]]:
        """Wait for futures, and yield the results of all that are done."""
        futures = self._wait()
        client = self._client
        for future in futures:
            if future.status == "error":
                raise self._failure(self._running[future.key][0], future.exception())
        if any(future.status in ("cancelled", "lost") for future in futures):
            raise self._gone()
        try:
            # With a time limit: if a worker is lost now, its results come only after its tasks have run again.
            found = client.sync(lambda: client.gather(futures, asynchronous=True), callback_timeout=_GATHER_SECONDS)
        except TimeoutError:
            self._look()
            for future in futures:
                future.add_done_callback(self._done.put)
            return
        except OSError:
            raise self._gone() from None
        except Exception as error:
            if type(error).__name__ in ("FuturesCancelledError", "FutureCancelledError", "CancelledError"):
                raise self._gone() from None
            if type(error).__name__ == "KilledWorker":
                raise self._failure(None, error) from None
            raise
        for future, result in zip(futures, found, strict=True):
            for part in (result, result.get("result", {})):
                if part.get("error") is not None:
                    part["error"] = job.to_error(part["error"])
            yield self._running.pop(future.key)[0], result

    def _wait(self) -> list[Any]:
        """Return the futures that are done, at least one."""
        while True:
            try:
                futures = {(future := self._done.get(timeout=_POLLED)).key: future}
            except Empty:
                self._look()
                continue
            while True:
                try:
                    future = self._done.get_nowait()
                except Empty:
                    break
                futures[future.key] = future
            wanted = [future for key, future in futures.items() if key in self._running]
            if wanted:
                return wanted

    def _failure(self, task: Task | None, error: BaseException) -> BaseException:
        """Return what to raise for an exception that Dask or a task raised."""
        if type(error).__name__ == "KilledWorker":
            name = "a task" if task is None else f"the task {task.key}"
            workers = counted(getattr(error, "allowed_failures", 3) + 1, "worker")
            return TransientError(
                f"{name} ended {workers} in turn; they probably have too little memory: give them more (dask worker "
                "--memory-limit), or fewer --nthreads"
            )
        if isinstance(error, ImportError) or "deserialization" in str(error):
            return TransientError(
                f"a worker, or the scheduler at {self._address}, cannot load hostdev's tasks; install this "
                "version of hostdev wherever they run"
            )
        return error

    def _gone(self) -> TransientError:
        return TransientError(f"the scheduler at {self._address} no longer answers")

    def _look(self) -> None:
        """Raise TransientError if the client has lost the scheduler; print a line if no worker is left."""
        if self._client.status in ("closed", "closing"):
            raise self._gone()
        if self._count_threads():
            self._lonely = monotonic()
        elif monotonic() - self._lonely > _LONELY_SECONDS:
            note(f"{self._address} has no worker; waiting for one")
            self._lonely = monotonic() + _LONELY_SECONDS

    def _count_threads(self) -> int:
        if monotonic() - self._looked >= _THREADS_SECONDS:
            try:
                self._threads, self._looked = sum(self._client.nthreads().values()), monotonic()
            except Exception:  # whatever a closed connection raises
                raise self._gone() from None
        return self._threads
