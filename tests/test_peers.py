"""The peers of the benchmarks: every package of their environments is pinned, and the pins fit together."""

import re
from importlib.metadata import PackageNotFoundError, metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bench import bench_peers, pins


def distribution(name):
    """Return an installed package's version and requirements, as pip's report has them, or None."""
    try:
        found = metadata(name)
    except PackageNotFoundError:
        return None
    return found["Version"].partition("+")[0], {"requires_dist": found.get_all("Requires-Dist") or []}


@pytest.mark.parametrize("peer", pins.WANTED)
def test_every_package_that_a_peer_needs_is_pinned(peer):
    pinned = pins.read(peer)
    for requirement in map(Requirement, pins.WANTED[peer]):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)].version), requirement
    missing = {need for pin in pinned.values() for need in pin.needs} - set(pinned)
    assert not missing
    wanted = {canonicalize_name(Requirement(one).name) for one in pins.WANTED[peer]}
    assert set(pinned) == wanted | {need for pin in pinned.values() for need in pin.needs}


def test_what_the_files_say_of_packages_is_true_of_those_installed_here():
    """Extras aside: only pip's report shows whether another package asks for them."""
    compared = set()
    for name, pin in ((name, pin) for peer in pins.WANTED for name, pin in pins.read(peer).items()):
        if (found := distribution(name)) is not None and found[0] == pin.version:
            assert {one.name for one in pins.requirements(found[1])} <= set(pin.needs), name
            compared.add(name)
    assert compared


def test_an_environment_has_its_pins_and_is_made_anew_for_others(tmp_path, monkeypatch):
    commands, made = [], []
    monkeypatch.setattr(bench_peers, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(bench_peers.venv, "create", lambda folder, **_: made.append(folder) or folder.mkdir())
    monkeypatch.setattr(bench_peers.subprocess, "run", lambda command, check: commands.append(command))
    for _ in range(2):
        bench_peers.find_python("torchrec")
    file = str(pins.path_of("torchrec"))
    assert [command[5:] for command in commands] == [
        ["--constraint", file, "torch"],
        ["--no-deps", "--requirement", file],
    ]
    (tmp_path / "torchrec/.ready").write_text("earlier pins")
    monkeypatch.setattr(bench_peers.venv, "create", lambda folder, **_: made.append(folder))
    bench_peers.find_python("torchrec")
    assert made == [tmp_path / "torchrec"] * 2


def test_a_line_without_a_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pins, "FOLDER", tmp_path)
    pins.path_of("torch").write_text("# packages\ntorch==2.13.0  # needs numpy\nnumpy\n")
    with pytest.raises(SystemExit, match=re.escape("'numpy' does not pin")):
        pins.read("torch")


@pytest.mark.slow
@pytest.mark.parametrize("peer", pins.WANTED)
def test_the_pins_fit_together(peer):
    """Asks the index: each version exists, needs what the file says, and fits the versions that others ask for."""
    pinned = pins.read(peer)
    packages = pins.report(["--no-deps", "--requirement", str(pins.path_of(peer))])
    assert set(packages) == set(pinned)
    for name, of in pins.needs(packages).items():
        assert {one.name for one in of} == set(pinned[name].needs), name
        for one in of:
            assert one.specifier.contains(pinned[one.name].version, prereleases=True), (name, str(one))
