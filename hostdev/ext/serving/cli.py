"""The command line of `serve`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.options import flag_of
from hostdev.ext.predict.cli import add_checkpoint, add_model, add_query, read_query
from hostdev.ext.serving.settings import ServerOptions, Settings

PROG = "hostdev.serving"
HELP = "answer requests for predictions over HTTP"
_PACKAGES = ("uvicorn", "httptools", "starlette", "prometheus_client")


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Answer requests for predictions over HTTP (Open Inference Protocol v2, and JSON rows).")
    add_checkpoint(made, "--checkpoint {}: there is no such checkpoint or folder")
    add_model(made)
    add_query(made)
    ServerOptions.add_flags(made)
    made.inputs["token_file"] = partial(_require_file, "token_file")
    return made


def _require_file(name: str, path: Path | None) -> None:
    if path is not None and not path.is_file():
        raise UserError(f"{flag_of(name)} {path}: there is no such file")


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and serve."""
    arguments = parser(prog).parse_args(argv)
    query = read_query(arguments.query)
    run_of = {name: getattr(arguments, name) for name in ("checkpoint", "which", "model")}
    settings = Settings.from_flags(arguments, prog=prog, query=query, **run_of)
    _require_file("tls_cert", settings.tls_cert)
    _require_file("tls_key", settings.tls_key)
    with cli.importing(prog):
        try:
            from hostdev.ext.serving.command import run
        except ModuleNotFoundError as error:
            if (error.name or "hostdev").partition(".")[0] not in _PACKAGES:
                raise
            raise UserError(
                f"serving needs {error.name}, which is not installed; pip install 'hostdev[serve]'"
            ) from None
    run(settings)
