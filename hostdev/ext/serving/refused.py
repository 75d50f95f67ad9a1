"""`RefusedError`: a request that is answered with an error."""

from collections.abc import Mapping
from http import HTTPStatus

from hostdev.core.printable import printable

RETRY_SECONDS = 1  # of the header Retry-After


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
