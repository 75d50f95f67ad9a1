"""The HTTP API: its endpoints, as an ASGI application of Starlette."""

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hostdev import __version__
from hostdev.core.errors import in_words
from hostdev.ext.serving import columns, openapi, protocol
from hostdev.ext.serving.body import BINARY, JSON, BodyReader, RequestBody
from hostdev.ext.serving.connection import Token, is_local_name
from hostdev.ext.serving.gathering import ClientGoneError, Gatherer, Predicted, wrong_version
from hostdev.ext.serving.json_input import PIECE_BYTES, Structure, dump, dump_list, parse_json, scan
from hostdev.ext.serving.metrics import Metrics
from hostdev.ext.serving.model import ServedModel
from hostdev.ext.serving.refused import Limits, RefusedError, bad

_FEW_ROWS = 4096  # the event loop writes answers with at most so many rows; a thread writes larger ones
_BINARY_MEMORY = 8  # bytes of memory per byte of binary tensors, once they are parsed; short texts need more
_GONE = 499  # the status in metrics of requests whose clients have gone; it is never sent

_T = TypeVar("_T")
Endpoint = Callable[[Request], Awaitable[Response]]


class Service:
    """The endpoints of a server.

    Args:
        name: The model's name.
        gatherer: Computes predictions; its attribute `model` is the served model.
        metrics: Counts requests.
        limits: The limits of requests.
        token: The token that clients must send, or None.
        local_name: The host name that a request's header Host may have, besides localhost and addresses; None for any.
        note: Called with a line for the log if the server itself fails.
    """

    def __init__(
        self,
        name: str,
        gatherer: Gatherer,
        metrics: Metrics,
        limits: Limits,
        token: Token | None,
        local_name: str | None,
        note: Callable[[str], None],
    ) -> None:
        self._name, self._gatherer, self._metrics, self._limits = name, gatherer, metrics, limits
        self._bodies, self._note = BodyReader(limits), note
        model = "/v2/models/{name}"
        ends: list[tuple[str, str, Endpoint]] = [  # in order of search: the most frequent one is first
            ("POST", "/v1/predict", self._predict),
            ("POST", model + "/infer", self._infer),
            ("GET", "/v2", self._server),
            ("GET", "/v2/health/live", self._live),
            ("GET", "/v2/health/ready", self._ready),
            *(
                (method, path + rest, end)
                for path in (model, model + "/versions/{version}")
                for method, rest, end in (("GET", "", self._metadata), ("GET", "/ready", self._model_ready))
            ),
            ("POST", model + "/versions/{version}/infer", self._infer),
            ("GET", "/metrics", self._show_metrics),
            ("GET", "/openapi.json", self._openapi),
            ("GET", "/", self._page),
        ]
        routes = [Route(path, self._guarded(end), methods=[method]) for method, path, end in ends]
        starlette = Starlette(routes=routes, exception_handlers={HTTPException: _http_error})
        starlette.router.redirect_slashes = False
        self.app: ASGIApp = _Front(starlette, metrics, token, local_name)

    @property
    def _model(self) -> ServedModel:
        return self._gatherer.model

    def _guarded(self, end: Endpoint) -> Endpoint:
        """Return an endpoint that answers errors of `end` with an error response."""

        async def run(request: Request) -> Response:
            try:
                return await end(request)
            except RefusedError as refusal:
                return _error(refusal)
            except ClientGoneError:
                request.scope["hostdev.gone"] = True
                return Response(status_code=HTTPStatus.BAD_REQUEST)  # not sent: the client has gone
            except Exception as error:
                self._note(f"error: {end.__name__.strip('_')} failed ({type(error).__name__}: {in_words(error)})")
                return _error(RefusedError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server has failed; its log says why"))

        run.__name__ = end.__name__.strip("_")
        return run

    async def _server(self, request: Request) -> Response:
        return _json({"name": "hostdev", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def _live(self, request: Request) -> Response:
        return _json({"live": True})

    def _ready_json(self, about: dict[str, Any]) -> Response:
        is_ready = not self._gatherer.is_closing
        return _json({**about, "ready": is_ready}, HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _ready(self, request: Request) -> Response:
        return self._ready_json({})

    async def _metadata(self, request: Request) -> Response:
        self._require_model(request)
        model = self._model
        inputs = [
            {"name": one.name, "datatype": one.datatype, "shape": list(one.shape)} for one in model.inputs.values()
        ]
        outputs = [{"name": label, "datatype": "FP32", "shape": [-1]} for label in model.labels]
        about = {"name": self._name, "versions": [model.version], "platform": "hostdev"}
        return _json({**about, "inputs": inputs, "outputs": outputs})

    async def _model_ready(self, request: Request) -> Response:
        self._require_model(request)
        return self._ready_json({"name": self._name})

    async def _infer(self, request: Request) -> Response:
        version = self._require_model(request)
        with self._bodies.holding() as body:
            content = await body.read(request.headers, request.receive, (JSON, BINARY))
            content, binary = protocol.split(content, request.headers.get(protocol.HEADER_LENGTH))
            parse = partial(self._parse_infer, content, binary)
            inference, given, values = await self._parsed(request, body, content, len(binary), parse)
            wanted_version, gone = version or inference.model[1] or None, partial(_gone, request.receive)
            try:
                async with asyncio.timeout(inference.timeout or None):
                    answer = await self._gatherer.predict(given, inference.rows, wanted_version, gone, values)
            except TimeoutError:
                raise RefusedError(
                    HTTPStatus.SERVICE_UNAVAILABLE, f"the request's timeout of {inference.timeout:g} s is over"
                ) from None
        return await _beside(inference.rows, partial(self._inferred, inference, answer))

    def _inferred(self, inference: protocol.Inference, answer: Predicted) -> Response:
        model, wanted = answer.model, inference.outputs
        if wanted is None:
            wanted = dict.fromkeys(model.labels, inference.is_binary)
        outputs = [(name, answer.values[:, model.labels.index(name)], binary) for name, binary in wanted.items()]
        about = {"model_name": self._name, "model_version": model.version}
        about |= {"id": inference.id} if inference.id else {}
        made, headers = protocol.write(about, outputs)
        return Response(made, headers=headers)

    def _parse_infer(
        self, content: bytes, binary: bytes, structure: Structure | None
    ) -> tuple[protocol.Inference, columns.Columns, int]:
        model = self._model
        inference = protocol.parse(content, binary, self._limits, structure)
        self._require_served(*inference.model)
        for name in inference.outputs or ():
            if name not in model.labels:
                raise bad(f"the model has no output {name!r}; its outputs are {', '.join(model.labels)}")
        tensors = [one for one in inference.inputs if one.name in model.inputs or one.name not in model.labels]
        inputs = model.inputs_of([tensor.name for tensor in tensors])
        given = columns.from_tensors(tensors, inputs)
        return inference, given, columns.count_values(given, inputs, self._limits)

    async def _predict(self, request: Request) -> Response:
        with self._bodies.holding() as body:
            content = await body.read(request.headers, request.receive, (JSON,))
            parse = partial(self._parse_rows, content)
            given, rows, values = await self._parsed(request, body, content, 0, parse)
            answer = await self._gatherer.predict(given, rows, None, partial(_gone, request.receive), values)
        return await _beside(rows, partial(self._predicted, answer))

    def _parse_rows(self, content: bytes, structure: Structure | None) -> tuple[columns.Columns, int, int]:
        document, model = parse_json(content, structure=structure), self._gatherer.model
        names = columns.names_in(document)
        inputs = model.inputs if names is None else model.inputs_of(names)
        return columns.from_rows(document, inputs, self._limits, has_escapes=b"\\u" in content)

    def _predicted(self, answer: Predicted) -> Response:
        labels = answer.model.labels
        found: Any = answer.values[:, 0].tolist()
        if len(labels) > 1:
            found = [dict(zip(labels, row, strict=True)) for row in answer.values.tolist()]
        about = dump({"model": self._name, "step": answer.model.step})[:-1]
        return _as_json(about + b',"predictions":' + dump_list(found) + b"}")

    async def _parsed(
        self,
        request: Request,
        body: RequestBody,
        content: bytes,
        binary_bytes: int,
        parse: Callable[[Structure | None], _T],
    ) -> _T:
        """Return the result of parsing a body: at once or, if it is large, in a thread, one body at a time."""
        if len(content) + binary_bytes <= PIECE_BYTES:
            return parse(None)
        async with self._bodies.turn:
            if await request.is_disconnected():
                raise ClientGoneError
            structure = await asyncio.to_thread(scan, content)
            structure.require(self._limits.most_containers)
            await body.reserve_parsed(structure.memory + _BINARY_MEMORY * binary_bytes)
            return await asyncio.to_thread(_paused()(parse), structure)

    async def _show_metrics(self, request: Request) -> Response:
        text, kind = self._metrics.text()
        return Response(text, headers={"Content-Type": kind})

    async def _openapi(self, request: Request) -> Response:
        return _json(openapi.describe(self._name, self._model))

    async def _page(self, request: Request) -> Response:
        address = str(request.base_url).rstrip("/")  # the address that the browser used
        return HTMLResponse(openapi.write(openapi.describe(self._name, self._model), self._name, self._model, address))

    def _require_model(self, request: Request) -> str | None:
        """Return the version in the request's path, or None; raise RefusedError if it or the model is not served."""
        name, version = request.path_params["name"], request.path_params.get("version")
        self._require_served(name, version)
        return version

    def _require_served(self, name: str | None, version: str | None) -> None:
        if name is not None and name != self._name:
            raise RefusedError(HTTPStatus.NOT_FOUND, f"there is no model {name!r}; model {self._name!r} is served")
        if version and version != self._model.version:
            raise wrong_version(version, self._model)


class _Front:
    """Middleware around an application: checks tokens and hosts, and counts answers."""

    def __init__(self, app: ASGIApp, metrics: Metrics, token: Token | None, local_name: str | None) -> None:
        self._app, self._metrics, self._token, self._local_name = app, metrics, token, local_name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        start = time.perf_counter()
        status = 0

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        app: ASGIApp = self._app
        if self._token is not None and not self._token.allows(
            scope["path"], next(_headers(scope, b"authorization"), None)
        ):
            needed = "give the header Authorization: Bearer TOKEN"
            app = _error(RefusedError(HTTPStatus.UNAUTHORIZED, needed, closes=True))
        elif self._local_name is not None:
            for host in _headers(scope, b"host"):
                if not is_local_name(host, self._local_name):
                    app = _error(_wrong_host(host))
        await app(scope, receive, note_status)
        end = getattr(scope.get("endpoint"), "__name__", "other")
        self._metrics.request(end, _GONE if scope.get("hostdev.gone") else status, time.perf_counter() - start)


def _headers(scope: Scope, name: bytes) -> Iterator[bytes]:
    return (value for found, value in scope["headers"] if found == name)


def _wrong_host(host: bytes) -> RefusedError:
    return RefusedError(
        HTTPStatus.FORBIDDEN,
        f"the host {host.decode('latin-1')!r} is not accepted; ask an address or localhost, or start the server with "
        "--host and this name, or with a token",
        closes=True,
    )


async def _beside(rows: int, write: Callable[[], Response]) -> Response:
    """Return the answer that `write` makes; call `write` in a thread if the answer has many rows."""
    return write() if rows <= _FEW_ROWS else await asyncio.to_thread(write)


def _gone(receive: Receive) -> "asyncio.Future[None]":
    """Return a future that is done when the client has closed the connection."""

    async def wait() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    return asyncio.ensure_future(wait())


def _as_json(body: bytes, status: int = HTTPStatus.OK) -> Response:
    return Response(body, status, headers={"Content-Type": JSON})


def _json(content: Any, status: int = HTTPStatus.OK) -> Response:
    return _as_json(dump(content), status)


def _error(refusal: RefusedError) -> Response:
    found = _json({"error": str(refusal)}, refusal.status)
    found.headers.update(refusal.headers)
    return found


async def _http_error(request: Request, error: Exception) -> Response:
    """Return Starlette's own errors, 404 and 405, as JSON."""
    assert isinstance(error, HTTPException)
    found = _json({"error": f"{request.method} {request.url.path}: {error.detail}"}, error.status_code)
    found.headers.update(error.headers or {})
    return found


@contextmanager
def _paused() -> Iterator[None]:
    """Disable garbage collection in the block: parsing makes no garbage, and visiting all parsed values is slow."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
