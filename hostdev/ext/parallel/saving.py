"""Saves a network's state in a folder, as one file or as one file per rank, and loads it on any mesh.

    manifest.json            steps, parameters, the optimizer's options, each tensor's parts, each file's SHA-256
    state.safetensors        the whole state, if saved with integrated=True
    rank<k>.safetensors      otherwise, the part of rank k; a tensor on several ranks is in the first one's file

The folder gets its final name in one rename, when it is complete.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from hostdev.core import json_files
from hostdev.core.checksums import checksum
from hostdev.core.errors import UserError, in_words
from hostdev.core.names import inside
from hostdev.core.outputs import is_text
from hostdev.distributed.world import World

MANIFEST, VERSION = "manifest.json", 1
_NO_TEXT = "the name is not UTF-8, and safetensors cannot read such a file"
T = TypeVar("T")


class Part(NamedTuple):
    """A part of a tensor: its file, and the dimension along which parts are concatenated; None for a whole tensor."""

    file: str
    dim: int | None


Own = Mapping[str, tuple[Tensor, int | None]]  # tensors of a rank by name, each with the dimension it is cut along


def save(folder: Path, name: str, own: Own, about: Mapping[str, Any], ranks: World) -> None:
    """Write a network's state to a new folder. All ranks must call this function.

    Args:
        folder: The new folder.
        name: Name of this rank's file, which is written if `own` has tensors.
        own: The tensors that this rank writes, by name.
        about: Additional entries of the manifest.
        ranks: The ranks of this run.

    Raises:
        UserError: The folder exists or cannot be written; raised on all ranks.
    """
    temporary = folder.with_name(f".{folder.name}.part")  # of all ranks: `outputs.new_folder` is for one process
    _require_all(ranks, _make_folder(folder, temporary) if ranks.rank == 0 else "")
    said: dict[str, Any] = {}
    problem = ""
    if own:
        try:
            save_file({key: value.detach().cpu().contiguous() for key, (value, _) in own.items()}, temporary / name)
            parts = {key: dim for key, (_, dim) in own.items()}
            said = {"file": name, "sha256": checksum(temporary / name), "parts": parts}
        except (OSError, SafetensorError) as error:
            problem = f"{temporary / name} cannot be written: {error}"
    written = ranks.control.share(said)
    _require_all(ranks, problem, temporary)
    if ranks.rank == 0:
        tensors: dict[str, list[Part]] = {}
        for each in written:
            for key, dim in each.get("parts", {}).items():
                tensors.setdefault(key, []).append(Part(each["file"], dim))
        files = {each["file"]: each["sha256"] for each in written if each}
        try:
            text = json.dumps({"version": VERSION, **about, "files": files, "tensors": tensors}, indent=1)
            (temporary / MANIFEST).write_text(text + "\n")
            temporary.rename(folder)
        except OSError as error:
            problem = f"{folder} cannot be written: {error}"
    _require_all(ranks, problem, temporary)


def load(folder: Path, wants: Callable[[str], bool]) -> tuple[dict[str, Tensor | None], dict[str, Any]]:
    """Return a folder's tensors by name and its manifest; raise UserError if the folder is damaged.

    A tensor for whose name `wants` returns False is not loaded, and is None.
    """
    if not is_text(folder):
        raise UserError(f"{folder}: {_NO_TEXT}; rename the folder")
    try:
        manifest = json_files.read(folder / MANIFEST)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder} has no saved network ({MANIFEST}: {error}); give a folder that Network.save wrote"
        ) from None
    if manifest.get("version") != VERSION:
        raise UserError(
            f"{folder} has format version {manifest.get('version')}, but this version of hostdev reads "
            f"version {VERSION}; load the folder with the version of hostdev that wrote it"
        )
    try:
        tensors = json_files.parse(dict[str, list[Part]], manifest["tensors"], "tensors")
        files = {part.file for key, parts in tensors.items() if wants(key) for part in parts}
        for name in files:
            inside(folder, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{folder / MANIFEST} is broken ({in_words(error)})") from None
    for name in sorted(files):
        try:
            same = checksum(folder / name) == manifest["files"][name]
        except OSError as error:
            raise UserError(f"{folder / name}: {error.strerror}; the saved network is incomplete") from None
        if not same:
            raise UserError(f"{folder / name} is damaged: its SHA-256 differs from {MANIFEST}")
    found: dict[str, Tensor | None] = dict.fromkeys(tensors)
    opened: dict[str, Any] = {name: safe_open(folder / name, "pt") for name in files}
    for key, parts in tensors.items():
        if wants(key):
            values = [opened[part.file].get_tensor(key) for part in parts]
            found[key] = values[0] if parts[0].dim is None else torch.cat(values, parts[0].dim)
    return found, manifest


def call_on_all(ranks: World, call: Callable[[], T]) -> T:
    """Run `call` on each rank, and return its result; if it raises UserError on any rank, raise it on all ranks.

    All ranks must call this function.
    """
    found, problem = None, ""
    try:
        found = call()
    except UserError as error:
        problem = str(error)
    _require_all(ranks, problem)
    return cast(T, found)


def _make_folder(folder: Path, temporary: Path) -> str:
    """Create the temporary folder; return an error message, or "" on success."""
    if not is_text(folder):
        return f"{folder}: {_NO_TEXT}; choose another folder"
    if folder.exists():
        return f"{folder} exists; choose another folder"
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a killed process
        temporary.mkdir(parents=True)
    except OSError as error:
        return f"{folder}: {error.strerror}; choose a folder that can be written"
    return ""


def _require_all(ranks: World, problem: str, temporary: Path | None = None) -> None:
    """Remove the temporary folder and raise UserError on all ranks if any rank has a problem."""
    for one in ranks.control.share(problem):
        if one:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(one)
