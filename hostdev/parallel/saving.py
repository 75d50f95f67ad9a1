"""A network's state in a folder: brought together, or as the slices and stages that ranks have; any mesh loads both.

    manifest.json            the parameters, the optimizer's options, of each tensor its parts, of each file its SHA-256
    state.safetensors        all of it, where it is integrated
    rank<k>.safetensors      else what rank k has; of what several have, the first has it

A folder comes to be at once, by its name: what has that name is whole.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hostdev.core.disk import is_text
from hostdev.core.errors import UserError, in_words
from hostdev.core.names import inside
from hostdev.parallel.world import World

MANIFEST, VERSION = "manifest.json", 1
_CHUNK = 1 << 22
_NO_TEXT = "the name is not UTF-8, and safetensors reads no such file"
T = TypeVar("T")


class Part(NamedTuple):
    """A part of a tensor: in which file; along which dimension it is cut, the parts being in order, or None."""

    file: str
    dim: int | None


Own = Mapping[str, tuple[Tensor, int | None]]  # tensors that a rank writes, and the dimension along which each is cut


def save(folder: Path, name: str, own: Own, about: Mapping[str, Any], ranks: World) -> None:
    """Write a folder; all ranks call it.

    name   of this rank's file, which is there if it has tensors
    about  what the manifest says beside

    UserError, on all ranks, where the folder is there already, or cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.part")
    _require_all(ranks, _make_folder(folder, temporary) if ranks.rank == 0 else "")
    said: dict[str, Any] = {}
    problem = ""
    if own:
        try:
            save_file({key: value.detach().cpu().contiguous() for key, (value, _) in own.items()}, temporary / name)
            parts = {key: dim for key, (_, dim) in own.items()}
            said = {"file": name, "sha256": _sha256(temporary / name), "parts": parts}
        except (OSError, SafetensorError) as error:
            problem = f"{temporary / name} cannot be written: {error}"
    told = ranks.control.share(said)
    _require_all(ranks, problem, temporary)
    if ranks.rank == 0:
        tensors: dict[str, list[Part]] = {}
        for each in told:
            for key, dim in each.get("parts", {}).items():
                tensors.setdefault(key, []).append(Part(each["file"], dim))
        files = {each["file"]: each["sha256"] for each in told if each}
        try:
            text = json.dumps({"version": VERSION, **about, "files": files, "tensors": tensors}, indent=1)
            (temporary / MANIFEST).write_text(text + "\n")
            temporary.rename(folder)
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    _require_all(ranks, problem, temporary)


def load(folder: Path, wants: Callable[[str], bool]) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Return the tensors of a folder by name, whole, None for those that nobody wants; and its manifest.

    UserError where it is not whole.
    """
    if not is_text(folder):
        raise UserError(f"{folder}: {_NO_TEXT}; rename the folder")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: no saved network ({MANIFEST}: {error})") from None
    if manifest.get("version") != VERSION:
        raise UserError(f"{folder} is of version {manifest.get('version')}, and this hostdev reads {VERSION}")
    try:
        tensors = {key: [Part(*one) for one in parts] for key, parts in manifest["tensors"].items()}
        files = {part.file for key, parts in tensors.items() if wants(key) for part in parts}
        for name in files:
            inside(folder, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST} is broken ({in_words(error)})") from None
    for name in sorted(files):
        try:
            same = _sha256(folder / name) == manifest["files"][name]
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror}; the saved network is not whole") from None
        if not same:
            raise UserError(f"{folder / name} is damaged: its SHA-256 is not that of {MANIFEST}")
    found: dict[str, Tensor | None] = dict.fromkeys(tensors)
    opened: dict[str, Any] = {name: safe_open(folder / name, "pt") for name in files}
    for key, parts in tensors.items():
        if wants(key):
            values = [opened[part.file].get_tensor(key) for part in parts]
            found[key] = values[0] if parts[0].dim is None else torch.cat(values, parts[0].dim)
    return found, manifest


def call_on_all(ranks: World, call: Callable[[], T]) -> T:
    """Return what a call returns, if it raises UserError on no rank; all ranks call it, and all raise it."""
    found, problem = None, ""
    try:
        found = call()
    except UserError as error:
        problem = str(error)
    _require_all(ranks, problem)
    return cast(T, found)


def _make_folder(folder: Path, temporary: Path) -> str:
    """Make the folder to write to; return what is wrong, or nothing."""
    if not is_text(folder):
        return f"{folder}: {_NO_TEXT}; choose another folder"
    if folder.exists():
        return f"{folder} exists; choose another folder"
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # of one that was killed
        temporary.mkdir(parents=True)
    except OSError as error:
        return f"{folder}: {error.strerror}; choose a folder that can be written"
    return ""


def _require_all(ranks: World, problem: str, temporary: Path | None = None) -> None:
    """UserError on all ranks where one has a problem."""
    for one in ranks.control.share(problem):
        if one:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(one)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
