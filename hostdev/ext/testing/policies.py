"""Checks of rules that decide which keys of a table by key get a row, and which keys lose their rows."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from hostdev.core.key_rules import Admission, Eviction, KeyUse
from hostdev.core.optimizers import SGD
from hostdev.host.table import HostTable

_KEYS, _STEPS, _BATCH = 400, 40, 60
_CAPACITY = 200


def check_admission(rule: Admission) -> None:
    """Check a rule of admission.

    Its answer for a key must not depend on the other keys of the call or their order, nor on earlier calls, and two
    tables that take the same steps must admit the same keys.

    Raises:
        AssertionError: A promise is broken.
    """
    assert isinstance(rule, Admission), f"{rule!r} must be a hostdev.Admission"
    _require_repr(rule)
    random = np.random.default_rng(0)
    keys, uses = _draw_keys(random), random.integers(1, 9, _KEYS)
    for step in (1, 2, 1000):

        def ask(some: npt.NDArray[np.int64], step: int = step) -> npt.NDArray[np.bool_]:
            answer = rule.admit(keys[some], uses[some], seed=3, name="table", step=step)
            assert isinstance(answer, np.ndarray) and answer.dtype == np.bool_ and answer.shape == some.shape, (
                f"{rule!r}: admit must return bool [N], not {answer!r}"
            )
            return answer

        _require_alone(rule, "admit", ask)
    _require_same_tables(lambda: copy.deepcopy(rule), None)


def check_eviction(rule: Eviction) -> None:
    """Check a rule of eviction; see `check_admission`.

    Raises:
        AssertionError: A promise is broken.
    """
    assert isinstance(rule, Eviction), f"{rule!r} must be a hostdev.Eviction"
    assert type(rule.every) is int and rule.every >= 1, f"{rule!r}: every must be at least 1 step, not {rule.every!r}"
    assert rule.keep is None or 0 < rule.keep <= 1, f"{rule!r}: keep must be above 0 and at most 1, not {rule.keep!r}"
    assert 0 < rule.decay <= 1, f"{rule!r}: decay must be above 0 and at most 1, not {rule.decay!r}"
    _require_repr(rule)
    random = np.random.default_rng(0)
    keys = _draw_keys(random)
    last, uses = (random.integers(1, 100, _KEYS).astype(np.uint32) for _ in range(2))
    norms = random.random(_KEYS)

    def ask(some: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        use = KeyUse(some.astype(np.int32), keys, last, uses, lambda rows: norms[rows])
        answer = rule.expired(use, 100) if rule.keep is None else rule.scores(use)
        kinds = (np.bool_,) if rule.keep is None else (np.uint32, np.float64)
        assert isinstance(answer, np.ndarray) and answer.dtype in kinds and answer.shape == some.shape, (
            f"{rule!r}: {'expired' if rule.keep is None else 'scores'} must return "
            f"{' or '.join(kind.__name__ for kind in kinds)} [N], not {answer!r}"
        )
        return answer

    _require_alone(rule, "expired" if rule.keep is None else "scores", ask)
    _require_same_tables(lambda: None, copy.deepcopy(rule))


def _draw_keys(random: np.random.Generator) -> npt.NDArray[np.int64]:
    """Return distinct keys."""
    return np.unique(random.integers(0, 1 << 40, 2 * _KEYS))[:_KEYS]


def _require_repr(rule: Any) -> None:
    for other in (copy.deepcopy(rule), pickle.loads(pickle.dumps(rule))):
        assert repr(other) == repr(rule), f"{rule!r}: its repr, which checkpoints store, is {other!r} after a copy"


def _require_alone(rule: Any, method: str, ask: Callable[[npt.NDArray[np.int64]], npt.NDArray[Any]]) -> None:
    """Check that answers depend on each key alone."""
    everything = np.arange(_KEYS)
    whole = ask(everything)
    for some in (everything[::-1].copy(), everything[: _KEYS // 3], everything[7:8], everything[:0], everything):
        assert np.array_equal(ask(some), whole[some]), (
            f"{rule!r}: {method} answers differently for a key with other keys beside it, in another order, or later"
        )


def _require_same_tables(admit: Callable[[], Admission | None], evict: Eviction | None) -> None:
    """Check that two tables that take the same steps have the same rows."""
    rows = []
    for _ in range(2):
        random = np.random.default_rng(1)
        table = HostTable(
            None, 2, SGD(lr=0.1), name="table", capacity=_CAPACITY, admit=admit(), evict=copy.deepcopy(evict), seed=3
        )
        for _ in range(_STEPS):
            keys = random.zipf(1.3, _BATCH).astype(np.int64) % 150
            table.apply(keys, random.random((_BATCH, 2)).astype(np.float32))
        rows.append(table.lookup(np.arange(150)))
    assert np.array_equal(rows[0], rows[1]), "two tables that took the same steps have different rows"
