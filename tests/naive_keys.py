"""The rules of tables by key as a dict in Python: which keys have a row after each step."""

import numpy as np

from hostdev.core.errors import UserError
from hostdev.core.key_rules import LeastFrequent, LeastRecent, Probability, SmallestNorm, Unused
from hostdev.kernels.counter import mix64


class Naive:
    """The same rules: `rows` has the last step and the uses of each key, `waiting` those of keys without a row."""

    def __init__(self, admit, evict, capacity, seed, name="t"):
        self.admit, self.evict, self.capacity, self.seed, self.name = admit, evict, capacity, seed, name
        self.rows, self.waiting = {}, {}

    def plan(self, keys, uses, step, norm):
        evicted = []
        if self.evict is not None and step % self.evict.every == 0:
            evicted += self._evict(step, (), norm, None)
        unknown = [key for key in keys if key not in self.rows]
        admitted = self._admitted(unknown, uses, step)
        lacking = len(self.rows) + len(admitted) - self.capacity
        if lacking > 0:
            if self.evict is None or isinstance(self.evict, Unused):
                raise UserError("full")
            evicted += self._evict(step, [key for key in keys if key in self.rows], norm, len(self.rows) - lacking)
        for key in keys:
            if key in self.rows:
                self.rows[key] = (step, self.rows[key][1] + uses[key])
        for key, total in admitted.items():
            self.rows[key] = (step, total)
        return list(admitted), evicted

    def _admitted(self, unknown, uses, step):
        if isinstance(self.admit, Probability):
            chosen = np.array(unknown, np.int64)
            drawn = self.admit.admit(chosen, np.ones(len(chosen), np.int64), seed=self.seed, name=self.name, step=step)
            return {key: uses[key] for key, is_in in zip(unknown, drawn, strict=True) if is_in}
        if self.admit is None:
            return {key: uses[key] for key in unknown}
        if self.admit.expires is not None:
            first = step - self.admit.expires
            self.waiting = {key: value for key, value in self.waiting.items() if value[0] >= first}
        admitted = {}
        for key in unknown:
            total = self.waiting.get(key, (0, 0))[1] + uses[key]
            self.waiting[key] = step, total
            if total >= self.admit.n:
                admitted[key] = total
                del self.waiting[key]
        return admitted

    def _evict(self, step, kept, norm, most):
        if isinstance(self.evict, Unused):
            gone = [key for key, (last, _) in self.rows.items() if last < step - self.evict.steps]
        else:
            target = int(self.evict.keep * self.capacity)
            excess = len(self.rows) - (target if most is None else min(target, most))
            if excess <= 0:
                return []
            if most is not None and len(kept) > most:
                raise UserError("too small")
            score = {
                LeastRecent: lambda key: self.rows[key][0],
                LeastFrequent: lambda key: self.rows[key][1],
                SmallestNorm: norm,
            }[type(self.evict)]
            others = [key for key in self.rows if key not in kept]
            gone = sorted(others, key=lambda key: (score(key), hash_of(key)))[:excess]
        for key in gone:
            del self.rows[key]
        if isinstance(self.evict, LeastFrequent) and self.evict.decay < 1:
            self.rows = {key: (last, int(uses * self.evict.decay)) for key, (last, uses) in self.rows.items()}
        return gone


def hash_of(key):
    return int(mix64(np.array([key]).view(np.uint64))[0])


def norm_of(key):
    return float(hash_of(key) % 7)
