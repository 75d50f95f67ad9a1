"""All options of `hostdev train`: those of the engine, and those of the extensions that take part."""

from dataclasses import dataclass, replace
from typing import Self

from hostdev.ext.report.extra import ReportOptions
from hostdev.ext.streams.options import FollowOptions
from hostdev.ext.tracking.options import TrackingOptions
from hostdev.ext.training.part_options import PartOptions
from hostdev.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class CommandConfig(TrainConfig, ReportOptions, TrackingOptions, FollowOptions, PartOptions):
    """The options of `hostdev train`. Its flags are frozen: a new option is a key of the file only."""

    def resolved(self) -> Self:
        """Return the settings, with defaults that depend on other options filled in."""
        return super(CommandConfig, self if self.follow is None else replace(self, epochs=1)).resolved()
