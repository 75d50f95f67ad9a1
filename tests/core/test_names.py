"""File names in manifests: plain relative paths, and no links to other folders."""

import os

import pytest

from hostdev.core.names import inside, require_name

BAD = [
    "",
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a/./b",
    "a//b",
    "./a",
    "a/",
    "a\0b",
    "a\nb",
    "a\x1b[2J",
    "c:\\x",
    5,
    None,
    ["a"],
    "x" * 5000,
]


@pytest.mark.parametrize("name", BAD)
def test_names_that_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="the name") as caught:
        inside(tmp_path, name)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["a", "a/b.arrow", "tables/0/0-000001.arrow", "..a", "ä b", ".a"])
def test_names_that_are_taken(tmp_path, name):
    assert require_name(name) == name
    assert inside(tmp_path, name) == tmp_path / name


def test_links(tmp_path):
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "x").write_text("x")
    (root / "x").write_text("x")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "x")
    (root / "dangling").symlink_to(outside / "y")
    (root / "circle").symlink_to("circle")
    (root / "within").symlink_to("x")
    os.mkfifo(root / "pipe")
    for name, message in (
        ("folder/x", "a link that leads outside"),
        ("file", "a link that leads outside"),
        ("pipe", "not a regular"),
        ("dangling", "a link that leads outside"),
        ("circle", "cannot be followed|leads outside"),
    ):
        with pytest.raises(ValueError, match=message):
            inside(root, name)
    assert inside(root, "within").read_text() == "x"
    (tmp_path / "linked").symlink_to(root)  # the folder itself may be a link
    assert inside(tmp_path / "linked", "x").read_text() == "x"
