"""python -m tests.standin.faults: leave out one wait at a time, and see which test notices.

Finds every statement of a package that makes a stream or the host wait, or that keeps memory for a stream; replaces one
after the other by `pass` in copies of the repository; and runs tests there on the simulated accelerator, first in the
lazy schedule, then with several ranks, then with random delays. Prints a Markdown table. What is not caught is not
needed, or not tested.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tests.copies import copy_of

CALLS = ("wait_event", "wait_stream", "record_stream", "await_event", "await_sent", "synchronize")
TESTS = (  # what finds most comes first
    "tests/device/test_staging.py",
    "tests/distributed/test_dense_streams.py",
    "tests/device/test_training.py",
    "tests/device/test_device.py",
    "tests/cache",
    "tests/runtime",
    "tests/test_pipeline.py",
    "tests/test_trainer.py",
)
SCHEDULES = ("lazy", "ranks", "delayed")
RANKS = "tests/distributed/test_devices.py"  # "ranks": several processes, each with a device and a schedule of its own
# They wait in order to measure, and no value depends on it.
MEASURING = (
    "hostdev/device/clock.py",
    "hostdev/ext/parallel/auto.py",
    "hostdev/train/room.py",
)


class Fault(NamedTuple):
    """A statement to leave out, or the `reason` why it cannot be left out."""

    file: Path
    node: ast.stmt
    statement: str
    reason: str | None

    def patched(self, source: str) -> str:
        """Return the file's text without the statement."""
        lines = source.encode().splitlines(keepends=True)  # offsets are in bytes
        begin, end = self.node.lineno - 1, self.node.end_lineno - 1
        head, tail = lines[begin][: self.node.col_offset], lines[end][self.node.end_col_offset :]
        return b"".join([*lines[:begin], head + b"pass" + tail, *lines[end + 1 :]]).decode()


def find(root: Path, package: str, calls: tuple[str, ...] = CALLS) -> Iterator[Fault]:
    """Yield all faults of a package."""
    for file in sorted((root / package).rglob("*.py")):
        source = file.read_text()
        statements = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)]
        for node in sorted(statements, key=lambda node: node.lineno):
            if any(_name(call) in calls for call in _own_calls(node)):
                statement = " ".join((ast.get_source_segment(source, node) or "").split())
                reason = None if isinstance(node, ast.Expr) else "its value is used"
                if (path := file.relative_to(root)).as_posix() in MEASURING:
                    reason = "it measures"
                yield Fault(path, node, statement, reason)


def name_of(fault: Fault) -> str:
    """Return a fault's name, which survives a change of other lines."""
    return f"{fault.file}: {fault.statement}"


def names_of(found: Sequence[Fault]) -> list[str]:
    """Return names of faults, in order; the second of two equal statements of a file is "(2)"."""
    names: list[str] = []
    for fault in found:
        name = name_of(fault)
        number = sum(other == name or other.startswith(f"{name} (") for other in names) + 1
        names.append(name if number == 1 else f"{name} ({number})")
    return names


def _own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """Yield the calls of a statement, without those of nested statements."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.stmt):
                continue
            if isinstance(child, ast.Call):
                yield child
            waiting.append(child)


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


class Tests:
    """Run tests in a copy of the repository, one process at a time.

    Args:
        known: Tests that fail without a fault.
    """

    def __init__(self, copy: Path, selected: list[str], timeout: float, known: list[str]) -> None:
        self.copy, self._selected, self._timeout, self.known = copy, selected, timeout, known

    def run(self, schedule: str, *options: str) -> tuple[list[tuple[str, str]], float]:
        """Return the failed tests with their errors, and the seconds taken."""
        device = [
            "-p",
            "tests.standin.plugin",
            "-m",
            "device and (not slow or not_drawn)",
            "--standin-schedule",
            schedule,
        ]
        command = [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "--tb=no"),
            *(["-m", "", RANKS] if schedule == "ranks" else [*device, *self._selected]),
            *(f"--deselect={test}" for test in self.known),
            *options,
        ]
        settings = {"PYTHONPATH": str(self.copy), "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "400"}
        start = time.monotonic()
        process = subprocess.Popen(
            command,
            cwd=self.copy,
            env={**os.environ, **settings},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        try:
            out, _ = process.communicate(timeout=self._timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return [("all of them", f"no end after {self._timeout:.0f} s")], time.monotonic() - start
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - (.*))?$", out, re.MULTILINE)
        if process.returncode not in (0, 1) or (process.returncode and not failed):
            failed.append(("the run itself", f"exit code {process.returncode}: {out.strip().splitlines()[-1]}"))
        return failed, time.monotonic() - start


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.standin.faults", description="Leave out one wait at a time.")
    parser.add_argument("--package", default="hostdev")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose file:line or statement has this in it")
    parser.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="NAME")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults that are tried at a time")
    parser.add_argument("--timeout", type=float, default=600, metavar="SECONDS", help="of one run of the tests")
    parser.add_argument("--list", action="store_true", help="only list the faults")
    parser.add_argument("tests", nargs="*", default=list(TESTS), help="what to run, in this order")
    arguments = parser.parse_args()
    root = Path.cwd()
    faults = [
        fault
        for fault in find(root, arguments.package)
        if arguments.only in f"{fault.file}:{fault.node.lineno} {fault.statement}"
    ]
    if arguments.list:
        for fault in faults:
            print(f"{fault.file}:{fault.node.lineno}: {fault.statement}{f' ({fault.reason})' if fault.reason else ''}")
        return 0
    if missing := [test for test in arguments.tests if not (root / test.partition("::")[0]).exists()]:
        parser.error(f"no such tests: {', '.join(missing)}")
    known: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        copies: SimpleQueue[Tests] = SimpleQueue()
        for job in range(arguments.jobs):
            copies.put(Tests(copy_of(root, Path(folder) / str(job)), arguments.tests, arguments.timeout, known))

        def try_one(fault: Fault) -> tuple[str, str]:
            tests = copies.get()
            try:
                return _try(fault, tests, arguments.schedules)
            finally:
                copies.put(tests)

        tests = copies.get()
        for schedule in arguments.schedules:
            failed, seconds = tests.run(schedule)
            print(f"without a fault, {schedule}: {len(failed)} tests fail in {seconds:.0f} s", flush=True)
            known += [test for test, _ in failed]
        copies.put(tests)
        for test in known:
            print(f"left out, as it fails without a fault: {test}")
        print("\n| where | statement | caught by | error |\n|---|---|---|---|", flush=True)
        missed = 0
        with ThreadPoolExecutor(arguments.jobs) as pool:
            for fault, (caught, error) in zip(faults, pool.map(try_one, faults), strict=True):
                missed += caught.startswith("NOT")
                cells = f"{fault.file}:{fault.node.lineno}", f"`{fault.statement}`", caught, error
                print("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |", flush=True)
    return 1 if missed else 0


def _try(fault: Fault, tests: Tests, schedules: Sequence[str]) -> tuple[str, str]:
    """Return the test that catches a fault, and its error."""
    if fault.reason is not None:
        return "skipped", fault.reason
    path = tests.copy / fault.file
    source = path.read_text()
    path.write_text(fault.patched(source))
    try:
        for schedule in reversed(schedules) if "distributed" in fault.file.parts else schedules:
            failed, seconds = tests.run(schedule, "-x")
            if failed:
                test, error = failed[0]
                return f"{schedule}, {seconds:.0f} s: {test}", error[:200]
    finally:
        path.write_text(source)
    return f"NOT CAUGHT ({', '.join(schedules)})", ""


if __name__ == "__main__":
    raise SystemExit(main())
