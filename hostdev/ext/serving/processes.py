"""Several worker processes behind one port; the parent replaces those that die."""

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.multiprocess import mark_process_dead

from hostdev.core.errors import HostdevError
from hostdev.ext.serving.metrics import FOLDER_VARIABLE
from hostdev.ext.serving.settings import Settings

_POLL_SECONDS = 0.2
_END_SECONDS = 40.0  # longer than a worker's own limit
_MOST_PAUSE = 30.0  # seconds before a worker is replaced again, while others serve; not `core.patience`


class Served(NamedTuple):
    """A checkpoint that is served; two may have the same step."""

    step: int
    written: float  # seconds since 1970
    checksum: str


class WorkerError(HostdevError):
    """A worker process has failed at its start and has said why."""


class _Worker:
    """A worker process. It serves `settings`, and ends when `close` closes a pipe, or when this process is gone."""

    def __init__(self, settings: Settings, listener: socket.socket, metrics: Path) -> None:
        read_end, self._write_end = os.pipe()
        self._messages, messages_write = os.pipe()
        inherited = listener.fileno(), read_end, messages_write
        command = [sys.executable, "-m", "hostdev.ext.serving.worker", settings.as_json(), *map(str, inherited)]
        environment = {**os.environ, FOLDER_VARIABLE: str(metrics)}
        metrics.mkdir(0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
        try:
            self.process = subprocess.Popen(
                command, pass_fds=inherited, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
        finally:
            os.close(read_end)
            os.close(messages_write)
        self._received = b""
        self.is_at_end = False  # whether the pipe has nothing more
        self.ready: dict[str, Any] | None = None
        self.serves: Served | None = None

    def read(self) -> Iterator[dict[str, Any]]:
        """Read what the worker has sent; yield its messages, and keep what they say of it."""
        part = os.read(self._messages, 1 << 16)
        self.is_at_end = not part
        *lines, self._received = (self._received + part).split(b"\n")
        for message in map(json.loads, lines):
            if "ready" in message:
                self.ready = message["ready"]
            if "serves" in message:
                self.serves = Served(*message["serves"])
            yield message

    def fileno(self) -> int:
        """Return the pipe's descriptor, for a selector."""
        return self._messages

    def end(self) -> None:
        """Ask the worker to end."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def close(self) -> None:
        """Release what belongs to a process that has ended."""
        self.end()
        os.close(self._messages)


class WorkerProcesses:
    """Runs worker processes until a signal.

    Args:
        settings: The server's settings.
        listener: The bound socket, which all workers accept connections from.
        note: Called with lines for people.
        started: Called once, with what the first worker has reported, when all workers listen.
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
        self._serves: Served | None = None  # what all workers serve
        self._problem = ""  # that was reported last
        self._pinned: Settings | None = None
        self._signal: int | None = None
        self._signals = 0
        self._workers: list[_Worker] = []

    def run(self) -> int:
        """Serve; return the number of the signal that ended it.

        Raises:
            WorkerError: A worker failed before all had started.
        """
        before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        folder = Path(tempfile.mkdtemp(prefix="hostdev-metrics-"))
        try:
            self._start_all(folder)
            self._supervise(folder)
        finally:
            self._end_all()
            shutil.rmtree(folder, ignore_errors=True)
            for number, handler in before.items():
                signal.signal(number, handler)
        assert self._signal is not None
        return self._signal

    def _handle(self, number: int, frame: object) -> None:
        self._signal = self._signal or number
        self._signals += 1

    def _start_all(self, folder: Path) -> None:
        """Start the first worker; when it listens, the others, with the same checkpoint."""
        self._workers.append(_Worker(self._settings, self._listener, folder))
        self._wait_until_ready()
        first = self._workers[0].ready
        if first is None:  # a signal
            return
        serves = self._workers[0].serves
        self._pinned = self._settings.pinned(first["path"], first["name"])
        for _ in range(self._settings.workers - 1):
            self._workers.append(_Worker(self._pinned, self._listener, folder))
        self._wait_until_ready()
        if self._signal is None:
            self._started(first)
            self._serves = serves

    def _wait_until_ready(self) -> None:
        while self._signal is None and any(worker.ready is None for worker in self._workers):
            self._read_lines()
            for worker in self._workers:
                if worker.process.poll() is not None:
                    raise WorkerError(f"a worker process ended at its start ({_how(worker.process.returncode)})")

    def _supervise(self, folder: Path) -> None:
        """Replace workers that end, until a signal."""
        pause, earliest, missing = 1.0, 0.0, 0
        while self._signal is None:
            self._read_lines()
            self._report_change()
            for worker in [worker for worker in self._workers if worker.process.poll() is not None]:
                how = _how(worker.process.returncode)
                self._workers.remove(worker)
                mark_process_dead(worker.process.pid, str(folder))  # type: ignore[no-untyped-call]
                worker.close()
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
        """Return the settings of a replacement: the same checkpoint, unless it has been removed since."""
        assert self._pinned is not None
        return self._pinned if self._pinned.checkpoint.exists() else self._settings

    def _read_lines(self) -> None:
        """Wait a moment for messages of workers."""
        sources = [worker for worker in self._workers if not worker.is_at_end]
        if not sources:
            time.sleep(_POLL_SECONDS)
            return
        with selectors.DefaultSelector() as selector:
            for worker in sources:
                selector.register(worker, selectors.EVENT_READ, worker)
            for key, _ in selector.select(_POLL_SECONDS):
                worker = key.data
                for message in worker.read():
                    if (problem := message.get("problem")) not in (None, self._problem):
                        self._problem = problem  # each worker reports it
                        self._note(f"warning: {problem}")

    def _end_all(self) -> None:
        """End all workers: let them answer what they have accepted, unless a second signal arrives."""
        for worker in self._workers:
            worker.end()
        deadline = time.monotonic() + _END_SECONDS
        for worker in self._workers:
            while worker.process.poll() is None and time.monotonic() < deadline and self._signals < 2:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    worker.process.wait(_POLL_SECONDS)
            if worker.process.poll() is None:
                worker.process.kill()
                worker.process.wait()
            worker.close()


def _how(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            return f"signal {name}{'; a file that it served was cut, or its disk failed' * (name == 'SIGBUS')}"
    return f"exit code {code}"
