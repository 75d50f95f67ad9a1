"""The formats in which a table stores the planes of a row. A plane is the row's weights, or one slot of D values."""

FLOAT32, BFLOAT16, SIGNED_8, UNSIGNED_8 = range(4)
EIGHT_BITS = (SIGNED_8, UNSIGNED_8)  # for slots of both signs, and for slots that are never negative


def plane_bytes(dim: int) -> int:
    """Return the size in bytes of an 8-bit slot of `dim` values: codes, padded to a multiple of 4, and the scale."""
    return (dim + 3) // 4 * 4 + 4
