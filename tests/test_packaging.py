"""The packages of the wheel, and the rooms: which may import which."""

import ast
import collections
import functools
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from setuptools import find_packages

from tests import house
from tests.conftest import ROOT, environment

PLACES = {"hostdev": "hostdev", "models": "hostdev.models", "data": "hostdev.data"}

# The rooms from top to bottom. A room imports those below it, at import time or later.
# Rooms and modules in one entry are one room. An entry need not exist. Other modules beside the rooms are above all.
# The engine imports no extension: tests/house.json bounds how many such imports are left.
ROOMS = [
    ("commands", "__main__", "frameworks", "ext"),
    ("ext.testing",),
    ("ext.verify", "ext.training", "ext.advice", "ext.warm_up"),
    ("ext.launch",),
    ("ext.neighbours",),
    ("ext.serving",),
    ("ext.predict",),
    ("ext.checkpoints",),
    ("ext.streams",),
    ("ext.parallel",),
    ("train",),
    ("ext.report",),
    ("runtime",),
    ("ext.tracking",),
    ("ext.frameworks",),
    ("checkpoint",),
    ("pipeline",),
    ("distributed",),
    ("cache",),
    ("device",),
    ("host",),
    ("ext.stores",),
    ("core", "errors"),
    ("kernels",),
    ("models",),
    ("data",),
]
# Imports against this order. models/ and data/ stand on what all rooms share, and a model says what it asks of tables.
AGAINST = {
    "kernels": {"hostdev.core.machine", "hostdev.core.errors", "hostdev.core.locks", "hostdev.core.signals"},
    "models": {"hostdev.core", "hostdev.runtime.spec"},
    "data": {"hostdev.core", "hostdev.kernels", "hostdev.ext.stores"},
}
# Networks in parts stand on what the ranks share; only this module knows how `hostdev train` uses them.
TRAINED_PARTS = "hostdev.ext.parallel.training"
# Options that several commands have, each with its own meaning. Every other option is added in one place.
SHARED_OPTIONS = {"--out", "--mesh", "--label", "--keep", "--query"}  # --keep keeps checkpoints, or columns of a file

UPPER = ("hostdev.pipeline", "hostdev.runtime", "hostdev.train", "hostdev.checkpoint", "hostdev.ext.predict")


@functools.cache
def modules():
    """Every source file of the package and the name under which it is imported."""
    found = []
    for top, name in PLACES.items():
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            found.append((path, ".".join([name, *parts]).removesuffix(".__init__")))
    return found


@functools.cache
def parse(path):
    return ast.parse(path.read_text())


def room_of(name):
    """Return a module's room: the first part of its name below `hostdev`, or the first two below `hostdev.ext`."""
    parts = f"{name}.".split(".")
    return ".".join(parts[1:3] if parts[1] == "ext" else parts[1:2]).rstrip(".")


@functools.cache
def imports_of(path):
    found = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            found.append(node.module or "")
            found += (f"{node.module}.{alias.name}" for alias in node.names)
    return found


def test_every_package_is_found():
    """`hostdev/models` and `hostdev/data` are links to the folders beside the package."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    present = {name for path, name in modules() if path.name == "__init__.py"}
    assert set(find_packages(ROOT, include=wanted)) == present
    folders = {path.parent for path, _ in modules()}
    assert all((folder / "__init__.py").is_file() for folder in folders)
    for name in ("models", "data"):
        assert (ROOT / "hostdev" / name).readlink() == Path("..", name)


def test_a_module_has_one_name(tmp_path):
    """`hostdev.hostdev.core.errors` would be a second module, with another `UserError`."""
    code = (
        "import hostdev, importlib.util as util\n"
        "assert util.find_spec('hostdev.hostdev') is None and util.find_spec('hostdev.tests') is None\n"
        "assert util.find_spec('hostdev.data.schema') and util.find_spec('hostdev.models.registry')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment(tmp_path))


@pytest.mark.parametrize(
    ("layer", "forbidden"),
    [
        ("hostdev.kernels", ("torch", "hostdev.host", "hostdev.device", "hostdev.data", "hostdev.models", "pyarrow")),
        ("hostdev.core", ("hostdev.host", "hostdev.cache", "hostdev.device", "hostdev.data", "hostdev.models", *UPPER)),
        ("hostdev.host", ("torch", "hostdev.device", "hostdev.data", "hostdev.models", "pyarrow")),
        ("hostdev.device", ("hostdev.host", "hostdev.data", "hostdev.models", "hostdev.cache", "pyarrow", *UPPER)),
        ("hostdev.cache", ("hostdev.host", "hostdev.data", "hostdev.models", "pyarrow", *UPPER)),
        ("hostdev.distributed", ("hostdev.ext.parallel", "hostdev.data", "hostdev.models", "pyarrow", *UPPER)),
        ("hostdev.ext.parallel", ("hostdev.data", "hostdev.models", "pyarrow", *UPPER)),
        ("hostdev.pipeline", ("hostdev.data", "hostdev.models", "hostdev.runtime", "hostdev.train", "pyarrow")),
        ("hostdev.runtime", ("hostdev.data", "hostdev.models", "hostdev.train", "pyarrow")),
        (
            "hostdev.checkpoint",
            (
                "hostdev.data",
                "hostdev.models",
                "hostdev.pipeline",
                "hostdev.runtime",
                "hostdev.train",
                "hostdev.device",
                "hostdev.ext.predict",
            ),
        ),
        (
            "hostdev.ext.predict",
            ("hostdev.host", "hostdev.pipeline", "hostdev.runtime.runtime", "hostdev.train.session"),
        ),
        ("hostdev.data", ("torch", "hostdev.host", "hostdev.device", "hostdev.models")),
        ("hostdev.models", ("hostdev.host", "hostdev.device", "hostdev.pipeline", "hostdev.data.shards")),
    ],
)
def test_arrows_point_one_way(layer, forbidden):
    seen = 0
    for path, name in modules():
        if not (name == layer or name.startswith(layer + ".")) or name == TRAINED_PARTS:
            continue
        seen += 1
        for imported in imports_of(path):
            wrong = [other for other in forbidden if imported == other or imported.startswith(other + ".")]
            assert not wrong, f"{path} imports {imported}"
    assert seen > 1


def is_in(name, places):
    return any(name == place or name.startswith(f"{place}.") for place in places)


def test_no_arrow_points_up():
    level = {room: number for number, entry in enumerate(ROOMS) for room in entry}
    found = {name for _, name in modules()}
    unknown = {room_of(name) for path, name in modules() if path.name == "__init__.py"} - {""} - level.keys()
    assert not unknown, f"rooms that are not in ROOMS: {unknown}"
    level |= {room_of(name): -1 for name in found if room_of(name) not in level}
    for path, name in modules():
        for other in imports_of(path):
            if other in found and name != "hostdev" and other != "hostdev":
                ours, theirs = room_of(name), room_of(other)
                if theirs.startswith("ext.") and not ours.startswith("ext.") and level[ours] >= 0:
                    continue  # by the engine: tests/house.py counts these, and none may be added
                allowed = level[ours] <= level[theirs] or is_in(other, AGAINST.get(ours, ()))
                assert allowed, f"{path} imports {other}, which is above it"


def test_the_tree_in_the_documents_is_current():
    """`python -m docs.tree` writes docs/tree.md, the engine from top to bottom."""
    tree = load_site("tree")
    assert tree.PAGE.read_text() == tree.make_page(), "run python -m docs.tree"
    rooms = [folder.rpartition("/")[2] for folder in tree.ENGINE]
    assert sorted(rooms) == sorted(house.ENGINE)
    level = {room: number for number, entry in enumerate(ROOMS) for room in entry}
    assert [level[room] for room in rooms] == sorted(level[room] for room in rooms)


def imported_at_once(body):
    """Yield the import statements that run when a module is imported: not those in functions or for type checkers."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            yield from imported_at_once(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "finalbody", "handlers"):
                yield from imported_at_once(getattr(node, field, None) or [])


def test_no_circle_of_imports():
    found = {name for _, name in modules()}
    needs = collections.defaultdict(set)
    for path, name in modules():
        for node in imported_at_once(parse(path).body):
            if isinstance(node, ast.Import):
                needs[name] |= {alias.name for alias in node.names} & found
                continue
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            needs[name] |= parts & found
            if not parts <= found and node.module in found:
                needs[name].add(node.module)
    left = set(found)
    while ready := {name for name in left if not (needs[name] - {name}) & left}:
        left -= ready
    assert not left, f"circles of imports among {sorted(left)}"


def load_site(name="site"):
    """Return docs/site.py, or another file of docs/, as a module; docs/ is no package."""
    spec = importlib.util.spec_from_file_location(f"{name}_of_docs", ROOT / f"docs/{name}.py")
    site = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(site)
    return site


def test_the_documents_name_files_that_exist():
    pages = [*(ROOT / "docs/internals").glob("*.md"), *(ROOT / f"docs/{name}.md" for name in ("dataflow", "doors"))]
    named = {
        (page, file) for page in [*pages, ROOT / "docs/tree.md", ROOT / "CONTRIBUTING.md"] for file in files_in(page)
    }
    gone = {
        f"{page.name}: {file}"
        for page, file in named
        if not any((ROOT / top / file).exists() for top in ("", "hostdev"))
    }
    assert not gone


def test_the_documents_import_names_that_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    pages = [page for page in pages if "log" not in page.relative_to(ROOT).parts and page.name != "log.md"]
    found = {
        line
        for page in pages
        for line in re.findall(r"^ *(from hostdev[\w.]* import [\w, ]+)$", page.read_text(), re.M)
    }
    assert found
    for line in sorted(found):
        exec(line.strip(), {})


def files_in(page):
    return re.findall(r"(?:\w+/)+[a-z0-9_]+\.py\b", page.read_text())


def test_the_picture_of_a_batch_is_drawn_by_its_script():
    picture = load_site("batch")
    assert picture.PICTURE.read_text() == picture.draw(), "run python docs/batch.py"


def test_cells_of_tables_have_their_columns_names():
    page = "<table><thead><tr><th>a <b>b</b></th><th>c</th></tr></thead><tr><td>1</td><td>2</td></tr></table><td>"
    found = load_site().on_page_content(page)
    assert found.endswith('<tr><td data-label="a b">1</td><td data-label="c">2</td></tr></table><td>')


def test_pages_list_no_private_names():
    """Those that optimizers inherit were listed: without members, all that are inherited were shown."""
    site = load_site()
    with pytest.raises(Exception, match=r"private names are listed: hostdev\.Adagrad\._within"):
        site.on_page_content('<h3 id="hostdev.Adagrad._within">_within</h3>')
    assert site.on_page_content('<h3 id="hostdev.Adagrad">Adagrad</h3>').startswith("<h3")
    assert site.on_page_content("<p>With g::</p>\n<p>::</p>\n<pre>") == "<p>With g:</p>\n<pre>"


ROOMS_OF_NAMES = ["distributed", "errors", "frameworks", "ops", "parallel", "testing", "tracking"]


def test_every_public_name_and_option_is_in_the_reference(monkeypatch):
    """The pages' marks are filled in from the sources; `make docs` fails if a name has no documentation."""
    import hostdev
    from hostdev import commands

    monkeypatch.setenv("COLUMNS", "100")
    site = load_site()
    pages = [path.read_text() for path in (ROOT / "docs/reference").glob("*.md")]
    shown = "\n".join(site.on_page_markdown(page) for page in pages)
    names = [f"hostdev.{name}" for name in hostdev.__all__ if not isinstance(getattr(hostdev, name), ModuleType)]
    rooms = [getattr(hostdev, name) for name in hostdev.__all__ if f"hostdev.{name}" not in names]
    assert sorted(room.__name__ for room in rooms) == [f"hostdev.{name}" for name in ROOMS_OF_NAMES]
    names += [f"{room.__name__}.{name}" for room in rooms for name in room.__all__]
    assert [name for name in names if f"\n::: {name}\n" not in f"{shown}\n"] == []
    assert all(f"## hostdev {name}\n" in shown for name in commands.names())
    assert [option for option in options() if not re.search(rf"{option}\b", shown)] == []


def test_the_page_of_names_lists_what_a_program_calls():
    """The first names come first; members that the engine alone calls are left out, by names that exist."""
    import hostdev

    site = load_site()
    assert re.findall(r"^::: hostdev\.(\w+)$", site.names(), re.M)[: len(site._FIRST)] == [*site._FIRST]
    filters = re.search(r"filters: (\[.*\])", (ROOT / "mkdocs.yml").read_text())[1]
    hidden = [re.compile(each.removeprefix("!")) for each in ast.literal_eval(filters)]
    members = {
        name
        for room in [hostdev, *(getattr(hostdev, name) for name in ROOMS_OF_NAMES)]
        for one in map(room.__dict__.get, room.__all__)
        if isinstance(one, type)
        for name in dir(one)
    }
    (by_name,) = [each.pattern for each in hidden if each.pattern.startswith("^(")]
    assert set(by_name.strip("^()$").split("|")) <= members
    shown = {name for name in dir(hostdev.HostTable) if not any(each.search(name) for each in hidden)}
    assert {"apply", "lookup", "update", "writing", "weights", "step"} <= shown
    assert not shown & {"find_ids", "rows_at", "begin_load", "describe_size", "begin_snapshot", "storage", "adopt"}


def options():
    """Return how often each option of a command line is added in the sources; hidden ones are left out."""
    count = collections.Counter()
    for path, _ in modules():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
                if "SUPPRESS" not in ast.dump(node):
                    count.update(text for text in texts if isinstance(text, str) and text.startswith("--"))
    return count


def test_every_option_is_added_once():
    several = {option for option, count in options().items() if count > 1}
    assert several <= SHARED_OPTIONS


def test_nothing_imports_the_command_lines():
    for path, name in modules():
        if not name.startswith("hostdev.commands") and name != "hostdev.__main__":
            wrong = [other for other in imports_of(path) if other.startswith("hostdev.commands")]
            assert not wrong, f"{path} imports {wrong}"


def test_a_model_needs_little():
    """A model imports what a user's own model needs: torch, optimizers, initial values, specs and columns."""
    needed = ("hostdev.core", "hostdev.runtime.spec", "hostdev.data.schema", "hostdev.models")
    for path, name in modules():
        if name == "hostdev.models" or name.startswith("hostdev.models."):
            own = [other for other in imports_of(path) if other.startswith("hostdev")]
            assert all(f"{other}.".startswith(tuple(f"{place}." for place in needed)) for other in own), (path, own)


def test_tables_and_preprocessing_run_without_torch(tmp_path):
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import numpy as np, hostdev, hostdev.data.preprocess.command\n"
        "table = hostdev.HostTable(5, 2, hostdev.LazyAdam(), name='t')\n"
        "table.apply([1, 1], np.ones((2, 2), np.float32))\n"
        "hostdev.ops.EmbeddingLookup(); hostdev.ops.ParameterServer()\n"
        "from hostdev.cache.planner import warm_up; warm_up(np.int64)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment(tmp_path))


def test_files_stay_readable():
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path, _ in modules()}
    assert max(lengths.values()) <= 500, lengths


def test_versions_agree():
    import hostdev

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == hostdev.__version__
    pinned = {line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert {requirement.split(";")[0].split(">=")[0].split("[")[0] for requirement in wanted} <= pinned
