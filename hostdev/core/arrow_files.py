"""Arrow files that anybody may have made: mapped into memory, and validated before a value of them is used."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from hostdev.core.errors import in_words


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Return a table of an Arrow IPC file, mapped, whose offsets, indices and texts have all been looked at.

    columns  of these names only; None: all

    Raises ValueError, in one line, where it is not such a file, and OSError where it cannot be read.
    """
    try:
        source = pa.memory_map(os.fsencode(path))
        options = pa.ipc.IpcReadOptions()
        if columns is not None:
            schema = pa.ipc.open_file(source).schema
            places = [schema.get_field_index(name) for name in columns]
            if min(places) < 0:
                raise ValueError(f"it has no column {columns[places.index(-1)]!r}")
            options = pa.ipc.IpcReadOptions(included_fields=places)
        table = pa.ipc.open_file(source, options=options).read_all()
        table.validate(full=True)
        _ = table.schema.names  # which are read as text here
    except UnicodeDecodeError:
        raise ValueError("the name of a column is not UTF-8") from None
    except pa.ArrowMemoryError:
        raise
    except pa.ArrowException as error:
        raise ValueError(f"not an Arrow file: {in_words(error)}") from None
    except OSError as error:
        if error.errno is None:  # Arrow's own, for a file that is broken
            raise ValueError(f"not an Arrow file: {in_words(error)}") from None
        raise
    return table
