"""The program `hostdev`, which runs commands by their names."""

import sys
from difflib import get_close_matches

from hostdev import __version__
from hostdev.commands import COMMANDS
from hostdev.core import cli
from hostdev.core.errors import UserError

PROG = "hostdev"


def text() -> str:
    """Return the text that `hostdev --help` prints."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    listed = "\n".join(lines)
    return (
        f"usage: {PROG} COMMAND [options]\n\n"
        "Train recommender models whose embedding tables outgrow the accelerator.\n\n"
        f"commands:\n{listed}\n\n{PROG} COMMAND --help lists the options; {PROG} --version prints the version."
    )


def main() -> int:
    """Run the command named by the first argument."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name not in COMMANDS:
        return cli.run(PROG, lambda argv: _run_other(name))
    prog = f"{PROG} {name}"
    sys.argv = [prog, *sys.argv[2:]]
    return cli.run_module(f"hostdev.commands.{name.replace('-', '_')}", prog)


def _run_other(name: str | None) -> int:
    if name in (None, "-h", "--help", "help"):
        print(text())
        return 0 if name is not None else cli.EXIT_ERROR
    if name in ("-V", "--version"):
        print(f"{PROG} {__version__}")
        return 0
    close = get_close_matches(str(name), COMMANDS, n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; the commands are {', '.join(COMMANDS)}"
    raise UserError(f"there is no command {name!r}{hint}")
