"""The packages that a report needs and that a training without one does not."""

from importlib.util import find_spec

from hostdev.core.errors import UserError

_PACKAGES = {"jinja2": "Jinja2", "vl_convert": "vl-convert-python"}


def require_extra(what: str) -> None:
    """Raise UserError if a package is missing; `what` is the command or option that needs it."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise UserError(f"{what} needs {package}, which is not installed; pip install 'hostdev[report]'")
