"""Several processes of one training: how tests start them, wait for them, and leave none behind."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from hostdev.distributed.host_memory import HOST_VARIABLE
from tests import forks
from tests.conftest import ROOT
from tests.ports import free_port

LONGEST = 280.0  # seconds that a training of a test may take on a busy machine
_OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Ended(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str


class Processes:
    """Processes whose output goes to files; the context kills those that are left at its end.

    folder  for their output, and the one that they run in
    shared  a cache folder, which many may use
    """

    def __init__(self, folder, shared):
        self.folder, self.shared = Path(folder), shared
        self.started = []
        self._files = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.started:
            if process.poll() is None:
                process.kill()
        for process in self.started:
            process.wait()

    def start(self, *command, **env):
        """Start one."""
        number = len(self.started)
        files = [self.folder / f"process{number}.{name}" for name in ("out", "err")]
        clean = {name: value for name, value in os.environ.items() if name not in _OTHERS}
        own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(self.shared), "COLUMNS": "200"}
        with files[0].open("wb") as out, files[1].open("wb") as err:
            process = forks.Popen(
                list(map(str, command)),
                cwd=self.folder,
                env={**clean, **own, **{k: str(v) for k, v in env.items()}},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.started.append(process)
        self._files.append(files)
        return process

    def start_ranks(self, count, *arguments, port=None, **env):
        """Start Python processes as a shell's loop does."""
        meeting = {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port or free_port()}
        return [self.start(sys.executable, *arguments, RANK=rank, **meeting, **env) for rank in range(count)]

    def ended(self, seconds=LONGEST):
        """Wait until all have ended; what they came to."""
        wait_until(lambda: all(process.poll() is not None for process in self.started), seconds, self._told)
        texts = [[path.read_text() for path in files] for files in self._files]
        return [Ended(process.returncode, *text) for process, text in zip(self.started, texts, strict=True)]

    def forget(self):
        """Forget those that have ended; the next is the first again."""
        self.started.clear()
        self._files.clear()

    def _told(self):
        """Return the output so far, for a failing test."""
        return "\n".join(
            f"{path.name}: code {process.poll()}\n{path.read_text()}"
            for process, files in zip(self.started, self._files, strict=True)
            for path in files
        )


def start_on(processes, places, *arguments, **env):
    """Start a rank on each of these hosts, which are names for parts of this one."""
    meeting = {"WORLD_SIZE": len(places), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [
        processes.start(sys.executable, *arguments, RANK=rank, **{HOST_VARIABLE: f"host{place}"}, **meeting, **env)
        for rank, place in enumerate(places)
    ]


def wait_until(is_so, seconds=LONGEST, told=lambda: ""):
    """Poll a condition; fail after a timeout."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"not within {seconds} s; {told()}"
        time.sleep(0.02)
