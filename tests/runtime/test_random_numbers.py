"""Random numbers that a user's program draws while batches are read, and in the loop's body: the same at any depth."""

import contextlib
import functools
import random
from random import randrange

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hostdev
from tests.runtime.cases import differing, tables_state

MODES = [(0, None), (2, None), (4, None), (2, "10%"), (0, "50%"), (2, hostdev.CacheSpec("30%", "lru"))]
STEPS, SIZE, ROWS = 9, 16, 200
BATCHES = [np.random.default_rng(i).integers(0, ROWS, SIZE) for i in range(STEPS)]
DRAWS = {
    "torch": lambda: torch.randint(0, ROWS, (SIZE,)),
    "NumPy": lambda: np.random.randint(0, ROWS, SIZE),
    "normal values, one at a time": lambda: [int(abs(np.random.randn()) * 20) for _ in range(SIZE - 1)] + [0],
    "random": lambda: [random.randrange(ROWS) for _ in range(SIZE)],
    "all": lambda: torch.randint(0, ROWS, (SIZE,)) // 2 + random.randrange(50) + np.random.randint(50),
}


class Drawing(Dataset):
    """Samples whose negatives are drawn when they are read."""

    def __len__(self):
        return STEPS * SIZE

    def __getitem__(self, at):
        return {
            "positive": at % ROWS,
            "negative": int(torch.randint(0, ROWS, ())),
            "label": np.float32(random.random()),
        }


def generator():
    """Batches in a random order, with negatives."""
    for at in torch.randperm(STEPS).tolist():
        yield {"positive": BATCHES[at], "negative": np.random.randint(0, ROWS, SIZE)}


def seed_all(seed=0):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def states_of_all():
    return torch.get_rng_state().tolist(), repr(np.random.get_state(legacy=False)), random.getstate()


class Program:
    """A user's program: negatives that are drawn, dropout, and draws in the loop's body."""

    def __init__(self, depth, cache):
        self.table = hostdev.HostTable(ROWS, 4, hostdev.LazyAdam(lr=0.05), name="t", seed=0)
        features = {"positive": self.table, "negative": self.table}
        self.runtime = hostdev.Runtime(features, device="cpu", depth=depth, cache=cache)
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.3), nn.Linear(4, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def epoch(self, loader, ids, last=None, after=None, **options):
        for _, rows in self.runtime.train(loader, ids=ids, **options):
            loss = nn.functional.softplus(self.model(rows["negative"] - rows["positive"])).mean()
            loss = loss * (1 + torch.rand(()) + np.random.randn() * 0.1 + random.random())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if after is not None:
                after(rows.step)
            if rows.step == last:
                break

    def state(self):
        self.runtime.write_back()
        weights = [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]
        return tables_state([self.table]), weights, states_of_all()


def drawn_ids(draw):
    return lambda batch: {"positive": batch, "negative": draw()}


@pytest.mark.parametrize("last", [None, 4])
@pytest.mark.parametrize("what", DRAWS)
def test_ids_that_draw(what, last):
    """Two epochs, each left early or gone through: the same numbers at any depth, others in each epoch."""
    found = []
    for depth, cache in MODES:
        seed_all()
        drawn = []

        def draw(drawn=drawn):
            drawn.append(np.array(list(map(int, DRAWS[what]()))))
            return drawn[-1]

        program = Program(depth, cache)
        seed_all(2)
        for _ in range(2):
            program.epoch(BATCHES, drawn_ids(draw), last)
        found.append(program.state())
        if last is None:
            assert len({one.tobytes() for one in drawn}) == 2 * STEPS
    assert all(one == found[0] for one in found[1:])


def loaders():
    return {
        "a generator": (generator, None),
        "a Dataset that draws": (lambda: DataLoader(Drawing(), SIZE, shuffle=True), features_of),
        "many epochs": (lambda: (b for _ in range(2) for b in DataLoader(Drawing(), 40, shuffle=True)), features_of),
    }


def features_of(batch):
    return {name: batch[name] for name in ("positive", "negative")}


@pytest.mark.parametrize("what", loaders())
def test_loaders_that_draw(what):
    make, ids = loaders()[what]
    found = []
    for depth, cache in MODES[:4]:
        program = Program(depth, cache)
        seed_all()
        loader = make()
        program.epoch(loader, ids, 3, read_ahead=True)
        program.epoch(loader, ids, read_ahead=True)  # an iterator goes on where the loop before has left it
        found.append(program.state())
    assert all(one == found[0] for one in found[1:])


@pytest.mark.filterwarnings("ignore:.*fork")
def test_what_draws_nothing_while_it_is_read_has_the_numbers_of_plain_torch():
    """A loader that shuffles, and dropout: the order, the masks and the state at the end are those of plain torch."""
    data = torch.utils.data.TensorDataset(torch.arange(40))
    seed_all()
    wanted = []
    for workers in (0, 1):
        for [batch] in DataLoader(data, 8, shuffle=True, num_workers=workers):
            wanted.append((batch.tolist(), torch.rand(()).item()))
    wanted_state = states_of_all()
    for depth in (0, 2):
        table = hostdev.HostTable(40, 4, hostdev.SGD(lr=0.1), name="t", seed=0)
        runtime = hostdev.Runtime({"id": table}, device="cpu", depth=depth)
        seed_all()
        found = []
        for workers in (0, 1):
            loader = DataLoader(data, 8, shuffle=True, num_workers=workers)
            for [batch], _ in runtime.train(loader, ids=lambda batch: {"id": batch[0]}):
                found.append((batch.tolist(), torch.rand(()).item()))
        assert found == wanted
        assert states_of_all() == wanted_state


def test_the_same_seed_before_each_evaluation_gives_the_same_negatives():
    program, seen = Program(2, None), []
    for _ in range(2):
        torch.manual_seed(7)
        for _, rows in program.runtime.predict(BATCHES, ids=drawn_ids(DRAWS["torch"])):
            seen.append(rows["negative"])
    assert torch.equal(torch.cat(seen[:STEPS]), torch.cat(seen[STEPS:]))


@pytest.mark.parametrize("what", ["ids", "loader"])
def test_saved_in_a_loop_and_resumed(tmp_path, what):
    """With the global generators' states beside the tables, as a program saves them."""

    def batches(done):
        for at in range(done, STEPS):
            negative = np.random.randint(0, ROWS, SIZE) if what == "loader" else None
            yield {"positive": BATCHES[at], "negative": negative}

    def ids(batch):
        return batch if what == "loader" else {**batch, "negative": torch.randint(0, ROWS, (SIZE,))}

    def save(program, at, number):
        if number == at:
            keys = np.random.get_state(legacy=True)
            extra = {
                "model": program.model.state_dict(),
                "torch": torch.get_rng_state(),
                "python": list(random.getstate()[1]),
                "NumPy": [torch.tensor(keys[1].astype(np.int64)), *keys[2:]],
            }
            program.runtime.save(tmp_path, extra=extra)

    whole = Program(2, None)
    seed_all()
    whole.epoch(batches(0), ids, after=lambda number: save(whole, 4, number), read_ahead=True)
    for depth, cache in MODES[:4]:
        resumed = Program(depth, cache)
        extra = resumed.runtime.load(tmp_path)
        resumed.model.load_state_dict(extra["model"])
        torch.set_rng_state(extra["torch"])
        key, *rest = extra["NumPy"]
        np.random.set_state(("MT19937", key.numpy().astype(np.uint32), *rest))
        random.setstate((3, tuple(extra["python"]), None))
        resumed.epoch(batches(4), ids, read_ahead=True)
        assert resumed.state() == whole.state()


def slow(kind):
    return pytest.warns(UserWarning, match=f"does not read ahead, .* uses a {kind}, .* read_ahead=True, or set own_gen")


def test_a_generator_of_the_programs_own_that_both_use():
    """What reading and the body draw from it is what they draw at depth 0, as nothing is read ahead; which is told."""

    class Loader:
        def __init__(self):
            self.source = torch.Generator().manual_seed(1)

        def __iter__(self):
            for batch in BATCHES:
                yield {"positive": batch, "negative": torch.randint(0, ROWS, (SIZE,), generator=self.source)}

    def through(make, kind, mode, **options):
        program = Program(*mode)
        loader, ids, body = make()
        with slow(kind) if mode[0] and not options else contextlib.nullcontext():
            for _, rows in program.runtime.train(loader, ids=ids, **options):
                (rows["negative"].sum() * float(body())).backward()
        return tables_state([program.table])

    def in_ids():
        shared = np.random.default_rng(0)
        return BATCHES, drawn_ids(lambda: shared.integers(0, ROWS, SIZE)), shared.random

    def in_loader():
        loader = Loader()
        return loader, None, functools.partial(torch.rand, (), generator=loader.source)

    def in_map():
        own = random.Random(3)
        batches = map(lambda batch: {"positive": batch, "negative": [own.randrange(ROWS) for _ in batch]}, BATCHES)  # noqa: C417
        return batches, None, own.random

    def in_sampler():
        order = torch.Generator().manual_seed(0)
        data = torch.utils.data.TensorDataset(torch.arange(80) % ROWS)
        loader = DataLoader(data, SIZE, shuffle=True, generator=order)
        return loader, by_place, functools.partial(torch.rand, (), generator=order)

    for make, kind in ((in_ids, "Generator"), (in_loader, "Loader"), (in_map, "map"), (in_sampler, "Generator")):
        wanted = through(make, kind, MODES[0])
        for mode in (MODES[1], MODES[3]):
            assert differing(through(make, kind, mode), wanted) == []
        assert differing(through(make, kind, MODES[1], read_ahead=0), wanted) == []


def by_place(batch):
    return {"positive": batch[0], "negative": batch[0]}


OWN = {
    "Generator": lambda: (one := np.random.default_rng(1), lambda: one.integers(0, ROWS, SIZE)),
    "RandomState": lambda: (one := np.random.RandomState(1), lambda: one.randint(0, ROWS, SIZE)),
    "Random": lambda: (one := random.Random(1), lambda: np.array([one.randrange(ROWS) for _ in range(SIZE)])),
    "torch.Generator": lambda: (
        one := torch.Generator().manual_seed(1),
        lambda: torch.randint(0, ROWS, (SIZE,), generator=one).numpy(),
    ),
}


@pytest.mark.drawn
@pytest.mark.filterwarnings("ignore:the loop over runtime.train.. does not read ahead")
@pytest.mark.filterwarnings("ignore:the last batch's gradients were left")
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("reads", ["loader", "ids", "loader and ids", "iterator", "iterator and ids"])
def test_a_loop_that_is_left_has_drawn_no_further(kind, reads):
    """What the program draws afterwards, and the loop that goes on with an iterator, see the generator of depth 0."""

    def run(mode, *, between):
        keep, draw = OWN[kind]()
        seen, program = [], Program(*mode)

        def load():
            for batch in BATCHES:
                yield {"positive": batch, "negative": batch if reads == "ids" else draw()}

        def ids(batch):
            seen_at = draw() if "ids" in reads else batch["negative"]
            return {"positive": batch["positive"], "negative": (batch["negative"] + seen_at) % ROWS}

        iterator = load()
        for leave_at in (3, 2, 9):
            for batch, rows in program.runtime.train(iterator if "iterator" in reads else load(), ids=ids):
                seen.append(np.array(batch["negative"]).tolist())
                rows["negative"].sum().backward()
                if rows.step == leave_at:
                    break
            if between and ("iterator" not in reads or leave_at == 9):
                seen.append(draw().tolist())
        assert keep is not None
        program.runtime.write_back()
        return seen, tables_state([program.table])

    for between in (False, True):
        wanted = run(MODES[0], between=between)
        for mode in MODES[1:]:
            found = run(mode, between=between)
            assert found[0] == wanted[0], mode
            assert differing(found[1], wanted[1]) == [], mode


def test_a_loop_says_once_that_it_does_not_read_ahead():
    runtime, read = Program(2, None).runtime, []

    class Batches:
        def __iter__(self):
            for batch in BATCHES:
                read.append(batch)
                yield {"positive": batch, "negative": batch}

    def count(ahead, **options):
        read.clear()
        numbers = enumerate(runtime.predict(Batches(), **options), 1)
        assert max(len(read) - number for number, _ in numbers) == ahead

    count(2, read_ahead=True)
    count(0, read_ahead=0)
    with slow("Batches"):
        count(0)
    count(0)


def test_pythons_generator_by_the_name_of_its_method():
    """`from random import choice` leads to the global generator, which has streams of its own."""
    found = []
    for mode in MODES[:2]:
        seed_all()
        program, seen = Program(*mode), []
        iterator = ({"positive": batch, "negative": [randrange(ROWS) for _ in batch]} for batch in BATCHES)
        for _ in range(2):
            for batch, rows in program.runtime.train(iterator, read_ahead=True):
                rows["negative"].sum().backward()
                program.runtime.optimizer.step()
                seen.append((batch["negative"], randrange(ROWS)))
                if rows.step in (2, 5):
                    break
        found.append(seen)
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:the loop over runtime.train.. does not read ahead")
def test_going_on_after_a_step_that_came_to_nothing():
    """An iterator whose loader draws from a generator of its own: nobody else has drawn from it."""
    found = []
    for mode in MODES:
        own, seen, program = np.random.default_rng(0), [], Program(*mode)
        iterator = ({"positive": batch, "negative": own.integers(0, ROWS, SIZE)} for batch in BATCHES)
        for _ in range(2):
            try:
                for batch, rows in program.runtime.train(iterator):
                    seen.append(batch["negative"].tolist())
                    factor = float("nan") if len(seen) == 3 else 1.0
                    (rows["negative"].sum() * factor).backward()
            except hostdev.NonFiniteError:
                seen.append(None)
        found.append(seen)
    assert all(one == found[0] for one in found[1:])
    assert len(found[0]) == STEPS + 1


def test_two_iterators_in_turn():
    """What a loop has read of one, and not come to, is there when another loop goes on with it."""
    for mode in MODES:
        program, seen = Program(*mode), []
        iterators = [iter([{"positive": [10 * k + i], "negative": [0]} for i in range(6)]) for k in range(2)]
        for which in (0, 1, 0, 1, 1, 0):
            for batch, rows in program.runtime.train(iterators[which]):
                rows["positive"].sum().backward()
                program.runtime.optimizer.step()
                seen.append(batch["positive"][0])
                if rows.step % 2 == 0:
                    break
        assert seen == [0, 1, 10, 11, 2, 3, 12, 13, 14, 15, 4, 5], mode


def test_a_generator_without_a_state_is_nobodys_business():
    system = random.SystemRandom()
    ids = drawn_ids(lambda: [system.randrange(ROWS) for _ in range(SIZE)])
    assert sum(1 for _ in Program(2, None).runtime.train(BATCHES, ids=ids)) == STEPS


def test_another_bit_generator_of_numpys():
    before = np.random.get_bit_generator()
    try:
        found = []
        for depth in (0, 2):
            np.random.set_bit_generator(np.random.PCG64(5))
            program = Program(depth, None)
            torch.manual_seed(0)
            random.seed(0)
            program.epoch(BATCHES, drawn_ids(DRAWS["normal values, one at a time"]))
            found.append(program.state())
        assert found[0] == found[1]
    finally:
        np.random.set_bit_generator(before)
    assert differing(found[0][0], found[1][0]) == []
