"""Check of a store."""

import contextlib
import os
import tempfile
from pathlib import Path

from hostdev.core.stores import Store, StoreBackend


def check_store(address: str) -> None:
    """Check a kind of store: files are written, replaced, listed, read, compared, copied and removed.

    Args:
        address: The address of a folder that is empty, and will be so again, such as "mystore://BUCKET/FOLDER".

    Raises:
        AssertionError: A promise is broken. Exceptions of the store are raised unchanged.
    """
    store = Store(address)
    backend = store.backend
    assert backend.list("") == {} and backend.list("b") == {}, f"{address} must be empty: its list must be {{}}"
    with tempfile.TemporaryDirectory() as folder:
        path, versions = Path(folder) / "file", set()
        for content in (b"", b"content", os.urandom(1 << 16)):
            path.write_bytes(content)
            for name in ("a", "b/c"):
                backend.put(path, name)
                about = backend.about(name)
                assert about is not None, f"about({name!r}) must not be None once the file was put"
                assert about.size == len(content), f"about({name!r}).size is {about.size}, not {len(content)}"
                assert backend.read(name) == content, f"read({name!r}) is not what was put"
                assert not content or backend.read(name, 2, 5) == content[2:5], f"read({name!r}, 2, 5) has other bytes"
                assert store.compare(name, path) is not None, f"about({name!r}).md5 is that of other bytes"
                versions.add((name, about.version))
        assert len(versions) == 6, "about(NAME).version must be another once a file is replaced"
        backend.copy("b/c", "d")
        assert backend.read("d") == content, "copy makes a file with other bytes"
    sizes = {name: about.size for name, about in backend.list("").items()}
    assert sizes == dict.fromkeys(["a", "b/c", "d"], len(content)), f"list('') has {sizes}"
    assert list(backend.list("b")) == ["c"], f"list('b') has {list(backend.list('b'))}, not 'c', its name in the folder"
    for name in sizes:
        backend.remove(name)
        assert backend.about(name) is None, f"about({name!r}) must be None once the file is removed"
        with contextlib.suppress(FileNotFoundError):
            backend.read(name)
            raise AssertionError(f"read({name!r}) must raise FileNotFoundError once the file is removed")
    _check_errors(backend)


def _check_errors(backend: StoreBackend) -> None:
    for error, is_transient in ((ConnectionError("reset"), True), (FileNotFoundError("none"), False)):
        assert backend.is_transient(error) is is_transient, f"is_transient({error!r}) must be {is_transient}"
        assert str(error) in backend.describe(error), f"describe({error!r}) must contain its text"
