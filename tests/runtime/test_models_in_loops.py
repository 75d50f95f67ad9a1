"""Models in a loop: autocast, compiled and checkpointed ones, several losses, copies without the tables."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from tests.runtime.cases import CACHES, Case, Twin, batches_of, differing, loss_of, sgd, tables_state


def test_bfloat16_autocast(device):
    """The model's arithmetic alone; bits do not depend on depth and cache."""
    batches, states = batches_of(5), []
    for depth, cache in [(0, None), (2, None), (2, "20%")]:
        case = Case(device, options={"depth": depth, "cache": cache})
        with torch.autocast("cpu", torch.bfloat16):  # around the whole loop, as some do
            for label, rows in case.loop(batches):
                assert rows["user"].dtype == torch.float32
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "standin"):
                    case.step(label, rows)
        states.append(case.state())
    assert [differing(state, states[0]) for state in states] == [[]] * 3
    if device.type == "cpu":
        assert differing(Case(device).train(batches).state(), states[0]) != []


def test_a_compiled_model():
    """It is compiled once, also where bags have another number of ids in each batch."""

    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, rows):
            return self.layer(rows["ids"]).square().mean() + rows["user"].sum()

    def run(compiled):
        case = Case(options={"cache": "20%"})
        model = Bags()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.1)
        called = torch.compile(model, backend=counted, dynamic=True) if compiled else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runtime = type(case.runtime)({"ids": case.tables["words"], "user": case.tables["users"]}, cache="20%")
        batches = [{"ids": b["words"].values, "user": b["user"]} for b in batches_of(12)]
        for _, rows in runtime.train(batches):
            optimizer.zero_grad()
            called(rows).backward()
            optimizer.step()
        return tables_state(case.tables.values()) | {
            n: p.detach().numpy().tobytes() for n, p in model.named_parameters()
        }

    compilations = []

    def counted(graph, inputs):
        compilations.append(graph)
        return aot(graph, inputs)

    from torch._dynamo.backends.debugging import aot_eager as aot

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of modules that it imports
        states = [run(False), run(True)]
    assert differing(*states) == []
    assert len(compilations) <= 3


def test_checkpointed_activations():
    batches, states = batches_of(4), []
    for reentrant in (None, False, True):
        case = Case()
        for _label, rows in case.loop(batches):
            case.adam.zero_grad()
            hidden = torch.cat([rows["user"], rows["item"][0], rows["history"], rows["words"]], 1)
            logits = (
                case.model.top(hidden)
                if reentrant is None
                else checkpoint(case.model.top, hidden, use_reentrant=reentrant)
            )
            (logits.sum() + rows["item"][1].sum()).backward()
            case.adam.step()
        states.append(case.state())
    assert [differing(state, states[0]) for state in states] == [[]] * 3


def test_several_losses(device):
    """One after the other on different features, without retain_graph; the same graph twice with it."""
    for cache in (None, "20%"):
        case = Case(device, sgd, options={"cache": cache})
        twin = Twin(case.tables)
        plain = torch.optim.SGD(twin.parameters(), lr=0.3)
        batches = batches_of(4)
        for _, rows in case.loop(batches):
            (rows["item"][0].square().sum() + rows["user"].sum()).backward()
            rows["history"].sin().sum().backward()  # of the same table as the item
            rows["item"][1].exp().sum().backward()
            loss = rows["words"].square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for batch in batches:
            rows = twin(batch)
            plain.zero_grad()
            (rows["item"][0].square().sum() + rows["user"].sum()).backward()
            rows["history"].sin().sum().backward()
            rows["item"][1].exp().sum().backward()
            (2 * rows["words"].square().sum()).backward()
            plain.step()
        twin.assert_close(case.tables)


@pytest.mark.filterwarnings("ignore:Using backward.* with create_graph=True")
def test_a_gradient_of_a_gradient_is_refused(device):
    for cache in (None, "20%"):
        case = Case(device, options={"cache": cache})
        for feature in ("user", "words"):
            with pytest.raises(RuntimeError, match="once_differentiable"):
                for _, rows in case.loop(batches_of(2)):
                    [unique, _] = rows.unique("users" if feature == "user" else feature)
                    [grad] = torch.autograd.grad(
                        rows[feature].pow(3).sum() + unique.pow(3).sum(), case_leaf(rows, feature), create_graph=True
                    )
                    grad.square().sum().backward()
        assert case.tables["users"].step == 0
        for label, rows in case.loop(batches_of(2)):  # it is only the second backward that cannot be
            case.adam.zero_grad()
            loss_of(case.model, rows, label).backward(create_graph=True)
            case.adam.step()
        assert differing(case.state(), Case(device).train(batches_of(2)).state()) == []


def case_leaf(rows, feature):
    name = "users" if feature == "user" else feature
    return next(leaf.rows for leaf in rows.leaves if leaf.table.name == name)


def test_unique_rows_in_a_loss(device):
    """The L2 of a batch's rows, each once; the same bits with a cache."""
    states = []
    for cache in CACHES:
        case = Case(device, options={"cache": cache})
        for label, rows in case.loop(batches_of(4)):
            case.adam.zero_grad()
            unique, counts = rows.unique("items")
            batch = batches_of(4)[rows.step - 1]
            used = [*batch["item"].tolist(), *batch["history"][batch["history"] >= 0].tolist()]
            order = list(dict.fromkeys(used))
            assert counts.tolist() == [used.count(row) for row in order]
            again, _ = rows.unique("items")
            penalty = 0.1 * (unique.square().sum(1) * counts).sum() + 0.01 * again.abs().sum() + unique.pow(4).sum()
            (loss_of(case.model, rows, label) + penalty).backward()
            case.adam.step()
        states.append(case.state())
        with pytest.raises(ValueError, match="no table 'item'; the tables are users, items, first, words"):
            for _, rows in case.loop(batches_of(1)):
                rows.unique("item")
    assert [differing(state, states[0]) for state in states] == [[]] * 3


def test_the_model_holds_no_table():
    """Its state, its copies and its averages are the dense side's alone."""
    case = Case()
    average, batches = AveragedModel(case.model), batches_of(4)
    with pytest.warns(UserWarning, match=r"averages the dense layers alone.*'users', 'items', 'first', 'words'"):
        for label, rows in case.loop(batches):
            case.step(label, rows)
            average.update_parameters(case.model)
            if rows.step == 2:
                halfway = copy.deepcopy(case.model), pickle.loads(pickle.dumps(case.model)), case.model.state_dict()
    assert list(case.model.state_dict()) == ["top.weight", "top.bias"] == list(halfway[2])
    other = Case(tables=case.tables)
    other.model.load_state_dict(case.model.state_dict())
    for model in (case.model, other.model, average, *halfway[:2]):
        for _, rows in case.runtime.predict(batches[:1]):
            assert model(rows).shape == (12,)
    assert other.model.top.weight.equal(case.model.top.weight)
    assert not average.module.top.weight.equal(case.model.top.weight)
