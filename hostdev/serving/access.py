"""The token that clients must show."""

import hmac
from pathlib import Path

from hostdev.core.errors import UserError, in_words

OPEN = ("/v2/health/live", "/v2/health/ready")  # probes have no token, and learn nothing from these
_LONGEST = 4096


class Token:
    """A secret that is compared in constant time, and is in no message and no `repr`."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def allows(self, path: str, authorization: bytes | None) -> bool:
        """Return whether a request with this header Authorization may have this path."""
        if path in OPEN:
            return True
        scheme, _, given = (authorization or b"").partition(b" ")
        is_same = hmac.compare_digest(given.strip(), self._secret)
        return is_same and scheme.lower() == b"bearer"


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
