# The public names, each with its module.
from .callback import Callback as Callback
from .callback import CheckpointInfo as CheckpointInfo
from .callback import EndInfo as EndInfo
from .callback import EpochInfo as EpochInfo
from .callback import RunInfo as RunInfo
from .callback import StepInfo as StepInfo
from .mlflow_writer import MLflowWriter as MLflowWriter
from .tracker import Tracker as Tracker
