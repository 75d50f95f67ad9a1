"""The step history, from which the steps that a table's rows have missed are applied to them; see `catch_up`."""

from typing import NamedTuple

import numpy as np

from hostdev.kernels.arrays import Numbers, Rows

FEW_TERMS, MOST_TERMS = 4, 10  # the two possible numbers of terms of the series in `catch_up`
LEAST = 2.0**-200  # when `Clock.product` becomes smaller, `core.history.History` scales it and the inverses


class Clock(NamedTuple):
    """The step history, from which the steps that rows have missed are applied; `catch_up` explains the symbols.

    Attributes:
        now: T, the last step to apply.
        product: D(0, T), times a power of 2. In the clock of an update, the decay of the update's step is included.
        inverse: float64 [any]: 1 / D(0, L) for L = 0 .. T, divided by the same power of 2.
        recent: float32 [N + 1, P + 1]: M_p(T - k, T), p < P, then e(T - k), for k = 0 .. N; [0, 0] if moments do not
            decay.
        frozen: float32 [any, P + 1]: M_p(L, T), then e(L), for L < T - N; these sums no longer depend on T.
        powers: float32 [any, 2]: beta1^k and beta2^k for k = 0, 1, ...; for larger k, both count as 0.
        shift: 1 if x is (s - e) / (s + e), 0 if it is s / (s + e).
    """

    now: np.int64
    product: np.float64
    inverse: Numbers
    recent: Rows
    frozen: Rows
    powers: Rows
    shift: np.float32

    @property
    def moments(self) -> bool:
        """Whether steps also decay the moments of rows without a gradient."""
        return len(self.recent) > 0
