"""The settings of a server: its options, which are flags of its command, and what else worker processes must know."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.memory import parse_bytes
from hostdev.core.options import OptionError, OptionGroup, count, option, switch

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST = 1 << 24  # the largest value of the options that count rows


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise UserError(f"--model-name {name}: use letters, digits, '.', '_' and '-', at most 100")


@dataclass(frozen=True, kw_only=True)
class ServerOptions(OptionGroup):
    """The flags that `hostdev serve` has in addition to those of all commands that predict."""

    section: ClassVar[str] = "server"
    title: ClassVar[str] = "the server"
    follow: bool = switch("take newer checkpoints of the folder while serving")
    device: str = option("where the dense layers run", str, default="cpu", metavar="NAME")
    host: str = option("the address to listen on", str, default="127.0.0.1", metavar="ADDRESS")
    port: int = option("the port; 0 chooses a free one", int, default=8000, least=0, most=65_535)
    model_name: str | None = option(
        "the model's name in requests (default: that of its kind)", str, metavar="NAME", check=_check_name
    )
    max_batch: int | None = count("rows computed together (default: the run's batch size)", most=_MOST)
    max_wait_ms: float = option(
        "how long a request waits for others while nothing is computed", float, default=0.0, least=0, most=10_000
    )
    max_queue: int = count("rows that wait; more get status 503", default=65_536, most=_MOST)
    max_rows: int = count("rows of a request", default=65_536, most=_MOST)
    max_request_bytes: int = option(
        "bytes of a request, or a size such as 16MB",
        cli.checked(parse_bytes),
        default=16 << 20,
        metavar="SIZE",
        least=1 << 10,
        most=1 << 30,
    )
    workers: int = count("processes; they share the tables' memory", default=1, most=256)
    token_file: Path | None = option("demand the header Authorization: Bearer TOKEN of this file", Path, metavar="FILE")
    tls_cert: Path | None = option("certificate chain in PEM, for HTTPS", Path, metavar="FILE")
    tls_key: Path | None = option("the certificate's unencrypted key in PEM", Path, metavar="FILE")

    def check(self) -> None:
        """Raise OptionError if only one of the certificate and its key is given."""
        if (self.tls_cert is None) != (self.tls_key is None):
            raise OptionError("tls_cert", " and --tls-key belong together; give both")


@dataclass(frozen=True, kw_only=True)
class Settings(ServerOptions):
    """All settings of `hostdev serve`; the fields of this class are not flags."""

    prog: str = option("the command's name in messages", str)
    checkpoint: Path = option("the checkpoint, or a folder of checkpoints", Path)
    which: str | None = option("which checkpoint of a folder", str)
    model: str | None = option("the model's class", str)
    query: str | None = option("the statement that computes the columns of raw rows", str)
    local_name: str | None = option(
        "if only this machine's programs reach the server, so that clients need no token: the name that a request's "
        "Host may be, besides localhost and addresses",
        str,
    )

    def pinned(self, checkpoint: str, model_name: str) -> "Settings":
        """Return the settings with the model's name and, unless `follow` is set, with one checkpoint of the folder."""
        if self.follow:
            return replace(self, model_name=model_name)
        return replace(self, checkpoint=Path(checkpoint), which=None, model_name=model_name)
