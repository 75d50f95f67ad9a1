"""The command line of `preprocess`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hostdev.core import cli, registry
from hostdev.core.addresses import local_path, require_input, result_path, source_path
from hostdev.data import folder
from hostdev.data.preprocess.options import (
    ConversionFlags,
    CriteoFlags,
    RowFlags,
    SyntheticFlags,
    TableFlags,
    TextFlags,
)
from hostdev.data.preprocess.row_source import KIND, RowSource

PROG = "hostdev.data.preprocess"
HELP = "turn tables or Criteo text into a data set; check or describe one"
_LOCAL, _RESULT, _SOURCE = map(cli.checked, (local_path, result_path, source_path))
_UNREAD = "the file cannot be read (No such file or directory)"


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    what = "Turn tables, Criteo text or synthetic data into Arrow shards; check or describe them."
    made = cli.parser(prog, what, cli.StrictParser)
    commands = made.add_subparsers(
        dest="command",
        required=True,
        metavar=f"table|{'|'.join(registry.names(KIND))}|criteo|synthetic|check|info|suggest",
    )
    table = _add(commands, "table", "from CSV, TSV, Parquet or Arrow files", TableFlags)
    table.add_argument("files", nargs="+", type=_SOURCE, metavar="FILE",
                       help="tables with the same columns, folders of them, or - for standard input")  # fmt: skip
    for name in registry.names(KIND):
        source: RowSource = registry.find(KIND, name)()
        to = _add(commands, name, source.help, RowFlags)
        source.add_options(to)
        to.set_defaults(source=source)
    criteo = _add(commands, "criteo", "from Criteo text", CriteoFlags)
    criteo.add_argument("files", nargs="+", type=_SOURCE, metavar="FILE",
                        help="Criteo text (label, 13 integers, 26 hex values), folders, or - for stdin")  # fmt: skip
    synthetic = _add(commands, "synthetic", "from generated Criteo-like rows", SyntheticFlags)
    synthetic.add_argument("--rows", type=int, required=True, metavar="N", help="number of rows")
    _add_inspections(commands)
    return made


def _add(commands: Any, name: str, what: str, flags: type[ConversionFlags]) -> cli.Parser:
    """Add a command that prepares a data set, and return its parser; `flags` is the class of its options."""
    made: cli.Parser = commands.add_parser(name, help=what, allow_abbrev=False)
    made.set_defaults(flags=flags)
    made.inputs["files"] = partial(require_input, said="{}: no such file")
    made.inputs["query"] = partial(require_input, said="--query {}: " + _UNREAD)
    made.inputs["features"] = partial(require_input, said="--features {}: " + _UNREAD)
    made.inputs["vocabulary"] = folder.require_input
    target = made.add_mutually_exclusive_group(required=True) if flags is SyntheticFlags else made
    target.add_argument("--out", type=_RESULT, required=target is made, metavar="DIR", help="the new data set's folder")
    if target is not made:
        target.add_argument("--tsv", type=_LOCAL, metavar="FILE", help="write raw Criteo text instead of shards")
    flags.add_flags(made)
    cli.add_debug(made)
    return made


def _add_inspections(commands: Any) -> None:
    """Add the subcommands `check`, `info` and `suggest`."""

    def add(name: str, what: str, argument: str, shown: str, **more: Any) -> cli.Parser:
        made: cli.Parser = commands.add_parser(
            name, help=what, description=what[0].upper() + what[1:] + ".", allow_abbrev=False
        )
        made.add_argument(argument, type=_LOCAL, **more)
        made.inputs[argument] = partial(require_input, said=shown)
        cli.add_debug(made)
        return made

    about = {"metavar": "DIR", "help": "a data set's folder"}
    none = "{} is not a data set: there is no such folder"
    add("check", "read a whole data set and report all damage; exit code 1 if there is any", "path", none, **about)
    info = add("info", "print and draw a summary of a data set, from all of its rows", "path", none, **about)
    info.inputs["path"] = folder.require_input
    picture = "a new file for the picture (default: info.png, or a numbered name if that exists)"
    info.add_argument("--out", type=_LOCAL, metavar="FILE", help=picture)
    what, table = (
        "look at a table's first rows and write a features file for --features",
        "a table in CSV, TSV, Parquet or Arrow",
    )
    suggest = add("suggest", what, "file", "{}: no such file", metavar="FILE", help=table)
    suggest.add_argument("--label", metavar="NAME", help="the column with the label (default: chosen by its name)")
    new = "the new file (default features.toml)"
    suggest.add_argument("--out", type=_LOCAL, metavar="FILE", default=Path("features.toml"), help=new)
    TextFlags.add_flags(suggest)


def main(argv: Sequence[str], prog: str = PROG) -> None:
    """Parse the command line, and run its command."""
    arguments = parser(prog).parse_args(argv)
    if hasattr(arguments, "flags"):
        arguments.flags = arguments.flags.from_flags(arguments)
    with cli.importing(prog):
        from hostdev.data.preprocess.command import run
    run(arguments)
