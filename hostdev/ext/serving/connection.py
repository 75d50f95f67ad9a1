"""uvicorn's HTTP connection, with limits to heads and to what precedes a request."""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_SECONDS = 10.0  # for a request's head to arrive
ANSWER_SECONDS = 30.0  # in which a client reads nothing of a large answer
_MOST_HEAD_BYTES = 1 << 16
# A body in chunks of one byte is six times as long on the wire.
_MOST_OVERHEAD, _MOST_REST_BYTES = 8, 16 << 20
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class BoundedConnection(HttpToolsProtocol):
    """A connection with limits: to heads, to chunk overhead, and to clients that do not read their answers.

    uvicorn has none of these. Memory and open connections could grow by requests that never reach the application.

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
        """Start the clock of the first head."""
        super().connection_made(transport)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the clocks."""
        self._stop_clock()
        self._stop_reader_clock()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Pass data to the parser, unless the request is too long."""
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
        """Keep a header; drop those after a body in chunks, which nobody reads."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Stop the clock, and start the request."""
        self._is_in_head = False
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Expect the next request's head."""
        self._is_in_head, self._wire_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        """Start the clock of a client that does not read its answer."""
        super().pause_writing()
        self._stop_reader_clock()
        self._unread = self.transport.get_write_buffer_size()
        self._reader_deadline = self.loop.call_later(ANSWER_SECONDS, self._require_reader)

    def resume_writing(self) -> None:
        """Stop that clock."""
        self._stop_reader_clock()
        super().resume_writing()

    def _stop_reader_clock(self) -> None:
        if self._reader_deadline is not None:
            self._reader_deadline.cancel()
            self._reader_deadline = None

    def _require_reader(self) -> None:
        """Close the connection if nothing was read since the last look."""
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
