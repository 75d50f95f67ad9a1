"""Reads the bodies of requests, within limits of size, time and memory."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

from hostdev.ext.serving.gathering import ClientGoneError
from hostdev.ext.serving.refused import Limits, RefusedError, bad, too_large

Receive = Callable[[], Awaitable[Any]]

_MOST_BODIES = 8  # all bodies in memory together may take as many bytes as this many bodies of the largest size
_DRAINED_BYTES = 8 << 20
_DRAINED_SECONDS = 1.0
_ENCODINGS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}  # zlib's `wbits` by content encoding
_INFLATED_BYTES = 1 << 20  # bytes that are decompressed at a time
JSON, BINARY = "application/json", "application/octet-stream"


class BodyReader:
    """Reads bodies, and limits the memory of all bodies together, and that of all their parsed values.

    Attributes:
        limits: The limits of requests.
        most_held: The limit in bytes of all bodies together; the same limit holds for all parsed values.
        held: Bytes of all bodies in memory.
        parsed: Bytes of all parsed values in memory.
        released: Set when a request has ended.
        turn: A lock that is held while a body is decompressed or a large body is parsed: one body at a time, in order.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.most_held = limits, _MOST_BODIES * limits.most_bytes
        self.held = self.parsed = 0
        self.released = asyncio.Event()
        self.turn = asyncio.Lock()

    @contextmanager
    def holding(self) -> Iterator["RequestBody"]:
        """Yield the body of one request, and count the memory of the body until the block ends."""
        body = RequestBody(self)
        try:
            yield body
        finally:
            self.held -= body.held
            self.parsed -= body.parsed
            self.released.set()


class RequestBody:
    """The body of one request."""

    def __init__(self, reader: BodyReader) -> None:
        self._reader, self._limits = reader, reader.limits
        self.held = self.parsed = 0
        self._is_complete = False

    def _reserve(self, count: int) -> None:
        """Count `count` more bytes; raise RefusedError if bytes are held already and the sum is above the limit."""
        reader = self._reader
        if reader.held + count > reader.most_held and reader.held:
            raise RefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE, "the requests in progress are too large together", closes=True
            )
        reader.held += count
        self.held += count

    async def reserve_parsed(self, memory: int) -> None:
        """Count the memory of the parsed values until the block of `holding` ends.

        Waits until this memory fits into the limit; any amount fits if no request has parsed values.
        """
        reader = self._reader
        while reader.parsed and reader.parsed + memory > reader.most_held:
            reader.released.clear()
            await reader.released.wait()
        reader.parsed += memory
        self.parsed += memory

    async def read(self, headers: Mapping[str, str], receive: Receive, types: tuple[str, ...]) -> bytes:
        """Return the body.

        Args:
            headers: The request's headers, by names in lower case.
            receive: ASGI's function that returns the next part.
            types: The content types that are accepted; a request without a content type is accepted, too.

        Raises:
            RefusedError: The content type or encoding is not accepted, or the body is too large or too slow.
            ClientGoneError: The client has closed the connection.
        """
        length = headers.get("content-length")
        most = self._limits.most_bytes
        if length is not None and not (length.isascii() and length.isdigit()):
            raise bad("Content-Length must be a number of bytes")
        try:
            encoding = _require_type(headers, types)
            if length is not None and (len(length) > 18 or int(length) > most):
                raise _too_large(most)
            if length is not None:
                self._reserve(int(length))
            async with asyncio.timeout(self._limits.body_seconds):
                content = await self._receive(receive, counted=length is None)
        except TimeoutError:
            seconds = f"{self._limits.body_seconds:g}"
            message = f"the body did not arrive within {seconds} seconds"
            raise RefusedError(HTTPStatus.REQUEST_TIMEOUT, message, closes=True) from None
        except RefusedError as refusal:
            if "Connection" in refusal.headers and not self._is_complete and "expect" not in headers:
                await _drain(receive)
            raise
        return content if encoding is None else await self._inflate(content, encoding)

    async def _inflate(self, content: bytes, encoding: str) -> bytes:
        """Return a compressed body's content; raise RefusedError if it is damaged or above a limit of bodies."""
        inflater = zlib.decompressobj(_ENCODINGS[encoding])
        parts: list[bytes] = []
        size = 0
        async with self._reader.turn:
            while not inflater.eof:
                try:
                    part = await asyncio.to_thread(inflater.decompress, content, _INFLATED_BYTES)
                except zlib.error as error:
                    raise bad(f"the body is not in {encoding}: {error}") from None
                content = inflater.unconsumed_tail
                if not part and not inflater.eof:
                    raise bad(f"the body ends within its {encoding}")
                size += len(part)
                if size > self._limits.most_bytes:
                    raise _too_large(self._limits.most_bytes)
                self._reserve(len(part))
                parts.append(part)
        if inflater.unused_data:
            raise bad(f"the body has {len(inflater.unused_data):,} bytes after its {encoding}")
        return b"".join(parts)

    async def _receive(self, receive: Receive, *, counted: bool) -> bytes:
        """Return the body; if `counted`, reserve its bytes as they arrive, because its length was not known before."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            self._is_complete = not message.get("more_body", False)
            size += len(part)
            if size > self._limits.most_bytes:
                raise _too_large(self._limits.most_bytes)
            if part:
                if counted:
                    self._reserve(len(part))
                parts.append(part)
            if self._is_complete:
                return parts[0] if len(parts) == 1 else b"".join(parts)


def _require_type(headers: Mapping[str, str], types: tuple[str, ...]) -> str | None:
    """Return the content encoding, None for none; raise RefusedError for a type or an encoding that is not accepted."""
    found = headers.get("content-type", "").partition(";")[0].strip().lower()
    if found and found not in types:
        shown = f"the content type {found!r} is not accepted; send {' or '.join(types)}"
        raise RefusedError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, shown, closes=True)
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding in ("", "identity"):
        return None
    if encoding not in _ENCODINGS:
        raise RefusedError(
            HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            f"the content encoding {encoding!r} is not accepted; send {' or '.join(_ENCODINGS)}, or the plain body",
            closes=True,
        )
    return encoding


def _too_large(most: int) -> RefusedError:
    return too_large(f"the body is larger than {most:,} bytes", closes=True)


async def _drain(receive: Receive) -> None:
    """Discard some of a body that is refused: a client that is still sending might not see the answer otherwise."""
    size = 0
    try:
        async with asyncio.timeout(_DRAINED_SECONDS):
            while size < _DRAINED_BYTES:
                message = await receive()
                size += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return
    except TimeoutError:
        pass
