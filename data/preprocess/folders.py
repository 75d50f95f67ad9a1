"""Expansion of a command's paths to input files: files, folders, standard input."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hostdev.core.addresses import address_of, shown_place
from hostdev.core.errors import UserError
from hostdev.core.progress import note
from hostdev.data.preprocess import places
from hostdev.data.preprocess.inputs import COMPRESSED, STANDARD_INPUT, is_empty, refuse_unread

_START_BYTES = 512
_NAMED = 3  # maximum files named in a message


def expand(paths: Sequence[Path], is_taken: Callable[[Path, bytes], bool] | None = None) -> list[Path]:
    """Return the files of the paths; a folder's files are sorted by name, and by number where names have numbers.

    `is_taken(path, first_bytes)` selects a folder's files; None selects all. Hidden files and names with a leading
    underscore, which other programs use internally, are skipped silently; a note names other skipped files.

    Raises:
        UserError: A folder has two forms of the same file (plain and compressed), a file with an unsupported
            compression, or no readable file; or standard input is named twice.
    """
    found: list[Path] = []
    for path in paths:
        found += _inside(path, is_taken) if path != STANDARD_INPUT and places.is_folder(path) else [path]
    _check_repeated(found)
    return found


def _inside(top: Path, is_taken: Callable[[Path, bytes], bool] | None) -> list[Path]:
    """Return the files to read in a folder."""
    taken: list[Path] = []
    empty: list[Path] = []
    others: list[Path] = []
    for file in sorted(_files(top), key=lambda file: order_by_name(str(file.relative_to(top)))):
        if is_taken is None or is_taken(file, _start(file)):
            (empty if is_empty(file) else taken).append(file)
        else:
            refuse_unread(file, _start(file))
            others.append(file)
    if not taken:
        left = f"; it has {_listed(others, top)}, which are read only if you name them" if others else ""
        raise UserError(f"{shown_place(top)}: the folder has no readable file{left}")
    _refuse_two_forms(taken)
    if empty:
        note(f"skipped in {shown_place(top)} as empty: {_listed(empty, top)}")
    if others:
        note(
            f"skipped in {shown_place(top)}, because neither name nor content is a table's: {_listed(others, top)}; to "
            "read one, name it"
        )
    return taken


def _files(top: Path) -> Iterator[Path]:
    """Yield the files of a folder tree. Links are followed, but each folder is visited only once."""
    if address_of(top) is not None:
        below = (file.relative_to(top).parts for file in places.files_below(top))
        yield from (top.joinpath(*parts) for parts in below if not any(map(_is_hidden, parts)))
        return
    seen = {_identity(top)}
    for folder, folders, names in os.walk(top, onerror=_raise, followlinks=True):
        inside = [Path(folder) / name for name in sorted(folders) if not _is_hidden(name)]
        folders.clear()
        for path in inside:  # links can form cycles
            if (identity := _identity(path)) not in seen:
                seen.add(identity)
                folders.append(path.name)
        yield from (Path(folder) / name for name in names if not _is_hidden(name))


def _raise(error: OSError) -> None:
    raise error


def _identity(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def _is_hidden(name: str) -> bool:
    return name.startswith((".", "_"))


def order_by_name(name: str) -> tuple[list[tuple[int, str]], str]:
    """Return a sort key that puts day_2 before day_10; if only leading zeros differ, names are ordered as text."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts if part], name


def _start(file: Path) -> bytes:
    """Return a file's first bytes; return no bytes for a pipe, which can be read only once."""
    if not places.is_file(file):
        return b""
    with places.open_bytes(file) as source:
        return source.read(_START_BYTES)


def _refuse_two_forms(files: Sequence[Path]) -> None:
    """Raise UserError if a folder has the same file plain and compressed, or in two compressed forms."""
    seen: dict[Path, Path] = {}
    for file in files:
        plain = file.with_suffix("") if file.suffix.lower() in COMPRESSED else file
        first = seen.setdefault(plain, file)
        if first != file:
            raise UserError(
                f"{first} and {file} have the same rows, judging by their names; remove one of them, or name "
                "the files to read"
            )


def _check_repeated(files: Sequence[Path]) -> None:
    """Print a note for each file given twice, also under two names; raise UserError if standard input is repeated."""
    if files.count(STANDARD_INPUT) > 1:
        raise UserError("- is standard input, which can be read only once; name it once")
    seen: dict[Any, Path] = {}
    for file, identity in places.identities([file for file in files if file != STANDARD_INPUT]):
        if (first := seen.get(identity)) is not None:
            how = f"{file} is given twice" if first == file else f"{first} and {file} are the same file"
            note(f"{how}: its rows are used twice, possibly in both training and test rows")
        seen[identity] = file


def _listed(files: Sequence[Path], top: Path) -> str:
    """Format the number of files and some names."""
    shown = ", ".join(str(file.relative_to(top)) for file in files[:_NAMED])
    more = f" and {len(files) - _NAMED:,} more" if len(files) > _NAMED else ""
    return f"{len(files):,} {'file' if len(files) == 1 else 'files'} ({shown}{more})"
