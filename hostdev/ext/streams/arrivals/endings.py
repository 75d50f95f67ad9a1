"""Detection of an incomplete file by its last bytes; it may still be written."""

import os
from pathlib import Path

from hostdev.data.preprocess import places

_STREAM, _STREAM_ENDS = b"\xff\xff\xff\xff", (b"\xff\xff\xff\xff\0\0\0\0",)  # of an Arrow stream
# Formats whose readers refuse a file without its end: Parquet, Arrow, gzip, bzip2, zstd, lz4, zip.
_CHECKED = b"PAR1", b"ARROW1", b"\x1f\x8b", b"BZh", b"\x28\xb5\x2f\xfd", b"\x04\x22\x4d\x18", b"PK"


def has_end(path: Path) -> bool:
    """Return whether a text ends its last line, and an Arrow stream has its last message.

    True for formats whose readers find out. False for an empty file.
    """
    with places.open_bytes(path) as file:
        start = file.read(8)
        file.seek(max(0, file.seek(0, os.SEEK_END) - 8))
        last = file.read(8)
    if start.startswith(_CHECKED):
        return True
    if start.startswith(_STREAM):
        return last.endswith(_STREAM_ENDS)
    return last.rstrip(b"\0").endswith(b"\n")  # UTF-16 has zeros


def ends_line(path: Path, nbytes: int) -> bool:
    """Return whether the first `nbytes` bytes of a text end with a line."""
    with places.open_bytes(path) as file:
        file.seek(max(0, nbytes - 4))
        return file.read(min(4, nbytes)).rstrip(b"\0").endswith(b"\n")
