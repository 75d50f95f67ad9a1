"""Rows that are brought up to date: to the bit beside NumPy, closely beside every step taken in float64."""

import numpy as np
import pytest
import torch

from hostdev import SGD, Adagrad, Adam, DeviceTable, HostTable, LazyAdam, Momentum, RowWiseAdagrad, RowWiseAdam
from hostdev.core import history as history_module
from hostdev.core.history import History
from hostdev.core.optimizer_base import CatchUp, adam_rate
from hostdev.device.ops import catch_up as on_device
from hostdev.device.ops import torch_operations
from tests import naive

ROWS, DIM = 40, 5
MAKERS = {
    "adam": lambda **given: Adam(lr=0.01, **given),
    "adam, epsilon hat": lambda **given: Adam(lr=0.01, epsilon_hat=True, **given),
    "lazy adam": lambda **given: LazyAdam(lr=0.01, nesterov=True, **given),
    "row-wise adam": lambda **given: RowWiseAdam(lr=0.01, **given),
    "adagrad": lambda **given: Adagrad(lr=0.01, **given),
    "row-wise adagrad": lambda **given: RowWiseAdagrad(lr=0.01, **given),
    "momentum": lambda **given: Momentum(lr=0.01, clip_norm=1.0, **given),
    "sgd": lambda **given: SGD(lr=0.01, **given),
}
# Adam with each way to store rows; the others, whose kernels share the decay, in turn.
CASES = [("adam", *stored) for stored in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "8bit"))]
CASES += [pytest.param("adam", *stored, marks=pytest.mark.slow) for stored in (("bf16", "fp32"), ("fp32", "bf16"))]
CASES += [(name, "fp32", "fp32") for name in MAKERS if name != "adam"]
CASES += [
    ("adagrad", "bf16", "bf16"),
    pytest.param("lazy adam", "bf16", "8bit", marks=pytest.mark.slow),
    pytest.param("row-wise adam", "bf16", "bf16", marks=pytest.mark.slow),
    pytest.param("sgd", "bf16", "fp32", marks=pytest.mark.slow),
]


def i32(*ids):
    return np.array(ids, np.int32)


def batches(count, seed=0, skew=0.7):
    """Ids, most of which are rarely used, with gradients and a rate for each step."""
    rng = np.random.default_rng(seed)
    for step in range(count):
        ids = np.unique(np.minimum(rng.pareto(skew, 4).astype(np.int32), ROWS - 1))
        yield ids, rng.normal(size=(len(ids), DIM)).astype(np.float32), 0.01 * (1 + 0.5 * np.cos(step / 30))


def make(name, dtype="fp32", slots="fp32", kind=HostTable, dim=DIM, **given):
    device = () if kind is HostTable else (torch.device("cpu"),)
    return kind(ROWS, dim, MAKERS[name](**given), *device, name="t", seed=1, dtype=dtype, slots=slots)


@pytest.mark.parametrize(("decay", "beta2"), [(0.0, 0.999), (0.3, 0.999), (0.3, 0.99)])
@pytest.mark.parametrize("hat", [False, True])
def test_adam_is_adam_with_all_steps_taken(decay, beta2, hat):
    """In float64, with rows that are unused for up to hundreds of steps, and a rate that changes."""
    table = make("adam", weight_decay=decay, beta2=beta2, epsilon_hat=hat)
    terms = 4 if hat and beta2 == 0.999 else 10
    assert table.history.clock().recent.shape[1] == terms + 1
    w, m, v = table.weights.astype(np.float64), np.zeros((ROWS, DIM)), np.zeros((ROWS, DIM))
    longest = np.zeros(ROWS, np.int64)
    for step, (ids, grads, lr) in enumerate(batches(2000), 1):
        table.optimizer.lr = lr
        table.update(ids, grads)
        g = np.zeros((ROWS, DIM))
        g[ids] = grads
        m, v = 0.9 * m + 0.1 * g, beta2 * v + (1 - beta2) * g * g
        correction = np.sqrt(1 - beta2**step)
        eps = 1e-8 if hat else 1e-8 * correction
        w = (1 - lr * decay) * w - lr * correction / (1 - 0.9**step) * m / (np.sqrt(v) + eps)
        longest = np.maximum(longest, step - table.row_slots[:, 0])
        if step in (1, 7, 500, 2000):
            np.testing.assert_allclose(table.weights, w, rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(table.slots["v"], v, rtol=1e-4, atol=1e-12)
            np.testing.assert_allclose(table.slots["m"], m, rtol=1e-4, atol=1e-6)
    assert longest.max() > len(table.history.clock().recent)  # beyond which the sums are frozen


@pytest.mark.drawn
@pytest.mark.parametrize(("name", "dtype", "slots"), CASES, ids=str)
def test_host_device_and_numpy_agree_to_the_bit(name, dtype, slots):
    tables = [make(name, dtype, slots, kind, weight_decay=0.3) for kind in (HostTable, DeviceTable, DeviceTable)]
    tables[2]._ops = torch_operations
    for ids, grads, lr in batches(300):
        for table in tables:
            table.optimizer.lr = lr
        tables[0].update(ids, grads)
        for table in tables[1:]:
            table.update(torch.from_numpy(ids), torch.from_numpy(grads))
    host = tables[0]
    stored = {column: np.array(values[:]) for column, values in host.columns().items()}
    for table in tables[1:]:
        for column, values in stored.items():
            np.testing.assert_array_equal(table.columns()[column].numpy(), values, err_msg=column)
    clock = host.history.clock()
    wanted = naive.brought(stored, clock, moments=name.startswith("adam"))
    for column, values in {"weights": host.weights, **host.slots}.items():
        np.testing.assert_array_equal(values, wanted[column], err_msg=column)
        torch_s = {"weights": tables[1].weights, **tables[1].slots}[column]
        np.testing.assert_array_equal(torch_s.numpy(), values, err_msg=column)
    block, row_slots = tables[2]._block.clone(), tables[2]._row_slots.clone()
    on_device._bring(block, row_slots[:, -1], clock, on_device.Clocks())
    np.testing.assert_array_equal(block[:, 0].numpy(), wanted["weights"])


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("dim", [1, 3, 80])
def test_lookups_of_any_width_by_any_number_of_threads(dim, threads, monkeypatch):
    from hostdev.kernels import pool

    monkeypatch.setattr(pool, "get_threads", lambda: threads, raising=False)
    table = make("adam", dim=dim, weight_decay=0.3)
    rng = np.random.default_rng(0)
    for _ in range(50):
        table.apply(rng.integers(0, ROWS, 6, np.int32), rng.normal(size=(6, dim)).astype(np.float32))
    ids = rng.integers(0, ROWS, 9000, np.int32)
    wanted = table.weights[ids]
    np.testing.assert_array_equal(table.lookup(ids), wanted)
    positions = rng.permutation(9000).astype(np.int32)
    out = np.empty_like(wanted)
    table.lookup(ids, out, positions)
    np.testing.assert_array_equal(out[positions], wanted)
    np.testing.assert_array_equal(table.lookup(ids[:0]), wanted[:0])


def test_hundreds_of_thousands_of_steps_without_a_use():
    """Powers end at 0, and the product of decays is scaled when it becomes small."""
    table = make("adam", weight_decay=0.0)
    table.update(i32(0), np.ones((1, DIM), np.float32))
    before = table.weights[0].copy()
    other, nothing = i32(1), np.zeros((1, DIM), np.float32)
    for _ in range(3):
        table.update(other, nothing)
    for _ in range(300):
        table.begin_step()
    run = table.history._runs[-1]
    table._step += 200_000
    table.history._runs[-1] = run._replace(length=run.length + 200_000)
    table.history._replay()
    assert (table.slots["m"][0] == 0).all() and (table.slots["v"][0] == 0).all()
    assert np.isfinite(table.weights).all() and (table.weights[0] < before).all()


@pytest.mark.parametrize("steps", [2000, 20_000])
def test_strong_decay_over_many_steps(steps):
    """(1 - 0.4)^2000 is 0, and rows that are used in between keep their weights."""
    history = History(CatchUp(weight_decay=1.0))
    for _ in range(steps):
        history.record(0.4, history.steps + 1, "t")
    clock = history.clock()
    for missed in (0, 1, 2, 10, 100):
        last = steps - missed
        assert np.float32(clock.product * clock.inverse[last]) == pytest.approx(0.6**missed, rel=1e-6)
    assert np.float32(clock.product * clock.inverse[0]) == 0
    assert np.isfinite(clock.inverse[: steps + 1]).all()


@pytest.mark.parametrize("beta2", [0.999, 0.99])
def test_the_sums_are_those_of_their_definition(beta2):
    beta1, N = 0.9, 172
    history = History(CatchUp(0.2, (beta1, beta2), 1e-8, epsilon_hat=True))
    rng = np.random.default_rng(0)
    lrs = rng.random(400)
    for step, lr in enumerate(lrs, 1):
        history.record(lr, step, "t")
    rates = np.array([adam_rate(lr, beta1, beta2, step) for step, lr in enumerate(lrs, 1)], np.float64)
    clock, T, q = history.clock(), 400, np.sqrt(beta2)
    assert N - 2 < len(clock.recent) - 1 < N + 2
    keep = 1 - lrs * 0.2
    for last in (0, 100, 227, 229, 300, 398, 399, 400):
        i = np.arange(1, min(T - last, len(clock.recent) - 1) + 1)
        decays = np.array([np.prod(keep[last : last + k]) for k in i])
        for p in range(clock.recent.shape[1] - 1):
            wanted = np.sum(rates[last + i - 1] * beta1**i * (1 - q**i) ** p / decays)
            k = T - last
            found = clock.recent[k, p] if k < len(clock.recent) else clock.frozen[last, p]
            assert found == pytest.approx(wanted, rel=1e-6, abs=1e-30)


@pytest.mark.parametrize("first", [1, 60_000])  # the number of the first step, which a program may set
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.99), (0.5, 0.95), (0.95, 0.999)])
def test_the_series_is_the_sum_of_the_missed_steps(betas, first):
    """For roots of v far below, near and far above eps, in float64."""
    beta1, beta2 = betas
    history, eps = History(CatchUp(0.01, betas, 1e-8)), 1e-8
    lrs = np.random.default_rng(0).random(400)
    for step, lr in enumerate(lrs, first):
        history.record(lr, step, "t")
    rates = np.array([adam_rate(lr, beta1, beta2, step) for step, lr in enumerate(lrs, first)], np.float64)
    epsilons = eps * np.sqrt(1 - beta2 ** np.arange(first, first + 400.0))
    clock, T, keep = history.clock(), 400, 1 - lrs * 0.01
    s = np.concatenate([[0.0], np.float32(10.0) ** np.arange(-12, 3)]).astype(np.float64)
    for last in (1, 2, 10, 100, 227, 390, 399):
        i = np.arange(1, T - last + 1)
        decays = np.array([np.prod(keep[last : last + k]) for k in i])
        divisors = s[:, None] * beta2 ** (i / 2) + epsilons[last:T]
        wanted = (rates[last:T] * beta1**i / decays / divisors).sum(1)
        k = T - last
        *c, e = (clock.recent[k] if k < len(clock.recent) else clock.frozen[last]).astype(np.float64)
        x = (s - e) / (s + e)
        np.testing.assert_allclose(np.polyval(c[::-1], x) / (s + e), wanted, rtol=5e-7, err_msg=str(last))


@pytest.mark.parametrize("hat", [False, True])
def test_steps_one_at_a_time_or_all_at_once_are_the_same_bits(hat):
    history = History(CatchUp(0.7, (0.9, 0.999), 1e-8, epsilon_hat=hat))
    rng = np.random.default_rng(0)
    for step in range(3000):
        history.record(0.1 if step % 700 else rng.random(), step + 1, "t")
    other = History(history.how)
    other.restore(history.packed())
    assert other == history
    known = slice(history.steps + 1)
    for one, two in zip(history.clock(), other.clock(), strict=True):
        np.testing.assert_array_equal(one[known] if np.ndim(one) else one, two[known] if np.ndim(two) else two)
    assert len(history.packed()) < 1000  # runs of equal steps are stored once
    history.forget(2)
    assert history.steps == 2998
    for step in (2999, 3000):
        history.record(0.1, step, "t")
    assert history == other


@pytest.mark.parametrize("text", ["", "AAAA", "é", "eJw="])
def test_a_damaged_history(text):
    with pytest.raises(ValueError, match="damaged|base64"):
        History(CatchUp(0.1)).restore(text)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"beta2": 0.9}, "beta2 = 0.9 is too small for beta1 = 0.9"),
        ({"beta1": 0.99, "beta2": 0.99}, "beta2 = 0.99 is too small"),
        ({"beta1": 0.5, "beta2": 0.0}, "beta2 must be above 0"),
        ({"weight_decay": -1.0}, "weight_decay must be at least 0"),
        ({"weight_decay": float("nan")}, "weight_decay must be at least 0"),
    ],
)
def test_what_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        Adam(**given)


def test_a_decay_of_all_of_a_weight_is_refused_at_the_step():
    table = make("sgd", weight_decay=10.0)
    table.optimizer.lr = 0.2
    with pytest.raises(ValueError, match=r"'t': lr 0.2 times weight_decay 10.0 must be below 1"):
        table.update(i32(0), np.ones((1, DIM), np.float32))


@pytest.mark.parametrize("last", [-1.0, 0.5, 3.0, 1e30])
def test_a_step_of_a_row_that_cannot_be(last):
    """Kernels index by it: it is refused where it is written, and whatever is in memory stays within the steps."""
    for kind in (HostTable, DeviceTable):
        table = make("adam", kind=kind)
        ids = i32(0) if kind is HostTable else torch.tensor([0], dtype=torch.int32)
        one = np.ones((1, DIM), np.float32)
        for _ in range(2):
            table.update(ids, one if kind is HostTable else torch.from_numpy(one))
        with pytest.raises(ValueError, match="`last` of row 1"):
            table.write_rows(i32(1), np.zeros((1, 3, DIM), np.float32), np.full((1, 1), last, np.float32))
    host = make("adam")
    host.update(i32(0), np.ones((1, DIM), np.float32))
    for wrong in (last, np.nan):
        host.storage.row_slots[0] = wrong
        assert np.isfinite(host.weights).all()
        host.update(i32(0), np.ones((1, DIM), np.float32))


def test_copies_and_resets():
    import copy

    table = make("adam", weight_decay=0.3)
    initial = table.weights.copy()
    for ids, grads, _ in batches(50):
        table.update(ids, grads)
    other = copy.deepcopy(table)
    for one in (table, other):
        one.update(i32(1), np.ones((1, DIM), np.float32))
    np.testing.assert_array_equal(other.weights, table.weights)
    table.reset()
    assert table.history.steps == 0
    np.testing.assert_array_equal(table.weights, initial)
    assert other.history.steps == 51


@pytest.mark.parametrize("name", ["adam", "adagrad"])
@pytest.mark.parametrize("n", [6, 3000])  # in one pass, and as a stream
def test_repeated_ids_are_summed_first(name, n):
    table = make(name, weight_decay=0.3)
    twin = naive.Table(table.weights, MAKERS[name](weight_decay=0.3))
    rng = np.random.default_rng(0)
    for _ in range(8):
        ids, grads = rng.integers(0, ROWS, n, np.int32), rng.normal(size=(n, DIM)).astype(np.float32)
        table.apply(ids, grads)
        twin.apply(ids, grads)
        table.apply(ids[:1], grads[:1])
        twin.apply(ids[:1], grads[:1])
    for column, values in {"weights": table.weights, **table.slots}.items():
        np.testing.assert_array_equal(values, twin.current()[column], err_msg=column)


@pytest.mark.parametrize("name", ["adam", "adagrad"])
def test_copies_of_clocks_on_a_device_grow_with_the_steps(name, monkeypatch):
    """Clocks of updates and of reads in turn, over several sizes of their arrays."""
    monkeypatch.setattr(history_module, "_ROOM", 4)
    table, clocks, cpu = make(name, weight_decay=0.3), on_device.Clocks(), torch.device("cpu")
    for _ in range(300):
        for clock in (table.begin_step().clock, table.clock()):
            found = clocks.get(clock, cpu)
            for one, values in zip(found, (clock.inverse, clock.recent, clock.frozen, clock.powers), strict=True):
                known = slice(int(clock.now) + 1) if values is clock.inverse else slice(None)
                np.testing.assert_array_equal(one.numpy()[known], values[known])
