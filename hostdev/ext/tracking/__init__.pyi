# The public names, each with its module.
from .mlflow_tracker import MLflowWriter as MLflowWriter
from .tracker import Callback as Callback
from .tracker import CheckpointInfo as CheckpointInfo
from .tracker import EndInfo as EndInfo
from .tracker import EpochInfo as EpochInfo
from .tracker import RunInfo as RunInfo
from .tracker import StepInfo as StepInfo
from .tracker import Tracker as Tracker
