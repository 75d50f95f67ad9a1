"""What every command shares: one line for an error, exit codes, --debug."""

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn

from hostdev.core import streams
from hostdev.core.errors import UserError, in_words, tell_at_once
from hostdev.core.interrupts import Arriving, leaving
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
    if argv is not None:
        return _run(prog, main, list(argv), Arriving())
    streams.prepare()
    with Arriving(lambda: _interrupted(prog)) as arriving:
        return _run(prog, main, sys.argv[1:], arriving, alone=True)


def _run(
    prog: str, main: Callable[[Sequence[str]], int | None], arguments: list[str], arriving: Arriving, *,
    alone: bool = False,
) -> int:  # fmt: skip
    try:
        code = main(arguments) or 0
        if arriving.has_come:  # somebody has swallowed it until now
            raise KeyboardInterrupt
        return code
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        arriving.arrived()
        if isinstance(error, KeyboardInterrupt) or arriving.has_come:  # which may have become another error on its way
            interrupt = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
            code = int(getattr(interrupt, "exit_code", EXIT_INTERRUPTED))
            print(printable(f"{prog}: interrupted{_detail(interrupt)}"), file=sys.stderr)
            if alone:
                _leave(code)
            return code
        if not isinstance(error, UserError | OSError | MemoryError):
            raise
        if "--debug" in arguments:
            traceback.print_exc()
        print(printable(f"{prog}: error: {in_words(error)}"), file=sys.stderr)
        return int(getattr(error, "exit_code", EXIT_ERROR))


def run_module(name: str) -> int:
    """Import a command's module and run its `main` as `run` does: Ctrl-C during the imports ends the command, too."""
    prog = name.removesuffix(".__main__")

    def main(arguments: Sequence[str]) -> int | None:
        with leaving(lambda: _interrupted(prog)):
            import_module("numpy")  # before torch, which reports a numpy that is broken as missing
            module = import_module(name)
        if (arrow := sys.modules.get("pyarrow")) is not None:
            arrow.enable_signal_handlers(False)  # its own take Ctrl-C while a file is read, and may keep it
        code: int | None = module.main(arguments)
        return code

    code = run(prog, main)
    if _RANKS & os.environ.keys():  # what torch.distributed leaves behind may abort the interpreter's own end
        _leave(code)
    return code


def _interrupted(prog: str) -> NoReturn:
    """End the process at once after Ctrl-C: nothing is to be cleaned up."""
    tell_at_once(f"{prog}: interrupted")
    _leave(EXIT_INTERRUPTED)


def _leave(code: int) -> NoReturn:
    """End the process at once."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # nobody reads it any more
            stream.flush()
    os._exit(code)


def _detail(interrupt: BaseException) -> str:
    return f"; {interrupt}" if str(interrupt) else ""
