"""Several worker processes behind one port; the parent replaces those that die."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.multiprocess import mark_process_dead

from hostdev.core.errors import HostdevError
from hostdev.ext.serving.metrics import FOLDER_VARIABLE
from hostdev.ext.serving.server import ServerEnd
from hostdev.ext.serving.settings import Settings

_POLL_SECONDS = 0.2
_END_SECONDS = 40.0  # the longest wait for workers to end; longer than a worker's own limit
_MOST_PAUSE = 30.0  # longest wait in seconds before a worker is replaced again, while others serve


class Served(NamedTuple):
    """A checkpoint that is served; different checkpoints may have the same step."""

    step: int
    written: float  # seconds since 1970
    checksum: str


class WorkerError(HostdevError):
    """A worker process has failed at its start and has said why."""


class _Worker:
    """A worker process that serves with `settings`. It ends when `end` closes the connection, or the parent dies."""

    def __init__(self, settings: Settings, listener: socket.socket, metrics: Path) -> None:
        self.connection, inner = Pipe()
        inherited = listener.fileno(), inner.fileno()
        command = [sys.executable, "-m", "hostdev.ext.serving.worker", settings.prog, *map(str, inherited)]
        environment = {**os.environ, FOLDER_VARIABLE: str(metrics)}
        metrics.mkdir(0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        with inner:
            self.process = subprocess.Popen(
                command, pass_fds=inherited, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        with contextlib.suppress(OSError):  # the worker has died already
            self.connection.send(settings)
        self.is_at_end = False  # whether the connection has nothing more
        self.ready: dict[str, Any] | None = None
        self.serves: Served | None = None

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the messages that the worker has sent, and record its state from them."""
        try:
            while self.connection.poll():
                message = self.connection.recv()
                self.ready = message.get("ready", self.ready)
                if "serves" in message:
                    self.serves = Served(*message["serves"])
                yield message
        except (EOFError, OSError):
            self.is_at_end = True

    def end(self) -> None:
        """Close the connection, which asks the worker to end."""
        self.connection.close()


class WorkerProcesses:
    """Runs worker processes until a signal.

    Args:
        settings: The server's settings.
        listener: The bound socket, which all workers accept connections from.
        note: Called with warnings for the user.
        started: Called once, when all workers listen, with the first worker's `Serving.about`.
        changed: Called with the step of a newer checkpoint, and when it was written, once all workers serve it.
    """

    def __init__(
        self,
        settings: Settings,
        listener: socket.socket,
        note: Callable[[str], None],
        started: Callable[[dict[str, Any]], None],
        changed: Callable[[int, float], None],
    ) -> None:
        self._settings, self._listener, self._note = settings, listener, note
        self._started, self._changed = started, changed
        self._serves: Served | None = None  # the checkpoint that all workers serve
        self._problem = ""  # the problem that was reported last
        self._pinned: Settings | None = None
        self._ending = ServerEnd()
        self._workers: list[_Worker] = []

    def run(self) -> int:
        """Serve; return the number of the signal that ended the server.

        Raises:
            WorkerError: A worker failed before all had started.
        """
        with self._ending.on_signals():
            folder = Path(tempfile.mkdtemp(prefix="hostdev-metrics-"))
            try:
                self._start_all(folder)
                self._supervise(folder)
            finally:
                self._end_all()
                shutil.rmtree(folder, ignore_errors=True)
        assert self._ending.number is not None
        return self._ending.number

    def _start_all(self, folder: Path) -> None:
        """Start the first worker; when it listens, start the others, with its checkpoint unless --follow is set."""
        self._workers.append(_Worker(self._settings, self._listener, folder))
        self._wait_until_ready()
        first = self._workers[0].ready
        if first is None:  # a signal came first
            return
        serves = self._workers[0].serves
        self._pinned = self._settings.pinned(first["path"], first["name"])
        for _ in range(self._settings.workers - 1):
            self._workers.append(_Worker(self._pinned, self._listener, folder))
        self._wait_until_ready()
        if self._ending.number is None:
            self._started(first)
            self._serves = serves

    def _wait_until_ready(self) -> None:
        while self._ending.number is None and any(worker.ready is None for worker in self._workers):
            self._read_messages()
            for worker in self._workers:
                if worker.process.poll() is not None:
                    raise WorkerError(f"a worker process ended at its start ({_how(worker.process.returncode)})")

    def _supervise(self, folder: Path) -> None:
        """Replace workers that end, until a signal."""
        pause, earliest, missing = 1.0, 0.0, 0
        while self._ending.number is None:
            self._read_messages()
            self._report_change()
            for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
                how = _how(worker.process.returncode)
                self._workers.remove(worker)
                mark_process_dead(worker.process.pid, str(folder))  # type: ignore[no-untyped-call]
                worker.end()
                missing += 1
                if worker.ready is None:  # it was a replacement, and has failed: do not try too often
                    earliest, pause = time.monotonic() + pause, min(2 * pause, _MOST_PAUSE)
                self._note(f"warning: worker {worker.process.pid} ended ({how}); another one starts")
            if all(worker.ready is not None for worker in self._workers) and not missing:
                pause = 1.0
            if missing and time.monotonic() >= earliest:
                self._workers.append(_Worker(self._replacement(), self._listener, folder))
                missing -= 1

    def _report_change(self) -> None:
        """Report a newer checkpoint once all workers serve it."""
        found = {worker.serves for worker in self._workers}
        served = found.pop() if len(found) == 1 else None
        if served is not None and served != self._serves:
            self._serves, self._problem = served, ""
            self._changed(served.step, served.written)

    def _replacement(self) -> Settings:
        """Return the pinned settings for a replacement, or the user's if the pinned checkpoint has been removed."""
        assert self._pinned is not None
        return self._pinned if self._pinned.checkpoint.exists() else self._settings

    def _read_messages(self) -> None:
        """Wait a moment for messages of workers, and report new problems."""
        sources: dict[Any, _Worker] = {worker.connection: worker for worker in self._workers if not worker.is_at_end}
        for source in wait(list(sources), _POLL_SECONDS):
            for message in sources[source].read():
                if (problem := message.get("problem")) not in (None, self._problem):
                    self._problem = problem  # each worker reports it; it is shown once
                    self._note(f"warning: {problem}")

    def _end_all(self) -> None:
        """End all workers: let them answer what they have accepted, unless a second signal arrives."""
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            while worker.process.poll() is None and time.monotonic() < deadline and not self._ending.is_forced:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_POLL_SECONDS)
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"signal {name}{'; a file that it served was cut, or its disk failed' * (name == 'SIGBUS')}"
    return f"exit code {code}"
