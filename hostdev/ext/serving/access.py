"""Access to the server: the token of clients, and the host names that a request may use."""

import hmac
import ipaddress
from functools import lru_cache
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
