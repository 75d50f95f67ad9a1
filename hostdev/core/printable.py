"""Escaping of untrusted text, such as other processes' messages and file headers, to make it safe to print."""

MOST_CHARACTERS = 500
_CUT = " ... "
# Lone surrogates stand for undecodable bytes of file names (PEP 383), and are printed as those bytes, except 0x80 to
# 0x9f, which some terminals interpret as control characters.
_RAW_BYTES = range(0xDCA0, 0xDD00)


def printable(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Return text on one line without control characters, such as a terminal's escape sequences.

    Line breaks and tabs become spaces; other unprintable characters become \x1b, \u202e, ...

    Args:
        text: The text.
        most: Maximum number of characters; the middle of a longer text is dropped.
    """
    if len(text) > 4 * most:  # bounds the time for long texts
        text = text[: 2 * most] + text[-2 * most :]
    shown = "".join(_shown(character) for character in " ".join(text.split()))
    if len(shown) <= most:
        return shown
    tail = (most - len(_CUT)) // 3
    return shown[: most - len(_CUT) - tail] + _CUT + shown[len(shown) - tail :]


def _shown(character: str) -> str:
    code = ord(character)
    if character.isprintable() or code in _RAW_BYTES:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
