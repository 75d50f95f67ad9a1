"""Which loaders and functions are known to have no random generator of their own, so that a loop may read ahead."""

import functools
import importlib
import json
from random import randrange
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hostdev.runtime.generators import find_unknown

BATCHES = [np.arange(i, 16 + i) for i in range(9)]
SHARED = np.random.default_rng(2)


class Fields(NamedTuple):
    """A batch as programs name its parts."""

    ids: np.ndarray


class Drawn(Dataset):
    """Samples of a generator that they hold."""

    def __init__(self):
        self.own = np.random.default_rng(0)

    def __len__(self):
        return 144

    def __getitem__(self, at):
        return at, int(self.own.integers(0, 200))


class Declared(Drawn):
    own_generators = False


def first_of(batch):
    return batch[0]


def test_what_is_read_ahead():
    """Containers of batches, torch's loaders, functions of data; and what the program declares."""
    own, names, data = np.random.default_rng(0), ["positive"], torch.utils.data.TensorDataset(torch.arange(9))

    def of_data(batch, scale=2.0, kept=(len, torch.stack, randrange, np.random.rand)):
        return {name: [first_of(batch), scale, kept] for name in names}

    def by_keyword(batch, *, rng=own):
        return rng.integers(batch)

    def nested(batch):
        return [by_keyword(one) for one in batch]

    def unset(batch):
        return later

    def of_the_module(batch):
        return [SHARED.integers(batch) for _ in batch]

    module, drawing = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    drawing.own = own

    def reading(count, draw=None):
        rng = np.random.default_rng(1)
        for batch in BATCHES[:count]:
            yield draw(rng.integers(9)) if draw else batch

    begun = reading(3)
    next(begun)
    known = [
        *(reading(3), reading(3, of_data), (batch for batch in BATCHES), (one for one in reading(2))),
        *(BATCHES, tuple(BATCHES), iter(BATCHES), DataLoader(data, 2, shuffle=True), DataLoader(BATCHES)),
        DataLoader(torch.utils.data.ConcatDataset([data, torch.utils.data.Subset(data, [1])]), sampler=[1, 2]),
        *(DataLoader(Drawn(), num_workers=2), DataLoader(Declared()), Declared()),
    ]
    assert [find_unknown(loader, [of_data, None, unset, module.forward]) for loader in known] == [None] * len(known)
    order = torch.Generator()
    drawn = Drawn()
    batches = iter(map(len, BATCHES))
    for loader, unknown in [
        (DataLoader(data, generator=order), order),
        (DataLoader(data, sampler=torch.utils.data.RandomSampler(data, generator=order)), order),
        (DataLoader(drawn), drawn),
        (DataLoader(torch.utils.data.Subset(drawn, [1])), drawn),
        (DataLoader(data, collate_fn=by_keyword), own),
        (batches, batches),
        (begun, begun),
        (reading(3, by_keyword), own),
        ((own.integers(len(batch)) for batch in BATCHES), own),
    ]:
        assert find_unknown(loader, [of_data]) is unknown
    for function, unknown in [
        (by_keyword, own),
        (nested, own),
        (of_the_module, SHARED),
        (drawing.forward, own),
        (own.integers, own),
        (functools.partial(of_data, scale=own), own),
        (drawn.__getitem__, drawn),
        (drawn, drawn),
    ]:
        assert find_unknown(BATCHES, [None, function]) is unknown
    later = None
    assert later is None


def test_what_is_named_in_the_modules_of_a_program(tmp_path, monkeypatch):
    """A module is code; what a function names in it is used. So are a class's methods, and what its objects share."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "package_of_program").mkdir()
    (tmp_path / "package_of_program/__init__.py").write_text("")
    (tmp_path / "package_of_program/drawing.py").write_text(
        "import datetime, logging, random, re, threading\nimport numpy as np\n"
        "import package_of_program.drawing as itself\n"
        "rng = np.random.default_rng(0)\n"
        "SCALE = 2\n"
        "log, words, lock = logging.getLogger('program'), re.compile('[a-z]+'), threading.Lock()\n"
        "noon = datetime.time(12)\n"
        "def logged(batch): return log.debug(words.findall(str(noon))), lock.locked()\n"
        "def scaled(batch): return np.random.rand() + random.random() + SCALE * len(batch)\n"
        "def draw(batch): return itself.rng.integers(batch)\n"
        "class Scaled:\n    factor: int = SCALE\n    def __call__(self, batch): return scaled(batch) * self.factor\n"
        "class Shared:\n    rng = rng\n"
        "class Drawing(Scaled):\n    @staticmethod\n    def draw(batch): return rng.integers(batch)\n"
    )
    program = importlib.import_module("package_of_program")
    drawing = importlib.import_module("package_of_program.drawing")

    def inside(batch):
        import package_of_program.drawing as here

        return here.rng.integers(batch)

    def through(module):
        return lambda batch: module.rng.integers(batch)

    known = [
        lambda batch: drawing.scaled(batch),
        lambda batch: (drawing.Scaled()(batch), drawing.SCALE, drawing.np.random.rand(), torch.rand(1), json.dumps(1)),
        lambda batch: (program.drawing.scaled(batch), drawing.logged(batch)),
        lambda batch: (Fields(batch), pytest.approx(batch)),
        lambda batch: np.random.default_rng(0),
    ]
    assert [find_unknown(BATCHES, [function]) for function in known] == [None] * len(known)
    for function in [
        lambda batch: drawing.rng.integers(batch),
        lambda batch: program.drawing.rng.integers(batch),
        lambda batch: drawing.draw(batch),
        lambda batch: drawing.Shared.rng.integers(batch),
        lambda batch: drawing.Drawing.draw(batch),
        lambda batch: [drawing.Drawing().draw(one) for one in batch],
        inside,
        through(drawing),
    ]:
        assert find_unknown(BATCHES, [None, function]) is drawing.rng
