"""What batches a loop takes and gives: loaders of all kinds, dicts, and what is sent to the device on the way."""

import collections
import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

from hostdev import Runtime
from tests.runtime.cases import Case, batches_of, differing, ids, loss_of, send


class Samples(Dataset):
    """Single samples, which a DataLoader puts together."""

    def __init__(self, count):
        rng = np.random.default_rng(0)
        self.user = rng.integers(0, 40, count)
        self.history = rng.integers(0, 30, (count, 3))
        self.label = rng.random(count, np.float32)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, at):
        return {"user": self.user[at], "history": self.history[at], "label": self.label[at], "name": f"sample {at}"}


def runtime_of(case, device, **options):
    return Runtime({"user": case.tables["users"], "history": case.tables["words"]}, device=device, **options)


@pytest.mark.filterwarnings("ignore:.*fork")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader(device, workers):
    """With shuffling, workers and a last batch that is smaller; batches are dicts, so no `ids` is needed."""
    states = []
    for depth in (0, 2):
        case = Case(device)
        runtime = runtime_of(case, device, depth=depth, cache="20%")
        loader = DataLoader(
            Samples(50),
            8,
            shuffle=True,
            num_workers=workers,
            generator=torch.Generator().manual_seed(1),
            persistent_workers=workers > 0,
        )
        seen = []
        for _ in range(2):
            loop = runtime.train(loader, read_ahead=True)
            assert len(loop) == 7
            for batch, rows in loop:
                seen.append(batch["name"])
                loss = (rows["user"].sum(1) - batch["label"].to(device)).square().sum() + rows["history"].square().sum()
                loss.backward()
            assert len(loop) == 7
        assert len(seen[6]) == 2
        assert seen[:7] != seen[7:]
        assert sorted(itertools.chain(*seen[:7])) == sorted(itertools.chain(*seen[7:]))
        states.append((case.state(), seen))
    assert differing(states[0][0], states[1][0]) == []
    assert states[0][1] == states[1][1]


def test_the_length_of_a_loop(capsys):
    case, batches = Case(), batches_of(5)
    for loop in (case.loop(batches), case.runtime.predict(batches, ids=ids), case.loop(batches, accumulate=2)):
        assert len(loop) == 5
    case.train(batches)
    steps = 0
    with tqdm(case.loop(batches)) as bar:
        assert bar.total == 5
        for label, rows in bar:
            case.step(label, rows)
            steps += 1
    assert steps == 5
    for label, rows in tqdm(case.loop(batch for batch in batches)):  # no length: no total
        case.step(label, rows)
    assert "5it [" in capsys.readouterr().err
    with pytest.raises(TypeError, match="has no len"):
        len(case.loop(iter(batches)))
    assert len(list(case.runtime.predict(iter(batches), ids=ids))) == 5
    assert list(case.loop([])) == []


Pair = collections.namedtuple("Pair", "first second")


def test_what_is_sent(device):
    """Tensors and arrays of numbers, wherever they are in what `send` returns; all else comes as it is."""
    case = Case(device)
    there = torch.ones(2, device=device)
    read_only = np.arange(4.0)
    read_only.flags.writeable = False
    thing = object()

    def send_of(batch):
        return {
            "pair": Pair(torch.arange(3), [np.float32([1, 2]), {"deep": (np.int64([[5]]),)}]),
            "names": np.array(["a", "b"]),
            "objects": np.array([None, thing], object),
            "backwards": np.arange(5)[::-1],
            "read only": read_only,
            "other order": np.arange(3, dtype=">i4"),
            "flags": np.array([True, False]),
            "half": torch.ones(2, dtype=torch.bfloat16),
            "empty": np.empty((0, 3), np.float32),
            "strided": torch.arange(12).view(3, 4).T,
            "there": there,
            "number": 7,
            "text": "x",
            "none": None,
            "thing": thing,
            "set": {1},
        }

    for depth in (0, 2):
        runtime = Runtime({"user": case.tables["users"]}, device=device, depth=depth)
        for loop in (
            runtime.train(batches_of(3), send=send_of, ids=only_user),
            runtime.predict(batches_of(3), send=send_of, ids=only_user),
        ):
            for batch, rows in loop:
                assert rows["user"].device == device
                assert isinstance(batch["pair"], Pair)
                sent = [batch["pair"].first, batch["pair"].second[0], batch["pair"].second[1]["deep"][0]]
                sent += [batch[name] for name in ("backwards", "read only", "other order", "flags", "half", "empty")]
                assert all(tensor.device == device for tensor in [*sent, batch["strided"]])
                assert [tensor.tolist() for tensor in sent] == [
                    [0, 1, 2],
                    [1, 2],
                    [[5]],
                    [4, 3, 2, 1, 0],
                    [0, 1, 2, 3],
                    [0, 1, 2],
                    [True, False],
                    [1, 1],
                    [],
                ]
                assert [tensor.dtype for tensor in sent[-3:]] == [torch.bool, torch.bfloat16, torch.float32]
                assert batch["strided"].tolist() == torch.arange(12).view(3, 4).T.tolist()
                assert batch["there"] is there
                assert batch["names"].tolist() == ["a", "b"]
                assert batch["objects"].tolist() == [None, thing]
                assert [batch[name] for name in ("number", "text", "none", "thing", "set")] == [
                    7,
                    "x",
                    None,
                    thing,
                    {1},
                ]


def only_user(batch):
    return {"user": batch["user"]}


def test_without_send_the_batch_comes_as_it_is():
    case = Case()
    batches = [object(), [1, 2], None, "text"]
    runtime = Runtime({"user": case.tables["users"]}, device="cpu")
    given = [batch for batch, _ in runtime.train(batches, ids=lambda batch: {"user": [1, 2]})]
    assert all(one is other for one, other in zip(given, batches, strict=True))


def test_batches_are_read_once_and_in_order(device):
    """`ids` and `send` are called once for each, in the order of the loader."""
    called, batches = [], batches_of(6)
    order = {id(batch): number for number, batch in enumerate(batches)}

    def ids_of(batch):
        called.append(("ids", order[id(batch)]))
        return ids(batch)

    def send_of(batch):
        called.append(("send", order[id(batch)]))
        return order[id(batch)], send(batch)

    case = Case(device)
    seen = []
    for (number, label), rows in case.runtime.train(batches, ids=ids_of, send=send_of):
        loss_of(case.model, rows, label).backward()
        seen.append(number)
    assert seen == list(range(6))
    assert sorted(called) == sorted([(what, number) for number in range(6) for what in ("ids", "send")])
    assert [number for what, number in called if what == "ids"] == list(range(6))


def test_ids_of_all_kinds_of_arrays(device):
    """Lists, tensors, arrays in any layout and integers of any width are the same ids."""
    wanted, case = None, None
    base = np.array([[3, 7, 3], [0, 39, 5]])
    kinds = [
        base,
        base.tolist(),
        torch.from_numpy(base),
        torch.from_numpy(base).int(),
        torch.from_numpy(base).short(),
        base.astype(np.uint8),
        base.astype(np.uint32),
        base.astype(">i8"),
        np.asfortranarray(base),
        np.repeat(base, 2, 1)[:, ::2],
        torch.from_numpy(base).to(device),
    ]
    for kind in kinds:
        case = Case(device, options={"cache": "50%"})
        runtime = Runtime({"user": case.tables["users"]}, device=device, cache="50%")
        for _, rows in runtime.train([{"user": kind}] * 2):
            assert rows["user"].shape == (2, 3, 4)
            rows["user"].square().sum().backward()
        wanted = wanted or case.state()
        assert differing(case.state(), wanted) == []


def test_sizes_that_vary(device):
    """A first batch that is small, huge ones between; batches without a single id."""
    rng = np.random.default_rng(0)
    sizes = [1, 300, 0, 7, 0, 0, 1000, 2]
    states = []
    for depth, cache in [(0, None), (2, None), (1, 5), (3, "100%")]:
        case = Case(device)
        runtime = runtime_of(case, device, depth=depth, cache=cache)
        rng = np.random.default_rng(0)
        batches = [{"user": rng.integers(0, 40, n), "history": rng.integers(0, 30, (n, 2))} for n in sizes]
        for (batch, rows), n in zip(runtime.train(batches), sizes, strict=True):
            assert rows["user"].shape == (n, 4)
            assert rows["history"].shape == (n, 2, 4)
            assert len(batch["user"]) == n
            (rows["user"].square().sum() + rows["history"].sin().sum()).backward()
        assert case.tables["users"].step == len(sizes)
        states.append(case.state())
        assert all(math.isfinite(x) for x in np.ravel(case.tables["users"].weights))
    assert [differing(state, states[0]) for state in states] == [[]] * 4
