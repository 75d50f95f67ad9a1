"""`hostdev greet`: a command with an option."""

from hostdev.core import cli
from hostdev.core.errors import UserError

PROG = "acme.command"
HELP = "say hello"


def parser(prog=PROG):
    """Return the parser."""
    made = cli.parser(prog, "Say hello.")
    made.add_argument("--name", default="world", metavar="NAME", help="whom to greet (default world)")
    return made


def main(argv, prog=PROG):
    """Say hello."""
    name = parser(prog).parse_args(argv).name
    if not name:
        raise UserError("--name must not be empty")
    print(f"hello, {name}")
