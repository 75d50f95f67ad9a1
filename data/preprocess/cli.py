"""The command line of `preprocess`."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from hostdev.core import cli, registry
from hostdev.core.addresses import local_path, require_input, result_path, source_path
from hostdev.core.errors import UserError
from hostdev.data.preprocess import options
from hostdev.data.preprocess.options import Options, add_options, add_seed
from hostdev.data.preprocess.row_source import KIND, RowSource

PROG = "hostdev.data.preprocess"
HELP = "turn tables or Criteo text into a data set; check or describe one"
_RESULT, _SOURCE = cli.checked(result_path), cli.checked(source_path)


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    what = "Turn tables, Criteo text or synthetic data into Arrow shards; check or describe them."
    made = cli.parser(prog, what, cli.StrictParser)
    commands = made.add_subparsers(
        dest="command",
        required=True,
        metavar=f"table|{'|'.join(registry.names(KIND))}|criteo|synthetic|check|info|suggest",
    )
    table = commands.add_parser("table", help="from CSV, TSV, Parquet or Arrow files", allow_abbrev=False)
    table.add_argument("files", nargs="+", type=_SOURCE, metavar="FILE",
                       help="tables with the same columns, folders of them, or - for standard input")  # fmt: skip
    table.add_argument("--out", type=_RESULT, required=True, metavar="DIR", help="the new data set's folder")
    options.add_table(table)
    options.add_split(table)
    options.add_split_files(table)
    sources = [_add_source(commands, name) for name in registry.names(KIND)]
    criteo = commands.add_parser("criteo", help="from Criteo text", allow_abbrev=False)
    criteo.add_argument("files", nargs="+", type=_SOURCE, metavar="FILE",
                        help="Criteo text (label, 13 integers, 26 hex values), folders, or - for stdin")  # fmt: skip
    criteo.add_argument("--out", type=_RESULT, required=True, metavar="DIR", help="the new data set's folder")
    synthetic = commands.add_parser("synthetic", help="from generated Criteo-like rows", allow_abbrev=False)
    synthetic.add_argument("--rows", type=int, required=True, metavar="N", help="number of rows")
    target = synthetic.add_mutually_exclusive_group(required=True)
    target.add_argument("--out", type=_RESULT, metavar="DIR", help="the new data set's folder")
    target.add_argument(
        "--tsv", type=cli.checked(local_path), metavar="FILE", help="write raw Criteo text instead of shards"
    )
    for command in (table, *sources):
        add_options(command, Options(threshold=options.THRESHOLD))
        add_seed(command, None)
    for command in (table, *sources, criteo):
        options.add_earlier(command)
        command.inputs["files"] = partial(require_input, said="{}: no such file")
        command.inputs["query"] = partial(
            require_input, said="--query {}: the file cannot be read (No such file or directory)"
        )
    for command in (criteo, synthetic):
        add_options(command)
        add_seed(command, Options().seed)
    for command in (table, *sources, criteo, synthetic):
        command.add_argument("--threads", type=int, metavar="N", help="number of threads (default: all cores)")
        options.add_scheduler(command)
        cli.add_debug(command)
    options.add_looking(commands)
    return made


def _add_source(commands: Any, name: str) -> cli.Parser:
    """Add the command of a registered source, and return its parser."""
    source: RowSource = registry.find(KIND, name)()
    to: cli.Parser = commands.add_parser(name, help=source.help, allow_abbrev=False)
    source.add_options(to)
    to.add_argument("--out", type=_RESULT, required=True, metavar="DIR", help="the new data set's folder")
    options.add_roles(to)
    options.add_split(to)
    to.set_defaults(source=source)
    return to


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line, and build, check or describe a data set."""
    arguments = parser(prog).parse_args(argv)
    if getattr(arguments, "threads", None) is not None and arguments.threads < 1:
        raise UserError(f"--threads must be at least 1, not {arguments.threads}")
    with cli.importing(prog):
        from hostdev.data.preprocess.command import run
    run(arguments)
