"""An S3 server on this machine: python -m tests.stores.server FOLDER [N [SECONDS]]

Writes its port to FOLDER/port. Every Nth request fails, in one of several ways, or takes SECONDS longer. While
FOLDER/away exists, all requests fail. FOLDER/requests counts requests.
"""

import itertools
import sys
import time
from pathlib import Path

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server


class Flaky:
    """A WSGI application whose requests fail now and then."""

    def __init__(self, folder, every, seconds):
        self._app = DomainDispatcherApplication(create_backend_app)
        self._folder, self._every, self._seconds = folder, every, seconds
        self._numbers = itertools.count(1)

    def __call__(self, environ, start_response):
        number = next(self._numbers)
        (self._folder / "requests").write_text(str(number))
        if (self._folder / "away").exists():
            return self._fail(start_response, "503 Service Unavailable")
        if self._every and number % self._every == 0:
            if number // self._every % 3 == 0:
                time.sleep(self._seconds)  # a slow answer is what is simulated
            else:
                status = "500 Internal Server Error", "503 Slow Down"
                return self._fail(start_response, status[number // self._every % 2])
        return self._app(environ, start_response)

    def _fail(self, start_response, status):
        code = status.partition(" ")[2].replace(" ", "")
        text = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>".encode()
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(text)))])
        return [text]


class Quiet(WSGIRequestHandler):
    def log(self, *arguments):
        pass


def main(folder, every="0", seconds="0"):
    app = Flaky(Path(folder), int(every), float(seconds))
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    part = Path(folder) / "port.part"
    part.write_text(str(server.server_port))
    part.rename(Path(folder) / "port")
    server.serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
