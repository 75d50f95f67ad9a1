"""`python -m tests.house`: counts of the product's source, which CI holds to the bounds in tests/house.json.

`--record` lowers bounds to the present counts; `--trace` also counts the files and calls of a training step and of a
served request (a minute). A count above its bound fails `tests/test_house.py`.
"""

import argparse
import ast
import collections
import functools
import io
import json
import re
import subprocess
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
BOUNDS = ROOT / "tests/house.json"
PLACES = {"hostdev": "hostdev", "data": "hostdev.data", "models": "hostdev.models"}
ENGINE = (
    *("kernels", "core", "host", "cache", "device", "pipeline", "runtime"),
    *("distributed", "checkpoint", "models", "data", "train"),
)
# Extensions that stay at the top level of the repository, and modules above everything: fronts and command lines.
EXTENSIONS = ("hostdev.ext", "hostdev.data.preprocess", "hostdev.commands")
LARGEST, NEAR = 500, 20  # lines of a file
SLIVER = 80  # lines of a file that only one other file imports
BRANCHES = {
    "by key": r"\bif\b.*\b(has_keys|is_keyed|by_key|keyed|KeyTable)\b",
    "ranks": r"\branks is (not )?None",
    "history": r"\bhistory is (not )?None",
    "on disk": r"\bif\b.*\b(on_disk|tier|tiers|disk) is (not )?None|\bis_on_disk",
    "cache": r"\bcache is (not )?None",
    "earlier": r"\bearlier is (not )?None",
}
# Files that build a mechanism themselves; each should be a helper's.
WAYS = {
    "files that rename into place": r"\bos\.(replace|rename)\(|\.(replace|rename)\((path|target|folder|final)\b",
    "files that hash with SHA-256": r"\bsha256\(",
    "files that start threads": r"\b(threading\.)?Thread\(",
    "files with a Condition": r"\bCondition\(",
    "files with an executor": r"\b(ThreadPool|ProcessPool)Executor\(",
    "files that count attempts": r"\b_?(ATTEMPTS|RETRIES|attempts?)\b",
    "files that read free memory": r"\bavailable_bytes\(",
    "files that write a carriage return": r"\\r\\x1b|\"\\r",
}


class Module(NamedTuple):
    """A source file: its path, its imported name and its text."""

    path: str
    name: str
    text: str

    @property
    def room(self) -> str:
        """The first part of the name below `hostdev`, or the first two below `hostdev.ext`."""
        parts = self.name.split(".")[1:]
        if not parts:
            return "(top)"
        if parts[0] == "ext" and len(parts) > 1:
            return f"ext.{parts[1]}"
        if self.name.startswith("hostdev.data.preprocess"):
            return "data.preprocess"
        return parts[0] if parts[0] in (*ENGINE, "commands", "ext") else "(top)"

    @property
    def is_engine(self) -> bool:
        """Whether the file belongs to the engine."""
        return self.room in ENGINE


@functools.cache
def modules() -> tuple[Module, ...]:
    """Return every source file of the product."""
    listed = []
    for top, package in PLACES.items():
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            name = ".".join([package, *parts]).removesuffix(".__init__")
            listed.append(Module(str(path.relative_to(ROOT)), name, path.read_text()))
    return tuple(listed)


@functools.cache
def parse(module: Module) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(module.text)


@functools.cache
def count_code(module: Module) -> int:
    """Return the number of lines without blanks, comments and docstrings."""
    documented: set[int] = set()
    for node in ast.walk(parse(module)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - documented)


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the modules that each module imports, also inside functions."""
    names = {module.name for module in modules()}
    arrows: dict[str, set[str]] = {name: set() for name in names}
    for module in modules():
        for node in ast.walk(parse(module)):
            targets: list[str] = []
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                targets = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            arrows[module.name] |= {
                target
                for target in targets
                if target in names and target != module.name and not module.name.startswith(f"{target}.")
            }
    return arrows


def find_circles() -> list[list[str]]:
    """Return the sets of modules that import each other (Tarjan's strongly connected components)."""
    arrows = imports()
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in arrows[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            members = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(members) > 1:
                circles.append(sorted(members))

    sys.setrecursionlimit(10_000)
    for name in arrows:
        if name not in index:
            visit(name)
    return circles


def find_arrows_outside() -> list[tuple[str, str]]:
    """Return the imports of extensions by the engine."""
    engine = {module.name for module in modules() if module.is_engine}
    return sorted(
        (name, other)
        for name in engine
        for other in imports()[name]
        if other == "hostdev.ext"
        or other.startswith(tuple(f"{extension}." for extension in EXTENSIONS))
        or other in EXTENSIONS
    )


def count_names(chosen: list[Module]) -> list[str]:
    """Return the public class names that are defined more than once."""
    names = collections.Counter(
        node.name
        for module in chosen
        for node in ast.walk(parse(module))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sorted(name for name, times in names.items() if times > 1)


def count_slivers() -> int:
    """Return the number of files of at most 80 lines that only one other file imports."""
    importers: dict[str, set[str]] = collections.defaultdict(set)
    for name, others in imports().items():
        for other in others:
            importers[other].add(name)
    return sum(
        len(importers[module.name]) == 1
        and module.text.count("\n") <= SLIVER
        and not module.path.endswith("__init__.py")
        for module in modules()
    )


def count() -> dict[str, int]:
    """Return every count by its name."""
    engine = [module for module in modules() if module.is_engine]
    lines = {module.path: module.text.count("\n") for module in modules()}
    counts = {
        "code": sum(map(count_code, modules())),
        "code of the engine": sum(map(count_code, engine)),
        "files": len(modules()),
        "files of the engine": len(engine),
        "circles": len(find_circles()),
        "arrows from the engine to extensions": len(find_arrows_outside()),
        "class names used twice": len(count_names(list(modules()))),
        "class names of the engine used twice": len(count_names(engine)),
        f"files above {LARGEST} lines": sum(number > LARGEST for number in lines.values()),
        f"files within {NEAR} lines of {LARGEST}": sum(LARGEST - NEAR < number <= LARGEST for number in lines.values()),
        f"files of at most {SLIVER} lines with one importer": count_slivers(),
        "branches": sum(count_branches().values()),
    }
    return counts | count_ways()


def count_branches() -> dict[str, int]:
    """Return the number of lines that ask what a thing is, by kind."""
    return {
        kind: sum(bool(re.search(pattern, line)) for module in modules() for line in module.text.splitlines())
        for kind, pattern in BRANCHES.items()
    }


def count_ways() -> dict[str, int]:
    """Return the number of files with a mechanism of their own, by mechanism."""
    return {way: sum(bool(re.search(pattern, module.text)) for module in modules()) for way, pattern in WAYS.items()}


def exceed(counts: dict[str, int]) -> list[str]:
    """Return a line for each count above its bound."""
    bounds = json.loads(BOUNDS.read_text())
    return [
        f"{name}: {number}, above its bound {bounds[name]}" for name, number in counts.items() if number > bounds[name]
    ]


def trace(kind: str) -> str:
    """Return the files and calls of a training step, or of a served request, as a process of its own counts them."""
    done = subprocess.run([sys.executable, "-m", "tests.house_trace", kind], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip().splitlines()[-1] if done.returncode == 0 else f"{kind}: {done.stderr.strip()[-300:]}"


def main() -> int:
    """Print the counts; return 1 if one is above its bound."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="lower bounds to the present counts")
    parser.add_argument("--trace", action="store_true", help="also trace a training step and a served request")
    parser.add_argument("--list", action="store_true", help="also list circles, arrows and names")
    options = parser.parse_args()
    rooms = collections.Counter(module.room for module in modules())
    code: collections.Counter[str] = collections.Counter()
    for module in modules():
        code[module.room] += count_code(module)
    print(f"{'room':<18}{'files':>7}{'code':>8}")
    for room, number in sorted(code.items(), key=lambda item: -item[1]):
        print(f"{room:<18}{rooms[room]:>7}{number:>8}")
    counts, bounds = count(), json.loads(BOUNDS.read_text()) if BOUNDS.is_file() else {}
    print(f"\n{'count':<52}{'now':>8}{'bound':>8}")
    for name, number in counts.items():
        print(f"{name:<52}{number:>8}{bounds.get(name, '-'):>8}")
    print("\nbranches:", ", ".join(f"{kind} {number}" for kind, number in count_branches().items()))
    if options.list:
        print("\ncircles:", *(" ".join(circle) for circle in find_circles()), sep="\n  ")
        print("arrows:", *(f"{name} -> {other}" for name, other in find_arrows_outside()), sep="\n  ")
        print("names:", *count_names(list(modules())))
    if options.trace:
        print(*map(trace, ("step", "request")), sep="\n")
    if options.record:
        lowered = {name: min(number, bounds.get(name, number)) for name, number in counts.items()}
        BOUNDS.write_text(json.dumps(lowered, indent=2) + "\n")
    above = exceed(counts)
    print(*above, sep="\n")
    return bool(above)


if __name__ == "__main__":
    raise SystemExit(main())
