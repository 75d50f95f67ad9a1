"""What a model asks for: tables, features that take their ids from them, and the ids of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hostdev.cache.options import WINDOW
from hostdev.core.initializers import Initializer, Normal
from hostdev.core.memory import TableShape
from hostdev.core.optimizers import SparseOptimizer
from hostdev.core.table_dtypes import FP32, require_table_dtype

POOLINGS = (None, "sum", "mean")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class TableSpec:
    """A table that a model wants: its rows, its columns, its optimizer, its initial values and its weights' dtype."""

    rows: int
    dim: int
    optimizer: SparseOptimizer
    init: Initializer = Normal(0.01)
    dtype: str = FP32

    def __post_init__(self) -> None:
        require_table_dtype(self.dtype, "of a model")

    @property
    def shape(self) -> TableShape:
        """What its bytes depend on, but for its rows."""
        return TableShape(self.dim, self.optimizer, self.dtype)


@dataclass(frozen=True)
class Feature:
    """A feature, which takes its ids from one table or from several at once.

    tables   the table, or a tuple of tables that are looked up with the same ids (a first-order weight beside a
             vector); tables or their names
    pooling  "sum" or "mean" of the rows of each sample: [B, D]; None leaves them as they come: a row for each id
    padding  an id that stands for none, inside the table's rows or not (such as -1): its row is zeros, it is no part
             of a sum or a mean, and is never looked up or updated
    dtype    of the rows as the model gets them, "float32" or "bfloat16", of each table or of all: rounded once, after
             weights and pooling

    A mean divides the sum of the weighted rows by the number of ids, and is zeros for none.
    """

    tables: Any
    pooling: str | None = None
    padding: int | None = None
    dtype: str | tuple[str, ...] = "float32"

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise ValueError(f'the pooling of a feature is None, "sum" or "mean", not {self.pooling!r}')
        if any(one not in DTYPES for one in ([self.dtype] if isinstance(self.dtype, str) else self.dtype)):
            raise ValueError(f"the dtype of a feature is one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if isinstance(self.padding, bool) or not isinstance(self.padding, int | None):
            raise ValueError(f"the padding of a feature is an id, not {self.padding!r}")
        if isinstance(self.tables, Sequence) and not isinstance(self.tables, str) and not self.tables:
            raise ValueError("a feature takes its ids from at least one table")

    @property
    def is_single(self) -> bool:
        """Tell whether it has one table, so that the model gets a tensor and not a tuple of them."""
        return isinstance(self.tables, str) or not isinstance(self.tables, Sequence)


@dataclass(frozen=True, eq=False)
class Bag:
    """A batch's ids of a feature.

    values   int32 or int64, a tensor or an array: [N], the ids of all samples end to end, with lengths or offsets; else
             [B] or [B, k], as many for each sample
    lengths  [B], how many ids each sample has; 0 is fine
    offsets  [B], where each sample's begin, as torch's EmbeddingBag takes them; instead of lengths
    weights  of the shape of the values, by which each row is multiplied; no gradient goes to them
    """

    values: Any
    lengths: Any = None
    offsets: Any = None
    weights: Any = None

    def __post_init__(self) -> None:
        if self.lengths is not None and self.offsets is not None:
            raise ValueError("a bag has lengths or offsets, not both")

    def to(self, *_: Any, **__: Any) -> "Bag":
        """Return itself: frameworks move the batches of a loader to the device, and ids are looked up on the host."""
        return self


@dataclass(frozen=True, eq=False)
class CacheSpec:
    """A cache of hot rows on the device.

    rows    of each table, a number or a share such as "10%"
    policy  "lookahead", "lru", "lfu" or "static"
    window  batches that lookahead knows in advance
    counts  [V], how often each row is used, in any unit: "static" needs it, and "lookahead" moves fewer bytes
    record  keep the first batches' ids for the optimum in its `summary()`, as of `EmbeddingCache`
    """

    rows: int | str
    policy: str = "lookahead"
    window: int = WINDOW
    counts: Any = None
    record: bool = False
