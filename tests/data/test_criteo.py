"""The parser on hand-written lines."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev import UserError
from hostdev.data.preprocess.criteo import EMPTY, CriteoText, hex_keys, hex_values, parse


def line(label="0", integers=(), categories=()):
    """A well-formed line; what is not given is empty."""
    integers = [*map(str, integers)] + [""] * (13 - len(integers))
    return "\t".join([label, *integers, *categories] + [""] * (26 - len(categories)))


def parse_lines(*lines, end="\n"):
    return parse((end.join(lines) + end).encode("latin-1"), file="f")


def test_values():
    rows = parse_lines(line("1", [5, -3, "", 0], ["000000ff", "", "FFFFFFFF"]), line())
    np.testing.assert_array_equal(rows.label, [1, 0])
    np.testing.assert_array_equal(rows.numbers[0, :5], [5, -3, np.nan, 0, np.nan])
    np.testing.assert_array_equal(rows.keys[0, :4], [255, EMPTY, 2**32 - 1, EMPTY])
    assert np.isnan(rows.numbers[1]).all()
    assert (rows.keys[1] == EMPTY).all()
    assert rows.rejected.numbers.tolist() == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line("2"), "label is '2', not 0 or 1"),
        (line(""), "label is '', not 0 or 1"),
        (line("0", ["1.5"]), "I1 is '1.5', not an integer or empty"),
        (line("0", [1, "0x1F"]), "I2 is '0x1F', not an integer or empty"),
        (line("0", [1, 2, " 3"]), "I3 is ' 3', not an integer or empty"),
        (line("0", ["9" * 19]), f"I1 is '{'9' * 19}', not an integer or empty"),
        (line("0", [], ["0000000g"]), "C1 is '0000000g', not 8 hexadecimal digits or empty"),
        (line("0", [], ["", "00ff"]), "C2 is '00ff', not 8 hexadecimal digits or empty"),
        (line("0", [], ["", "", "000000000"]), "C3 is '000000000', not 8 hexadecimal digits or empty"),
        (line("7", ["x"], ["y"]), "label is '7', not 0 or 1"),
        (line() + "\t", "41 columns, not 40"),
        ("1\t2", "2 columns, not 40"),
        ("0\xff\t1", "2 columns, not 40"),
        (line("0", [], ["000000\xff0"]), "C1 is '000000?0', not 8 hexadecimal digits or empty"),
        (line("0", ['"1', '2"']), "I1 is '\"1', not an integer or empty"),
        (line("0\r0"), "label is '0\\x000', not 0 or 1"),
    ],
)
def test_a_malformed_line_is_set_aside(text, reason):
    rows = parse_lines(line("1"), text, line("0", [3]))
    assert [(reject.line, reject.reason) for reject in rows.rejected] == [(2, reason)]
    np.testing.assert_array_equal(rows.label, [1, 0])
    assert rows.numbers[1, 0] == 3


def test_lines_keep_their_numbers_between_rejects():
    rows = parse_lines("x", line(), line("9"), "", line("1"), "a\tb", line("0", ["q"]))
    assert [reject.line for reject in rows.rejected] == [1, 3, 4, 6, 7]
    assert len(rows) == 2


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("block_bytes", [200, 1000, 1 << 20])
def test_blocks_cut_the_file_at_line_ends(tmp_path, end, last, block_bytes):
    lines = [line(str(i % 2), [i], [f"{i:08x}"]) for i in range(50)]
    lines[20] = "broken"
    path = tmp_path / "f.txt"
    path.write_bytes((end.join(lines) + (end if last else "")).encode())
    source = CriteoText([path, path], block_bytes=block_bytes)
    blocks = list(source.blocks())
    chunks = [source.parse(block) for block in blocks]
    found = np.concatenate([rows.numbers[:, 0] for rows in chunks])
    expected = [i for i in range(50) if i != 20]
    np.testing.assert_array_equal(found, expected * 2)
    assert [reject.text for rows in chunks for reject in rows.rejected] == ["broken", "broken"]
    assert sum(block.size for block in blocks) == source.total == 2 * path.stat().st_size
    for i, block in enumerate(blocks):
        rest = b"".join(later.content for later in source.blocks(block.end))
        assert rest == b"".join(later.content for later in blocks[i + 1 :])


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(UserError, match="nowhere: no such file"):
        CriteoText([tmp_path / "nowhere"])
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match="empty: the file is empty"):
        CriteoText([tmp_path / "empty"])
    (tmp_path / "binary").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match="no line end in .* bytes"):
        list(CriteoText([tmp_path / "binary"], block_bytes=100).blocks())


DIGITS = "0123456789abcdefABCDEF"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(DIGITS + "g \t٣ä", max_size=10) | st.text(DIGITS, min_size=8, max_size=8)))
def test_keys_of_plain_texts(texts):
    """They are those of Arrow's texts; a malformed text leaves all of them to Arrow."""
    keys, wrong = hex_values(pa.array(texts, pa.string()).cast(pa.binary()))
    found = hex_keys(texts)
    assert (found is None) == bool(wrong.any())
    if found is not None:
        np.testing.assert_array_equal(found, keys)
