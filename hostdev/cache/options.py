"""What users say of a cache: its size, its policy, how far it looks ahead. Imports little, as every command does it."""

import math

from hostdev.core.errors import UserError

POLICIES = ("lookahead", "lru", "lfu", "static")
AUTO = "auto"  # a size that `hostdev.train` finds
WINDOW = 16  # batches, unless said otherwise
MOST_WINDOW = 32  # batches: the bits that a row has for them


def rows_of(size: int | str, rows: int) -> int:
    """Return a number of rows from a number, or from a share of `rows` such as "5%" (rounded up); at most `rows`.

    Raises UserError for anything else.
    """
    text = str(size).strip()
    try:
        wanted = float(text[:-1]) / 100 if text.endswith("%") else int(text)
    except ValueError:
        wanted = -1
    if not 0 <= wanted < math.inf or (text.endswith("%") and wanted > 1):
        raise UserError(f"a cache's size is a number of rows or a share from 0% to 100%, not {str(size)!r}")
    return min(math.ceil(round(wanted * rows, 6)) if text.endswith("%") else int(wanted), rows)
