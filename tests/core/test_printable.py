"""Untrusted text is printed on one line, without control characters, and bounded in length."""

import pytest

from hostdev.core.printable import MOST_CHARACTERS, printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("rank 1 has failed: «größer»", "rank 1 has failed: «größer»"),
        ("two\nlines\tand\r\nmore", "two lines and more"),
        ("\x1b[31mred\x1b]0;title\x07", "\\x1b[31mred\\x1b]0;title\\x07"),
        ("a\x00b\x7f\x9b2J", "a\\x00b\\x7f\\x9b2J"),
        ("left \u202eright", "left \\u202eright"),
        ("\u2028", ""),
        ("\U000e0041", "\\U000e0041"),
        ("caf\udce9", "caf\udce9"),  # an undecodable byte of a name is printed unchanged
        ("\udc9b", "\\udc9b"),  # but not a control character
    ],
)
def test_what_is_shown(text, shown):
    assert printable(text) == shown


@pytest.mark.parametrize("text", ["x" * 501, "x" * 10**7, "\x1b" * 10**6, "begin " + "y" * 5000 + " end"])
def test_a_long_text_loses_its_middle(text):
    found = printable(text)
    assert len(found) <= MOST_CHARACTERS
    assert " ... " in found
    assert found[0] == printable(text[0])[0]
    assert found[-1] == printable(text[-1])[-1]
    assert printable("z" * MOST_CHARACTERS) == "z" * MOST_CHARACTERS
    assert len(printable(text, 60)) <= 60
