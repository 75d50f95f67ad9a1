"""A server in a thread, calls of the application without a socket, and rows to ask for."""

import asyncio
import json
import socket
import threading
from pathlib import Path
from typing import NamedTuple

import numpy as np

import hostdev
from hostdev.ext.serving.server import ServerEnd, Serving, listen
from hostdev.ext.serving.settings import Settings

FILMS = {
    "user": ["u1", "u2", "nobody", "u7"],
    "item": ["m0001", "m0007", "m0003", ""],
    "age": [31.0, 54.0, None, 18.5],
    "genres": ["Drama|War", "", "Drama", "never|Drama"],
    "history": ["m0005 m0007", "m0001", "", "m0002"],
}


class Served:
    """A server that runs in a thread, or, with `listens=False`, only its application."""

    def __init__(self, checkpoint, *, listens=True, limits=(), **options):
        self._limits = dict(limits)
        self.settings = Settings(prog="serve", checkpoint=Path(checkpoint), **options)
        self._listens = listens

    def __enter__(self):
        self.serving = Serving(self.settings, **self._limits)
        self.app, self.name = self.serving.app, self.serving.name
        self.predictor = hostdev.Predictor(self.settings.checkpoint)
        self.ending, started = ServerEnd(), threading.Event()
        if self._listens:
            self.listener = listener = listen("127.0.0.1", 0)
            self.port = listener.getsockname()[1]
            self.url = f"127.0.0.1:{self.port}"
            self._thread = threading.Thread(target=self.serving.run, args=(listener, started.set, self.ending))
            self._thread.start()
            assert started.wait(60)
        return self

    def __exit__(self, *error):
        if self._listens:
            self.ending.set()
            self._thread.join(60)
            assert not self._thread.is_alive()
        else:
            assert self.serving.gatherer.close(60)

    def ask(self, method, path, content=None, headers=(), **options):
        """Call the application with a body that is JSON, or bytes."""
        return asyncio.run(ask(self.app, method, path, content, headers, **options))

    def predict(self, content):
        return self.ask("POST", "/v1/predict", content)

    def infer(self, content, headers=(), version=""):
        return self.ask("POST", f"/v2/models/{self.name}{version}/infer", content, headers)

    def raw(self, sent, *, is_cut=False, timeout=30):
        """Send bytes to the server, and nothing more if `is_cut`; return all that it sends until it closes."""
        with socket.create_connection(("127.0.0.1", self.port), timeout) as connection:
            try:
                connection.sendall(sent)
                if is_cut:
                    connection.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError):
                pass  # the server has answered and closed
            return receive_all(connection)

    def raw_json(self, content):
        """Ask for predictions over a connection of its own."""
        body = json.dumps(content).encode()
        head = "POST /v1/predict HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
        received = self.raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        assert received.startswith(b"HTTP/1.1 200"), received
        return json.loads(received.partition(b"\r\n\r\n")[2])


def receive_all(connection):
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


class Answer(NamedTuple):
    status: int
    headers: dict
    body: bytes

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def error(self):
        assert self.status >= 400, self
        assert set(self.json) == {"error"}
        return self.json["error"]


async def ask(app, method, path, content=None, headers=(), chunks=1, length=True, gone_after=None):
    """Call an ASGI application as uvicorn does.

    Args:
        chunks: The number of parts of the body.
        length: Whether the body's length is known beforehand.
        gone_after: The number of parts after which the client goes; it then never sends the rest.
    """
    body = content if isinstance(content, bytes) else b"" if content is None else json.dumps(content).encode()
    given = {"content-type": "application/json", **{name.lower(): value for name, value in dict(headers).items()}}
    if length and method == "POST":
        given.setdefault("content-length", str(len(body)))
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "http_version": "1.1",
        "server": ("test", 80),
        "client": ("test", 1),
        "headers": [(name.encode(), value.encode()) for name, value in given.items() if value is not None],
    }
    size = -(-len(body) // chunks) or 1
    parts = [body[i : i + size] for i in range(0, len(body), size)] or [b""]
    events = [{"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)][
        :gone_after
    ]
    if gone_after is not None:
        events.append({"type": "http.disconnect"})
    sent = []

    async def receive():
        if events:
            return events.pop(0)
        return await asyncio.get_running_loop().create_future()  # the client waits

    async def send(message):
        sent.append(message)

    await app(scope, receive, send)
    start, *rest = sent
    found = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], found, b"".join(part.get("body", b"") for part in rest))


def tensor(name, datatype, values, shape=None):
    return {"name": name, "datatype": datatype, "shape": shape or [len(values)], "data": values}


def film_tensors(rows=None):
    rows = FILMS if rows is None else rows
    return [tensor(name, "FP64" if name == "age" else "BYTES", values) for name, values in rows.items()]


def repeated(rows, n):
    """Return n rows, the same again and again."""
    count = len(next(iter(rows.values())))
    return {name: [values[i % count] for i in range(n)] for name, values in rows.items()}


def as_rows(columns):
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32).tolist()
