"""The options of a run that follows a folder, and the options that they exclude."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from hostdev.core.addresses import source_path
from hostdev.core.cli import checked
from hostdev.core.errors import UserError
from hostdev.core.options import OptionError, OptionGroup, count, option, switch

POLL_SECONDS = 5.0
QUIET_SECONDS = 30.0
WINDOW = 24  # the default of --follow-window, in files
_END, _IDLE = "end", "idle:"
_LONGEST_POLL = 3600.0
_BY_NAME = "files are trained on in the order of their names"
_ALONE = "one process trains"
_NEEDS = {"follow": ""}


class Until(NamedTuple):
    """When a run that follows a folder ends: after `idle` minutes without a file, or after the file `name`.

    Both are None for the value "end": the run ends when all files in the folder have been trained on.
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


def check_mark(name: str) -> None:
    """Raise UserError unless --follow-mark is the name of a file."""
    if not name or "/" in name:
        raise UserError(f"--follow-mark {name!r}: give the name of a file, such as _SUCCESS")


@dataclass(frozen=True, kw_only=True)
class FollowOptions(OptionGroup):
    """The options of a run that follows a folder."""

    section: ClassVar[str] = "following"
    title: ClassVar[str] = "files that arrive"
    follow: Path | None = option(
        "train on the files that arrive in DIR, once, in the order of their names; --data, with --ids raw, says how to "
        "read them; implies --tables dynamic and --host-device-mix",
        checked(source_path),
        excludes={
            "epochs>1": "each row is trained on once",
            "order": _BY_NAME,
            "shuffle_window": _BY_NAME,
            "early_stop": "there are no epochs",
            "spawn": _ALONE,
            "parallel": _ALONE,
            "mesh": _ALONE,
            "batch_per_rank": f"{_ALONE}; give --batch-size",
            "cache_rows=auto": "it would measure rows of the past; give a number or a share",
        },
        implies={"tables": "dynamic", "host_device_mix": True},
        is_kind=True,
    )
    follow_until: str | None = option(
        "when to end --follow: end, when all present files are trained on; idle:MINUTES without a file; or the name of "
        "the last file (default: after a signal)",
        str,
        metavar="WHEN",
        check=parse_until,
        needs=_NEEDS,
    )
    follow_mark: str | None = option(
        "follow the sub-folders of --follow that have a file of this name, such as _SUCCESS (default: the files of the "
        "folder itself)",
        str,
        metavar="NAME",
        check=check_mark,
        needs=_NEEDS,
        is_fixed=True,
    )
    follow_poll: float | None = option(
        f"seconds between two looks at the folder of --follow (default {POLL_SECONDS:g})",
        float,
        metavar="S",
        above=0,
        most=_LONGEST_POLL,
        unit="seconds",
        needs=_NEEDS,
    )
    follow_quiet: float | None = option(
        "seconds after which a file of --follow that has not changed is taken even if its last line is cut, or set "
        f"aside if it cannot be read (default {QUIET_SECONDS:g})",
        float,
        metavar="S",
        least=0,
        unit="seconds",
        needs=_NEEDS,
    )
    follow_grown: bool = switch(
        "also train on the lines that are added to the file of --follow that was taken last", needs=_NEEDS
    )
    follow_window: int | None = count(
        f"files over which --follow also reports the quality (default {WINDOW})", needs=_NEEDS
    )

    def check(self) -> None:
        """Raise OptionError if no data set says how to read the files."""
        if self.follow is not None and getattr(self, "data", None) is None:
            raise OptionError(
                "follow",
                " needs --data EXAMPLE, a data set prepared with --ids raw, which says how to read the files; make one "
                "from some first files",
            )
