"""Tables by key in runtimes: the same bits in every mode, what is refused, and reports of users of other tools."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch

import hostdev
from hostdev.core.digest import StateDigest
from hostdev.errors import UserError
from hostdev.runtime.digest import add_table

DIM, STEPS = 4, 40
MODES = [(0, None), (2, None), (4, 60), (0, hostdev.CacheSpec(150, "lfu")), (2, hostdev.CacheSpec(30, "lru"))]
POLICIES = {
    "all": {},
    "count": {"admit": hostdev.MinCount(2), "evict": hostdev.Unused(steps=5, every=3)},
    "waiting expires": {"admit": hostdev.MinCount(3, expires=6), "evict": hostdev.Unused(steps=6, every=2)},
    "sketch": {"admit": hostdev.MinCount(3, sketch="64KiB"), "evict": hostdev.LeastRecent(every=7), "capacity": 120},
    "probability": {
        "admit": hostdev.Probability(0.4),
        "evict": hostdev.LeastFrequent(every=4, decay=0.5),
        "capacity": 200,
    },
    "norm": {"evict": hostdev.SmallestNorm(keep=0.8, every=5), "capacity": 300},
    "zeros": {"admit": hostdev.MinCount(4), "evict": hostdev.Unused(steps=5, every=3), "unknown": "zeros"},
    "initial": {"admit": hostdev.MinCount(4), "evict": hostdev.LeastRecent(), "capacity": 200, "unknown": "initial"},
}


def batch_of(rng, size, step):
    """Return a batch of keys that drift: each step uses some new ones, and old ones less and less."""
    ids = {
        "item": rng.zipf(1.3, size).clip(0, 300) + 15 * step,
        "history": rng.zipf(1.3, (size, 3)).clip(0, 200) + 15 * step,
        "fixed": rng.integers(0, 30, size),
    }
    return ids | {"y": rng.normal(size=size).astype(np.float32)}


def batches(steps=STEPS, seed=1):
    rng = np.random.default_rng(seed)
    return [batch_of(rng, 40, step) for step in range(steps)]


def ids_of(batch):
    return {name: batch[name] for name in ("item", "history", "fixed")}


class Program:
    """Two tables, one of them by key, and a linear model."""

    def __init__(self, mode=(0, None), optimizer=hostdev.LazyAdam, seed=3, dtype="fp32", device="cpu", **options):
        depth, cache = mode
        self.keyed = hostdev.HostTable(
            None, DIM, optimizer(lr=0.05), name="keyed", seed=seed, dtype=dtype, **{"capacity": 5_000, **options}
        )
        self.fixed = hostdev.HostTable(30, DIM, optimizer(lr=0.05), name="fixed", seed=seed)
        history = hostdev.Feature(self.keyed, pooling="mean", unknown="history")
        features = {"item": self.keyed, "history": history, "fixed": self.fixed}
        self.runtime = hostdev.Runtime(features, device=device, depth=depth, cache=cache and {"keyed": cache})
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3 * DIM, 1).to(device)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.losses = []

    def loss(self, batch, rows):
        outputs = self.model(torch.cat([rows["item"], rows["history"], rows["fixed"]], 1))[:, 0]
        loss = (outputs - torch.from_numpy(batch["y"]).to(outputs.device)).square().mean()
        self.losses.append(loss.item())
        return loss

    def train(self, data, after=lambda step: None, skipped=(), **options):
        for step, (batch, rows) in enumerate(self.runtime.train(data, ids=ids_of, **options)):
            self.dense.zero_grad()
            loss = self.loss(batch, rows)
            if step in skipped:
                continue
            loss.backward()
            self.dense.step()
            after(step)
        return self

    def digest(self):
        digest = StateDigest(2)
        for table in (self.fixed, self.keyed):
            add_table(digest, table)
        return digest.hexdigest(), tuple(self.losses)


def run(mode, data, policy, after=None, **options):
    program = Program(mode, **policy)
    program.train(data, (lambda step: after(program, step)) if after else lambda step: None, **options)
    found = program.digest()
    program.runtime.close()
    return found


@pytest.mark.drawn
@pytest.mark.parametrize(
    "policy",
    [
        policy if name in ("count", "probability", "initial") else pytest.param(policy, marks=pytest.mark.slow)
        for name, policy in POLICIES.items()
    ],
    ids=POLICIES,
)
def test_the_same_bits_in_every_mode(device, policy):
    data, policy = batches(), {**policy, "device": device}

    def evaluate(program, step):
        if step in (4, 19):
            for batch, rows in program.runtime.predict(data[step : step + 3], ids=ids_of):
                program.loss(batch, rows)
            program.losses.append(float(program.runtime.lookup(ids_of(data[step + 5]))["history"].sum()))

    def freeze(program, step):
        if step in (5, 25):
            (program.runtime.freeze if step == 5 else program.runtime.unfreeze)("keyed")

    for options in ({}, {"skipped": (2, 3, 17, 30)}, {"after": evaluate}, {"after": freeze}):
        found = {run(mode, data, policy, **options) for mode in MODES}
        assert len(found) == 1


@pytest.mark.drawn
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"optimizer": hostdev.Adam}, marks=pytest.mark.slow),
        pytest.param({"optimizer": hostdev.FTRL, "dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"dtype": "bfloat16", "slots": "8bit"},
        {"slots": "bfloat16", "optimizer": hostdev.Adagrad},
        pytest.param({"optimizer": hostdev.RowWiseAdam}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_same_bits_with_every_storage(device, options):
    policy = {**POLICIES["count"], **options, "device": device}
    data = batches(25)
    assert len({run(mode, data, policy, skipped=(5,)) for mode in MODES}) == 1


def test_the_same_bits_with_other_threads_and_readers(monkeypatch):
    data, policy = batches(25), POLICIES["count"]
    expected = run((0, None), data, policy)
    assert run((2, None), data, policy, background=True) == expected
    assert run((3, 40), data, policy, background=True) == expected
    assert run((2, None), data, policy, read_ahead=0) == expected


def test_left_loops_continue_as_one():
    data = batches()
    expected = run((0, None), data, POLICIES["norm"])
    for mode in MODES:
        program = Program(mode, **POLICIES["norm"])
        stream = iter(data)  # batches that a left loop has read ahead come again
        for stop in (7, 8, 20, None):
            for step, (batch, rows) in enumerate(program.runtime.train(stream, ids=ids_of)):
                program.dense.zero_grad()
                program.loss(batch, rows).backward()
                program.dense.step()
                if step == stop:
                    break
        assert program.digest() == expected
        program.runtime.close()


def test_an_error_takes_out_what_was_planned_ahead():
    data = batches(12)
    for mode in MODES:
        program = Program(mode, **POLICIES["count"])
        seen = []

        def fail(step, program=program, seen=seen):
            seen.append(len(program.keyed))
            if step == 5:
                raise RuntimeError("by the program")

        with pytest.raises(RuntimeError, match="by the program"):
            program.train(data, fail)
        program.runtime.close()
        expected = Program(**POLICIES["count"]).train(data[:6])
        assert program.digest() == expected.digest()
        assert seen[-1] == len(program.keyed)


def test_equal_to_a_table_by_row_with_the_same_initial_values():
    data, rows = batches(), 1_000
    keyed = Program(capacity=rows).train(data)
    initial = np.empty((rows, 1, DIM), np.float32)
    hostdev.Normal(0.01).fill(initial, 3, "keyed", np.empty(0, np.float32), ids=np.arange(rows))
    for depth in (0, 2):
        by_row = hostdev.HostTable(rows, DIM, hostdev.LazyAdam(lr=0.05), name="keyed", init=initial[:, 0])
        fixed = hostdev.HostTable(30, DIM, hostdev.LazyAdam(lr=0.05), name="fixed", seed=3)
        other = Program()
        other.runtime = hostdev.Runtime(
            {"item": by_row, "history": hostdev.Feature(by_row, pooling="mean"), "fixed": fixed},
            device="cpu",
            depth=depth,
        )
        other.train(data)
        assert other.losses == keyed.losses
        np.testing.assert_array_equal(keyed.keyed.weights, by_row.weights[keyed.keyed.keys])
        np.testing.assert_array_equal(keyed.keyed.slots["v"], by_row.slots["v"][keyed.keyed.keys])


def test_direct_steps_are_those_of_a_loop():
    table = hostdev.HostTable(
        None, 1, hostdev.SGD(lr=1.0), name="t", admit=hostdev.MinCount(2), init=hostdev.Constant(8)
    )
    table.apply([5, 5, 9], np.float32([[1], [2], [4]]))
    assert table.keys.tolist() == [5] and len(table) == 1
    assert table.lookup([5, 9, 77, 5])[:, 0].tolist() == [5, 4, 4, 5]  # 9 has trained the out-of-vocabulary row
    table.update([9], np.float32([[1]]))
    assert sorted(table.keys.tolist()) == [5, 9] and table.lookup([9, 77])[:, 0].tolist() == [7, 4]
    with table.writing([9]) as one:
        one.weights[:] = 3
    assert table.lookup([9]).item() == 3
    with pytest.raises(UserError, match="no row for key 4"), table.writing([4]):
        pass
    with pytest.raises(ValueError, match="all different"):
        table.update([5, 5], np.ones((2, 1), np.float32))
    table.reset()
    assert len(table) == 0 and table.step == 0 and table.lookup([9]).item() == 8


def test_erased_keys_are_new_when_they_come_back():
    for mode in MODES:
        program = Program(mode)
        program.train(batches(10), lambda step, table=program.keyed: step == 4 and table.erase(table.keys))
        other = Program(mode)
        other.train(batches(10)[:5])
        other.keyed.erase(other.keyed.keys[::-1])
        other.train(batches(10)[5:])
        assert program.digest() == other.digest()


def test_frozen_tables_get_no_keys():
    data = batches(12)
    found = set()
    for mode in MODES:
        program = Program(mode)

        def switch(step, runtime=program.runtime):
            if step == 3:
                runtime.freeze("keyed")
            elif step == 7:
                runtime.unfreeze()

        sizes = []
        program.train(data, lambda step, program=program, sizes=sizes, switch=switch: (switch(step), sizes.append(0)))
        found.add(program.digest())
    assert len(found) == 1
    program = Program()
    program.train(data[:4])
    before = program.digest()[0]
    program.runtime.freeze("keyed")
    program.train(data[4:6])
    digest = StateDigest(2)
    add_table(digest, program.keyed)
    assert len(program.keyed) == len(Program().train(data[:4]).keyed)
    program.runtime.unfreeze()
    program.train(data[6:])
    assert program.digest()[0] != before


def test_rows_are_used_again_with_new_values():
    """As reported of recsys-examples (#467) and DeepRec (#1023): reused rows began with the state of former keys."""
    table = hostdev.HostTable(
        None, 2, hostdev.LazyAdam(lr=1.0), name="t", evict=hostdev.Unused(steps=1, every=1), init=hostdev.Constant(1)
    )
    runtime = hostdev.Runtime({"t": table}, device="cpu", cache=4)
    for batch, rows in runtime.train([{"t": np.arange(5) + 10 * step} for step in range(50)]):
        assert (rows["t"] == 1).all(), batch
        (rows["t"] * 1e15).sum().backward()
    assert table.used_rows < 200
    assert sorted(table.keys.tolist()) == [*range(480, 485), *range(490, 495)]
    table.erase(table.keys)
    table.apply([7], np.zeros((1, 2), np.float32))
    assert table.slots["m"].tolist() == [[0, 0]] and table.slots["v"].tolist() == [[0, 0]]


def test_what_evictions_report_is_the_same_in_every_mode():
    found = []
    for mode in MODES:
        program, seen, thread = Program(mode, **POLICIES["count"]), [], threading.get_ident()

        def note(keys, weights, program=program, seen=seen, thread=thread):
            assert threading.get_ident() == thread
            seen.append((keys.tolist(), weights.tobytes(), program.keyed.lookup(keys).shape))

        program.keyed.on_evict(note)
        program.train(batches())
        assert len(seen) > 5
        found.append(seen)
    assert all(one == found[0] for one in found)


class ReadingNorms(hostdev.Eviction):
    """Evicts nothing, and keeps the norms that it was given."""

    keep, every = None, 4

    def __init__(self):
        self.norms = {}

    def expired(self, use, step):
        self.norms = dict(zip(use.keys.tolist(), use.norms.tolist(), strict=True))
        np.testing.assert_allclose(use.norms**2, use.square_norms, rtol=1e-12)
        return np.zeros(len(use), bool)


def test_a_rule_reads_norms():
    rule = ReadingNorms()
    table = hostdev.HostTable(None, DIM, hostdev.LazyAdam(lr=0.05), name="keyed", evict=rule, capacity=100)
    rng = np.random.default_rng(0)
    for step in range(5):  # the last step evicts nothing: the rule was asked before the fourth
        before = {int(key): row for key, row in zip(table.keys, table.weights, strict=True)}
        table.apply(np.arange(9) + step, rng.normal(size=(9, DIM)).astype(np.float32))
        if step == 3:
            known = {key: float(np.linalg.norm(row.astype(np.float64))) for key, row in before.items()}
    assert rule.norms and rule.norms == pytest.approx(known, rel=1e-12)


def test_a_full_table_keeps_all_finished_steps():
    program = Program((2, None), capacity=150)
    with pytest.raises(UserError, match=r"table 'keyed' has \d+ keys.*raise capacity, or give evict="):
        program.train(batches())
    steps = program.keyed.step
    assert steps > 1
    expected = Program(capacity=5_000).train(batches()[:steps])
    assert program.digest()[0] == expected.digest()[0]


def test_memory_is_taken_as_keys_come():
    table = hostdev.HostTable(None, 16, hostdev.LazyAdam(lr=0.1), name="t", capacity="2GiB")
    assert table.capacity > 5_000_000
    before = table.used_rows
    table.apply(np.arange(1_000), np.zeros((1_000, 16), np.float32))
    assert (before, table.used_rows) == (1, 1_001)
    assert table.key_rows.index.nbytes < 1 << 20


@pytest.mark.parametrize("mode", [(0, hostdev.CacheSpec(200, "lru")), (2, hostdev.CacheSpec(200, "lru"))], ids=str)
def test_rows_that_wait_for_the_cache_are_not_missing(mode, monkeypatch):
    """When no row is free, since evicted ones are still cached, the loop begins a new pass, in which they are."""
    monkeypatch.setattr("hostdev.host.key_index._LEAST_SPARE", 1_000)
    found = []
    for one in ((0, None), mode):
        table = hostdev.HostTable(
            None, 2, hostdev.SGD(lr=1.0), name="t", capacity=1_200, evict=hostdev.LeastRecent(keep=1.0), seed=1
        )
        runtime = hostdev.Runtime({"t": table}, device="cpu", depth=one[0], cache=one[1])
        for _, rows in runtime.train([{"t": np.arange(1_000) + 1_000 * step} for step in range(40)]):
            rows["t"].sum().backward()
        found.append((table.keys.tolist(), table.weights.tolist()))
        runtime.close()
    assert found[0] == found[1]


def test_a_skipped_key_is_unknown_to_a_later_batch():
    table = hostdev.HostTable(None, 1, hostdev.SGD(lr=1.0), name="t", admit=hostdev.MinCount(2))
    runtime = hostdev.Runtime({"t": table}, device="cpu", depth=3)
    keys = [[1], [2], [2], [1]]
    for step, (_, rows) in enumerate(runtime.train([{"t": np.array(one)} for one in keys])):
        if step != 1:  # the first use of key 2 does not count
            rows["t"].sum().backward()
    assert table.keys.tolist() == [1]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (np.array([1.5]), "feature 't': keys must be integers, not float64"),
        (np.array([np.nan]), "feature 't': keys must be integers, not float64"),
        (np.array(["a"]), r"feature 't': keys must be integers, not <U1; for text, pass hostdev.hash_ids\(values\)"),
        (["a", "b"], r"for text, pass hostdev.hash_ids\(values\)"),
        ([True], "must be integers, not bool"),
        ([2**64], "18446744073709551616 does not fit into 64 bits"),
        (torch.zeros(2), "must be integers, not a Tensor of torch.float32"),
    ],
    ids=str,
)
def test_keys_that_are_not_integers(given, error):
    table = hostdev.HostTable(None, 1, hostdev.SGD(lr=1.0), name="t")
    runtime = hostdev.Runtime({"t": table}, device="cpu")
    with pytest.raises((TypeError, ValueError), match=error):
        next(iter(runtime.train([{"t": given}])))


def test_keys_of_all_kinds_are_the_same():
    table = hostdev.HostTable(None, 1, hostdev.SGD(lr=1.0), name="t")
    runtime = hostdev.Runtime({"t": hostdev.Feature(table, padding=2**64 - 1)}, device="cpu")
    forms = [
        np.array([2**63, 7], np.uint64),
        [2**63, 7],
        np.array([-(2**63), 7]),
        torch.tensor([-(2**63), 7, -1]),
        np.array([7], np.int16),
        np.array([7, 2**64 - 1], np.uint64),
        hostdev.hash_ids(["anna", "ben"]),
    ]
    for batch, rows in runtime.train([{"t": form} for form in forms]):
        assert len(rows["t"]) == len(batch["t"])
        rows["t"].sum().backward()
    assert set(table.keys.tolist()) == {-(2**63), 7, *hostdev.hash_ids(["anna", "ben"]).tolist()}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"rows": 5, "capacity": 9}, "need a table by key: give None for rows"),
        ({"capacity": 0}, "capacity 0 has no room"),
        ({"capacity": "1KiB", "dim": 500}, "capacity '1KiB' has no room for a row of"),
        ({"capacity": 2.5}, "capacity must be a number of rows or a size"),
        ({"capacity": "900TiB"}, "table 't' may need .* GiB|TiB.* free"),
        ({"admit": 3}, "admit must be hostdev.MinCount, .* another hostdev.Admission, not 3"),
        ({"evict": "lru"}, "evict must be hostdev.Unused"),
        ({"evict": hostdev.LeastRecent()}, "needs a capacity"),
        ({"admit": hostdev.MinCount(2, expires=9), "evict": hostdev.Unused(steps=5)}, "expires must be at most steps"),
        ({"part": (0, 257)}, "has 256 parts"),
        ({"unknown": "nothing"}, "unknown must be one of 'shared', 'zeros', 'initial', not 'nothing'"),
        ({"rows": 5, "unknown": "zeros"}, "capacity, admit, evict and unknown need a table by key"),
        ({"init": np.zeros((3, 2))}, "init must be Normal, Uniform or Constant"),
        ({"dim": 0}, "needs at least one column"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, error):
    given = {"rows": None, "dim": 2, **options}
    rows, dim = given.pop("rows"), given.pop("dim")
    with pytest.raises((UserError, ValueError, TypeError), match=error):
        hostdev.HostTable(rows, dim, hostdev.SGD(lr=1.0), name="t", **given)


def test_a_subclass_by_key_is_refused():
    class Own(hostdev.HostTable):
        pass

    assert Own(5, 2, hostdev.SGD(lr=1.0), name="t").rows == 5
    with pytest.raises(TypeError, match="'t': Own needs a number of rows; HostTable makes tables by key"):
        Own(None, 2, hostdev.SGD(lr=1.0), name="t")


def test_uses_that_are_refused():
    import copy

    program = Program((2, None))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(program.keyed)
    with pytest.raises(TypeError, match="rows have no order"):
        _ = program.keyed.block
    with pytest.raises(ValueError, match="counts are by row"):
        Program((0, hostdev.CacheSpec(5, counts=np.ones(5_000))))
    data = batches(4)
    for batch, rows in program.runtime.train(data, ids=ids_of):
        with pytest.raises(ValueError, match="only after the batch's step"):
            program.keyed.erase([1])
        program.loss(batch, rows).backward()
        break  # the dense optimizer has gradients, but no step was taken
    with pytest.warns(UserWarning, match="gradients were left without a step"):
        assert len(program.keyed) == 0
    program.train(data)
    with program.runtime.predict(data, ids=ids_of) as loop:
        next(loop)
        with pytest.raises(ValueError, match="a loop over `predict` is open"):
            program.keyed.erase([1])


@pytest.mark.parametrize("cache", [None, 50])
def test_memory_is_freed_with_the_last_reference(cache):
    program = Program((2, cache), **POLICIES["count"]).train(batches(4))
    held = weakref.ref(program.keyed), weakref.ref(program.keyed.key_rows.index), weakref.ref(program.keyed.storage)
    program.runtime.close()
    gc.disable()
    try:
        program.__dict__.clear()
        assert [one() for one in held] == [None] * 3
    finally:
        gc.enable()
