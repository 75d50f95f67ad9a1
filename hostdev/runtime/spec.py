"""Specifications of a model's tables, its features, and a batch's ids."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Union

import numpy as np
import numpy.typing as npt

from hostdev.cache.options import WINDOW
from hostdev.core.disk_storage import Disk
from hostdev.core.initializers import Initializer, Normal
from hostdev.core.key_rules import Admission, Eviction
from hostdev.core.keys import SHARED
from hostdev.core.memory import TableShape
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.table_dtypes import FP32, require_slots_dtype, require_table_dtype
from hostdev.core.tables import Capabilities

if TYPE_CHECKING:
    from torch import Tensor

POOLINGS = (None, "sum", "mean")
DTYPES = ("float32", "bfloat16")

Array: TypeAlias = Union["Tensor", npt.ArrayLike]


@dataclass(frozen=True)
class KeySpec:
    """The rules of a table by key; see `HostTable`."""

    admit: Admission | None = None
    evict: Eviction | None = None
    unknown: str = SHARED


@dataclass(frozen=True)
class TableSpec:
    """A table that a model needs: its size, optimizer, initial values and dtypes.

    With `keys`, it is a table by key, and `rows` is its capacity. With `disk`, the rows that do not fit in
    its memory are on disk.
    """

    rows: int
    dim: int
    optimizer: SparseOptimizer
    init: Initializer = Normal(0.01)
    dtype: str = FP32  # of the weights
    slots: str = FP32  # of the optimizer state
    keys: KeySpec | None = None
    disk: Disk | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", require_table_dtype(self.dtype, "of a model"))
        object.__setattr__(self, "slots", require_slots_dtype(self.slots, "of a model", self.dim))

    @property
    def capacity(self) -> int:
        """The most rows that the table can have."""
        return self.rows

    @property
    def capabilities(self) -> Capabilities:
        """The table's capabilities if it is in host memory, without `formats`."""
        return Capabilities(self.keys is not None, self.disk is not None, self.optimizer.catch_up is not None)

    @property
    def slots_dtype(self) -> str:
        """The same as `slots`, under the name that tables use; one of SLOT_DTYPES."""
        return self.slots

    @property
    def shape(self) -> TableShape:
        """The shape, which together with the number of rows determines the table's size in bytes."""
        return TableShape(self.dim, self.optimizer, self.dtype, self.slots_dtype)


@dataclass(frozen=True)
class Feature:
    """A feature, whose ids are looked up in one table or in several at once.

    A mean divides the sum of the weighted rows by the number of ids; a sample without ids gets zeros.

    Attributes:
        tables: The table, or a tuple of tables that are looked up with the same ids (for example, first-order weights
            and vectors). For a `Runtime`, these are table objects; in a model, they are the tables' names.
        pooling: "sum" or "mean" of each sample's rows, [B, D]; None returns a row for each id.
        padding: An id that means "no row", inside the table's range or not (such as -1): the model gets zeros for it,
            sums and means leave it out, and it is never looked up or updated.
        dtype: The dtype of the rows that the model gets, "float32" or "bfloat16", for all tables; or a tuple with one
            dtype for each table. Rows are rounded once, after weights and pooling.
        unknown: For a table by key: the name of the out-of-vocabulary row, which keys without a row share; or a tuple
            with a name for each column of ids [B, k]. Features and columns with the same name share this row.

    Raises:
        TypeError: `unknown` is neither a name nor a tuple of names.
        ValueError: The pooling or dtype is unknown, the padding is not an integer, there is no table, or a padding is
            given with several names in `unknown`.
    """

    tables: Any  # table objects for a `Runtime`, names in a model
    pooling: str | None = None
    padding: int | None = None
    dtype: str | tuple[str, ...] = "float32"
    unknown: str | tuple[str, ...] = ""

    def __post_init__(self) -> None:
        if not self.unknown_names or not all(isinstance(name, str) for name in self.unknown_names):
            raise TypeError(f"unknown must be the name of an out-of-vocabulary row, or a tuple, not {self.unknown!r}")
        if len(self.unknown_names) > 1 and self.padding is not None:
            raise ValueError("unknown names a row for each column of ids, so there can be no padding")
        if self.pooling not in POOLINGS:
            raise ValueError(f'the pooling of a feature must be None, "sum" or "mean", not {self.pooling!r}')
        if any(one not in DTYPES for one in ([self.dtype] if isinstance(self.dtype, str) else self.dtype)):
            raise ValueError(f"the dtype of a feature must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if isinstance(self.padding, bool) or not isinstance(self.padding, int | None):
            raise ValueError(f"the padding of a feature must be an id, not {self.padding!r}")
        if isinstance(self.tables, Sequence) and not isinstance(self.tables, str) and not self.tables:
            raise ValueError("a feature needs at least one table")

    @property
    def unknown_names(self) -> tuple[str, ...]:
        """The names of the out-of-vocabulary rows: one, or one for each column of ids."""
        return (self.unknown,) if isinstance(self.unknown, str) else tuple(self.unknown)

    @property
    def is_single(self) -> bool:
        """Whether the feature has one table, so that the model gets a tensor and not a tuple of tensors."""
        return isinstance(self.tables, str) or not isinstance(self.tables, Sequence)


@dataclass(frozen=True, eq=False)
class Bag:
    """The ids of one feature in a batch.

    Attributes:
        values: The ids, int32 or int64: with lengths or offsets [N], all samples concatenated; else [B] or [B, k].
        lengths: [B], the number of ids in each sample, 0 or more.
        offsets: [B], where each sample's ids begin, as in torch's EmbeddingBag; an alternative to lengths.
        weights: The factor of each id's row, with the shape of `values`; weights get no gradients. None if all are 1.

    Raises:
        ValueError: Both lengths and offsets are given.
    """

    values: Array
    lengths: Array | None = None
    offsets: Array | None = None
    weights: Array | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None and self.offsets is not None:
            raise ValueError("a bag has lengths or offsets, not both")

    def to(self, *_: object, **__: object) -> "Bag":
        """Return the bag unchanged: frameworks move batches to the device, but ids are looked up on the host."""
        return self


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """A cache of hot rows on the device.

    Attributes:
        rows: The size of the cache for each table: a number of rows, or a share such as "10%".
        policy: "lookahead", "lru", "lfu" or "static".
        window: Number of batches that the policy "lookahead" knows in advance.
        counts: [V], how often each row is used, in any unit. Required by "static"; helps "lookahead" to move fewer
            bytes.
        record: Whether to keep the first batches' ids, for the offline optimum in `EmbeddingCache.summary`.
    """

    rows: int | str
    policy: str = "lookahead"
    window: int = WINDOW
    counts: npt.NDArray[np.generic] | None = None
    record: bool = False


FeatureInput: TypeAlias = Array | Bag | tuple[Array, Array] | tuple[Array, Array, Array]  # a feature's ids in a batch
