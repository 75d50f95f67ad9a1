"""Runs `hostdev serve`, once its flags are parsed.

If a served file is cut, SIGBUS ends the process and no Python code can run: `announce_lost_files` prints the reason.
"""

import ctypes
import ipaddress
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import numba

from hostdev.core.addresses import shown_place
from hostdev.core.progress import note
from hostdev.ext.serving.server import ServerEnd, Serving, address_of, listen, settled, show_change
from hostdev.ext.serving.settings import Settings

_libc = ctypes.CDLL(None)
_write, _signal = _libc.write, _libc.signal
_write.argtypes, _write.restype = (ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t), ctypes.c_ssize_t
_signal.argtypes, _signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
_kept: list[object] = []  # keeps the objects alive that the signal handler uses


def announce_lost_files(prog: str) -> None:
    """Install a handler of SIGBUS, the signal for access to a lost part of a mapped file: print a line, then end."""
    line = (
        f"{prog}: error: a file that is served was cut, or its disk failed (SIGBUS); serve a folder in which nothing "
        "changes files\n"
    ).encode()
    buffer = ctypes.create_string_buffer(line)
    address, size, write, reset = ctypes.addressof(buffer), len(line), _write, _signal

    def handle(number):  # type: ignore[no-untyped-def]
        write(2, address, size)
        reset(number, 0)  # restores the default action: the access is repeated, and SIGBUS ends the process

    handler = numba.cfunc("void(int32)")(handle)
    _kept[:] = [buffer, handler]
    _signal(signal.SIGBUS, handler.address)


def run(settings: Settings) -> None:
    """Serve until a signal; raise KeyboardInterrupt after Ctrl-C."""
    listener = listen(settings.host, settings.port)
    if _is_loopback(listener) and settings.token_file is None:
        settings = replace(settings, local_name=settings.host)
    with listener:
        number = _run_workers(settings, listener) if settings.workers > 1 else _run_alone(settings, listener)
    if number == signal.SIGINT:
        raise KeyboardInterrupt


def _run_alone(settings: Settings, listener: socket.socket) -> int | None:
    serving = Serving(settings)
    about = serving.about()
    ending = ServerEnd()
    announce_lost_files(settings.prog)
    with ending.on_signals(), settled():
        serving.run(listener, lambda: _started(settings, listener, about), ending)
    return ending.number


def _run_workers(settings: Settings, listener: socket.socket) -> int:
    from hostdev.ext.serving.processes import WorkerProcesses

    return WorkerProcesses(
        settings,
        listener,
        lambda line: note(f"{settings.prog}: {line}"),
        lambda about: _started(settings, listener, about),
        show_change,
    ).run()


def _started(settings: Settings, listener: socket.socket, about: dict[str, Any]) -> None:
    """Print the model and the address; warn if others on the network may get predictions or read the token."""
    chosen = f" ({about['why']})" if about["why"] else ""
    print(f"model    {about['model']} of {shown_place(Path(about['path']))}{chosen}")
    workers = f", {settings.workers} processes" if settings.workers > 1 else ""
    print(
        f"serving  {about['name']!r}, version {about['step']}, at {address_of(listener, settings)}{workers}; "
        "Ctrl-C ends it",
        flush=True,
    )
    host = listener.getsockname()[0]
    if _is_loopback(listener):
        return
    if settings.token_file is None:
        note(f"{settings.prog}: warning: anyone who reaches {host} gets predictions; --token-file demands a token")
    elif settings.tls_cert is None:
        note(f"{settings.prog}: warning: the token is readable on the network; --tls-cert and --tls-key encrypt it")


def _is_loopback(listener: socket.socket) -> bool:
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
