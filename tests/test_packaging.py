"""The packages of the wheel, and the layers: who may import whom."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_packages

from tests.conftest import ROOT, environment

PLACES = {"hostdev": "hostdev", "models": "hostdev.models", "data": "hostdev.data"}


UPPER = ("hostdev.pipeline", "hostdev.runtime", "hostdev.train", "hostdev.checkpoint", "hostdev.predict")


def modules():
    """Every source file of the package and the name under which it is imported."""
    for top, name in PLACES.items():
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT / top).with_suffix("").parts
            yield path, ".".join([name, *parts]).removesuffix(".__init__")


def imports_of(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: absolute imports only"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
    """`hostdev.hostdev.core.errors` was another module, with another `UserError`."""
    code = (
        "import hostdev, importlib.util as util\n"
        "assert util.find_spec('hostdev.hostdev') is None and util.find_spec('hostdev.tests') is None\n"
        "assert util.find_spec('hostdev.data.schema') and util.find_spec('hostdev.models.registry')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment(tmp_path))


@pytest.mark.parametrize(("layer", "forbidden"), [
    ("hostdev.kernels", ("torch", "hostdev.host", "hostdev.device", "hostdev.data", "hostdev.models", "pyarrow")),
    ("hostdev.core", ("hostdev.host", "hostdev.cache", "hostdev.device", "hostdev.data", "hostdev.models", *UPPER)),
    ("hostdev.host", ("torch", "hostdev.device", "hostdev.data", "hostdev.models", "pyarrow")),
    ("hostdev.device", ("hostdev.host", "hostdev.data", "hostdev.models", "hostdev.cache", "pyarrow", *UPPER)),
    ("hostdev.cache", ("hostdev.host", "hostdev.data", "hostdev.models", "pyarrow", *UPPER)),
    ("hostdev.distributed", ("hostdev.parallel", "hostdev.data", "hostdev.models", "pyarrow", *UPPER)),
    ("hostdev.parallel", ("hostdev.data", "hostdev.models", "pyarrow", *UPPER)),
    ("hostdev.pipeline", ("hostdev.data", "hostdev.models", "hostdev.runtime", "hostdev.train", "pyarrow")),
    ("hostdev.runtime", ("hostdev.data", "hostdev.models", "hostdev.train", "pyarrow")),
    ("hostdev.checkpoint", ("hostdev.data", "hostdev.models", "hostdev.pipeline", "hostdev.runtime", "hostdev.train",
                            "hostdev.device", "hostdev.predict")),
    ("hostdev.predict", ("hostdev.host", "hostdev.pipeline", "hostdev.runtime.runtime", "hostdev.train.run")),
    ("hostdev.data", ("torch", "hostdev.host", "hostdev.device", "hostdev.models")),
    ("hostdev.models", ("hostdev.host", "hostdev.device", "hostdev.pipeline", "hostdev.data.shards")),
])  # fmt: skip
def test_arrows_point_one_way(layer, forbidden):
    seen = 0
    for path, name in modules():
        if not (name == layer or name.startswith(layer + ".")):
            continue
        seen += 1
        for imported in imports_of(path):
            wrong = [other for other in forbidden if imported == other or imported.startswith(other + ".")]
            assert not wrong, f"{path} imports {imported}"
    assert seen > 1


def test_nothing_imports_the_command_lines():
    for path, name in modules():
        if not name.startswith("hostdev.commands") and name != "hostdev.__main__":
            wrong = [other for other in imports_of(path) if other.startswith("hostdev.commands")]
            assert not wrong, f"{path} imports {wrong}"


def test_a_model_needs_little():
    """What a model of one's own needs, too: torch, optimizers and initial values, what it asks for, and the columns."""
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
        "hostdev.EmbeddingLookup(); hostdev.ParameterServer()\n"
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
