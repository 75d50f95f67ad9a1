"""Runs tasks on a cluster: one whose scheduler runs already, or local worker processes.

The journal of their results is verified and kept by a repeated command.
"""

import contextlib
import json
import logging
import shutil
import signal
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from queue import Empty, SimpleQueue
from time import monotonic, sleep
from typing import Any, NamedTuple

from hostdev.core.errors import HostdevError, TransientError, UserError, in_words
from hostdev.core.json_files import parse
from hostdev.core.memory import available_bytes
from hostdev.core.progress import counted, note
from hostdev.data.preprocess.cluster import tasks, words
from hostdev.data.preprocess.cluster.first import Result
from hostdev.data.preprocess.cluster.job import Reference
from hostdev.data.preprocess.options import parse_scheduler
from hostdev.data.preprocess.work import WorkFolder

_CONNECT_SECONDS = 20
_FIRST_WORKER_SECONDS = 60
_CLOSE_SECONDS = 10
_CHECKS, _CHECK_AGAIN_SECONDS = 10, 0.5
_LOGGERS = ("distributed", "tornado", "asyncio")
_POLLED = 1.0  # seconds between looks at the scheduler
_THREADS_SECONDS = 5.0
_GATHER_SECONDS = 20
_LONELY_SECONDS = 30.0  # without a worker, until a line says so
_AHEAD, _LEAST_AHEAD = 4, 16  # submitted tasks per thread, and at least


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


class Task(NamedTuple):
    """A task.

    Attributes:
        key: Its name in the journal and, with a mark of this run, on Dask's dashboard.
        kind: A name of `tasks._TASKS`.
        arguments: Its arguments, which JSON can hold.
        size: For the progress bar.
        priority: Tasks with a higher one run first.
        again: Whether a result of the journal is not used.
    """

    key: str
    kind: str
    arguments: tuple[Any, ...] = ()
    size: int = 1
    priority: int = 0
    again: bool = False


class Runner:
    """Submits tasks and yields their results.

    Args:
        mark: Makes the keys of this run differ from those of an interrupted one, which the scheduler may still have.
        entries: The journal's entries.
    """

    def __init__(
        self,
        connection: Connection,
        reference: Reference,
        work: WorkFolder,
        mark: str,
        entries: Iterable[dict[str, Any]],
    ) -> None:
        self.connection, self._reference, self._work, self._mark = connection, reference, work, mark
        self._known = {entry["task"]: entry for entry in entries if _is_sound(entry)}
        self._running: dict[str, tuple[Task, Any]] = {}
        self._done: SimpleQueue[Any] = SimpleQueue()
        self._ready: list[tuple[Task, Result | HostdevError]] = []
        self._threads, self._looked, self._lonely = 0, -_THREADS_SECONDS, None if connection is None else monotonic()

    def known(self, task: Task) -> Result | None:
        """Return the journal's result of a task, or None."""
        entry = self._known.get(task.key)
        if entry is None or entry["arguments"] != _checksum(task):
            return None
        result: Result = entry["result"]
        return result

    def has_room(self) -> bool:
        """Return whether more tasks should be submitted."""
        return len(self._running) < max(_LEAST_AHEAD, _AHEAD * self._count_threads())

    @property
    def is_idle(self) -> bool:
        """Whether no task is under way."""
        return not self._running and not self._ready

    def submit(self, task: Task) -> None:
        """Submit a task."""
        known = None if task.again else self.known(task)
        future = self.connection.client.submit(
            tasks.run,
            self._reference,
            task.kind,
            task.arguments,
            None if known is None else known["files"],
            key=f"{task.key}-{self._mark}" + "-again" * task.again,
            priority=task.priority,
            pure=False,
        )
        self._running[future.key] = task, future
        future.add_done_callback(self._done.put)

    def next(self) -> tuple[Task, Result | HostdevError]:
        """Wait for the next finished task; return it with its result, or with the error for the user.

        Raises TransientError if the scheduler is gone, or a task has ended several workers.
        """
        while not self._ready:
            self._ready = list(self._gather())
        return self._ready.pop(0)

    def map(self, given: Iterable[Task], done: Callable[[int], object] = lambda n: None) -> dict[str, Result]:
        """Run tasks; return their results by key. Calls `done` with the size of each task that has finished.

        If several fail, raises the error of the first one in the order of the tasks.
        """
        results: dict[str, Result] = {}
        failed: dict[int, HostdevError] = {}
        order: dict[str, int] = {}
        waiting = iter(given)
        task = next(waiting, None)
        while task is not None or not self.is_idle:
            while task is not None and not failed and self.has_room():
                order[task.key] = len(order)
                self.submit(task)
                task = next(waiting, None)
            if self.is_idle:
                break
            finished, result = self.next()
            if isinstance(result, HostdevError):
                failed[order[finished.key]] = result
            else:
                results[finished.key] = result
                done(finished.size)
        if failed:
            raise failed[min(failed)]
        return results

    def _gather(self) -> Iterator[tuple[Task, Result | HostdevError]]:
        """Wait for futures, and yield the results of all that are done."""
        futures = self._wait()
        client = self.connection.client
        for future in futures:
            if future.status == "error":
                raise self._failure(self._running[future.key][0], future.exception())
        if any(future.status in ("cancelled", "lost") for future in futures):
            raise self._gone()
        try:
            # With a limit, as the results of a worker that is lost now come only when its tasks have run again.
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
            task, _ = self._running.pop(future.key)
            yield task, self._take(task, result)

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

    def _take(self, task: Task, found: dict[str, Any]) -> Result | HostdevError:
        if "error" in found:
            return to_error(found["error"])
        if "known" in found:
            known = self.known(task)
            assert known is not None
            return known
        result: Result = json.loads(json.dumps(found["result"]))  # as the journal has it
        if not result.get("missing") and not result.get("error") and task.kind != "verify":
            self.note(task, result)
        return result

    def note(self, task: Task, result: Result) -> None:
        """Record the result of a task in the journal."""
        entry = {"task": task.key, "arguments": _checksum(task), "result": result}
        self._work.note(**entry)
        self._known[task.key] = entry

    def entries(self) -> list[dict[str, Any]]:
        """Return the journal's entries, the last one of each task."""
        return list(self._known.values())

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
                f"a worker, or the scheduler at {self.connection.address}, cannot load hostdev's tasks; install this "
                "version of hostdev wherever they run"
            )
        return error

    def _gone(self) -> TransientError:
        return TransientError(f"the scheduler at {self.connection.address} no longer answers")

    def _look(self) -> None:
        """Raise TransientError if the client has lost the scheduler; print a line if no worker is left."""
        if self.connection.client.status in ("closed", "closing"):
            raise self._gone()
        if self._count_threads():
            self._lonely = monotonic()
        elif monotonic() - (self._lonely or 0) > _LONELY_SECONDS:
            note(f"{self.connection.address} has no worker; waiting for one")
            self._lonely = monotonic() + _LONELY_SECONDS

    def _count_threads(self) -> int:
        if monotonic() - self._looked >= _THREADS_SECONDS:
            try:
                self._threads, self._looked = self.connection.threads(), monotonic()
            except Exception:  # whatever a closed connection raises
                raise self._gone() from None
        return self._threads


def to_error(content: dict[str, Any]) -> HostdevError:
    """Return the error that `first.describe_error` described."""
    kind = TransientError if content["kind"] in ("TransientError", "StoreError") else UserError
    return kind(content["message"])


def _checksum(task: Task) -> int:
    return zlib.crc32(json.dumps([task.kind, task.arguments]).encode())


def _is_sound(entry: dict[str, Any]) -> bool:
    try:
        parse(str, entry["task"])
        parse(dict[str, str], parse(dict[str, Any], entry["result"])["files"])
    except (ValueError, KeyError):
        return False
    return entry.keys() == {"task", "arguments", "result"}
