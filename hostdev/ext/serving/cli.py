"""The command line of `serve`."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hostdev.core import cli
from hostdev.core.addresses import require_input
from hostdev.core.errors import UserError
from hostdev.core.memory import parse_bytes
from hostdev.ext.predict.cli import add_checkpoint, add_model, add_query, read_query

PROG = "hostdev.serving"
HELP = "answer requests for predictions over HTTP"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LEAST_REQUEST_BYTES, _MOST_REQUEST_BYTES = 1 << 10, 1 << 30
_MOST_WORKERS, _MOST_WAIT_MS = 256, 10_000


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(prog, "Answer requests for predictions over HTTP (Open Inference Protocol v2, and JSON rows).")
    add = made.add_argument
    add_checkpoint(made, "--checkpoint {}: there is no such checkpoint or folder")
    made.inputs["token_file"] = partial(require_input, said="--token-file {}: there is no such file")
    add("--follow", action="store_true", help="take newer checkpoints of the folder while serving")
    add_model(made)
    add_query(made)
    add("--device", default="cpu", metavar="NAME", help="where the dense layers run (default cpu)")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="the address to listen on (default 127.0.0.1)")
    add("--port", type=int, default=8000, metavar="N", help="the port (default 8000; 0 chooses a free one)")
    add("--model-name", metavar="NAME", help="the model's name in requests (default: that of its kind)")
    add("--max-batch", type=int, metavar="N", help="rows computed together (default: the run's batch size)")
    add(
        "--max-wait-ms",
        type=float,
        default=0.0,
        metavar="X",
        help="how long a request waits for others while nothing is computed (default 0)",
    )
    add("--max-queue", type=int, default=65_536, metavar="N", help="rows that wait; more get status 503 (65,536)")
    add("--max-rows", type=int, default=65_536, metavar="N", help="rows of a request (default 65,536)")
    add(
        "--max-request-bytes",
        type=cli.checked(parse_bytes),
        default=16 << 20,
        metavar="SIZE",
        help="size of a request, such as 16MB (default 16 MiB)",
    )
    add("--workers", type=int, default=1, metavar="N", help="processes; they share the tables' memory (default 1)")
    add("--token-file", type=Path, metavar="FILE", help="demand the header Authorization: Bearer TOKEN of this file")
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain in PEM, for HTTPS")
    add("--tls-key", type=Path, metavar="FILE", help="the certificate's unencrypted key in PEM")
    return made


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line and serve."""
    arguments = vars(parser(prog).parse_args(argv))
    _check(arguments)
    arguments["query"] = read_query(arguments["query"])
    host, port, _ = (arguments.pop(name) for name in ("host", "port", "debug"))
    with cli.importing(prog):
        from hostdev.ext.serving.settings import Settings

        try:
            from hostdev.ext.serving.command import run
        except ModuleNotFoundError as error:
            if (error.name or "hostdev").partition(".")[0] not in (
                "uvicorn",
                "httptools",
                "starlette",
                "prometheus_client",
            ):
                raise
            raise UserError(
                f"serving needs {error.name}, which is not installed; pip install 'hostdev[serve]'"
            ) from None
    run(Settings(prog=prog, **arguments), host, port)


def _check(given: dict[str, object]) -> None:
    """Raise UserError for an option out of its range, without another, or that is not a file."""
    ranges = {
        "port": (0, 65_535),
        "max_batch": (1, 1 << 24),
        "max_wait_ms": (0, _MOST_WAIT_MS),
        "max_queue": (1, 1 << 24),
        "max_rows": (1, 1 << 24),
        "max_request_bytes": (_LEAST_REQUEST_BYTES, _MOST_REQUEST_BYTES),
        "workers": (1, _MOST_WORKERS),
    }
    for name, (low, high) in ranges.items():
        value = given[name]
        if value is not None and not (isinstance(value, int | float) and low <= value <= high):
            raise UserError(f"--{name.replace('_', '-')} must be in {low:,}..{high:,}, not {value}")
    model_name = given["model_name"]
    if isinstance(model_name, str) and _NAME.fullmatch(model_name) is None:
        raise UserError(f"--model-name {model_name}: use letters, digits, '.', '_' and '-', at most 100")
    if (given["tls_cert"] is None) != (given["tls_key"] is None):
        raise UserError("--tls-cert and --tls-key belong together; give both")
    for option in ("token_file", "tls_cert", "tls_key"):
        path = given[option]
        if isinstance(path, Path) and not path.is_file():
            raise UserError(f"--{option.replace('_', '-')} {path}: there is no such file")
