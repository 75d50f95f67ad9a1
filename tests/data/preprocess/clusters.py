"""Clusters for tests: workers in threads of the test's process, or a scheduler and workers as processes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress

from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.kernels import jit
from hostdev.kernels.pool import host_threads, set_host_threads
from tests.conftest import ROOT

OPTIONS = Options(threshold=1, dense="standard", rows_per_shard=900)
BLOCK = 100_000

# A client in a process of its own: the text, the new folder and the scheduler's address.
CLIENT = """
import sys
from pathlib import Path
from hostdev.core import cli

def main(arguments):
    from hostdev.data.preprocess.cluster.prepare import prepare
    from tests.data.preprocess import clusters

    prepare(clusters.source(Path(arguments[0])), Path(arguments[1]), clusters.OPTIONS, arguments[2])

if __name__ == "__main__":
    sys.exit(cli.run("client", main))
"""


def source(text):
    """Return Criteo text in small blocks."""
    return CriteoText([text], block_bytes=BLOCK)


def build_alone(text, out):
    """Make the data set on one machine; return its files."""
    build(source(text), out, OPTIONS)
    return files_of(out)


def files_of(folder):
    """Return the bytes of all files of a data set by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@contextmanager
def local_cluster(workers=2):
    """Run a scheduler and workers in threads of this process, so that a test can change what they call."""
    from distributed import LocalCluster

    turns, threads = jit._turns, host_threads()
    cluster = LocalCluster(
        n_workers=workers,
        threads_per_worker=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        silence_logs=50,
    )
    try:
        yield cluster.scheduler_address
    finally:
        cluster.close()
        jit.take_turns(turns)
        set_host_threads(threads)


class Processes:
    """A scheduler and workers, each a process of its own, with a folder for their files."""

    def __init__(self, folder):
        self._folder, self._stack = folder, ExitStack()
        self._number = 0
        self.scheduler = self.address = None
        self.workers = []

    def __enter__(self):
        self.folder = self._folder
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_):
        self._stack.close()

    def start_scheduler(self, *before, host="127.0.0.1", **environment):
        """Start a scheduler; set its address."""
        self._number += 1
        file = self.folder / f"scheduler-{self._number}.json"
        flags = scheduler_flags(file, host)
        self.scheduler = self._start([*before, sys.executable, "-m", "dask", "scheduler", *flags], environment)
        self.address = wait_for(lambda: read_address(file), self.scheduler)

    def start_worker(self, *before, preload="", nanny=False, host="127.0.0.1", **environment):
        """Start a worker with one thread."""
        self._number += 1
        flags = ["--nthreads", "1", "--no-dashboard", "--nanny" if nanny else "--no-nanny", "--host", host]
        flags += ["--local-directory", self.folder / f"worker-{self._number}", "--death-timeout", "60"]
        if preload:
            path = self.folder / f"preload_{self._number}.py"
            path.write_text(preload)
            flags += ["--preload", path]
        worker = self._start([*before, sys.executable, "-m", "dask", "worker", self.address, *flags], environment)
        self.workers.append(worker)
        return worker

    def client(self, text, out):
        """Start a client that makes the data set."""
        script = self.folder / "client.py"
        script.write_text(CLIENT)
        return self._start([sys.executable, script, text, out, self.address], {}, stderr=subprocess.PIPE)

    def _start(self, command, environment, stderr=None):
        self._number += 1
        log = (self.folder / f"log-{self._number}").open("w")
        process = subprocess.Popen(
            list(map(str, command)),
            stdout=log,
            stderr=stderr or log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            start_new_session=True,
        )
        log.close()
        self._stack.callback(end, process)
        return process


def scheduler_flags(file, host="127.0.0.1"):
    """Return the flags of a scheduler with a free port, which writes its address to a file."""
    return ["--host", host, "--port", "0", "--dashboard-address", "127.0.0.1:0", "--no-show", "--scheduler-file", file]


def read_address(file):
    """Return the address in a scheduler's file, or None while it is not written."""
    try:
        return json.loads(file.read_text())["address"]
    except (FileNotFoundError, ValueError):
        return None


def end(process):
    """Kill a process with its children, wait for it, and close its pipe."""
    kill(process)
    if process.stderr is not None:
        process.stderr.close()


def kill(process):
    """Kill a process with its children, and wait for it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)


def wait_for(look, process=None, seconds=90):
    """Return the first true result of a function; fail if it does not come, or the process ends before it."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := look():
            return found
        assert process is None or process.poll() is None, "the process has ended"
        time.sleep(0.05)
    raise AssertionError("it did not come in time")
