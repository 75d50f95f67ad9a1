"""A store of a stranger's package, which registers a class for a URL scheme of its own."""

from hashlib import sha256
from pathlib import Path

import pytest

from hostdev.core import registry, stores
from hostdev.core.addresses import result_path
from hostdev.core.errors import StoreError, UserError
from hostdev.core.stores import About, Store
from hostdev.core.sync import KeptFiles, sending
from hostdev.ext.testing import check_store

ROOT = Path(__file__).parents[2]

SOURCE = """
from hostdev.core.stores import About, StoreBackend

FILES, ERRORS = {}, []


class Shelf(StoreBackend):
    def __init__(self, address):
        self._root = address.partition("://")[2]

    def _path(self, name):
        if ERRORS:
            raise ERRORS.pop()
        return f"{self._root}/{name}"

    def about(self, name):
        content = FILES.get(self._path(name))
        return None if content is None else About(len(content), str(hash(content)))

    def list(self, name):
        below = self._path(name).rstrip("/") + "/"
        return {path.removeprefix(below): About(len(FILES[path]), "") for path in FILES if path.startswith(below)}

    def read(self, name, start=0, stop=None):
        path = self._path(name)
        if path not in FILES:
            raise FileNotFoundError(path)
        return FILES[path][start:stop]

    def put(self, path, name):
        FILES[self._path(name)] = path.read_bytes()

    def copy(self, source, name):
        FILES[self._path(name)] = FILES[self._path(source)]

    def remove(self, name):
        if self._path(name) not in FILES:
            raise FileNotFoundError(name)
        del FILES[self._path(name)]
"""


@pytest.fixture
def shelf(tmp_path, monkeypatch):
    """The module of an installed package with a store for addresses such as shelf://A/B."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "shelf_store.py").write_text(SOURCE)
    folder = tmp_path / "shelf-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[hostdev.store]\nshelf = shelf_store:Shelf\n")
    monkeypatch.setattr(stores, "_PAUSES", (0.001, 0.01))
    monkeypatch.setenv("HOSTDEV_STORE_CACHE", str(tmp_path / "copies"))
    registry.clear()
    import shelf_store

    yield shelf_store
    registry.clear()
    shelf_store.FILES.clear()
    shelf_store.ERRORS.clear()


def test_a_store_of_a_package(shelf, tmp_path):
    store, path = Store("shelf://a/b/"), tmp_path / "file"
    path.write_bytes(b"content")
    assert store.put(path, "x/y").size == 7
    store.copy("x/y", "z")
    assert sorted(store.list()) == ["x/y", "z"] and list(store.list("x")) == ["y"]
    assert store.read("z") == b"content" and store.read_range("z", 1, 3) == b"on"
    assert store.compare("z", path) is not None
    store.write("z", b"CONTENT")
    assert store.compare("z", path) is None
    store.remove("z")
    store.remove("z")
    assert store.read_if_there("z") is None and store.about("z") is None
    assert KeptFiles().get(store, "x/y", sha256(b"content").hexdigest()).read_bytes() == b"content"


@pytest.mark.parametrize("address", ["shelf://checked/x", "memory://checked/x"])
def test_it_passes_the_check(shelf, address):
    check_store(address)
    check_store(address)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("about", "size is"),
        ("read", "is not what was put"),
        ("list", "must be empty"),
        ("copy", "other bytes"),
        ("remove", "must be None"),
        ("is_transient", "is_transient"),
        ("describe", "must contain"),
    ],
)
def test_the_check_notices_what_is_wrong(shelf, monkeypatch, method, message):
    wrong = {"about": About(1, ""), "read": b"other", "list": {"x": About(1, "")}, "is_transient": True, "describe": ""}
    monkeypatch.setattr(shelf.Shelf, method, lambda *_: wrong.get(method))
    if method == "copy":
        monkeypatch.setattr(shelf.Shelf, method, lambda self, source, name: self.put(ROOT / "pyproject.toml", name))
    with pytest.raises(AssertionError, match=message):
        check_store("shelf://checked/x")


def test_its_errors_are_those_of_every_store(shelf, tmp_path):
    store = Store("shelf://a")
    store.write("x", b"content")
    shelf.ERRORS += [ConnectionError("reset"), TimeoutError("slow")]
    assert store.read("x") == b"content" and not shelf.ERRORS
    shelf.ERRORS.append(PermissionError("shelf://me:secret@a is locked"))
    with pytest.raises(StoreError, match=r"shelf://a/x: no permission \(shelf://a is locked\)"):
        store.read("x")
    with pytest.raises(StoreError, match="shelf://a/y: there is no such file or bucket"):
        store.fetch("y", tmp_path / "y")
    shelf.ERRORS.append(ValueError("not transient by default"))
    with pytest.raises(StoreError, match="shelf://a/x: not transient by default"):
        store.read("x")


def test_results_are_sent_to_it_once_they_are_complete(shelf):
    out = result_path("shelf://a/out")
    with sending(out, "manifest.json"):
        (out / "part").mkdir(parents=True)
        (out / "part/rows").write_bytes(b"rows")
        (out / "manifest.json").write_bytes(b"{}")
        assert not shelf.FILES
    assert shelf.FILES == {"a/out/part/rows": b"rows", "a/out/manifest.json": b"{}"}
    assert list(shelf.FILES)[-1] == "a/out/manifest.json"
    assert not out.exists()
    with pytest.raises(UserError, match="--out shelf://a/out exists already"), sending(out):
        raise AssertionError
