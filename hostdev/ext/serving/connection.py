"""uvicorn's HTTP connection with limits for heads, bodies and slow clients, and the checks of tokens and host names."""

import asyncio
import hmac
import ipaddress
from functools import lru_cache
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hostdev.core.errors import UserError, in_words

HEAD_SECONDS = 10.0  # the longest time for a request's head to arrive
ANSWER_SECONDS = 30.0  # a client that reads nothing of its answer for so long is disconnected
_MOST_HEAD_BYTES = 1 << 16
# The limit of a request's bytes on the wire is _MOST_OVERHEAD times the largest body, plus _MOST_REST_BYTES: a body in
# chunks of one byte takes six times its size.
_MOST_OVERHEAD, _MOST_REST_BYTES = 8, 16 << 20
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
OPEN = ("/v2/health/live", "/v2/health/ready")  # paths that need no token: health probes have none
_LONGEST = 4096


class BoundedConnection(HttpToolsProtocol):
    """A connection with limits: to heads, to chunk overhead, and to clients that do not read their answers.

    uvicorn has no such limits: requests that never reach the application could use up memory and connections.

    Attributes:
        most_body_bytes: The largest body that the application accepts.
    """

    most_body_bytes = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_in_head, self._wire_bytes = True, 0
        self._deadline: asyncio.TimerHandle | None = None
        self._unread = 0  # bytes of an answer that did not fit the kernel's buffer
        self._reader_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of the first head."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all time limits."""
        self._stop_clock()
        self._stop_reader_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data to the parser; close the connection if the head or the body is too long."""
        if self._is_in_head and self._deadline is None:
            self._start_clock()
        self._wire_bytes += len(data)
        super().data_received(data)
        if self._is_in_head:
            if self._wire_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LARGE)
                self.transport.close()
        elif self._wire_bytes > _MOST_OVERHEAD * self.most_body_bytes + _MOST_REST_BYTES:
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header of the head; drop trailers, the headers after a body in chunks, because nobody reads them."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Cancel the time limit of the head, and start the request."""
        self._is_in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next request's head."""
        self._is_in_head, self._wire_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not read its answer."""
        super().pause_writing()
        self._stop_reader_clock()
        self._unread = self.transport.get_write_buffer_size()
        self._reader_deadline = self.loop.call_later(ANSWER_SECONDS, self._require_reader)

    def resume_writing(self) -> None:
        """Cancel the time limit of a client that did not read its answer."""
        self._stop_reader_clock()
        super().resume_writing()

    def _stop_reader_clock(self) -> None:
        if self._reader_deadline is not None:
            self._reader_deadline.cancel()
            self._reader_deadline = None

    def _require_reader(self) -> None:
        """Abort the connection if the client has read nothing since the last check; else check again later."""
        self._reader_deadline = None
        left = self.transport.get_write_buffer_size()
        if left >= self._unread:
            self.transport.abort()
            return
        self._unread = left
        self._reader_deadline = self.loop.call_later(ANSWER_SECONDS, self._require_reader)

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end(self) -> None:
        self._deadline = None
        if self._is_in_head and not self.transport.is_closing():
            self.transport.close()


class Token:
    """A secret that is compared in constant time, and is in no message and no `repr`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def allows(self, path: str, authorization: bytes | None) -> bool:
        """Return whether a request with this header Authorization may use this path."""
        if path in OPEN:
            return True
        scheme, _, given = (authorization or b"").partition(b" ")
        is_same = hmac.compare_digest(given.strip(), self._secret)
        return is_same and scheme.lower() == b"bearer"


@lru_cache(64)
def is_local_name(host: bytes, given: str) -> bool:
    """Return whether a header Host is an address, localhost, or the name `given`, with or without a port.

    Any other name may be one that a web page has pointed to this machine (DNS rebinding), to read the answers.
    """
    text = host.decode("latin-1").strip().lower()
    name, colon, port = text.rpartition(":")
    name = name if colon and (port.isdecimal() or not port) and not text.endswith("]") else text
    if name.removesuffix(".") in ("localhost", given.lower().removesuffix(".")):
        return True
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]") if name.startswith("[") else name)
    except ValueError:
        return False
    return True


def read_token(path: Path) -> Token:
    """Return the token in a file: one line of printable ASCII characters without spaces.

    Raises:
        UserError: The file cannot be read, or has something else.
    """
    try:
        with path.open("rb") as file:
            secret = file.read(_LONGEST + 1).strip()
    except OSError as error:
        raise UserError(f"--token-file {in_words(error)}") from None
    if not secret or len(secret) > _LONGEST or not all(ord("!") <= byte <= ord("~") for byte in secret):
        raise UserError(
            f"--token-file {path} must have one token: printable ASCII characters without spaces, at most {_LONGEST:,}"
        )
    return Token(secret)
