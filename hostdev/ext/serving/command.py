"""The command `serve`, after its flags are parsed."""

import ipaddress
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from hostdev.core.addresses import shown_place
from hostdev.core.progress import note
from hostdev.ext.serving.collector import settled
from hostdev.ext.serving.lost_file import announce_lost_files
from hostdev.ext.serving.server import ServerEnd, Serving, address_of, listen, show_change
from hostdev.ext.serving.settings import Settings


def run(settings: Settings, host: str, port: int) -> None:
    """Serve until a signal; raise KeyboardInterrupt after Ctrl-C."""
    listener = listen(host, port)
    if _is_loopback(listener) and settings.token_file is None:
        settings = replace(settings, local_name=host)
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
    from hostdev.ext.serving.processes import Workers

    return Workers(
        settings,
        listener,
        lambda line: note(f"{settings.prog}: {line}"),
        lambda about: _started(settings, listener, about),
        show_change,
    ).run()


def _started(settings: Settings, listener: socket.socket, about: dict[str, Any]) -> None:
    """Print what is served and where, and warn of what others on the network may do."""
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
