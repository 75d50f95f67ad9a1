"""64-bit ids of texts."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hostdev.kernels.xxhash import xxh64

_TEXTS = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
_BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_binary_view)


def hash_ids(values: Any) -> npt.NDArray[np.int64]:  # Any: arrays of several libraries, and lists of texts
    """Return 64-bit ids of texts, for tables by key: XXH64 with seed 0 of a text's bytes in UTF-8, as int64.

    The ids are the same on all platforms and in all versions. Among 1e8 different texts, any two have the same id
    with a probability of 0.03%; among 1e9, with 2.7%.

    ::

        ids = hostdev.hash_ids(["anna", "ben"])  # int64 [2]

    Args:
        values: Texts or bytes of any shape: a NumPy array, a list, a pandas Series, or a pyarrow array.

    Returns:
        The ids, int64, in the shape of `values`.

    Raises:
        TypeError: Values are not texts; integers are ids themselves.
        ValueError: A value is missing, nested lists differ in length, or an Arrow array is broken.
    """
    shape: tuple[int, ...] | None = None
    if isinstance(values, np.ndarray):
        values, shape = values.reshape(-1), values.shape
    elif isinstance(values, list | tuple):
        values, shape = _flatten(values)
    texts = _as_arrow(values)
    if texts.null_count:
        row = int(np.flatnonzero(texts.is_null().to_numpy(zero_copy_only=False))[0])
        raise ValueError(f"the value at index {row} is missing; replace missing values with one text, such as ''")
    _, offsets, data = texts.buffers()
    n = len(texts)
    begins = np.frombuffer(offsets, np.int64, n + 1, 8 * texts.offset) if n else np.zeros(1, np.int64)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    found = xxh64(begins, content).view(np.int64)
    return found if shape is None else found.reshape(shape)


def _flatten(values: Any) -> tuple[list[Any], tuple[int, ...]]:
    """Return the elements of nested lists, and the lists' shape; raise ValueError if their lengths differ."""
    if not any(isinstance(value, list | tuple | np.ndarray) for value in values):
        return list(values), (len(values),)
    parts = [_flatten(value) if isinstance(value, list | tuple | np.ndarray) else ([value], ()) for value in values]
    shapes = {shape for _, shape in parts}
    if len(shapes) > 1:
        raise ValueError("hash_ids takes texts, or lists of equally many texts; these lists have different lengths")
    return [value for flat, _ in parts for value in flat], (len(values), *shapes.pop())


def _as_arrow(values: Any) -> pa.LargeBinaryArray:
    """Return texts or bytes as an array of bytes; raise TypeError for other values."""
    try:
        array = values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values, from_pandas=True)
    except (pa.ArrowException, TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise TypeError(f"hash_ids takes texts, and these values are of several types or none: {first}") from None
    try:
        array.validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"the values are not a valid Arrow array: {str(error).splitlines()[0]}") from None
    chunks = [_as_bytes(chunk) for chunk in (array.chunks if isinstance(array, pa.ChunkedArray) else [array])]
    return pa.concat_arrays(chunks) if chunks else pa.array([], pa.large_binary())


def _as_bytes(array: pa.Array) -> pa.LargeBinaryArray:
    if pa.types.is_dictionary(array.type):
        array = array.cast(pa.large_string() if pa.types.is_string(array.type.value_type) else array.type.value_type)
    if any(test(array.type) for test in _TEXTS):
        return array.cast(pa.large_string()).cast(pa.large_binary())
    if pa.types.is_null(array.type) or any(test(array.type) for test in _BYTES):
        return array.cast(pa.large_binary())
    more = "; integers are ids themselves, and need no hash" if pa.types.is_integer(array.type) else ""
    raise TypeError(f"hash_ids takes texts, not values of type {array.type}{more}")
