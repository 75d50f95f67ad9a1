"""The options of `hostdev train --follow`, and the options that it excludes."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.core.addresses import source_path
from hostdev.core.cli import checked
from hostdev.core.errors import UserError
from hostdev.train.config_checks import option_name
from hostdev.train.option_fields import flag

POLL_SECONDS = 5.0
QUIET_SECONDS = 30.0
WINDOW = 24  # files
_END, _IDLE = "end", "idle:"
_LONGEST_POLL = 3600.0
# Options that have no meaning without epochs or with files that are not there yet, and what to say about each.
_EXCLUDED = {
    "epochs": "each row is trained on once",
    "order": "files are trained on in the order of their names",
    "shuffle_window": "files are trained on in the order of their names",
    "early_stop": "there are no epochs",
    "spawn": "one process trains",
    "parallel": "one process trains",
    "mesh": "one process trains",
    "batch_per_rank": "one process trains; give --batch-size",
}
_HARMLESS: dict[str, tuple[Any, ...]] = {  # values of these options that change nothing
    "epochs": (1,),
    "order": ("shuffled",),
    "shuffle_window": (1,),
    "parallel": ("none",),
}


class Until(NamedTuple):
    """When a run that follows a folder ends: after `idle` minutes without a file, or after the file `name`.

    Both are None for the value "end": when all files that are there have been trained on.
    """

    name: str | None = None
    idle: float | None = None

    @property
    def trains_rest(self) -> bool:
        """Whether the rows that wait for a full batch are trained on at the end, as a smaller batch."""
        return self.idle is None


def parse_until(text: str) -> Until:
    """Parse --follow-until; raise UserError if it is malformed."""
    if text == _END:
        return Until()
    if not text.startswith(_IDLE):
        if not text:
            raise UserError("--follow-until is empty; give end, idle:MINUTES or the name of a file")
        return Until(name=text)
    try:
        minutes = float(text.removeprefix(_IDLE))
    except ValueError:
        minutes = math.nan
    if not (math.isfinite(minutes) and minutes >= 0):
        raise UserError(f"--follow-until {text}: give a number of minutes of at least 0, such as idle:30")
    return Until(idle=minutes)


@dataclass(frozen=True, kw_only=True)
class FollowOptions:
    """The options of `hostdev train` about files that arrive; `TrainConfig` has all options."""

    follow: Path | None = flag(
        "train on the files that arrive in DIR, once, in the order of their names; --data, with --ids raw, says how to "
        "read them; implies --tables dynamic and --host-device-mix",
        kind=checked(source_path),
        metavar="DIR",
    )
    follow_until: str | None = flag(
        "when to end --follow: end, when all present files are trained on; idle:MINUTES without a file; or the name of "
        "the last file (default: after a signal)",
        kind=str,
        metavar="WHEN",
    )
    follow_mark: str | None = flag(
        "follow the sub-folders of --follow that have a file of this name, such as _SUCCESS (default: the files of the "
        "folder itself)",
        kind=str,
        metavar="NAME",
    )
    follow_poll: float | None = flag(
        f"seconds between two looks at the folder of --follow (default {POLL_SECONDS:g})", kind=float, metavar="S"
    )
    follow_quiet: float | None = flag(
        "seconds after which a file of --follow that has not changed is taken even if its last line is cut, or set "
        f"aside if it cannot be read (default {QUIET_SECONDS:g})",
        kind=float,
        metavar="S",
    )
    follow_grown: bool = flag(
        "also train on the lines that are added to the file of --follow that was taken last", default=False
    )
    follow_window: int | None = flag(
        f"files over which --follow also reports the quality (default {WINDOW})", kind=int, metavar="N"
    )


def check_follow(settings: Any) -> None:
    """Raise UserError for options that contradict --follow, or have no effect without it."""
    if settings.follow is None:
        for name in ("follow_until", "follow_mark", "follow_poll", "follow_quiet", "follow_grown", "follow_window"):
            if getattr(settings, name) not in (None, False):
                option = option_name(name)
                raise UserError(f"{option} has no effect without --follow; leave out {option}")
        return
    if settings.data is None:
        raise UserError(
            "--follow needs --data EXAMPLE, a data set prepared with --ids raw, which says how to read the files; make "
            "one from some first files"
        )
    for name, why in _EXCLUDED.items():
        if getattr(settings, name) not in (None, *_HARMLESS.get(name, ())):
            raise UserError(f"{option_name(name)} does not fit --follow: {why}; leave out {option_name(name)}")
    if settings.cache_rows == "auto":
        raise UserError("--cache-rows auto would measure rows of the past; give a number or a share with --follow")
    if settings.follow_until is not None:
        parse_until(settings.follow_until)
    if settings.follow_mark is not None and (not settings.follow_mark or "/" in settings.follow_mark):
        raise UserError(f"--follow-mark {settings.follow_mark!r}: give the name of a file, such as _SUCCESS")
    quiet = settings.follow_quiet
    if quiet is not None and not (math.isfinite(quiet) and quiet >= 0):
        raise UserError(f"--follow-quiet must be a number of seconds of at least 0, not {quiet}")
    poll = settings.follow_poll
    if poll is not None and not (math.isfinite(poll) and 0 < poll <= _LONGEST_POLL):
        raise UserError(f"--follow-poll must be a number of seconds above 0, at most {_LONGEST_POLL:g}, not {poll}")
