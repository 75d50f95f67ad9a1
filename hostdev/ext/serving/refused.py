"""`RefusedError`, which becomes the answer of a wrong request, and the limits of requests: bytes, rows, and values."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus

from hostdev.core.printable import printable

RETRY_SECONDS = 1  # the value of the header Retry-After
_VALUES_PER_ROW = 32  # values in lists that each row of a request of the largest size may have on average
_CONTAINERS_PER_ROW = 16
_LEAST = 1 << 16  # the limits of values and containers are never below those for this many rows


class RefusedError(Exception):
    """An answer with an error; the message is one line that says what is wrong and where.

    Args:
        status: The HTTP status.
        message: For the client; control characters are escaped, and long texts are cut.
        closes: Whether the connection must be closed, because the request's body was not read.
    """

    def __init__(self, status: int, message: str, *, closes: bool = False) -> None:
        super().__init__(printable(message))
        self.status = status
        headers = {"Connection": "close"} if closes else {}
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            headers["Retry-After"] = str(RETRY_SECONDS)
        if status == HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        self.headers: Mapping[str, str] = headers


def bad(message: str) -> RefusedError:
    """Return the refusal of a request whose content is wrong."""
    return RefusedError(HTTPStatus.BAD_REQUEST, message)


def too_large(message: str, *, closes: bool = False) -> RefusedError:
    """Return the refusal of a request that has too much of something."""
    return RefusedError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, closes=closes)


def values_of(rows: int) -> int:
    """Return the largest number of values in the lists and separated texts of this many rows."""
    return _VALUES_PER_ROW * max(_LEAST, rows)


@dataclass(frozen=True)
class Limits:
    """Limits of requests.

    Attributes:
        most_bytes: The largest number of bytes of a body.
        most_rows: The largest number of rows of a request.
        body_seconds: The longest time for a body to arrive, in seconds.
    """

    most_bytes: int
    most_rows: int
    body_seconds: float

    @cached_property
    def most_containers(self) -> int:
        """The largest number of JSON objects and lists in a body."""
        return _CONTAINERS_PER_ROW * max(_LEAST, self.most_rows)

    @cached_property
    def most_values(self) -> int:
        """The largest number of values in the lists and separated texts of a request."""
        return values_of(self.most_rows)

    def require_few(self, what: str, values: int, most: int = 0) -> None:
        """Raise RefusedError if there are more values than both `most_values` and `most`."""
        if values > max(most, self.most_values):
            raise too_large(
                f"{what} has {values:,} values in lists, more than {self.most_values:,}; send its rows in several "
                "requests"
            )
