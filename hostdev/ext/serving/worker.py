"""One of several processes of a server; `hostdev.ext.serving.processes` starts it."""

import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from hostdev.core import cli
from hostdev.ext.serving.settings import Settings

if TYPE_CHECKING:
    from hostdev.ext.serving.model import ServedModel

_LOOK_SECONDS = 1.0  # time between two checks that the metrics' files still exist


def main(argv: Sequence[str]) -> None:
    """Serve until the parent closes its end of a connection.

    Args:
        argv: The file descriptors of the bound socket and of the connection to the parent. The parent sends the
            settings and receives dicts. The first one, sent when the worker listens, has "ready", the result of
            `Serving.about`. "serves" is the step, time and checksum of the first and each newer checkpoint.
            "problem" is a line about a checkpoint that cannot be used.
    """
    listener, parent = int(argv[0]), Connection(int(argv[1]))
    settings: Settings = parent.recv()
    with cli.importing(settings.prog):
        from hostdev.ext.serving.server import ServerEnd, Serving, settled
    ending = ServerEnd()
    signal.signal(signal.SIGTERM, ending.handle)

    def tell(**content: Any) -> None:
        with suppress(OSError):  # the parent is gone; `watch` ends this process
            parent.send(content)

    serving = Serving(
        settings, changed=lambda model: tell(serves=_mark(model)), refused=lambda line: tell(problem=line)
    )

    def watch() -> None:
        while not parent.poll(_LOOK_SECONDS):
            serving.metrics.restore()
        ending.set()  # the parent has closed the connection, or is gone

    threading.Thread(target=watch, name="hostdev-parent", daemon=True).start()
    first = {"ready": serving.about(), "serves": _mark(serving.gatherer.model)}
    with settled():
        serving.run(socket.socket(fileno=listener), lambda: tell(**first), ending)


def _mark(model: "ServedModel") -> tuple[int, float, str]:
    return model.step, model.written, model.predictor.checksum


if __name__ == "__main__":
    raise SystemExit(cli.run(sys.argv[1], main, sys.argv[2:]))
