"""File names in manifests: plain relative paths that stay inside the manifest's folder."""

import stat
from pathlib import Path
from typing import Any

_LONGEST = 4096  # maximum characters of a path


def wrong_name(name: Any) -> str | None:
    """Return None if a manifest may contain this file name, or else the reason, to follow the name in a message."""
    if not isinstance(name, str) or not name:
        return "is empty or not a string"
    if len(name) > _LONGEST:
        return f"has {len(name)} characters, more than 4096"
    if any(ord(character) < 32 or 127 <= ord(character) < 160 for character in name):
        return "has control characters"
    if name.startswith("/") or "\\" in name:
        return "is not relative to the manifest's folder"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "leads outside the manifest's folder, or is not a plain path"
    return None


def require_name(name: Any) -> str:
    """Return `name`; raise ValueError if a manifest may not contain this file name."""
    if wrong := wrong_name(name):
        raise ValueError(f"the name {str(name)[:80]!r} {wrong}")
    return str(name)


def inside(root: Path, name: str) -> Path:
    """Return the path of a file that a manifest in the folder `root` names.

    Raises:
        ValueError: The name is not a plain relative path, a link leads outside the folder, the file is a pipe or a
            device, or it cannot be accessed.
    """
    path, mode, is_linked = root, 0, False
    for part in require_name(name).split("/"):
        path = path / part
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            return root / name
        except OSError as error:
            raise ValueError(f"{path} cannot be accessed ({error.strerror})") from None
        is_linked |= stat.S_ISLNK(mode)
    if is_linked:
        try:
            if not path.resolve().is_relative_to(root.resolve()):
                raise ValueError(f"{path} is a link that leads outside its folder")
            mode = path.stat().st_mode
        except FileNotFoundError:
            return path
        except (OSError, RuntimeError) as error:  # circular links
            raise ValueError(f"{path} is a link that cannot be followed ({error})") from None
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a folder is refused when it is opened
        raise ValueError(f"{path} is not a regular file")
    return path
