"""python -m tests.standin.covered [TESTS]: which tests of the simulated accelerator notice that a wait is left out.

Writes tests/standin/covered.json: for each fault of faults.py, two tests, quick ones first; prints it if one has none.
One process collects the tests. A fork of it tells which tests come to which wait. Then a fork for each fault leaves the
wait out of the function that has it, and runs those tests until two have failed. Where fewer do, the tests with several
processes follow, in a copy of the repository. Conftest.py keeps the tests of this table in the quick rung;
tests/device/test_faults.py checks that no wait is missing.
"""

import argparse
import gc
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import types
from importlib import import_module
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol

from tests.standin import faults

ROOT = Path(__file__).resolve().parent.parent.parent
TABLE = Path(__file__).with_suffix(".json")
TESTS = (
    "tests/device",
    "tests/distributed/test_dense_streams.py",
    "tests/cache",
    "tests/runtime",
    "tests/test_pipeline.py",
)
ENOUGH = 2
LONGEST = 600


def functions_with(fault):
    """Return the functions whose code has a fault's statement, and how to find that code in another version."""
    module = import_module(".".join(fault.file.with_suffix("").parts))
    path, line = module.__file__, fault.node.lineno
    return [
        function
        for function in gc.get_objects()
        if type(function) is types.FunctionType  # `isinstance` would ask each object for its class
        and function.__code__.co_filename == path
        and line in {number for code in _codes(function.__code__) for _, _, number in code.co_lines()}
    ]


def replace(fault, source):
    """Give the functions that have a fault's statement the code of another source."""
    functions = functions_with(fault)
    assert functions, f"no function has {faults.name_of(fault)}"
    codes = {}
    for code in _codes(compile(source, functions[0].__code__.co_filename, "exec")):
        codes[code.co_qualname, code.co_firstlineno] = code
    for function in functions:
        function.__code__ = codes[function.__code__.co_qualname, function.__code__.co_firstlineno]


def noting(found, file):
    """Return a file's text in which a note precedes each fault's statement: its number, for `reached`."""
    lines = (ROOT / file).read_bytes().splitlines(keepends=True)
    for number, fault in enumerate(found):
        if fault.file == file:
            line, column = fault.node.lineno - 1, fault.node.col_offset
            note = f"__import__('sys').modules['tests.standin.covered'].reached.add({number}); ".encode()
            lines[line] = lines[line][:column] + note + lines[line][column:]
    return b"".join(lines).decode()


reached = set()  # the numbers of faults, in this process


class Search:
    """A plugin for pytest: it runs no test itself."""

    def __init__(self, found):
        self.found = found
        self.table = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session):
        gc.unfreeze()  # see conftest.py
        came = list(_in_a_fork(lambda: self._reaching(session.items)))
        print(
            f"\n{len(came)} of {len(session.items)} tests in {sum(test['seconds'] for test in came):.0f} s", flush=True
        )
        for number, (name, fault) in enumerate(zip(faults.names_of(self.found), self.found, strict=True)):
            there = [at for at, test in enumerate(came) if number in test["reached"] and test["passed"]]
            there.sort(key=lambda at: came[at]["seconds"])
            items = [session.items[at] for at in there]
            self.table[name] = list(_in_a_fork(lambda fault=fault, items=items: _failing(fault, items)))
            print(f"{name}: {len(there)} tests come to it; {self.table[name]}", flush=True)
        return True

    def _reaching(self, items):
        """Yield what each test comes to."""
        for fault in self.found:
            replace(fault, noting(self.found, fault.file))
        for item, following in zip(items, [*items[1:], None], strict=False):
            reached.clear()
            start = time.monotonic()
            passed = _passes(item, following)
            yield {"reached": sorted(reached), "passed": passed, "seconds": time.monotonic() - start}


def _failing(fault, items):
    """Yield the first tests that fail without a wait."""
    replace(fault, fault.patched((ROOT / fault.file).read_text()))
    count = 0
    for item, following in zip(items, [*items[1:], None], strict=False):
        if not _passes(item, following):
            yield item.nodeid
            count += 1
            if count == ENOUGH:
                break


def _in_a_fork(work):
    """Yield what an iterator yields in a fork of this process, which may take `LONGEST` seconds."""
    read, write = os.pipe()
    if not os.fork():
        signal.alarm(LONGEST)
        try:
            with os.fdopen(write, "w") as file:
                for result in work():
                    print(json.dumps(result), file=file, flush=True)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        yield from map(json.loads, file)
    os.wait()


def _codes(code):
    """Yield a code object and those within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _passes(item, following):
    """Run a test with its fixtures; return whether it passed."""
    return all(report.passed for report in runtestprotocol(item, log=False, nextitem=following))


def _noticed_by_ranks(few):
    """Yield the names of faults, each with a test with several processes that fails without the wait."""
    if not few:
        return
    with tempfile.TemporaryDirectory() as folder:
        tests = faults.Tests(faults.copy_of(ROOT, Path(folder)), [], LONGEST, [])
        for name, fault in few.items():
            path = tests.copy / fault.file
            source = path.read_text()
            path.write_text(fault.patched(source))
            failed, _ = tests.run("ranks", "-x")
            path.write_text(source)
            yield from ((name, test) for test, _ in failed[:1])


def main():
    parser = argparse.ArgumentParser(prog="tests.standin.covered", description="Which tests notice which missing wait.")
    parser.add_argument("--only", default="", metavar="TEXT", help="faults whose name has this in it; prints the table")
    parser.add_argument("--schedule", default="lazy")
    parser.add_argument("tests", nargs="*", default=list(TESTS))
    arguments = parser.parse_args()
    found = [fault for fault in faults.find(Path(), "hostdev") if fault.reason is None]
    search = Search([fault for fault in found if arguments.only in faults.name_of(fault)])
    flags = ["-p", "tests.standin.plugin", "-p", "no:cacheprovider", "-m", "device and (not slow or not_drawn)", "-q"]
    flags += ["--standin-schedule", arguments.schedule]
    code = pytest.main([*flags, *arguments.tests], plugins=[search])
    if not search.table:
        return int(code)
    by_name = dict(zip(faults.names_of(search.found), search.found, strict=True))
    few = {name: by_name[name] for name, tests in search.table.items() if len(tests) < ENOUGH}
    for name, test in _noticed_by_ranks(few):
        search.table[name].append(test)
        print(f"{name}: {test}", flush=True)
    missing = [name for name, tests in search.table.items() if not tests]
    print(f"{len(few)} of {len(search.table)} waits are noticed by fewer than {ENOUGH} tests: {list(few)}")
    if arguments.only or missing or len(search.table) < len(search.found):
        print(json.dumps(search.table, indent=1))
    else:
        TABLE.write_text(json.dumps(search.table, indent=1) + "\n")
    return int(code)


if __name__ == "__main__":
    sys.modules["tests.standin.covered"] = sys.modules["__main__"]
    raise SystemExit(main())
