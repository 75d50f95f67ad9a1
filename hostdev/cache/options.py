"""Options of a cache: size, policy and window. Every command imports this module, so it must import little."""

import math

from hostdev.core.errors import UserError

POLICIES = ("lookahead", "lru", "lfu", "static")
AUTO = "auto"  # `hostdev.train` finds the size
WINDOW = 16  # batches, the default
MOST_WINDOW = 32  # batches: a row has one bit for each


def rows_of(size: int | str, rows: int) -> int:
    """Parse a cache's size, a number of rows or a share of `rows` such as "5%" (rounded up); return at most `rows`.

    Raises:
        UserError: `size` is neither a number of rows nor a share from 0% to 100%.
    """
    text = str(size).strip()
    try:
        wanted = float(text[:-1]) / 100 if text.endswith("%") else int(text)
    except ValueError:
        wanted = -1
    if not 0 <= wanted < math.inf or (text.endswith("%") and wanted > 1):
        raise UserError(f"a cache's size must be a number of rows or a share from 0% to 100%, not {str(size)!r}")
    return min(math.ceil(round(wanted * rows, 6)) if text.endswith("%") else int(wanted), rows)
