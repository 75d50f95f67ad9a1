"""The options --log-to and --callback, and the trackers and callbacks that they name."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hostdev.core import registry
from hostdev.core.errors import UserError
from hostdev.core.options import OptionError, OptionGroup, option
from hostdev.core.registry import load_class
from hostdev.ext.tracking.tracker import METHODS, Tracker


@dataclass(frozen=True, kw_only=True)
class TrackingOptions(OptionGroup):
    """The options that name trackers and callbacks."""

    section: ClassVar[str] = "tracking"
    title: ClassVar[str] = "what the run writes"
    log_to: str | None = option(
        "also write losses, metrics, speed and histograms to tensorboard (RUN/tensorboard), mlflow "
        "(MLFLOW_TRACKING_URI) or another installed tracker; separate several by commas",
        str,
        metavar="NAMES",
    )
    callback: str | None = option(
        "your class, as package.module:Class, that receives steps, epochs, checkpoints and the end (hostdev.Callback); "
        "separate several by commas",
        str,
        metavar="CLASS",
    )

    @property
    def trackers(self) -> tuple[str, ...]:
        """The names in --log-to."""
        return () if self.log_to is None else tuple(self.log_to.split(","))

    @property
    def callback_classes(self) -> tuple[str, ...]:
        """The classes in --callback."""
        return () if self.callback is None else tuple(self.callback.split(","))

    def check(self) -> None:
        """Raise OptionError if --log-to has a name that is not a tracker's, or an option has a name twice."""
        for key, names in (("log_to", self.trackers), ("callback", self.callback_classes)):
            for name in names:
                if names.count(name) > 1:
                    raise OptionError(key, f" names {name!r} twice; name it once")
        known = registry.names("tracker") if self.trackers else ()
        for name in self.trackers:
            if name not in known:
                raise OptionError("log_to", f" has no {name!r}; choose one or more of {','.join(known)}")


def require_tracking(settings: TrackingOptions) -> None:
    """Raise UserError if a tracker of --log-to or a class of --callback cannot be used."""
    for name in settings.trackers:
        _find_tracker(name).require()
    for name in settings.callback_classes:
        _load(name)


def make_trackers(settings: TrackingOptions) -> list[Tracker]:
    """Return the trackers of --log-to."""
    return [_find_tracker(name)() for name in settings.trackers]


def _find_tracker(name: str) -> type[Tracker]:
    found = registry.find("tracker", name)
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise UserError(f"--log-to {name}: {found!r} must be a class, derived from hostdev.tracking.Tracker")
    return found


def make_callbacks(settings: TrackingOptions) -> list[tuple[str, Any]]:
    """Return the name and an object of each class in --callback; raise UserError if a class cannot be used."""
    made = []
    for name in settings.callback_classes:
        try:
            made.append((name, _load(name)()))
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"callback {name!r} cannot be created without arguments: {type(error).__name__}: {error}"
            ) from error
    return made


def _load(name: str) -> Any:
    found = load_class(name, "callback")
    if not isinstance(found, type):
        raise UserError(f"callback {name!r} must be a class, not {found!r}")
    given = [method for method in dir(found) if method.startswith("on_")]
    wrong = [method for method in given if method not in METHODS or not callable(getattr(found, method))]
    if wrong or not given:
        what = f"a method {wrong[0]!r} that is never called" if wrong else "no method that is called"
        raise UserError(f"callback {name!r} has {what}; the methods are {', '.join(METHODS)}")
    return found
