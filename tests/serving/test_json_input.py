"""JSON of requests is parsed in pieces with the result of Python's parser, and counted before it is parsed."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.ext.serving import json_input
from hostdev.ext.serving.json_input import parse_json, scan
from hostdev.ext.serving.refused import RefusedError

words = st.sampled_from(["", "a", '"', "\\", "é", "ሴ", "😀", "\ud800", "]", "},{", "null", "x" * 40, "\n"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | words,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(words, inner, max_size=4),
    max_leaves=25,
)
parts = st.sampled_from(
    [
        *b'[]{},:" \\1-',
        *b"\xff\xe1\x00",
        b"NaN",
        b"null",
        b"[]",
        b',"":0',
        b'{"a":1,"a":1}',
        b"9" * 5000,
        b"\xef\xbb\xbf",
    ]
)


def outcome(content):
    try:
        return parse_json(content)
    except RefusedError as refusal:
        assert "\n" not in str(refusal)
        return RefusedError


@settings(max_examples=150, deadline=None)
@given(values, st.booleans(), st.sampled_from([None, 1]), st.sampled_from([4, 30]), st.data())
def test_equal_to_pythons_parser(value, is_ascii, indent, piece, data):
    content = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode("utf-8", "surrogatepass")
    for _ in range(data.draw(st.integers(0, 2))):
        at, part = data.draw(st.integers(0, len(content))), data.draw(parts)
        part = bytes([part]) if isinstance(part, int) else part
        content = content[:at] + part + content[at + data.draw(st.integers(0, 2)) :]
    expected = outcome(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_input, "PIECE_BYTES", piece)
        found = outcome(content)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": [1, 2,, 3]}', "Expecting value at line 1, column 13"),
        (b"[[1, 2], [3, 4],]", "Expecting value at line 1, column 17"),
        (b"[[1, 2] [3, 4]]", "not JSON: Expecting ',' delimiter at line 1, column 9"),
        (b'{"a": 1, "b": [1, 2], "a": 3}', "the name 'a' occurs twice"),
        (b'{"b": [1, 2, 3], "c": 3, "b": [1, 2, 3]}', "the name 'b' occurs twice"),
        (b"[1, 2, 3], 4", "Unexpected bracket or comma at line 1, column 10"),
        (b'[1, 2, 3]\n"4"', "Expecting ',' delimiter at line 2, column 1"),
        (b"[1, 2, 3\n, {]}", "Unexpected bracket or comma at line 2, column 4"),
        (b"[1, 2, 3, \n[4, 5, 6]", "Unterminated value starting at line 1, column 1"),
        (b'[1, 2, 3, \n"4, 5, 6]', "Unterminated value starting at line 2, column 1"),
        (b'[1, 2, 3, "\xff"]', "not UTF-8, from byte 12"),
        (b"\xef\xbb\xbf[1, 2, 3]", "not JSON"),
        (b"1[1, 2, 3]", "not JSON"),
        (b"[" * 300 + b"]" * 300, "nested too deeply"),
    ],
)
def test_what_is_wrong_and_where(content, message, monkeypatch):
    monkeypatch.setattr(json_input, "PIECE_BYTES", 4)
    with pytest.raises(RefusedError, match=message):
        parse_json(content)


def test_counted_before_it_is_parsed():
    rows = [{"a": "x", "b": [1, 2]}] * 5000
    found = scan(json.dumps({"rows": rows}).encode())
    assert found.containers == 2 + 2 * len(rows)
    assert found.memory > 240 * len(rows)
    assert len(found.cuts[9]) >= 2  # the list of rows is parsed in pieces, and the object around it in one
    assert found.starts == [0, 9]
    found.require(10_002)
    with pytest.raises(RefusedError, match="10,002 JSON objects and lists, more than 10,001") as refused:
        found.require(10_001)
    assert refused.value.status == 413
    wide, plain = (scan(f'["{text * 1000}"]'.encode()).memory for text in ("😀", "abcd"))
    assert wide >= 4 * 4000 > plain > 4000
