"""Finds the table in a .zip file, and recognizes other formats based on zip archives (.xlsx, .npz)."""

import zipfile
from collections.abc import Callable
from pathlib import Path

from hostdev.core.errors import UserError
from hostdev.data.preprocess import places

MAGIC = b"PK\x03\x04"
_MAC = "__MACOSX/"  # a folder that macOS adds
_SHOWN = 10


def find_member(path: Path, wanted: Callable[[str], bool] | None) -> str:
    """Return the name of the file to read in a .zip file.

    `wanted` is called with a file's name without folders, and returns whether this is the file to read. If `wanted` is
    None, the .zip file must have a single file.

    Raises UserError for a broken or encrypted file, for several files, and for other formats.
    """
    try:
        with places.open_bytes(path) as file, zipfile.ZipFile(file) as archive:
            members = [one for one in archive.infolist() if not one.is_dir() and not one.filename.startswith(_MAC)]
    except (zipfile.BadZipFile, OSError, NotImplementedError) as error:
        raise UserError(f"{path}: the .zip file cannot be read ({error})") from None
    names = [one.filename for one in members if not one.filename.rpartition("/")[2].startswith(".")]
    if "[Content_Types].xml" in names:
        raise UserError(f"{path}: this is an Excel workbook; save the sheet as CSV")
    if names and all(name.endswith(".npy") for name in names):
        raise UserError(
            f"{path}: this is NumPy's .npz; write its arrays as Parquet, such as pandas.DataFrame(...).to_parquet(...)"
        )
    chosen = [name for name in names if wanted is not None and wanted(name.rpartition("/")[2])] or names
    if len(chosen) != 1 or (wanted is not None and not wanted(chosen[0].rpartition("/")[2])):
        expected = "a train.txt" if wanted is not None else "a single file"
        shown = ", ".join(names[:_SHOWN]) or "no file"
        raise UserError(f"{path}: the .zip file must have {expected}, but has {shown}; unpack the file you need")
    if next(one for one in members if one.filename == chosen[0]).flag_bits & 1:
        raise UserError(f"{path}: the .zip file is encrypted; unpack it with its password")
    return chosen[0]
