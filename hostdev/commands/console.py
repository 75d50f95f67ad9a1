"""The program `hostdev`, which runs commands by their names."""

import sys
from difflib import get_close_matches

from hostdev import __version__, commands
from hostdev.core import cli
from hostdev.core.errors import UserError

PROG = "hostdev"


def text() -> str:
    """Return the text that `hostdev --help` prints."""
    names = commands.names()
    width = max(map(len, names))
    listed = "\n".join(f"  {name:{width}}  {commands.find(name).HELP}" for name in names)
    return (
        f"usage: {PROG} COMMAND [options]\n\n"
        "Train recommender models whose embedding tables outgrow the accelerator.\n\n"
        f"commands:\n{listed}\n\n{PROG} COMMAND --help lists the options; {PROG} --version prints the version."
    )


def main() -> int:
    """Run the command named by the first argument."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    if name is None or name not in commands.names():
        return cli.run(PROG, lambda argv: _run_other(name))
    prog = f"{PROG} {name}"
    sys.argv = [prog, *sys.argv[2:]]
    return cli.run_found(lambda: commands.find(name), prog)


def _run_other(name: str | None) -> int:
    if name in (None, "-h", "--help", "help"):
        print(text())
        return 0 if name is not None else cli.EXIT_ERROR
    if name in ("-V", "--version"):
        print(f"{PROG} {__version__}")
        return 0
    close = get_close_matches(str(name), commands.names(), n=1)
    hint = f"; did you mean {close[0]}?" if close else f"; the commands are {', '.join(commands.names())}"
    raise UserError(f"there is no command {name!r}{hint}")
