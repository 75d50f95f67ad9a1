"""Copying of files to a store, and results that are written on this machine first, then copied there."""

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from hostdev.core.addresses import address_of
from hostdev.core.errors import UserError
from hostdev.core.progress import bar
from hostdev.core.stores import Store
from hostdev.core.workers import call_all

_THREADS = 4


def require_new(path: Path, manifest: str | None = None) -> None:
    """Raise UserError if a store has something at the address of a result; a path of this machine is not checked.

    Args:
        path: From `address.result_path`.
        manifest: The file without which a folder there is incomplete, and is written over.
    """
    address = address_of(path)
    if address is None:
        return
    there = Store(address).list()
    if there if manifest is None else manifest in there:
        raise UserError(f"--out {address} exists already; remove it or choose another --out")


@contextmanager
def sending(path: Path, manifest: str | None = None) -> Iterator[None]:
    """Copy a file or folder that the block creates to its address, if it has one, and remove it from this machine.

    Args:
        path: From `address.result_path`.
        manifest: See `sync`.

    Raises:
        UserError: The store has something at the address, or cannot be written.
    """
    address = address_of(path)
    if address is None:
        yield
        return
    require_new(path)
    _remove(path)  # left by a killed command
    yield
    if path.is_dir():
        sync(path, Store(address), list_files(path), manifest)
    else:
        above, _, name = address.rpartition("/")
        Store(above).put(path, name)
    _remove(path)


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def list_files(folder: Path) -> list[str]:
    """Return the names of the files below a folder, within it, in order."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def sync(
    folder: Path,
    store: Store,
    names: Sequence[str],
    manifest: str | None = None,
    done: Callable[[str], None] = lambda name: None,
) -> None:
    """Copy files of a folder to a store, several at a time.

    Args:
        folder: The source.
        store: The target.
        names: The files, within both.
        manifest: Files of this name are copied after all others: a folder without them is incomplete for its readers.
        done: Called with the name of each file that has been copied, in this thread.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    is_last = {name: name == manifest or name.endswith(f"/{manifest}") for name in names}
    with bar(sum(sizes.values()), f"copying to {store.shown}", "B", unit_scale=True) as progress:
        for turn in (False, True):
            some = [name for name in names if is_last[name] is turn]
            calls = (partial(store.put, folder / name, name) for name in some)
            for name, _ in zip(some, call_all(_THREADS, "hostdev-upload", calls), strict=True):
                done(name)
                progress.update(sizes[name])
