"""The option --report, and the packages that a report needs and that a training without one does not."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import ClassVar

from hostdev.core.errors import UserError
from hostdev.core.options import OptionGroup, switch

_PACKAGES = {"jinja2": "Jinja2", "vl_convert": "vl-convert-python"}


def require_extra(what: str) -> None:
    """Raise UserError if a package is missing; `what` is the command or option that needs it."""
    for module, package in _PACKAGES.items():
        if find_spec(module) is None:
            raise UserError(f"{what} needs {package}, which is not installed; pip install 'hostdev[report]'")


@dataclass(frozen=True, kw_only=True)
class ReportOptions(OptionGroup):
    """The page with charts and tables."""

    section: ClassVar[str] = "page"
    title: ClassVar[str] = "what the run writes"
    report: bool = switch(
        "at the end, write report.html in the run directory: charts and tables",
        check=lambda wanted: require_extra("--report"),
    )
