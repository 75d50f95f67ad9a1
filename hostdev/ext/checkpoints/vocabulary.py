"""The vocabulary of the data set that a checkpoint was trained on: the column and value of each id."""

import pyarrow as pa

from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.state import find_file
from hostdev.core import arrow_files
from hostdev.core.errors import in_words

VOCABULARY = "data/vocabulary.arrow"


def read_vocabulary(layers: Layers) -> pa.Table | None:
    """Return the columns `field` and `value` of each id, in a memory-mapped table; None if the checkpoint has none.

    Raises:
        BrokenCheckpointError: The file cannot be read, or has other columns.
    """
    path = find_file(layers, VOCABULARY)
    if path is None:
        return None
    try:
        table = arrow_files.read_table(path)
        if table.schema.names[:2] != ["field", "value"]:
            raise ValueError(f"its first columns must be field and value, not {', '.join(table.schema.names[:10])}")
    except ValueError as error:
        raise BrokenCheckpointError(f"{path} is broken ({in_words(error)})") from None
    return table
