"""Options as data: flags, bounds, what needs and excludes what, and files of options."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.options import OptionError, OptionGroup, When, describe, option
from hostdev.ext.training.option_files import read_options


@dataclass(frozen=True, kw_only=True)
class Oven(OptionGroup):
    section: ClassVar[str] = "oven"
    title: ClassVar[str] = "the oven"
    degrees: int = option("heat", int, default=180, metavar="N", least=0, most=300)
    minutes: float | None = option("time", float, above=0, unit="minutes")
    mode: str = option("fan", str, default="top", choices=("top", "air"), aliases={"fan": "air"})
    grill: bool = option("grill", default=False, excludes={"mode=air": "it blows", "minutes>30": ""})

    @property
    def is_hot(self):
        return self.degrees > 100


def require_digits(text):
    if not text.isdigit():
        raise UserError(f"no number: {text}")


@dataclass(frozen=True, kw_only=True)
class Tray(OptionGroup):
    section: ClassVar[str] = "tray"
    title: ClassVar[str] = "the tray"
    tray: Path | None = option("which", Path, needs={When("is_hot", shown="a hot oven"): ""})
    level: str | None = option("where", str, needs={"tray": "it has levels"}, is_number=True, check=require_digits)
    pizza: bool = option("pizza", default=False, implies={"degrees": 300})
    rest: str = option("rest", str, default="none", off=("no",), excludes={"tray": ""}, is_flag=False)


@dataclass(frozen=True, kw_only=True)
class Kitchen(Oven, Tray):
    pass


@pytest.mark.parametrize(
    ("values", "name", "words"),
    [
        ({"degrees": 301}, "degrees", "--degrees must be in 0..300, not 301"),
        ({"degrees": -1}, "degrees", "--degrees must be in 0..300"),
        ({"minutes": 0.0}, "minutes", "--minutes must be a number above 0 minutes, not 0.0"),
        ({"minutes": float("nan")}, "minutes", "nan"),
        ({"minutes": float("inf")}, "minutes", "inf"),
        ({"grill": True, "mode": "fan"}, "grill", "--grill cannot be combined with --mode air: it blows"),
        ({"grill": True, "minutes": 31.0}, "grill", "--minutes above 30"),
        ({"tray": Path("a"), "degrees": 5}, "tray", "--tray has no effect without a hot oven"),
        ({"level": "2"}, "level", "--level 2 needs --tray: it has levels"),
        ({"level": "x", "tray": Path("a")}, "level", "--level: no number: x"),
        ({"rest": "long", "tray": Path("a")}, "rest", "--rest cannot be combined with --tray"),
    ],
)
def test_values_that_do_not_fit(values, name, words):
    with pytest.raises(OptionError) as caught:
        Kitchen(**values)
    assert caught.value.name == name and words in str(caught.value)


def test_values_that_fit():
    Kitchen(grill=True, minutes=30.0, tray=Path("a"), level="2", rest="no")
    assert Kitchen(mode="fan").mode == "air"
    assert Kitchen(pizza=True).degrees == 300
    assert Kitchen(pizza=True).as_json() == Kitchen.defaults() | {"pizza": True, "degrees": 300}
    assert Oven(grill=True, mode="top").grill  # without the other group, too
    assert list(Kitchen.options()) == ["degrees", "minutes", "mode", "grill", "tray", "level", "pizza", "rest"]


def test_flags():
    parser = cli.parser("x", "")
    Kitchen.add_flags(parser)
    flags = ["--minutes", "3.5", "--mode", "fan", "--tray", "a b", "--pizza"]
    kitchen = Kitchen.from_flags(parser.parse_args(flags), more={"rest": "no"})
    assert kitchen == Kitchen(minutes=3.5, mode="fan", tray=Path("a b"), pizza=True, rest="no")
    assert kitchen.to_flags() == ["--degrees", "300", *flags]
    assert kitchen.file_values() == {"rest": "no"} and Kitchen().file_values() == {}
    assert "--rest" not in parser.format_help() and "the oven:" in parser.format_help()
    few = argparse.ArgumentParser()
    Kitchen.add_flags(few, ["mode"])
    assert "--degrees" not in few.format_help()
    assert Kitchen.from_flags(few.parse_args(["--mode", "air"]), ["mode"], degrees=5) == Kitchen(mode="air", degrees=5)


def test_the_reference():
    [(oven, rows), (tray, _)] = describe(Kitchen.groups())
    assert (oven, tray) == ("oven", "tray")
    assert rows[:3] == [
        ("degrees", "integer in 0..300", "heat"),
        ("minutes", "number above 0 minutes", "time"),
        ("mode", "top or air", "fan"),
    ]


def test_a_file(tmp_path):
    file = tmp_path / "oven.toml"
    file.write_text('mode = "fan"\nlevel = 2\n[oven]\nminutes = 3\ngrill = false\n[tray]\ntray = "a"\n')
    found = read_options(file, Kitchen)
    assert found.values == {"mode": "fan", "level": "2", "minutes": 3.0, "grill": False, "tray": Path("a")}
    assert found.keys["minutes"] == "oven.minutes"
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**Kitchen(minutes=3.0).as_json(), "versions": {"x": 1}}))
    assert Kitchen(**read_options(file, Kitchen, ["versions"]).values) == Kitchen(minutes=3.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("degree = 3", "there is no option degree; did you mean degrees?"),
        ("[oven]\ndegree = 3", "there is no option degree in oven; did you mean degrees?"),
        ("[ovens]\ndegrees = 3", "there is no table ovens; did you mean oven?"),
        ("[tray]\ndegrees = 3", "there is no option degrees in tray"),
        ("degrees = 3.5", "degrees must be an integer, not 3.5"),
        ("degrees = true", "degrees must be an integer, not True"),
        ("[oven]\nminutes = 'x'", "oven.minutes must be a number, not 'x'"),
        ("grill = 1", "grill must be true or false, not 1"),
        ("mode = 3", "mode must be text, not 3"),
        ("mode = 'low'", "mode must be top or air or fan, not 'low'"),
        ("level = 1.5", "level must be text or an integer, not 1.5"),
        ("degrees = 1\n[oven]\ndegrees = 1", "oven.degrees is given twice, also as degrees"),
        ("degrees", "is not a file of options"),
    ],
)
def test_files_that_are_wrong(tmp_path, text, words):
    file = tmp_path / "oven.toml"
    file.write_text(text)
    with pytest.raises(UserError) as caught:
        read_options(file, Kitchen)
    assert str(file) in str(caught.value) and words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["[1]", "3", "{", "null"])
def test_json_that_is_wrong(tmp_path, content):
    file = tmp_path / "oven.json"
    file.write_text(content)
    with pytest.raises(UserError, match="is not a file of options"):
        read_options(file, Kitchen)
    with pytest.raises(UserError, match="No such file"):
        read_options(tmp_path / "none.toml", Kitchen)


def test_whose_error_it_is(tmp_path):
    file = tmp_path / "oven.toml"
    file.write_text("[oven]\ndegrees = 301")
    found = read_options(file, Kitchen)
    error = OptionError("degrees", " must be less")
    assert str(found.explain(error, {"degrees": 301})) == f"{file}: oven.degrees must be less"
    assert found.explain(error, {"degrees": 302}) is error  # a flag took precedence
