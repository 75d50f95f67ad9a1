"""Pin every package of the peers' environments: `python -m bench.pins [PEER ...]` writes bench/peers/PEER.txt anew.

A file has a line for each package: its version, and the packages that it needs. By these, tests find a missing package
without a network. fbgemm-gpu, which TorchRec needs, would bring a CUDA build; fbgemm-gpu-cpu has the same modules.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

FOLDER = Path(__file__).parent / "peers"
WANTED = {
    "mindspore": ["mindspore==2.10.0"],
    "torch": ["torch==2.13.0", "fbgemm-gpu-cpu==1.8.0"],
    "recbole": ["torch==2.13.0", "recbole==1.2.1", "numpy==1.26.4", "pandas<3", "scipy<1.16"],
    "fuxictr": ["torch==2.13.0", "fuxictr==2.3.10", "polars<1.30", "pandas<3"],
    "torchrec": ["torch==2.13.0", "torchrec==1.9.2", "fbgemm-gpu-cpu==1.8.0", "pandas", "iopath"],
}
INSTEAD = {"fbgemm-gpu": "fbgemm-gpu-cpu"}


class Pin(NamedTuple):
    """A package's version, and the names of the packages that it needs."""

    version: str
    needs: tuple[str, ...]


def path_of(peer: str) -> Path:
    """Return the file with a peer's pins, which pip takes as requirements and as constraints."""
    return FOLDER / f"{peer}.txt"


def read(peer: str) -> dict[str, Pin]:
    """Return a peer's pins by canonical name."""
    lines = [line for line in path_of(peer).read_text().splitlines() if line and not line.startswith("#")]
    pins = {}
    for line in lines:
        found = re.fullmatch(r"([\w.-]+)==([\w.!+-]+)(?:  # needs (.+))?", line)
        if found is None:
            raise SystemExit(f"{path_of(peer)}: {line!r} does not pin a package")
        name, version, needs = found.groups()
        pins[canonicalize_name(name)] = Pin(version, tuple(needs.split(", ")) if needs else ())
    return pins


def install_commands(peer: str, python: Path) -> Iterator[list[str]]:
    """Yield the commands that install a peer's packages into an environment.

    torch comes first, with what the index's build of it needs, which may be more than the CPU's build needs.
    """
    pip = [str(python), "-m", "pip", "install", "--quiet"]
    if "torch" in read(peer):
        yield [*pip, "--constraint", str(path_of(peer)), "torch"]
    yield [*pip, "--no-deps", "--requirement", str(path_of(peer))]


def requirements(metadata: dict[str, Any], extras: Iterable[str] = ()) -> list[Requirement]:
    """Return the requirements of a package, as pip's report has its metadata, with these extras, for this Python."""
    found = []
    for text in metadata.get("requires_dist", ()):
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            one.name = INSTEAD.get(canonicalize_name(one.name), canonicalize_name(one.name))
            found.append(one)
    return found


def report(arguments: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return the metadata of all packages that pip would install, by canonical name."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        subprocess.run([*command, "--report", str(out), *arguments], check=True)
        packages = json.loads(out.read_text())["install"]
    return {canonicalize_name(one["metadata"]["name"]): one["metadata"] for one in packages}


def needs(packages: dict[str, dict[str, Any]]) -> dict[str, list[Requirement]]:
    """Return the requirements of each package, with the extras that the others ask for."""
    extras: dict[str, set[str]] = {name: set() for name in packages}
    found: dict[str, list[Requirement]] = {}
    while True:
        before = {name: set(of) for name, of in extras.items()}
        for name, metadata in packages.items():
            found[name] = requirements(metadata, extras[name])
            for one in found[name]:
                extras.get(one.name, set()).update(one.extras)
        if extras == before:
            return found


def resolve(peer: str) -> dict[str, Pin]:
    """Return pins of the newest packages that fit together."""
    alone = [one for one in WANTED[peer] if one.startswith(("torchrec", "fbgemm"))]  # not with what INSTEAD replaces
    packages = report(["--no-deps", *alone]) if alone else {}
    theirs = [one for metadata in packages.values() for one in requirements(metadata)]
    wanted = [str(one) for one in theirs if one.name not in packages]
    packages |= report([*(one for one in WANTED[peer] if one not in alone), *wanted])
    of = needs(packages)
    return {
        name: Pin(metadata["version"].partition("+")[0], tuple(sorted({one.name for one in of[name]})))
        for name, metadata in sorted(packages.items())
    }


def main() -> None:
    """Write the files of the peers that the command names, or of all."""
    for peer in sys.argv[1:] or WANTED:
        lines = [f"# All packages of the peer {peer}, for Python 3.11; `python -m bench.pins {peer}` pins them anew."]
        for name, pin in resolve(peer).items():
            lines.append(f"{name}=={pin.version}" + (f"  # needs {', '.join(pin.needs)}" if pin.needs else ""))
        path_of(peer).write_text("\n".join(lines) + "\n")
        print(f"{path_of(peer)}: {len(lines) - 1} packages")


if __name__ == "__main__":
    main()
