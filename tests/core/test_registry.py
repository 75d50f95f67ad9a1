import sys
import tomllib

import pytest

from hostdev.core import registry
from hostdev.core.errors import UserError
from tests.conftest import ROOT


@pytest.fixture
def install(tmp_path, monkeypatch):
    """A function that installs a package with entry points of the kind "thing"."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(package, source="", **entries):
        (tmp_path / f"{package}_module.py").write_text(source)
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}_module:{attribute}" for name, attribute in entries.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[hostdev.thing]", *lines, ""]))
        registry.clear()

    yield write
    registry.clear()
    for name in [name for name in sys.modules if name.endswith("_module")]:
        if getattr(sys.modules[name], "__file__", "").startswith(str(tmp_path)):
            del sys.modules[name]


def test_a_package_registers_things(install):
    install("one", "Lamp = 'lamp'\n", lamp="Lamp")
    install("two", "Table = 'table'\n", table="Table")
    assert registry.names("thing") == ["lamp", "table"]
    assert registry.find("thing", "lamp") == "lamp"
    assert registry.find("thing", "table") == "table"
    assert registry.names("other") == []


def test_names_imports_nothing_and_find_imports_once(install):
    install("one", "raise RuntimeError('imported')\n", lamp="Lamp")
    assert registry.names("thing") == ["lamp"]
    with pytest.raises(RuntimeError, match="imported"):  # an error of the module itself is raised unchanged
        registry.find("thing", "lamp")
    install("two", "Chair = object()\n", chair="Chair")
    assert registry.find("thing", "chair") is registry.find("thing", "chair")


def test_an_unknown_name(install):
    with pytest.raises(UserError, match=r"there is no thing 'lamp'; no installed package .* hostdev\.thing"):
        registry.find("thing", "lamp")
    install("one", "", lamp="Lamp", table="Table")
    with pytest.raises(UserError, match=r"there is no thing 'lmap'; did you mean lamp\?"):
        registry.find("thing", "lmap")
    with pytest.raises(UserError, match="choose one of lamp, table"):
        registry.find("thing", "xyz")


def test_a_name_of_two_packages(install):
    install("one", "Lamp = 1\n", lamp="Lamp")
    install("two", "Lamp = 2\n", lamp="Lamp")
    assert registry.names("thing") == ["lamp"]
    with pytest.raises(UserError, match=r"(one and two|two and one) both register a thing 'lamp'"):
        registry.find("thing", "lamp")


@pytest.mark.parametrize(
    ("source", "problem"), [("import nowhere_at_all\n", "nowhere_at_all"), ("Chair = 1\n", "Lamp"), (None, "module")]
)
def test_what_cannot_be_imported(install, tmp_path, source, problem):
    install("one", source or "", lamp="Lamp")
    if source is None:
        (tmp_path / "one_module.py").unlink()
    with pytest.raises(UserError, match=rf"thing 'lamp' of one, one_module:Lamp, cannot be imported: .*{problem}"):
        registry.find("thing", "lamp")


def test_sources_are_newer_than_the_installed_package(install, tmp_path, monkeypatch):
    """In a source tree our own table is pyproject.toml's, whatever was installed from an earlier one."""
    install("hostdev", "Old = 'old'\n", old="Old")
    install("one", "Lamp = 'lamp'\nNew = 'new'\n", lamp="Lamp")
    project = tmp_path / "pyproject.toml"
    monkeypatch.setattr(registry, "_SOURCES", project)
    assert registry.names("thing") == ["lamp", "old"]
    project.write_text('[project]\nname = "hostdev"\n[project.entry-points."hostdev.thing"]\nnew = "one_module:New"\n')
    registry.clear()
    assert registry.names("thing") == ["lamp", "new"]
    assert registry.find("thing", "new") == "new"
    project.write_text(project.read_text().replace('"hostdev"', '"another"'))
    registry.clear()
    assert registry.names("thing") == ["lamp", "old"]


def test_the_sources_are_this_repository(install):
    assert ROOT / "pyproject.toml" == registry._SOURCES


def test_every_entry_of_ours_can_be_imported():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("entry-points", {})
    for group in groups:
        kind = group.removeprefix("hostdev.")
        for name in registry.names(kind):
            registry.find(kind, name)
