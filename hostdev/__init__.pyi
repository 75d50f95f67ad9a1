# The public names, each with its module: type checkers read this list, and each name is imported at its first use.
from . import distributed as distributed
from . import errors as errors
from . import ops as ops
from . import parallel as parallel
from .cache.cache import EmbeddingCache as EmbeddingCache
from .checkpoint.saved import open as open
from .core.errors import NonFiniteError as NonFiniteError
from .core.errors import UserError as UserError
from .core.hash_ids import hash_ids as hash_ids
from .core.initializers import Constant as Constant
from .core.initializers import Normal as Normal
from .core.initializers import Uniform as Uniform
from .core.launched import alone as alone
from .core.optimizers import FTRL as FTRL
from .core.optimizers import SGD as SGD
from .core.optimizers import Adagrad as Adagrad
from .core.optimizers import Adam as Adam
from .core.optimizers import LazyAdam as LazyAdam
from .core.optimizers import Momentum as Momentum
from .core.optimizers import RowWiseAdagrad as RowWiseAdagrad
from .core.optimizers import RowWiseAdam as RowWiseAdam
from .device.table import DeviceTable as DeviceTable
from .distributed.session import join as join
from .host.table import HostTable as HostTable
from .predict.predictor import Predictor as Predictor
from .runtime.ema import EMA as EMA
from .runtime.runtime import Runtime as Runtime
from .runtime.spec import Bag as Bag
from .runtime.spec import CacheSpec as CacheSpec
from .runtime.spec import Feature as Feature
from .runtime.spec import TableSpec as TableSpec

__version__: str
