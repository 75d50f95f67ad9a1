"""Write the modules of docs/tree.md from their docstrings: python -m docs.tree."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PAGE = Path(__file__).with_name("tree.md")
ROOT = PAGE.parent.parent
MARK = "<!-- `python -m docs.tree` writes the rest of this page -->"
ENGINE = (  # from top to bottom, as ROOMS of tests/test_packaging.py
    *("hostdev/train", "hostdev/runtime", "hostdev/checkpoint", "hostdev/pipeline", "hostdev/distributed"),
    *("hostdev/cache", "hostdev/device", "hostdev/host", "hostdev/core", "hostdev/kernels", "models", "data"),
)
PREPARATION = "data/preprocess"


def describe(path: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0].split())
    sentence = re.match(r".*?\.(?= [A-Z`\"-]|$)", text)
    return (sentence[0] if sentence else text).removesuffix(".")


def find_folders(folder: str) -> Iterator[Path]:
    """Yield a folder and those below it that hold modules, except the preparation of data if it is not asked for."""
    for path in sorted({path.parent for path in (ROOT / folder).rglob("*.py")}):
        if folder == PREPARATION or not path.is_relative_to(ROOT / PREPARATION):
            yield path


def list_modules(folder: Path) -> str:
    """Return a folder's heading, what it is for, and a line for each of its modules."""
    names = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
    about = describe(folder / "__init__.py") if (folder / "__init__.py").exists() else ""
    lines = [f"- `{path.name}`: {describe(path)}" for path in names]
    return "\n\n".join(part for part in (f"### {folder.relative_to(ROOT)}/", about, "\n".join(lines)) if part)


def make_list() -> str:
    """Return the generated part of the page."""
    fronts = sorted((ROOT / "hostdev").glob("*.py"))
    parts = ["## Engine", *(list_modules(path) for folder in ENGINE for path in find_folders(folder)), "## Extensions"]
    parts += [list_modules(path) for path in find_folders("hostdev/ext")]
    parts += [list_modules(path) for path in find_folders(PREPARATION)]
    parts += [
        "## Commands and public names",
        "\n".join(f"- `hostdev/{path.name}`: {describe(path)}" for path in fronts),
    ]
    parts += [list_modules(path) for path in find_folders("hostdev/commands")]
    return "\n\n".join(parts) + "\n"


def make_page() -> str:
    """Return docs/tree.md: what was written by hand, and the modules."""
    return f"{PAGE.read_text().partition(MARK)[0]}{MARK}\n\n{make_list()}"


if __name__ == "__main__":
    PAGE.write_text(make_page())
