"""AUC and log loss in bounded memory: those of all rows at once, whatever is held and however the rows come."""

import math
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hostdev.core.micro_batches import cut
from hostdev.train import scores, target_scores
from hostdev.train.scores import Scores
from hostdev.train.target_scores import TargetScores, Together
from tests import naive
from tests.conftest import environment
from tests.distributed.threads import with_ranks

SPECIAL = np.array([np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.4e38, -3.4e38, 1, np.nextafter(np.float32(1), 0)], "f")


def drawn(kind, n=500):
    rng = np.random.default_rng(len(kind))
    labels = (rng.random(n) < 0.3).astype(np.float32)
    logits = {
        "normal": lambda: rng.normal(-1, 2, n),
        "ties": lambda: rng.integers(-3, 4, n) / 7,
        "equal": lambda: np.full(n, -1.25),
        "special": lambda: rng.choice(SPECIAL, n),
        "bits": lambda: np.nan_to_num(rng.integers(-(1 << 31), 1 << 31, n).astype(np.int32).view(np.float32)),
        "ascending": lambda: np.arange(n) / 3,
        "one label": lambda: rng.normal(size=n),
        "few positives": lambda: rng.normal(size=n),
    }[kind]()
    labels = {"one label": np.ones(n, "f"), "few positives": (np.arange(n) == 77).astype("f")}.get(kind, labels)
    return logits.astype(np.float32), labels


def collected(logits, labels, block, tmp_path, seed=0):
    cuts = np.sort(np.random.default_rng(seed).integers(0, len(logits) + 1, 9))
    with Scores(tmp_path, block) as found:
        for some, truth in zip(np.split(logits, cuts), np.split(labels, cuts), strict=True):
            found.add(some, truth)
        return found.figures()


KINDS = ["normal", "ties", "equal", "special", "bits", "ascending", "one label", "few positives"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stride", [3, 4096])
def test_any_budget_and_any_batches_give_the_figures_of_all_rows(kind, stride, tmp_path, monkeypatch):
    monkeypatch.setattr(scores, "_STRIDE", stride)
    logits, labels = drawn(kind)
    whole = collected(logits, labels, 1 << 20, tmp_path)
    np.testing.assert_equal(whole[:2], (scores.auc(logits, labels), scores.log_loss(logits, labels)))
    assert whole.rows == len(logits)
    assert whole.not_finite == (~np.isfinite(logits)).sum()
    if 0 < labels.sum() < len(labels):
        assert whole.auc == pytest.approx(naive.auc(logits, labels), abs=1e-12)
    for block in (70, 499, 500):
        found = [collected(logits, labels, block, tmp_path, seed) for seed in range(2)]
        np.testing.assert_equal([each[0] for each in found], [whole.auc] * 2)
        blocks = [scores.losses(logits[i : i + block], labels[i : i + block]).sum() for i in range(0, 500, block)]
        expected = math.fsum(blocks) / 500 if np.isfinite(blocks).all() else np.nan
        np.testing.assert_equal([each[1] for each in found], [expected] * 2)
        np.testing.assert_allclose(found[0].logloss, whole.logloss, rtol=1e-15)
    assert list(tmp_path.iterdir()) == []


def test_losses_do_not_depend_on_how_many_are_held(monkeypatch):
    logits, labels = drawn("bits", 10_000)
    whole = scores.losses(logits, labels)
    monkeypatch.setattr(scores, "_AT_ONCE", 77)
    np.testing.assert_array_equal(scores.losses(logits, labels), whole)
    assert scores.auc(logits, labels) == collected(logits, labels, 1 << 20, None).auc


def test_no_rows(tmp_path):
    with Scores(tmp_path) as none:
        np.testing.assert_equal(tuple(none.figures()), (np.nan, np.nan, 0, 0, np.nan, np.nan))


def test_the_pairs_are_counted_in_integers():
    """In float64 the sums of ranks lose units from 2^53 pairs on."""
    n = 1 << 30
    twice = 2 * n * n - 1
    assert scores.make_auc(twice, n, n) == float(Fraction(twice, 2 * n * n))
    assert scores.make_auc(3 * n * n + 2, 3 * n, n) == float(Fraction(3 * n * n + 2, 6 * n * n))


def test_a_folder_that_is_gone_is_not_needed(tmp_path):
    logits, labels = drawn("normal")
    assert collected(logits, labels, 100, tmp_path / "gone") == collected(logits, labels, 100, None)


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    full = partial(Path("/dev/full").open, "r+b", buffering=0)
    monkeypatch.setattr(scores.tempfile, "TemporaryFile", lambda dir: full())
    with pytest.raises(OSError, match="No space left") as found:
        collected(*drawn("normal"), 100, tmp_path)
    assert found.value.filename == str(tmp_path)


@pytest.mark.parametrize("at_once", [1, 90, 1 << 20])
def test_ranks_bring_theirs_together_in_the_order_of_the_rows(tmp_path, monkeypatch, at_once):
    """Each has two micro-batches of a batch, of which the last may be empty; losses are summed in this order."""
    monkeypatch.setattr(target_scores, "_AT_ONCE", at_once)
    logits, labels = drawn("normal")
    sizes, parts = [90, 90, 3, 90, 90, 90, 47], 6
    edges = np.cumsum([0, *sizes])

    def work(ranks):
        ranks.control = ranks.channel()
        with TargetScores(folder=tmp_path, block=100) as to:
            found = Together(ranks, to)
            for start, size in zip(edges, sizes, strict=False):
                for begin, stop in cut(size, parts)[2 * ranks.rank : 2 * ranks.rank + 2]:
                    found.add(logits[start + begin : start + stop], labels[start + begin : start + stop])
                found.end_batch(size)
            assert ranks.rank == 0 or to.figures()[0].rows == 0
            return found.figures()

    np.testing.assert_equal(with_ranks(3, work), [[collected(logits, labels, 100, tmp_path)]] * 3)
    none = with_ranks(
        2, lambda ranks: setattr(ranks, "control", ranks.channel()) or Together(ranks, TargetScores()).figures()
    )
    assert [each.rows for (each,) in none] == [0, 0]


LARGE = """
import resource, sys, time
import numpy as np
from hostdev.train.scores import BLOCK, Scores
rows, levels = int(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
begun = time.perf_counter()
with Scores() as found:
    for start in range(0, rows, 1 << 20):
        n = min(1 << 20, rows - start)
        label = rng.random(n, np.float32) < 0.25
        logits = rng.standard_normal(n, np.float32) + label
        found.add(np.round(logits * levels) / levels if levels else logits, label.astype(np.float32))
    figures = found.figures()
print(figures.auc, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - started) << 10, time.perf_counter() - begun)
"""


def large(tmp_path, rows, levels=0):
    command = [sys.executable, "-c", LARGE, str(rows), str(levels)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(tmp_path), capture_output=True, text=True, check=True)
    auc, peak, _ = map(float, done.stdout.split())
    return auc, peak


@pytest.mark.slow
def test_memory_is_bounded(tmp_path):
    """50 million rows from a known model, whose AUC is known: that of normal scores one deviation apart."""
    known = (1 + math.erf(0.5)) / 2
    for rows, levels in ((17_000_000, 0), (50_000_000, 0), (50_000_000, 2)):
        auc, peak = large(tmp_path, rows, levels)
        assert auc == pytest.approx(known, abs=1e-3 if not levels else 2e-2)
        assert peak < 20 * scores.BLOCK
