"""All options of `hostdev train`: those of the engine, and those of the extensions that take part."""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from hostdev.core.options import When, choice, option
from hostdev.distributed.world import SCHEDULES, parse_mesh, parse_plan
from hostdev.ext.report.cli import ReportOptions
from hostdev.ext.streams.options import FollowOptions
from hostdev.ext.tracking.options import TrackingOptions
from hostdev.train.options import ProcessOptions, TrainConfig

_STAGES = When("may_have_stages", shown="--mesh pipe=N")


@dataclass(frozen=True, kw_only=True)
class PartOptions(ProcessOptions):
    """How processes divide a network."""

    section: ClassVar[str] = "parts"
    title: ClassVar[str] = "networks in parts"
    schedule: str | None = choice(
        "order of the micro-batches in the stages of --mesh pipe=N (default 1f1b)", SCHEDULES, needs={_STAGES: ""}
    )
    stage_cut: str | None = option(
        "the modules that begin the second and later stages, for example deep.2,deep.4 (default: stages of equal cost)",
        str,
        metavar="NAMES",
        needs={_STAGES: ""},
    )
    plan: str | None = option(
        "how --mesh model=N slices layers, by the layers' names or patterns: colwise slices outputs, rowwise slices "
        "inputs; for example deep.0=colwise,deep.2=rowwise; other layers are replicated",
        str,
        metavar="STRATEGIES",
        check=parse_plan,
        needs={When("may_have_slices", shown="--mesh model=N"): ""},
    )

    @property
    def _is_open(self) -> bool:
        return self.parallel in ("semi", "auto") and self.mesh is None

    @property
    def may_have_stages(self) -> bool:
        """Whether the mesh has stages, or is chosen later."""
        return self._is_open or (self.mesh is not None and parse_mesh(self.mesh).pipe > 1)

    @property
    def may_have_slices(self) -> bool:
        """Whether the mesh has slices of layers, or is chosen later."""
        return self._is_open or (self.mesh is not None and parse_mesh(self.mesh).model > 1)


@dataclass(frozen=True, kw_only=True)
class CommandConfig(TrainConfig, ReportOptions, TrackingOptions, FollowOptions, PartOptions):
    """The options of `hostdev train`. Its flags are frozen: a new option is only a key of the --config file."""

    def resolved(self) -> Self:
        """Return the settings, with defaults that depend on other options filled in."""
        if self.follow is not None and self.epochs is None:
            return replace(self, epochs=1).resolved()
        return super().resolved()
