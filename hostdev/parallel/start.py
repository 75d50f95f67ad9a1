"""Processes of a command on this host, which meet one another: started, waited for, ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

_END_SECONDS = 8.0  # that others have after one has failed


def start_here(ranks: int, command: Sequence[str], **how: Any) -> "list[subprocess.Popen[bytes]]":
    """Start so many processes of a command on this host, which meet one another; `how` as `subprocess.Popen` has it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
              "LOCAL_WORLD_SIZE": str(ranks)}  # fmt: skip
    end = end_with_parent if sys.platform == "linux" else None
    return [
        subprocess.Popen(
            command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, preexec_fn=end, **how
        )
        for rank in range(ranks)
    ]


def end_with_parent() -> None:
    """In a child, before its program begins: be killed where the parent is (Linux)."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait_for(processes: "list[subprocess.Popen[bytes]]") -> int:
    """Wait until all have ended; where one fails the others have some seconds. Signals are theirs to handle."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        numbers.append(signal.SIGHUP)
    handlers = {number: signal.signal(number, _passed_on(number, processes)) for number in numbers}
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


def _passed_on(number: signal.Signals, processes: "list[subprocess.Popen[bytes]]") -> Any:
    has_terminal = os.isatty(0)

    def handle(*_: object) -> None:
        if number in (signal.SIGINT, signal.SIGHUP) and has_terminal:
            return  # the terminal has told them
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    return handle
