"""The program `hostdev`, which runs the commands that packages register.

A command is a module, registered as an entry point of the group `hostdev.command`; `Command` lists its members. The
module imports little, so that its options are checked, and `--help` is printed, before slow imports.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from hostdev.core import registry

KIND = "command"
FIRST = ("train", "quickstart", "preprocess")  # first in lists; all others follow alphabetically


class Command(Protocol):
    """The module of a command."""

    PROG: str
    """The program's name in messages of `python -m`."""
    HELP: str
    """What the command does, in a line of `hostdev --help`."""

    def parser(self, prog: str = ...) -> Any:
        """Return the parser of the command's flags, an argparse.ArgumentParser (`hostdev.core.cli.parser`)."""

    def main(self, argv: Sequence[str], prog: str = ...) -> int | None:
        """Parse the flags and run the command; return its exit code, None for 0."""


def names() -> list[str]:
    """Return the names of the registered commands, in the order of lists."""
    registered = registry.names(KIND)
    return [*(name for name in FIRST if name in registered), *(name for name in registered if name not in FIRST)]


def find(name: str) -> Command:
    """Return a command's module; raise UserError if no command has this name."""
    command: Command = registry.find(KIND, name)
    return command
