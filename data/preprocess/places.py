"""Where the files with raw rows are: paths of this machine, or those of `source_path` for files in a store."""

import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa

from hostdev.core.addresses import address_of, shown_place
from hostdev.core.errors import UserError
from hostdev.ext.stores import files


def is_file(path: Path) -> bool:
    """Return whether there is a file."""
    return path.is_file() if address_of(path) is None else files.about(path) is not None


def is_folder(path: Path) -> bool:
    """Return whether there is a folder; in a store, one that has files."""
    return path.is_dir() if address_of(path) is None else bool(files.names_below(path))


def files_below(path: Path) -> list[Path]:
    """Return the files below a folder in a store."""
    return [path / name for name in files.names_below(path)]


def stamp(path: Path) -> tuple[int, Any]:
    """Return a file's size, and its modification time or what else differs if it is replaced."""
    if address_of(path) is None:
        found = path.stat()
        return found.st_size, found.st_mtime_ns
    about = files.about(path)
    if about is None:
        raise UserError(f"{shown_place(path)}: no such file")
    return about.size, about.version


def whole_path(path: Path) -> str:
    """Return a file's absolute path, or its address."""
    return address_of(path) or str(path.resolve())


def open_bytes(path: Path, *, buffered: bool = True) -> BinaryIO:
    """Open a file for reading."""
    if address_of(path) is None:
        return path.open("rb", buffering=-1 if buffered else 0)
    file = files.StoreFile(path, stamp(path)[0])
    return cast(BinaryIO, io.BufferedReader(file) if buffered else file)


def open_arrow(path: Path, *, mapped: bool = False) -> Any:
    """Open a file as Arrow's readers take it; `mapped` maps one of this machine into memory."""
    if address_of(path) is not None:
        return pa.PythonFile(open_bytes(path), mode="r")
    return pa.memory_map(os.fsencode(path)) if mapped else pa.OSFile(os.fsencode(path))


def identities(paths: list[Path]) -> Iterator[tuple[Path, Any]]:
    """Yield the files that are there, each with a value that is the same for the same file under another name."""
    for path in paths:
        if (address := address_of(path)) is not None:
            yield path, address
        elif path.exists():
            found = path.stat()
            yield path, (found.st_dev, found.st_ino)
