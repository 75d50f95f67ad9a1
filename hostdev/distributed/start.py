"""Starts a command on this host in one process per rank, waits for the processes, and ends them together."""

import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from hostdev.core.launched import LAUNCHERS, RANK_TABLE
from hostdev.distributed.rank_environment import LISTEN_VARIABLE, TOKEN_VARIABLE

# Variables from the launcher of this process; the child processes must not inherit them.
_LAUNCHER_VARIABLES = {
    *itertools.chain.from_iterable(names for _, names in LAUNCHERS),
    *RANK_TABLE,
    "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_RESTART_COUNT",
}
_BACKLOG = 2048
_END_SECONDS = 8.0  # time for the other processes to end after a failure


def start_processes(ranks: int, command: Sequence[str], **how: Any) -> "list[subprocess.Popen[bytes]]":
    """Start a command on this host in several processes, which are the ranks of a run.

    Args:
        ranks: Number of processes.
        command: Command line of each process.
        **how: Further arguments of `subprocess.Popen`.
    """
    # Rank 0 inherits the socket, so no other program can take the port first, and other hosts cannot reach it.
    with listen_at(("127.0.0.1", 0), socket.AF_INET, socket.SOCK_STREAM) as listening:
        return _start(ranks, command, listening, how)


def _start(
    ranks: int, command: Sequence[str], listening: socket.socket, how: dict[str, Any]
) -> "list[subprocess.Popen[bytes]]":
    port, descriptor = listening.getsockname()[1], listening.fileno()
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        TOKEN_VARIABLE: secrets.token_hex(16),
    }
    inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCHER_VARIABLES}
    end = die_with_parent if sys.platform == "linux" else None
    return [
        subprocess.Popen(
            command,
            env={**inherited, **common, **own, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            preexec_fn=end,
            pass_fds=[descriptor] if own else [],
            **how,
        )
        for rank, own in enumerate([{LISTEN_VARIABLE: str(descriptor)}, *[dict[str, str]()] * (ranks - 1)])
    ]


def listen_at(address: Any, *how: int) -> socket.socket:
    """Return a socket that listens at one address; `how` is passed to `socket.socket`."""
    made = socket.socket(*how)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(_BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def die_with_parent() -> None:
    """Have the kernel kill this child process if its parent dies (Linux)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait_for(processes: "list[subprocess.Popen[bytes]]") -> int:
    """Wait until all processes have ended; return the exit code of the first that failed, or 0.

    Processes that still run 8 s after a failure are killed. Stop signals are forwarded to all processes.
    """
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # unless ignored, as under nohup
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, _forward_signal(number, processes)) for number in numbers}
    deadline, first = float("inf"), 0
    try:
        while None in (codes := [process.poll() for process in processes]):
            if any(codes) and not first:
                first = next(code for code in codes if code)
                deadline = time.monotonic() + _END_SECONDS
            if time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    first = first or next((code for code in codes if code), 0)
    return 128 - first if first < 0 else first


def _forward_signal(number: signal.Signals, processes: "list[subprocess.Popen[bytes]]") -> Any:
    has_terminal = os.isatty(0)

    def handle(*_: object) -> None:
        if number in (signal.SIGINT, signal.SIGHUP) and has_terminal:
            return  # the terminal has already sent it to the children
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return handle
