"""Classes of users, named on a command line as package.module:Class."""

from collections.abc import Iterable
from importlib import import_module
from typing import Any, TypeVar

from hostdev.core.errors import UserError

_T = TypeVar("_T")


def load_class(path: str, what: str, name: str | None = None, choices: Iterable[str] = ()) -> Any:
    """Import what "package.module:Class" names.

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
