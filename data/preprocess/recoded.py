"""Converts text inputs with other encodings and line ends to UTF-8 with newlines, and skips leading lines."""

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hostdev.core.errors import UserError
from hostdev.data.preprocess.inputs import AnyInput, Stream

_AT_ONCE = 1 << 22  # bytes


class Recoded:
    """An input converted to UTF-8 with newlines as line ends.

    Args:
        source: The input.
        encoding: Python's name for the input's encoding.
        skipped_lines: Number of lines to skip at the beginning.
        returns: Whether lines end with a carriage return and no newline.
    """

    plain = False

    def __init__(self, source: AnyInput, *, encoding: str, skipped_lines: int, returns: bool) -> None:
        self._source, self._how = source, (encoding, skipped_lines, returns)
        self.path, self.name, self.size = source.path, source.name, source.size

    def head(self, size: int) -> bytes:
        """Return the beginning of the content, at most `size` bytes; fewer if lines are skipped."""
        return _Recoder(_Given(self._source.head(size)), self.name, *self._how, whole=False).read(size)

    @contextmanager
    def open(self) -> Iterator[Stream]:
        """Open the content from its beginning."""
        with self._source.open() as stream:
            yield Stream(_Recoder(stream, self.name, *self._how), self.name, stream.taken)

    def describe(self) -> dict[str, Any]:
        """Return the absolute path and size."""
        return self._source.describe()

    def stamp(self) -> list[Any] | None:
        """Return path, size and modification time; None for a pipe."""
        return self._source.stamp()

    def check_unchanged(self) -> None:
        """Raise UserError if the file has changed since construction."""
        self._source.check_unchanged()


def recode(source: AnyInput, *, encoding: str, skipped_lines: int, head: int) -> "AnyInput | Recoded":
    """Convert an input to UTF-8 with newlines; return `source` itself if no conversion is needed.

    The line ends are inferred from the first `head` bytes.
    """
    start = source.head(head)
    returns = b"\r" in start and b"\n" not in start and encoding == "utf-8"
    if encoding == "utf-8" and not skipped_lines and not returns:
        return source
    return Recoded(source, encoding=encoding, skipped_lines=skipped_lines, returns=returns)


class _Recoder:
    """Reads a byte stream as UTF-8; `whole` is false if the stream is only the beginning of an input."""

    def __init__(
        self, stream: Any, name: str, encoding: str, skipped_lines: int, returns: bool, *, whole: bool = True
    ) -> None:
        self._stream, self._name, self._encoding, self._whole = stream, name, encoding, whole
        self._decoder = None if encoding == "utf-8" else codecs.getincrementaldecoder(encoding)()
        self._left, self._returns, self._rest, self._read = skipped_lines, returns, b"", 0

    def read(self, size: int) -> bytes:
        """Return at most `size` bytes; none at the end."""
        while not self._rest:
            piece = self._stream.read(_AT_ONCE)
            text = self._decoded(piece)
            if self._returns:
                text = text.replace(b"\r", b"\n")
            self._rest = self._without_first_lines(text)
            if not piece:
                break
        found, self._rest = self._rest[:size], self._rest[size:]
        return found

    def _decoded(self, piece: bytes) -> bytes:
        if self._decoder is None:
            return piece
        try:
            text: bytes = self._decoder.decode(piece, final=self._whole and not piece).encode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self._name}: byte {self._read + error.start:,} or a byte near it is not {self._encoding}; "
                "choose another --encoding"
            ) from None
        except UnicodeEncodeError:  # the encoding allows lone surrogates
            raise UserError(
                f"{self._name}: a character cannot be written as UTF-8; choose another --encoding"
            ) from None
        self._read += len(piece)
        return text

    def _without_first_lines(self, text: bytes) -> bytes:
        while self._left and text:
            _, newline, text = text.partition(b"\n")
            self._left -= bool(newline)
        return text


class _Given:
    """A stream of given bytes."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    def read(self, size: int) -> bytes:
        """Return the next bytes."""
        found, self._content = self._content[:size], self._content[size:]
        return found
