"""One server process: loads the model, listens, and ends gracefully."""

import hostdev.core.environment  # noqa: F401  # isort: skip  (before torch)

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import uvicorn
from starlette.types import ASGIApp

from hostdev.core.errors import UserError, in_words
from hostdev.core.machine import available_cpus
from hostdev.core.progress import note
from hostdev.ext.predict.following import SECONDS, FollowingPredictor, list_checkpoints
from hostdev.ext.predict.predictor import Predictor, open_for_command
from hostdev.ext.serving import json_structure
from hostdev.ext.serving.app import Service
from hostdev.ext.serving.connection import BoundedConnection, read_token
from hostdev.ext.serving.gathering import Gatherer
from hostdev.ext.serving.metrics import Metrics
from hostdev.ext.serving.model import ServedModel
from hostdev.ext.serving.refused import Limits
from hostdev.ext.serving.settings import Settings
from hostdev.kernels.pool import set_host_threads

END_SECONDS = 30.0  # the longest time for answers to accepted requests after a signal
_KEEP_ALIVE_SECONDS = 75
_BACKLOG = 1024  # connections that the kernel holds until they are accepted
_NEW_OBJECTS = 20_000  # container objects created between two garbage collections; a large request has thousands
_ENDING = (signal.SIGINT, signal.SIGTERM)


def show_change(step: int, written: float) -> None:
    """Print that a newer checkpoint is served."""
    print(f"serving  version {step}, written {max(0.0, time.time() - written):.0f} s ago", flush=True)


class Serving:
    """A loaded model and the HTTP application that serves it.

    Args:
        settings: The server's settings.
        changed: With --follow, called with the new model after each change, in the thread that follows the folder.
        refused: With --follow, called with a line about a checkpoint that cannot be used, in the same thread.
        body_seconds: The longest time for a request's body to arrive, in seconds.

    Attributes:
        name: The model's name.
        gatherer: Computes predictions; its attribute `model` is the served model.
        metrics: The server's metrics.
        app: The ASGI application.

    Raises:
        UserError: The checkpoint cannot be served, or a file that the settings name is wrong.
    """

    def __init__(
        self,
        settings: Settings,
        changed: Callable[[ServedModel], None] = lambda model: show_change(model.step, model.written),
        refused: Callable[[str], None] | None = None,
        body_seconds: float = 30.0,
    ) -> None:
        self._settings, self._prog = settings, settings.prog
        self._changed = changed
        self._refused = refused or (lambda line: self._note(f"warning: {line}"))
        if settings.follow:
            list_checkpoints(settings.checkpoint)  # raises UserError for a single checkpoint
        token = None if settings.token_file is None else read_token(settings.token_file)
        self._tls = _tls_context(settings.tls_cert, settings.tls_key)
        if settings.workers > 1:  # one worker keeps torch's threads, and so the bits of `Predictor`
            threads = max(1, available_cpus() // settings.workers)
            torch.set_num_threads(threads)
            set_host_threads(threads)
        predictor = open_for_command(
            self._note,
            settings.checkpoint,
            settings.device,
            model=settings.model,
            which=settings.which,
            query=settings.query,
        )
        model = ServedModel(predictor, self._note)
        model.warm_up()
        json_structure.warm_up()
        self.name = settings.model_name or model.default_name
        self.metrics = metrics = Metrics()
        metrics.model(model.step, model.written)
        self.gatherer = Gatherer(
            model,
            most_rows=settings.max_batch or predictor.batch_size,
            wait=settings.max_wait_ms / 1000,
            most_waiting=settings.max_queue,
            metrics=metrics,
            note=self._note,
        )
        limits = Limits(settings.max_request_bytes, settings.max_rows, body_seconds)
        self.app: ASGIApp = Service(
            self.name, self.gatherer, metrics, limits, token, settings.local_name, self._note
        ).app

    def _note(self, line: str) -> None:
        note(f"{self._prog}: {line}")

    def about(self) -> dict[str, Any]:
        """Return the fields of the startup banner: the model, its path, why it was chosen, its name, and its step."""
        predictor = self.gatherer.model.predictor
        about = {"model": predictor.settings["model"], "path": str(predictor.path), "why": predictor.why}
        return {**about, "name": self.name, "step": predictor.step}

    def _take(self, predictor: Predictor) -> None:
        """Serve a newer checkpoint, from the next batch on."""
        model = self.gatherer.model.successor(predictor)
        self.gatherer.model = model
        self.metrics.change(model.step, model.written)
        self._changed(model)

    def _refuse(self, line: str) -> None:
        self.metrics.problem()
        self._refused(line)

    @contextlib.contextmanager
    def _follows(self) -> Iterator[None]:
        """Follow newer checkpoints within the block if the settings have --follow."""
        if not self._settings.follow:
            yield
            return
        predictor, settings = self.gatherer.model.predictor, self._settings
        following = FollowingPredictor(
            predictor, settings.checkpoint, settings.which, SECONDS, self._take, self._refuse
        )
        try:
            yield
        finally:
            following.close(SECONDS)  # a limit, so that the process ends even if a large checkpoint is being read

    def run(self, listener: socket.socket, started: Callable[[], None], ending: "ServerEnd") -> None:
        """Serve until `ending` is set; then answer the accepted requests, within `END_SECONDS`.

        Args:
            listener: A bound socket; it is closed at the end.
            started: Called when connections are accepted.
            ending: Ends the server.
        """
        _log_lines(self._note)
        connection = type("_Connection", (BoundedConnection,), {"most_body_bytes": self._settings.max_request_bytes})
        config = uvicorn.Config(
            self.app,
            http=connection,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=1,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=END_SECONDS,  # type: ignore[arg-type]  # any number
        )
        config.load()
        config.ssl = self._tls
        server = _Server(config, started)
        try:
            with self._follows():
                asyncio.run(self._serve(server, listener, ending))
        finally:
            if not self.gatherer.close(END_SECONDS):
                self._note(f"error: a batch was not computed within {END_SECONDS:g} seconds")

    async def _serve(self, server: "_Server", listener: socket.socket, ending: "ServerEnd") -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._report)
        ending.attach(loop, server)
        await server.serve([listener])

    def _report(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        detail = "" if error is None else f" ({type(error).__name__}: {in_words(error)})"
        self._note(f"error: {context.get('message', 'the event loop reports an error')}{detail}")


class _Server(uvicorn.Server):
    """uvicorn's server, whose signals are handled by its caller."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen with a queue of `_BACKLOG`; the loop accepts one connection at a time, so that workers share them."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(_BACKLOG)
        self._started()


class ServerEnd:
    """A request to end a server, from a signal handler or another thread; a second one does not wait for answers.

    Attributes:
        number: The first signal's number, or None.
        is_forced: Whether there was a second request.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._is_set = self.is_forced = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _Server | None = None

    def attach(self, loop: asyncio.AbstractEventLoop, server: "_Server") -> None:
        """Connect a server; it ends at once if its end was requested before."""
        self._loop, self._server = loop, server
        server.should_exit = self._is_set

    def set(self) -> None:
        """End the server; at a second call, without waiting for answers."""
        self.is_forced, self._is_set = self._is_set, True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._apply)

    def _apply(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._server.force_exit = self.is_forced

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Record the number of the first signal, and end the server."""
        self.number = self.number or number
        self.set()

    @contextlib.contextmanager
    def on_signals(self) -> Iterator[None]:
        """End the server on Ctrl-C or SIGTERM within the block, which must run in the main thread."""
        before = {number: signal.signal(number, self.handle) for number in _ENDING}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def settled() -> Iterator[None]:
    """Exempt all objects that exist before the block from garbage collection, and collect less often within it.

    Requests make many lists, so that the collector runs often; this makes a server about a tenth faster.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address, for `Serving.run`.

    Raises:
        UserError: The address is unknown, or the port is taken.
    """
    try:
        found_all = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found_all[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host}: {in_words(error)}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(_BACKLOG)  # fails if another socket listens at the same address
        return found
    except OSError as error:
        found.close()
        raise UserError(f"--port {port} of {host} cannot be used: {in_words(error)}; choose another port") from None


def address_of(listener: socket.socket, settings: Settings) -> str:
    """Return a listening socket's address as a URL."""
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if settings.tls_cert is None else 'https'}://{shown}:{port}"


def _tls_context(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for option, path in (("--tls-cert", cert), ("--tls-key", key)):
        if path is not None and not path.is_file():
            raise UserError(f"{option} {path}: there is no such file")
    try:
        context.load_cert_chain(cert, key, password=lambda: "")  # without this, OpenSSL asks on the terminal
    except (OSError, ValueError) as error:
        raise UserError(
            f"--tls-cert {cert} and --tls-key {key} are not a certificate and its unencrypted key in PEM "
            f"({in_words(error)})"
        ) from None
    return context


class _Lines(logging.Handler):
    """Prints uvicorn's errors as one line each."""

    def __init__(self, write: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record."""
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, asyncio.CancelledError):
            return  # uvicorn has said that it cancels requests
        detail = "" if error is None else f" ({type(error).__name__}: {in_words(error)})"
        self._write(f"error: {record.getMessage().strip()}{detail}")


def _log_lines(write: Callable[[str], None]) -> None:
    logger = logging.getLogger("uvicorn.error")
    logger.handlers, logger.propagate = [_Lines(write)], False
    logger.setLevel(logging.ERROR)
