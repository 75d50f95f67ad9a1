"""The settings of a server, which its command passes to worker processes."""

from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `hostdev serve` was told; see its flags.

    Attributes:
        local_name: If clients need no token because only this machine's programs reach the server: the name that a
            request's Host may be, besides localhost and addresses.
    """

    prog: str
    checkpoint: Path
    which: str | None = None
    follow: bool = False
    model: str | None = None
    query: str | None = None  # the statement
    device: str = "cpu"
    model_name: str | None = None
    max_batch: int | None = None
    max_wait_ms: float = 0.0
    max_queue: int = 65_536
    max_rows: int = 65_536
    max_request_bytes: int = 16 << 20
    workers: int = 1
    token_file: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    local_name: str | None = None

    def pinned(self, checkpoint: str, model_name: str) -> "Settings":
        """Return the settings with the model's name and, unless `follow` is set, with one checkpoint of the folder."""
        if self.follow:
            return replace(self, model_name=model_name)
        return replace(self, checkpoint=Path(checkpoint), which=None, model_name=model_name)
