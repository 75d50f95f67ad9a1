"""An S3 server on this machine: python -m tests.stores.server FOLDER [N [SECONDS [RATE]]]

Writes its port to FOLDER/port. Every Nth request fails, in one of several ways, or takes SECONDS longer. All answers
together have at most RATE bytes per second. While FOLDER/away or FOLDER/denied exists, all requests fail.
FOLDER/requests counts requests.
"""

import itertools
import sys
import threading
import time
from pathlib import Path

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_PIECE = 1 << 18  # bytes


class Flaky:
    """A WSGI application whose requests fail now and then."""

    def __init__(self, folder, every, seconds, rate=0):
        self._app = DomainDispatcherApplication(create_backend_app)
        self._folder, self._every, self._seconds = folder, every, seconds
        self._numbers = itertools.count(1)
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def __call__(self, environ, start_response):
        number = next(self._numbers)
        (self._folder / "requests").write_text(str(number))
        if (self._folder / "away").exists():
            return self._fail(environ, start_response, "503 Service Unavailable")
        if (self._folder / "denied").exists():
            return self._fail(environ, start_response, "403 Access Denied")
        if self._every and number % self._every == 0:
            if number // self._every % 3 == 0:
                time.sleep(self._seconds)  # a slow answer is what is simulated
            else:
                status = "500 Internal Server Error", "503 Slow Down"
                return self._fail(environ, start_response, status[number // self._every % 2])
        answer = self._app(environ, start_response)
        return self._paced(answer) if self._rate else answer

    def _paced(self, answer):
        """Yield an answer's pieces no faster than the link has room for them."""
        try:
            for piece in answer:
                for start in range(0, len(piece), _PIECE):
                    part = piece[start : start + _PIECE]
                    with self._lock:
                        self._free = max(self._free, time.monotonic()) + len(part) / self._rate
                        until = self._free
                    time.sleep(max(0.0, until - time.monotonic()))
                    yield part
        finally:
            if hasattr(answer, "close"):
                answer.close()

    def _fail(self, environ, start_response, status):
        code = status.partition(" ")[2].replace(" ", "")
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
        if environ["REQUEST_METHOD"] == "HEAD":
            text = b""
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]


class Quiet(WSGIRequestHandler):
    def log(self, *arguments):
        pass


def main(folder, every="0", seconds="0", rate="0"):
    app = Flaky(Path(folder), int(every), float(seconds), float(rate))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    part = Path(folder) / "port.part"
    part.write_text(str(server.server_port))
    part.rename(Path(folder) / "port")
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
