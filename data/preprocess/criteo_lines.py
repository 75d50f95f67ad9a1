"""A parser for Criteo's data files, whose lines have tab-separated fields.

The fields of a line are a label, 13 integers, and 26 values of 8 hexadecimal digits.
"""

from typing import Any

import numpy as np

from hostdev.kernels.jit import kernel

EMPTY = 1 << 32  # the key of an empty categorical field, above every 32-bit value

_TAB, _LINE_END, _RETURN, _MINUS, _ZERO = 9, 10, 13, 45, 48
_MOST_DIGITS = 18  # so that any number fits an int64
HEX_DIGITS = np.full(256, 255, np.uint8)  # the value of each character as a digit; 255 for other characters
for _digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
    HEX_DIGITS[np.frombuffer(_digits, np.uint8)] = np.arange(16)


@kernel
def parse_lines(text: Any, digits: Any, label: Any, numbers: Any, keys: Any, odd: Any) -> Any:
    """Parse the well-formed lines of a text, and locate the malformed ones.

    Args:
        text: uint8 [N], the bytes of complete lines; only the last line may lack its line end.
        digits: uint8 [256], HEX_DIGITS.
        label: uint8 [n], written: the label of each well-formed line; n is at least the number of lines in the text.
        numbers: float64 [n, D], written: the D integers of each well-formed line, NaN for an empty field.
        keys: int64 [C, n], written: the C categorical values of each well-formed line, EMPTY for an empty field.
        odd: int32 [M, 3], written: for each of the first M malformed lines, the position in `text` at which it begins,
            the position at which the next line begins, and the malformed line's number, counted from 0.

    Returns:
        How many lines are well-formed, how many lines there are, and how many are malformed.
    """
    N, one, eight = np.uint64(len(text)), np.uint64(1), np.uint64(8)
    D, C = np.uint64(numbers.shape[1]), np.uint64(len(keys))
    at = n = np.uint64(0)
    lines = malformed = np.int64(0)
    while at < N:
        begin = at
        positive = np.uint8(text[at]) - np.uint8(_ZERO)
        well = positive <= 1 and at + one < N and text[at + one] == _TAB
        if well:
            at += np.uint64(2)
            for i in range(D):
                negative = at < N and text[at] == _MINUS
                at += np.uint64(negative)
                first, value = at, np.int64(0)
                while at < N:
                    digit = np.uint8(text[at] - np.uint8(_ZERO))
                    if digit > 9:
                        break
                    value = value * 10 + np.int64(digit)
                    at += one
                length = at - first
                if at >= N or text[at] != _TAB or length > _MOST_DIGITS or (negative and length == 0):
                    well = False
                    break
                at += one
                numbers[n, i] = np.nan if length == 0 else np.float64(-value if negative else value)
        if well:
            for i in range(C):
                key = np.int64(EMPTY)
                if at + eight <= N and text[at] > _MINUS:
                    found, wrong = np.uint32(0), np.uint8(0)
                    for k in range(eight):
                        digit = digits[text[at + k]]
                        wrong |= digit
                        found = (found << np.uint32(4)) | np.uint32(digit & np.uint8(15))
                    key = np.int64(found)
                    at += eight
                    if wrong > 15:
                        well = False
                        break
                keys[i, n] = key
                if i + one < C:
                    if at >= N or text[at] != _TAB:
                        well = False
                        break
                    at += one
        if well and at < N:
            at += np.uint64(text[at] == _RETURN and at + one < N and text[at + one] == _LINE_END)
            well = text[at] == _LINE_END
        if well:
            label[n] = positive
            at += np.uint64(at < N)
            n += one
        else:
            at = begin
            while at < N and text[at] != _LINE_END:
                at += one
            at += np.uint64(at < N)
            if malformed < len(odd):
                odd[malformed, 0], odd[malformed, 1], odd[malformed, 2] = begin, at, lines
            malformed += 1
        lines += 1
    return np.int64(n), lines, malformed
