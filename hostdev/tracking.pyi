from hostdev.ext.tracking import Callback as Callback
from hostdev.ext.tracking import CheckpointInfo as CheckpointInfo
from hostdev.ext.tracking import EndInfo as EndInfo
from hostdev.ext.tracking import EpochInfo as EpochInfo
from hostdev.ext.tracking import MLflowWriter as MLflowWriter
from hostdev.ext.tracking import RunInfo as RunInfo
from hostdev.ext.tracking import StepInfo as StepInfo
from hostdev.ext.tracking.tracker import Tracker as Tracker
