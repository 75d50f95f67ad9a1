"""Durations in bounded memory: exact up to a number, then within 0.4%."""

import numpy as np
import pytest

from hostdev.core import primitive
from hostdev.core.primitive import Durations, statistics


def durations_of(values):
    found = Durations()
    for value in values:
        found.add(int(value))
    return found


def plain(values):
    us = np.concatenate(values) / 1e3
    p50, p99 = np.percentile(us, [50, 99])
    rounded = {"total_us": us.sum(), "mean_us": us.mean(), "p50_us": p50, "p99_us": p99}
    return {"count": len(us), **{name: round(float(value), 1) for name, value in rounded.items()}}


def drawn(n, seed=0):
    return np.exp(np.random.default_rng(seed).normal(12, 3, n)).astype(np.int64)


def test_few_are_exact(monkeypatch):
    monkeypatch.setattr(primitive, "EXACT", 100)
    for values in ([drawn(100)], [drawn(3), drawn(100, 1)], [np.array([7])]):
        found = [durations_of(each) for each in values]
        assert statistics(found) == plain(values)


@pytest.mark.parametrize("kind", ["drawn", "small", "equal", "two", "huge"])
def test_many_are_close(monkeypatch, kind):
    monkeypatch.setattr(primitive, "EXACT", 100)
    values = {
        "drawn": drawn(1234),
        "small": np.arange(500),
        "equal": np.full(301, 123_456_789),
        "two": np.repeat([1000, 10**9], [249, 250]),
        "huge": np.array([0, (1 << 50) + 1] * 150),
    }[kind]
    found, expected = durations_of(values), plain([values.astype(np.float64)])
    told = statistics([found])
    assert (told["count"], len(found)) == (len(values), len(values))
    assert told["total_us"] == pytest.approx(sum(map(int, values)) / 1e3, rel=1e-12, abs=0.06)
    assert len(found.latest) <= 100
    for name, value in expected.items():
        assert told[name] == pytest.approx(value, rel=0.004 if name in ("p50_us", "p99_us") else 1e-9, abs=0.051)
    other = drawn(50, 3)
    both = statistics([found, durations_of(other)])
    assert both["count"] == len(values) + 50
    assert both["p50_us"] == pytest.approx(plain([values.astype(float), other])["p50_us"], rel=0.004, abs=0.051)


def test_a_copy_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(primitive, "EXACT", 10)
    found = durations_of(range(25))
    copy = found.copy()
    for value in range(30):
        found.add(value)
    assert (len(copy), statistics([copy])["total_us"], len(found)) == (25, 0.3, 55)
