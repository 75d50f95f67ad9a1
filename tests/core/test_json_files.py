"""JSON from untrusted sources: read within limits, parsed by a dataclass's annotations."""

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest

from hostdev.core import json_files


@dataclass(frozen=True)
class Inner:
    name: str
    n: int


@dataclass(frozen=True)
class Outer:
    inner: list[Inner]
    rate: float
    pair: tuple[int, ...]
    parent: Inner | None
    state: dict[str, Any]
    flag: bool = False
    more: list[str] = field(default_factory=list)


GOOD = {"inner": [{"name": "a", "n": 1}], "rate": 1, "pair": [1, 2], "parent": None, "state": {"x": [1, None]}}


def test_what_is_right():
    made = json_files.parse(Outer, GOOD)
    assert made == Outer([Inner("a", 1)], 1, (1, 2), None, {"x": [1, None]})
    assert json_files.parse(Outer, {**GOOD, "parent": {"name": "b", "n": 2}}).parent == Inner("b", 2)
    for rate in (1.99e22, -1e300, 2**63 - 1, -(2**63)):
        assert json_files.parse(Outer, {**GOOD, "rate": rate}).rate == rate
    for rate in (2**63, 10**400, float("inf"), float("nan"), True):
        with pytest.raises(ValueError, match=r"rate is .*, not a number"):
            json_files.parse(Outer, {**GOOD, "rate": rate})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"inner": 5}, "inner is 5, not a list"),
        ({"inner": [{"name": "a", "n": True}]}, r"inner\[0\].n is true, not a 64-bit integer"),
        ({"inner": [{"name": "a", "n": 1.0}]}, r"inner\[0\].n is 1.0, not a 64-bit integer"),
        ({"inner": [{"name": "a", "n": 2**63}]}, r"inner\[0\].n is an integer of more than 64 bits"),
        ({"inner": [{"name": "a"}]}, r"inner\[0\].n is missing"),
        ({"inner": [{"name": None, "n": 1}]}, r"inner\[0\].name is null, not text"),
        ({"inner": ["x" * 1000]}, r'inner\[0\] is "x{39}\.\.\., not an object'),
        ({"rate": float("nan")}, "rate is NaN, not a number"),
        ({"rate": float("inf")}, "rate is Infinity, not a number"),
        ({"rate": "1"}, 'rate is "1", not a number'),
        ({"pair": {}}, "pair is an object, not a list"),
        ({"parent": []}, "parent is a list, not an object"),
        ({"state": []}, "state is a list, not an object"),
        ({"flag": 1}, "flag is 1, not true or false"),
        ({"other": 1}, "other is not a known field"),
    ],
)
def test_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        json_files.parse(Outer, {**GOOD, **change})
    assert len(str(caught.value)) < 200


LARGE = ["1" * 400, "-" + "1" * 400, "1" * 5000, str(2**64), str(-(2**63) - 1), "1e400", "-1e999"]


@pytest.mark.parametrize("text", LARGE)
def test_numbers_of_more_than_64_bits_are_damage(text, tmp_path):
    (tmp_path / "a.json").write_text('{"a": [' + text + "]}")
    with pytest.raises(ValueError, match="a number has more than 64 bits"):
        json_files.read(tmp_path / "a.json")
    with pytest.raises(ValueError, match="a number has more than 64 bits"):
        json_files.loads(text.encode())


def test_numbers_of_64_bits():
    for value in (2**64 - 1, -(2**63), 0, 1.5, -1e308, 5e-324, 1e22):
        assert json_files.loads(repr(value)) == value
    assert json_files.loads("0." + "1" * 400) == 1 / 9


def test_files(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert json_files.read(path) == {"a": 1}
    for content, message in ((b"\xff\xfe", "not UTF-8"), (b"[" * 200_000, "nested too deeply"), (b"{", "Expecting")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            json_files.read(path)
    with pytest.raises(ValueError, match="more than .* 10$"):
        json_files.read(path.with_name("a.json") if path.write_text("[" + "1," * 99 + "1]") else path, most=10)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="not a regular file"):
        json_files.read(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        json_files.read(tmp_path)


class Pair(NamedTuple):
    first: int
    second: str


def test_tuples():
    assert json_files.parse(tuple[int, ...], [1, 2, 3]) == (1, 2, 3)
    assert json_files.parse(tuple[int, float], [1, 2.5]) == (1, 2.5)
    assert json_files.parse(dict[str, Pair], {"a": [1, "b"]}) == {"a": Pair(1, "b")}
    for kind, content, message in (
        (tuple[int, float], [1], "the content is a list, not a list of 2"),
        (tuple[int, float], [1, "2"], r"\[1\] is \"2\", not a number"),
        (Pair, [1, 2], r"\[1\] is 2, not text"),
        (Pair, {"first": 1}, "the content is an object, not a list"),
    ):
        with pytest.raises(ValueError, match=message):
            json_files.parse(kind, content)
