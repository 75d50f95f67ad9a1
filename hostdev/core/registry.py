"""Implementations that installed packages register by kind and name; hostdev registers its own in the same way.

A package declares them in its pyproject.toml; `find("tracker", "mine")` then imports and returns `Tracker`:

    [project.entry-points."hostdev.tracker"]
    mine = "package.module:Tracker"

On a command line, a user's own class is named as package.module:Class.
"""

import functools
import tomllib
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hostdev.core.errors import UserError

_T = TypeVar("_T")
_OURS = "hostdev"
_SOURCES = Path(__file__).parents[2] / "pyproject.toml"  # exists only if hostdev runs from its sources


class _Registered(NamedTuple):
    """An entry point, and the name of the package that declares it."""

    entry: EntryPoint
    package: str


def names(kind: str) -> list[str]:
    """Return the names of a kind's implementations, sorted. None of them is imported.

    Args:
        kind: The kind of thing, such as "tracker".
    """
    return sorted(_list_registered(kind))


@functools.cache
def find(kind: str, name: str) -> Any:
    """Import and return the implementation with this name.

    Args:
        kind: The kind of thing, such as "tracker".
        name: The name under which a package registers it.

    Raises:
        UserError: No package registers the name, several do, or the implementation cannot be imported. Other errors
            of the module are raised unchanged.
    """
    registered = _list_registered(kind)
    if name not in registered:
        raise UserError(f"there is no {kind} {name!r}; {_suggest(kind, name, registered)}")
    (entry, package), *others = registered[name]
    if others:
        packages = " and ".join([package, *(other.package for other in others)])
        raise UserError(f"{packages} both register a {kind} {name!r}; uninstall one of them")
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise UserError(f"{kind} {name!r} of {package}, {entry.value}, cannot be imported: {error}") from error


def clear() -> None:
    """Forget the registered names and imported implementations, so that packages installed since are found."""
    find.cache_clear()
    _list_registered.cache_clear()


def _suggest(kind: str, name: str, known: Iterable[str]) -> str:
    close = get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]}?"
    if known:
        return f"choose one of {', '.join(sorted(known))}"
    return f"no installed package registers any under hostdev.{kind}"


@functools.cache
def _list_registered(kind: str) -> dict[str, list[_Registered]]:
    group = f"hostdev.{kind}"
    ours = _read_sources(_SOURCES, group)
    registered: dict[str, list[_Registered]] = {}
    for entry in entry_points(group=group):
        package = entry.dist.name if entry.dist is not None else "a package"
        # The sources are newer than the package that was installed from them.
        if ours is None or package != _OURS:
            registered.setdefault(entry.name, []).append(_Registered(entry, package))
    for name, value in (ours or {}).items():
        registered.setdefault(name, []).append(_Registered(EntryPoint(name, value, group), _OURS))
    return registered


def _read_sources(path: Path, group: str) -> dict[str, str] | None:
    """Return a group's table in our pyproject.toml, or None where the package is installed without its sources."""
    if not path.is_file():
        return None
    project = tomllib.loads(path.read_text()).get("project", {})
    if project.get("name") != _OURS:
        return None
    table: dict[str, str] = project.get("entry-points", {}).get(group, {})
    return table


def load_class(path: str, what: str, name: str | None = None, choices: Iterable[str] = ()) -> Any:
    """Import and return what "package.module:Class" names, usually a class.

    Args:
        path: The module and the class.
        what: What the class is, such as "model", for messages.
        name: What the user has written, for messages; None for `path`.
        choices: Names that the user may write instead.

    Raises:
        UserError: There is no such module or class. Errors of the user's module are raised unchanged.
    """
    name = path if name is None else name
    module, _, attribute = path.partition(":")
    if not (module and attribute) or module.startswith("."):
        choose = ", ".join(choices)
        how = f"choose one of {choose}, or name a class" if choose else "name a class"
        raise UserError(f"there is no {what} {name!r}; {how} as package.module:Class")
    try:
        imported = import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise UserError(
                f"{what} {name!r}: there is no module {error.name!r}; modules must be in the current folder, on "
                "PYTHONPATH, or installed"
            ) from None
        raise UserError(
            f"{what} {name!r}: module {module!r} needs {error.name!r}, which is not installed; install it"
        ) from error
    except ImportError as error:
        raise UserError(f"{what} {name!r}: module {module!r} cannot be imported: {error}") from error
    if not hasattr(imported, attribute):
        classes = [
            key
            for key, value in vars(imported).items()
            if getattr(value, "__module__", None) == module and isinstance(value, type)
        ]
        there = f"; its classes are {', '.join(classes)}" if classes else ", and it defines no class"
        raise UserError(f"{what} {name!r}: module {module!r} has no {attribute!r}{there}")
    return getattr(imported, attribute)


def load_object(path: str, what: str, kind: type[_T]) -> _T:
    """Import the object of class `kind` that "package.module:NAME" names; a class is called without arguments.

    Args:
        path: The module and the name.
        what: What the object is, such as "admission", for messages.
        kind: The class that the object must have.

    Raises:
        UserError: There is no such object. Errors of the user's module are raised unchanged.
    """
    found = load_class(path, what)
    if isinstance(found, type) and issubclass(found, kind):
        try:
            found = found()
        except TypeError as error:
            raise UserError(f"{what} {path!r} cannot be created without arguments: {error}; name an object") from error
    if not isinstance(found, kind):
        raise UserError(f"{what} {path!r} must be a hostdev.{kind.__name__}, not {found!r}")
    return found
