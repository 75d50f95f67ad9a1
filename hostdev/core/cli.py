"""Common behaviour of all commands: one-line errors, exit codes, and --debug."""

import argparse
import contextlib
import gc
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from hostdev.core.errors import HostdevError, UserError, in_words, write_stderr
from hostdev.core.printable import prepare_streams, printable
from hostdev.core.signals import InterruptGuard, leaving

_RANKS = {"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK_ID"}  # set by multi-process launchers
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
_is_own = False  # whether the process runs only a command


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an invalid option in one line.

    Attributes:
        inputs: By argument, a function that raises UserError if a value is an input that does not exist. It is called
            before the parser reports a missing argument, and before the command sees the arguments.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.inputs: dict[str, Callable[[Any], object]] = {}

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse, and check that inputs exist."""
        found = super().parse_args(args, namespace)
        self._check_inputs(found)
        return found

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments like argparse, but check the given inputs before reporting a missing argument."""
        namespace = argparse.Namespace() if namespace is None else namespace
        try:
            return super().parse_known_args(args, namespace)
        except UserError as error:
            if "required" in str(error):
                self._check_inputs(namespace)
            raise

    def _check_inputs(self, namespace: argparse.Namespace) -> None:
        """Check the inputs that are given, including the inputs of the chosen sub-command."""
        for name, require in self.inputs.items():
            value = getattr(namespace, name, None)
            for one in value if isinstance(value, list) else [value]:
                if one is not None:
                    require(one)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                chosen = action.choices.get(str(getattr(namespace, action.dest, None)))
                if chosen is not None:
                    chosen._check_inputs(namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage and exiting."""
        raise UserError(f"{message}{self._suggestion(message)} (see {self.prog} --help)")

    def _suggestion(self, message: str) -> str:
        """Return a hint with known options that resemble the unknown ones."""
        if not message.startswith("unrecognized arguments"):
            return ""
        given = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
        near = [found for word in given for found in get_close_matches(word, self._all_options(), n=1, cutoff=0.7)]
        near = [found for found in near if found not in given]  # a given word may be an option of another sub-command
        return f"; did you mean {' '.join(near)}?" if near else ""

    def _all_options(self) -> list[str]:
        options = [
            option for action in self._actions for option in action.option_strings if action.help != argparse.SUPPRESS
        ]
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                options += [option for one in action.choices.values() for option in one._all_options()]
        return options


class StrictParser(Parser):
    """A parser that rejects two different values for one option; argparse would silently use the last value.

    It is for commands with two kinds of options: some may be repeated to name several columns, the rest may not.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for name in (None, "store"):
            self.register("action", name, _Once)

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        """Forget the values of earlier calls, and parse arguments like argparse."""
        self.values_given: dict[str, Any] = {}
        return super().parse_known_args(*args, **options)


class _Once(argparse._StoreAction):
    """An action that stores an option's value and rejects a second, different value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        given = vars(parser)["values_given"]
        if given.setdefault(self.dest, values) != values:
            parser.error(f"{option} is given twice, as {given[self.dest]} and as {values}; give it once")
        super().__call__(parser, namespace, values, option)


def parser(prog: str, description: str, of: type[Parser] = Parser) -> Parser:
    """Return a parser with the options that all commands share."""
    made = of(prog=prog, description=description, allow_abbrev=False)
    add_debug(made)
    return made


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `parse` for use as the type of a flag: its UserErrors are reported as errors of the command line."""

    def parse_flag(text: str) -> Any:
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_flag


def add_debug(to: argparse.ArgumentParser) -> None:
    """Add the option --debug."""
    to.add_argument("--debug", action="store_true", help="show the traceback of an error")


def run(prog: str, main: Callable[[Sequence[str]], int | None], argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: the result of `main` (0 for None), or a code for an exception.

    The code is 2, or the exception's `exit_code`, for a HostdevError, an OSError or a MemoryError; 130 for Ctrl-C; and
    141 if the program that reads the output has exited. Other exceptions are bugs and propagate. Without `argv`, the
    process must run only this command, and this function ends the process after Ctrl-C: the interpreter's own exit
    takes seconds on a busy machine, and may be aborted by running threads.
    """
    if argv is not None:
        return _run(prog, main, list(argv), InterruptGuard())
    global _is_own
    _is_own = True
    prepare_streams()
    with InterruptGuard(lambda: _interrupted(prog)) as guard:
        return _run(prog, main, sys.argv[1:], guard, alone=True)


def _run(
    prog: str,
    main: Callable[[Sequence[str]], int | None],
    arguments: list[str],
    guard: InterruptGuard,
    *,
    alone: bool = False,
) -> int:
    try:
        code = main(arguments) or 0
        if guard.is_interrupted:  # a library has swallowed the KeyboardInterrupt
            raise KeyboardInterrupt
        return code
    except BrokenPipeError:  # the reader has exited, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:
        guard.handled()
        if isinstance(error, KeyboardInterrupt) or guard.is_interrupted:  # Ctrl-C may have become another error
            interrupt = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
            code = int(getattr(interrupt, "exit_code", EXIT_INTERRUPTED))
            detail = f"; {interrupt}" if str(interrupt) else ""
            print(printable(f"{prog}: interrupted{detail}"), file=sys.stderr)
            if alone:
                _leave(code)
            return code
        if not isinstance(error, HostdevError | OSError | MemoryError):
            raise
        if "--debug" in arguments:
            traceback.print_exc()
        print(printable(f"{prog}: error: {in_words(error)}"), file=sys.stderr)
        return int(getattr(error, "exit_code", EXIT_ERROR))


def run_module(name: str, prog: str) -> int:
    """Import a command's module and run its function `main(argv, prog)` as `run` does."""
    return run_found(lambda: import_module(name), prog)


def run_found(find: Callable[[], Any], prog: str) -> int:
    """Run the function `main(argv, prog)` of the module that `find` imports and returns, as `run` does."""

    def main(arguments: Sequence[str]) -> int | None:
        with importing(prog):
            module = find()
        code: int | None = module.main(arguments, prog)
        return code

    code = run(prog, main)
    if _RANKS & os.environ.keys():  # objects left by torch.distributed may abort the interpreter's own exit
        _leave(code)
    return code


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection while the block imports modules; then exempt all existing objects from it.

    This saves a sixth of the time to import torch. In a process that runs more than the command, nothing is changed.
    """
    if not _is_own or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def importing(prog: str) -> Iterator[None]:
    """Let Ctrl-C end the command at once while the block imports modules, which may take seconds.

    In a process that runs more than the command, such as a test, the handling of Ctrl-C is unchanged.
    """
    with leaving(lambda: _interrupted(prog)) if _is_own else contextlib.nullcontext(), _without_garbage_collection():
        import_module("numpy")  # before torch, which reports a broken numpy as missing
        yield
    if _is_own and (arrow := sys.modules.get("pyarrow")) is not None:
        arrow.enable_signal_handlers(False)  # Arrow's handlers may lose a Ctrl-C during a read


def _interrupted(prog: str) -> NoReturn:
    """Exit at once after Ctrl-C, without Python's cleanup."""
    write_stderr(f"{prog}: interrupted")
    _leave(EXIT_INTERRUPTED)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the stream is closed, or its reader is gone
            stream.flush()
    os._exit(code)
