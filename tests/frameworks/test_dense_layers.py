"""Dense layers and tables of different steps are told, however the layers' state was loaded; equal steps are silent.

Warnings are errors in these tests, so that each program without `pytest.warns` is silent.
"""

import copy
import re
import warnings

import pytest
import torch

import hostdev
from tests.frameworks.cases import adam, ids, loader, loss_of, make_runtime, make_top, weights

TOLD = r"step .*'user', 'film'|'user', 'film'.* step"


class Program:
    """A runtime, a model and its optimizer, trained for some steps."""

    def __init__(self, steps=0):
        self.runtime, self.model = make_runtime(), make_top()
        self.adam = adam(self.model.parameters())
        self.train(steps)

    def train(self, steps, in_body=lambda: None):
        for batch, rows in self.runtime.train(list(loader())[:steps], ids=ids):
            self.adam.zero_grad()
            loss_of(self.model, batch, rows).backward()
            self.adam.step()
            in_body()
        return self

    def predict(self):
        return [loss_of(self.model, batch, rows).item() for batch, rows in self.runtime.predict(loader(125), ids=ids)]

    def look_up(self):
        self.runtime.lookup({"user": torch.tensor([3]), "film": torch.tensor([4])})

    def fill(self, runtime):
        """Write another runtime's tables, as a program with checkpoints of its own does."""
        for name, table in self.runtime.tables.items():
            with table.writing() as w:
                w.weights[:] = runtime.tables[name].weights


def through_file(state, folder):
    torch.save({"model": state}, folder / "model.pt")
    return torch.load(folder / "model.pt", weights_only=True)["model"]


COPIES = {
    "file": through_file,
    "deepcopy": lambda state, _: copy.deepcopy(state),
    "clones": lambda state, _: {name: value.clone() for name, value in state.items()},
}
USES = {
    "predict": Program.predict,
    "train": lambda program: program.train(1),
    "lookup": Program.look_up,
    "loop": lambda program: program.train(2, in_body=lambda: program.model.load_state_dict(program.best)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("use", USES)
def test_the_best_layers_over_the_last_tables_are_told_once(how, use, tmp_path):
    program = Program(5)
    program.best = COPIES[how](program.model.state_dict(), tmp_path)
    program.train(4)
    if use != "loop":
        program.model.load_state_dict(program.best)
    with pytest.warns(UserWarning, match=TOLD) as told:
        USES[use](program)
    if use != "loop":
        assert len(told) == 1
        program.predict()


def test_saving_both_is_told(tmp_path):
    program = Program(5)
    best = copy.deepcopy(program.model.state_dict())
    program.train(4).model.load_state_dict(best)
    with pytest.warns(UserWarning, match=TOLD):
        program.runtime.save(tmp_path / "tables")


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("order", ["tables first", "tables last"])
def test_layers_and_tables_of_one_step_are_silent(how, order, tmp_path):
    program = Program(5)
    losses = program.predict()
    program.runtime.save(tmp_path / "tables")
    best = COPIES[how](program.model.state_dict(), tmp_path)
    for other in (program.train(4), Program()):
        for one in ("tables", "model") if order == "tables first" else ("model", "tables"):
            if one == "tables":
                other.runtime.load(tmp_path / "tables")
            else:
                other.model.load_state_dict(best)
        assert other.predict() == losses
        other.train(2)


def test_tables_that_the_program_restores_are_silent(tmp_path):
    program = Program(5)
    losses, best = program.predict(), through_file(program.model.state_dict(), tmp_path)
    other = Program()
    other.fill(program.runtime)
    other.model.load_state_dict(best)
    assert other.predict() == losses
    program.train(3)
    program.fill(other.runtime)
    program.model.load_state_dict(best)
    assert program.predict() == losses
    init = {name: table.weights.copy() for name, table in other.runtime.tables.items()}
    tables = [hostdev.HostTable(len(rows), 8, hostdev.SGD(lr=1), name=name, init=rows) for name, rows in init.items()]
    other.runtime = hostdev.Runtime({table.name: table for table in tables}, device="cpu")
    other.model = make_top()
    other.model.load_state_dict(best)
    assert other.predict() == losses


@pytest.mark.parametrize("step", [0, 7])
def test_another_process_without_the_tables_is_told(step, tmp_path):
    before = Program(5)
    state = through_file(before.model.state_dict(), tmp_path)
    Program(7).runtime.save(tmp_path / "tables")
    other = Program()
    if step:
        other.runtime.load(tmp_path / "tables")
    other.model.load_state_dict(state)
    with pytest.warns(UserWarning, match=rf"step 5 .*'user', 'film' are at step {step}"):
        other.predict()


def test_the_bodys_step_is_in_the_stamp(tmp_path):
    program, states = Program(2), []
    program.train(5, in_body=lambda: states.append(copy.deepcopy(program.model.state_dict())))
    other = Program()
    program.runtime.save(tmp_path / "tables")
    other.runtime.load(tmp_path / "tables")
    other.model.load_state_dict(states[-1])
    other.predict()
    other.model.load_state_dict(states[-2])
    with pytest.warns(UserWarning, match="step 6 .* step 7"):
        other.predict()


@pytest.mark.parametrize("how", COPIES)
def test_layers_that_are_swapped_and_swapped_back(how, tmp_path):
    """An average of the layers with the tables' averages, and then the layers again."""
    program, ema = Program(3), copy.deepcopy(make_top())
    averages = [hostdev.EMA(table, 0.9) for table in program.runtime.tables.values()]
    program.train(5, in_body=lambda: [one.update() for one in averages])
    before = COPIES[how](program.model.state_dict(), tmp_path)
    losses = program.predict()
    program.model.load_state_dict(ema.state_dict())
    with averages[0].applied(), averages[1].applied():
        program.predict()
    program.model.load_state_dict(before)
    assert program.predict() == losses
    program.train(2)


def test_other_modules_are_silent(tmp_path):
    program, other = Program(3), torch.nn.Linear(3, 3)
    state = copy.deepcopy(other.state_dict())
    program.train(2)
    other.load_state_dict(state)
    fresh = make_top()
    fresh.load_state_dict({name: value + 1 for name, value in program.model.state_dict().items()})
    program.predict()
    assert "hostdev_tables" not in state._metadata[""]


def test_a_state_dict_is_as_without_tables(tmp_path):
    program = Program(3)
    state, plain = program.model.state_dict(), make_top().state_dict()
    assert list(state) == list(plain)
    assert state._metadata.keys() == plain._metadata.keys()
    assert program.model[0].state_dict()._metadata[""]["hostdev_tables"] == {"tables": ["user", "film"], "steps": 3}
    nested = torch.nn.ModuleDict({"top": program.model}).state_dict(prefix="all.")
    assert list(nested) == [f"all.top.{name}" for name in plain]
    make_top().load_state_dict(state)


def test_torch_is_as_it_was_without_a_runtime():
    functions = [
        (torch.nn.Module, "state_dict"),
        (torch.nn.Module, "load_state_dict"),
        (torch.optim.swa_utils.AveragedModel, "update_parameters"),
        (torch.optim.swa_utils.SWALR, "__init__"),
    ]
    program = Program(1)
    assert all(hasattr(getattr(*one), "__wrapped__") for one in functions)
    program.runtime.close()
    del program
    assert not any(hasattr(getattr(*one), "__wrapped__") for one in functions)


def test_a_restored_optimizer_over_new_tables_is_told():
    program, other = Program(5), Program()
    other.model.load_state_dict({name: value.clone() for name, value in program.model.state_dict().items()})
    other.adam.load_state_dict(program.adam.state_dict())
    with pytest.warns(UserWarning, match=r"step 5, .*'user', 'film' are at step 0"):
        other.train(2)
    right = Program()
    right.fill(program.runtime)
    right.model.load_state_dict({name: value.clone() for name, value in program.model.state_dict().items()})
    right.adam.load_state_dict(program.adam.state_dict())
    right.train(2)


@pytest.mark.parametrize("with_tables", [False, True])
@pytest.mark.parametrize("how", ["AveragedModel", "SWALR"])
def test_averages_of_the_layers_alone_are_told_once(how, with_tables):
    program = Program(1)
    averages = [hostdev.EMA(table, 0.9) for table in program.runtime.tables.values()] if with_tables else []

    def average():
        if how == "SWALR":
            schedules.append(torch.optim.swa_utils.SWALR(program.adam, swa_lr=0.01))
        else:
            averaged.update_parameters(program.model)
        for one in averages:
            one.update()

    averaged, schedules = torch.optim.swa_utils.AveragedModel(program.model), []
    if with_tables:
        program.train(3, in_body=average)
        return
    with pytest.warns(UserWarning, match=re.escape("hostdev.EMA")) as told:
        program.train(3, in_body=average)
    assert len(told) == 1 and how in str(told[0].message) and "'user', 'film'" in str(told[0].message)
    program.train(1, in_body=average)


def test_averages_of_other_models_are_silent():
    program, other = Program(1), torch.nn.Linear(2, 2)
    averaged = torch.optim.swa_utils.AveragedModel(other)
    program.train(2, in_body=lambda: averaged.update_parameters(other))
    frozen = Program()
    frozen.runtime.freeze()
    averaged = torch.optim.swa_utils.AveragedModel(frozen.model)
    frozen.train(2, in_body=lambda: averaged.update_parameters(frozen.model))


def test_two_runtimes(tmp_path):
    """Each with its model: a state concerns the runtime that trains the module, or the one that is new."""
    first, second = Program(3), Program(6)
    state = copy.deepcopy(first.model.state_dict())
    second.predict()
    first.model.load_state_dict(state)
    first.predict()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        second.model.load_state_dict(state)
        first.predict()
        assert not told
        second.predict()
        assert len(told) == 1
    assert weights(first.runtime) != weights(second.runtime)
