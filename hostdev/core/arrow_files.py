"""Reading of Arrow files, which may come from untrusted sources: they are memory-mapped, and validated before use."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.core.errors import in_words


def read_table(path: Path, columns: Sequence[str] | None = None) -> Any:
    """Return an Arrow IPC file's table, mapped into memory, after validating its offsets, indices and strings.

    Args:
        columns: Names of the columns to read, or None for all.

    Raises:
        ValueError: The file is not a valid Arrow file; the message is one line.
        OSError: The file cannot be read.
    """
    try:
        source = pa.memory_map(os.fsencode(path))
        options = pa.ipc.IpcReadOptions()
        if columns is not None:
            schema = pa.ipc.open_file(source).schema
            places = [schema.get_field_index(name) for name in columns]
            if min(places) < 0:
                raise ValueError(f"the file has no column {columns[places.index(-1)]!r}")
            options = pa.ipc.IpcReadOptions(included_fields=places)
        table = pa.ipc.open_file(source, options=options).read_all()
        table.validate(full=True)
        _ = table.schema.names  # raises UnicodeDecodeError if a name is not UTF-8
    except UnicodeDecodeError:
        raise ValueError("the name of a column is not UTF-8") from None
    except pa.ArrowMemoryError:
        raise
    except pa.ArrowException as error:
        raise ValueError(f"not an Arrow file: {in_words(error)}") from None
    except OSError as error:
        if error.errno is None:  # raised by Arrow for a broken file
            raise ValueError(f"not an Arrow file: {in_words(error)}") from None
        raise
    return table


def as_numpy(array: Any) -> npt.NDArray[Any]:
    """Return a read-only NumPy view of a numeric Arrow array that has no missing values.

    Arrow's own `to_numpy` is avoided because it imports pandas, if installed, which is slow.
    """
    dtype = np.dtype(array.type.to_pandas_dtype())
    data = array.buffers()[1]
    if data is None or not len(array):
        return np.frombuffer(b"", dtype)
    found: npt.NDArray[Any] = np.frombuffer(data, dtype, len(array), array.offset * dtype.itemsize)
    return found
