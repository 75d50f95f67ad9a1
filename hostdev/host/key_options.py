"""Checks of the options of a table by key."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hostdev.core.errors import TableFullError, UserError
from hostdev.core.initializers import Initializer, initializer
from hostdev.core.key_rules import Admission, Eviction
from hostdev.core.keys import INITIAL, SHARED, UNKNOWN
from hostdev.core.memory import available_bytes, format_bytes, free_addresses, parse_bytes
from hostdev.kernels.key_directory import MOST_ROWS

KEY_BYTES = 45  # bytes of a key besides its row: its entry in the directory, its last step, its uses, and itself
_LEAST_CAPACITY = 1 << 20
_ADDRESSES_OF = 2  # errors advise a capacity that takes at most 1 / 2 of the addresses left
MOST_KEYS = MOST_ROWS // 2  # largest number of keys with a row
LEAST_SPARE, MOST_SPARE = 1 << 16, 1 << 24  # limits of the rows beyond the capacity, which evicted keys keep at first


class KeyRules(NamedTuple):
    """The arguments that only a table by key has; see `HostTable`."""

    capacity: int | str | None = None
    admit: Any = None
    evict: Any = None
    unknown: Any = SHARED


def require_policies(name: str, rules: KeyRules) -> None:
    """Raise an error unless `admit`, `evict` and `unknown` are policies that do not contradict each other."""
    capacity, admit, evict, unknown = rules
    if unknown not in UNKNOWN:
        raise ValueError(f"table {name!r}: unknown must be one of {', '.join(map(repr, UNKNOWN))}, not {unknown!r}")
    if admit is not None and not isinstance(admit, Admission):
        raise TypeError(
            f"table {name!r}: admit must be hostdev.MinCount, hostdev.Probability or another hostdev.Admission, "
            f"not {admit!r}"
        )
    if evict is not None and not isinstance(evict, Eviction):
        raise TypeError(
            f"table {name!r}: evict must be hostdev.Unused, LeastRecent, LeastFrequent, SmallestNorm or another "
            f"hostdev.Eviction, not {evict!r}"
        )
    if evict is not None and evict.keep is not None and capacity is None:
        raise ValueError(f"table {name!r}: evict={evict!r} needs a capacity, down to which keys are evicted")
    expires, steps = getattr(admit, "expires", None), getattr(evict, "steps", None)
    if steps is not None and expires is not None and expires > steps:
        raise ValueError(
            f"table {name!r}: {evict!r} forgets a key sooner than {admit!r} forgets one that has no row yet; expires "
            "must be at most steps"
        )


def require_answer(rule: Any, method: str, answer: Any, n: int, *dtypes: Any) -> npt.NDArray[Any]:
    """Return a rule's answer about n keys; raise TypeError unless it is an array [n] of one of these dtypes.

    Raise ValueError if float64 scores are negative or NaN: scores are ordered by their bits.
    """
    if not (isinstance(answer, np.ndarray) and answer.shape == (n,) and answer.dtype in dtypes):
        shown = f"{answer.dtype} {list(answer.shape)}" if isinstance(answer, np.ndarray) else repr(answer)
        wanted = " or ".join(np.dtype(dtype).name for dtype in dtypes)
        raise TypeError(f"{rule!r}: {method} must return an array of {wanted} with shape [{n}], not {shown}")
    if answer.dtype == np.float64 and not (answer >= 0).all():
        raise ValueError(f"{rule!r}: {method} must return numbers that are at least 0")
    return answer


def require_initializer(init: Any, dim: int, name: str) -> Initializer:
    """Return the initializer `init`; raise ValueError if its values are not functions of the key."""
    if hasattr(init, "__array__") or isinstance(init, list | tuple):
        raise ValueError(f"table {name!r}: init must be Normal, Uniform or Constant, since a table by key has no order")
    return initializer(init, 0, dim, name)


def get_capacity(name: str, capacity: int | str | None, row_bytes: int, ranks: int) -> int:
    """Return a table's maximum number of keys for its argument `capacity`.

    The number is that of all ranks together, and each rank is taken to have as much free memory as this one.
    `row_bytes` is the memory of a key with its row.
    """
    free = available_bytes() * ranks
    if capacity is None:
        return min(MOST_KEYS, max(_LEAST_CAPACITY, free // row_bytes))
    rows = parse_bytes(capacity) // row_bytes if isinstance(capacity, str) else capacity
    if isinstance(rows, bool) or not isinstance(rows, int | np.integer):
        raise TypeError(
            f"table {name!r}: capacity must be a number of rows or a size such as '24GiB', not {capacity!r}"
        )
    if rows < 1:
        raise ValueError(f"table {name!r}: capacity {capacity!r} has no room for a row of {row_bytes} bytes")
    if rows * row_bytes > free:
        raise UserError(
            f"table {name!r} may need {int(rows):,} rows x {row_bytes} bytes = "
            f"{format_bytes(int(rows) * row_bytes)}, but {format_bytes(free)} of host memory are free; use a "
            "smaller capacity or dimension"
        )
    return int(rows)


def advise_full(evict: Eviction | None) -> str:
    """Return what to do if new keys do not fit and the table's rule evicts too few."""
    if evict is None:
        return "raise capacity, or give evict="
    if evict.keep is None:
        return (
            f"{evict!r} has evicted too few: raise capacity, evict keys after fewer steps, or give a rule that evicts "
            "down to the capacity, such as hostdev.LeastRecent()"
        )
    return "raise capacity, or use smaller batches"


def require_row_memory(name: str, row_bytes: int, rows: int, keys: int) -> None:
    """Raise UserError unless there is memory for `rows` more rows of a table that has `keys` keys."""
    needed, free = rows * row_bytes, available_bytes()
    if needed > free:
        raise TableFullError(
            f"table {name!r} has {keys:,} keys and needs memory for more, but only {format_bytes(free)} of host memory "
            "are free",
            "all finished steps are kept. Use a smaller capacity with evict=, admit fewer keys, or free memory",
        )


@contextmanager
def require_addresses(name: str, capacity: int, address_bytes: int, unknown: str) -> Iterator[None]:
    """In a `with` block that reserves addresses for a table of `capacity` keys, turn MemoryError into UserError.

    `address_bytes` is the number of bytes of addresses for a row.
    """
    before = free_addresses()
    try:
        yield
    except MemoryError as error:
        fact = f"table {name!r}: a capacity of {capacity:,} keys needs too many addresses ({error})"
        if before is None:
            raise UserError(f"{fact}; give a smaller capacity, or see vm.overcommit_memory") from None
        rows = before // _ADDRESSES_OF // address_bytes
        fits = rows - MOST_SPARE if unknown == INITIAL else min(rows - LEAST_SPARE, max(rows // 2, rows - MOST_SPARE))
        give = f"give capacity={fits} (--capacity {fits}), or raise the limit" if fits > 0 else "raise the limit"
        raise UserError(f"{fact}; `ulimit -v` leaves it {format_bytes(before)}; {give}") from None
