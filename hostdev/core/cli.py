"""What every command shares: one line for an error, exit codes, --debug."""

import argparse
import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from hostdev.core.errors import UserError, in_words
from hostdev.core.printable import printable

_RANKS = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK_ID"}  # of one of several processes
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class Parser(argparse.ArgumentParser):
    """An argument parser that reports a wrong option in one line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and leaving."""
        raise UserError(f"{message} (see {self.prog} --help)")


def parser(prog: str, description: str) -> Parser:
    """Return a parser with the options that every command has."""
    made = Parser(prog=prog, description=description, allow_abbrev=False)
    add_debug(made)
    return made


def add_debug(to: argparse.ArgumentParser) -> None:
    """Add --debug."""
    to.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(prog: str, main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: its own or 0, 2 after an error, 130 after Ctrl-C.

    Other exceptions are bugs. Without `argv` the command is all that the process does, which ends here after Ctrl-C:
    the interpreter's own end takes seconds on a busy machine, and threads that are at work may abort it.
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="surrogateescape")  # the name of a file may be in no encoding
    try:
        return main(arguments) or 0
    except KeyboardInterrupt as interrupt:
        print(printable(f"{prog}: interrupted{_detail(interrupt)}"), file=sys.stderr)
        code = int(getattr(interrupt, "exit_code", EXIT_INTERRUPTED))
        if argv is None:
            _leave(code)
        return code
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (UserError, OSError, MemoryError) as error:
        if "--debug" in arguments:
            traceback.print_exc()
        print(printable(f"{prog}: error: {in_words(error)}"), file=sys.stderr)
        return int(getattr(error, "exit_code", EXIT_ERROR))


def run_module(name: str) -> int:
    """Import a command's module and run its `main` as `run` does: Ctrl-C during the imports ends the command, too."""

    def main(arguments: Sequence[str]) -> int | None:
        import_module("numpy")  # before torch, which takes Ctrl-C in the midst of it for a numpy that is broken
        code: int | None = import_module(name).main(arguments)
        return code

    code = run(name.removesuffix(".__main__"), main)
    if _RANKS & os.environ.keys():  # what torch.distributed leaves behind may abort the interpreter's own end
        _leave(code)
    return code


def _leave(code: int) -> NoReturn:
    """End the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _detail(interrupt: BaseException) -> str:
    return f"; {interrupt}" if str(interrupt) else ""
