"""Run a target's cases in a child process that survives many; a crash, hang or kill counts against its case.

A target is a module of this folder with

    make(folder)             writes what all cases start from
    load(base)               in the child, before memory is limited: imports, kernels
    run(base, case, draw)    one case in the empty folder `case`: changes a copy of `base`, and reads it

`run` raises or prints what a user would see. A case fails that ends the process, takes longer than SECONDS, raises what
is no error of ours, has a message of more than LONGEST characters or one that is no plain text, or writes outside its
folder.
"""

import io
import json
import os
import resource
import selectors
import shutil
import subprocess
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from random import Random

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 500  # characters of a message
SECONDS = 60  # per case, on a busy machine
MEMORY = 2 << 30  # bytes that a case may allocate in addition


def fuzz(name: str, base: Path, work: Path, *, seed: int, cases: int, first: int = 0) -> list[str]:
    """Run a target's cases; return a line for each failed case, with the command that repeats it."""
    failed: list[str] = []
    number, end = first, first + cases
    while number < end:
        number = _run_child(name, base, work, seed, number, end, failed)
    return failed


def _run_child(name: str, base: Path, work: Path, seed: int, first: int, end: int, failed: list[str]) -> int:
    """Run cases in a child until it ends; return the number of the next case."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command = [sys.executable, "-W", "ignore", "-m", "tests.fuzz.harness", name, str(base), str(work), str(seed)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(work / "cache"), "COLUMNS": "200"}
    with (
        (work / "native.txt").open("w+b") as native,
        subprocess.Popen(
            [*command, str(first), str(end)], cwd=work, env=environment, stdout=subprocess.PIPE, stderr=native
        ) as process,
        selectors.DefaultSelector() as ready,
    ):
        assert process.stdout is not None
        ready.register(process.stdout, selectors.EVENT_READ)
        current, buffer = None, b""
        wrong = ""
        while True:
            if not ready.select(SECONDS if current is not None else 10 * SECONDS):
                wrong = f"hangs for {SECONDS} s"
                process.kill()
                break
            piece = os.read(process.stdout.fileno(), 1 << 16)
            if not piece:
                break
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                kind, at, *more = json.loads(line)
                if kind == "begin":
                    current = at
                elif kind == "wrong":
                    failed.append(_told(name, seed, at, more[0]))
        code = process.wait()
        if code == 0 and not wrong:
            return end
        native.seek(0)
        said = native.read()[-600:].decode(errors="replace")
        if current is None:
            before = "\n".join(failed)
            raise RuntimeError(f"the child of {name} ends with {code} before its first case: {said}\n{before}")
        failed.append(_told(name, seed, current, wrong or f"ends the process with {code}: {said}"))
        return current + 1


def _told(name: str, seed: int, number: int, what: str) -> str:
    return f"{name}, seed {seed}, case {number}: {what}"


def _child(name: str, base: Path, work: Path, seed: int, first: int, end: int) -> None:
    target = import_module(f"tests.fuzz.{name}")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        target.load(base)
    os.fsync = lambda number: None  # type: ignore[assignment]  # the disk is not under test
    _limit_memory()
    outside = _watch_writes(work)
    case = work / "case"
    for number in range(first, end):
        _tell("begin", number)
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir()
        outside.clear()
        draw = Random(f"{name} {seed} {number}")
        wrong = _case(lambda draw=draw: target.run(base, case, draw))  # type: ignore[misc]
        if outside:
            wrong.append(f"writes outside its folder: {sorted(outside)[:5]}")
        wrong += [f"leaves {each.name} beside its folder" for each in work.iterdir() if each.name not in _MINE]
        for each in wrong:
            _tell("wrong", number, each)
    os._exit(0)


_MINE = {"case", "native.txt", "cache"}


def _case(run) -> list[str]:
    """Run a case; return the faults of its outcome."""
    from hostdev.core.errors import HostdevError, in_words

    out, said = io.StringIO(), io.StringIO()
    messages = []
    try:
        with redirect_stdout(out), redirect_stderr(said):
            run()
    except HostdevError as error:
        messages.append(in_words(error))
    except (ValueError, TypeError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        if not _is_ours(frames[-1].filename):
            return [_trace(error)]
        messages.append(in_words(error))
    except (OSError, MemoryError) as error:  # commands print these in one line
        messages.append(in_words(error))
    except BaseException as error:
        return [_trace(error)]
    messages += said.getvalue().splitlines() + out.getvalue().splitlines()
    wrong = []
    for message in messages:
        if len(message) > LONGEST:
            wrong.append(f"a message of {len(message):,} characters: {message[:200]}...")
        if any(ord(character) < 32 and character not in "\t\r" for character in message) or "\x7f" in message:
            wrong.append(f"a message that is no plain text: {message[:200]!r}")
    return wrong


def _is_ours(file: str) -> bool:
    return any(Path(file).is_relative_to(ROOT / folder) for folder in ("hostdev", "data", "models"))


def _trace(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))[-1500:]


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _watch_writes(work: Path) -> set[str]:
    """Return a set of the paths outside a folder that Python opens for writing, creates, renames or removes."""
    found: set[str] = set()
    allowed = (str(work), "/dev/", "/proc/")
    changing = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "os.chmod"}

    def hook(event: str, arguments: tuple) -> None:
        if event == "open":
            path, _, flags = arguments
            if not isinstance(path, str | bytes) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
                return
            paths = [path]
        elif event in changing:
            paths = [each for each in arguments[:2] if isinstance(each, str | bytes)]
        else:
            return
        for path in paths:
            text = os.path.realpath(os.fsdecode(path)) if path else ""
            if not text.startswith(allowed) and "__pycache__" not in text:
                found.add(text)

    sys.addaudithook(hook)
    return found


def _tell(*what: object) -> None:
    os.write(1, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    _name, _base, _work, *_numbers = sys.argv[1:]
    _child(_name, Path(_base), Path(_work), *map(int, _numbers))
