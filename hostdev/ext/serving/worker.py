"""One of several processes of a server; `hostdev.ext.serving.processes` starts it."""

import json
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from hostdev.core import cli
from hostdev.ext.serving.settings import from_json

if TYPE_CHECKING:
    from hostdev.ext.serving.model import ServedModel

_LOOK_SECONDS = 1.0  # between two looks at the files of the metrics


def main(argv: Sequence[str]) -> None:
    """Serve until the parent closes its end of a pipe.

    Args:
        argv: The settings as JSON, and file descriptors: of the bound socket, of the pipe from the parent, and of the
            pipe to the parent, which gets lines of JSON: "ready" when the worker listens, "serves" then and at each
            newer checkpoint, with its step, time and checksum, and "problem" with a line for people.
    """
    text, listener, from_parent, to_parent = argv[0], *map(int, argv[1:4])
    settings = from_json(text)
    with cli.importing(settings.prog):
        from hostdev.ext.serving.collector import settled
        from hostdev.ext.serving.server import ServerEnd, Serving
    ending = ServerEnd()
    signal.signal(signal.SIGTERM, ending.handle)

    def tell(**content: Any) -> None:
        with suppress(BrokenPipeError):  # the parent is gone; `watch` ends this process
            os.write(to_parent, (json.dumps(content) + "\n").encode())

    serving = Serving(
        settings, changed=lambda model: tell(serves=_mark(model)), refused=lambda line: tell(problem=line)
    )

    def watch() -> None:
        while not select.select([from_parent], [], [], _LOOK_SECONDS)[0]:
            serving.metrics.restore()
        ending.set()  # the parent has closed the pipe, or is gone

    threading.Thread(target=watch, name="hostdev-parent", daemon=True).start()
    first = {"ready": serving.about(), "serves": _mark(serving.gatherer.model)}
    with settled():
        serving.run(socket.socket(fileno=listener), lambda: tell(**first), ending)


def _mark(model: "ServedModel") -> tuple[int, float, str]:
    return model.step, model.written, model.predictor.checksum


if __name__ == "__main__":
    raise SystemExit(cli.run(from_json(sys.argv[1]).prog, main, sys.argv[1:]))
