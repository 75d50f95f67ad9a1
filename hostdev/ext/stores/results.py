"""New files and folders in a store. They are written on this machine first, then copied, and removed here."""

import contextlib
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from hostdev.core.addresses import address_of
from hostdev.core.errors import UserError
from hostdev.core.progress import bar
from hostdev.core.workers import call_all
from hostdev.ext.stores.store import Store

_THREADS = 4


def require_new(path: Path, option: str = "--out", manifest: str | None = None) -> None:
    """Raise UserError if something is at the address of a result; return at once if it is a path of this machine.

    Args:
        path: From `address.result_path`.
        option: The command-line option that named it, for messages.
        manifest: The file without which a folder there is incomplete, and is written over.
    """
    address = address_of(path)
    if address is None:
        return
    there = Store(address).list()
    if there if manifest is None else manifest in there:
        raise UserError(f"{option} {address} exists already; remove it or choose another {option}")


def remove_copy(path: Path) -> None:
    """Remove what a killed command has left of a result on this machine, if it is for a store."""
    if address_of(path) is None:
        return
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def send(path: Path, last: str | None = None) -> None:
    """Copy a result to its address, if it has one, and remove it here.

    Args:
        path: From `address.result_path`: a file or a folder.
        last: Files of this name are copied after all others: a folder without them is incomplete for its readers.

    Raises:
        UserError: The store cannot be written.
    """
    address = address_of(path)
    if address is None:
        return
    if path.is_dir():
        put_all(Store(address), path, files_of(path), last)
    else:
        above, _, name = address.rpartition("/")
        Store(above).put(path, name)
    remove_copy(path)


def files_of(folder: Path) -> list[str]:
    """Return the names of the files below a folder, within it, in order."""
    return sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file())


def put_all(
    store: Store,
    folder: Path,
    names: Sequence[str],
    last: str | None = None,
    done: Callable[[str], None] = lambda name: None,
) -> None:
    """Copy files of a folder to a store, several at a time; those named `last` after all others.

    Args:
        store: Where to.
        folder: Where from.
        names: The files, within both.
        last: See `send`.
        done: Called with the name of each file that has been copied, in this thread.
    """
    sizes = {name: (folder / name).stat().st_size for name in names}
    is_last = {name: name == last or name.endswith(f"/{last}") for name in names}
    with bar(sum(sizes.values()), f"copying to {store.shown}", "B", unit_scale=True) as progress:
        for turn in (False, True):
            some = [name for name in names if is_last[name] is turn]
            calls = (partial(store.put, folder / name, name) for name in some)
            for name, _ in zip(some, call_all(_THREADS, "hostdev-upload", calls), strict=True):
                done(name)
                progress.update(sizes[name])
