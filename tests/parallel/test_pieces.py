"""Networks as pieces: where they may be cut, what crosses there, and which cut costs least."""

import subprocess
import sys
from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hostdev import UserError
from hostdev.core.pieces import Piece, run
from hostdev.ext.parallel.pieces import balanced, count_flops, cut, get_pieces, trace
from hostdev.models.deepfm import DeepFM
from tests.conftest import ROOT
from tests.models.samples import schema_of


def sequential():
    return nn.Sequential(
        nn.Linear(6, 8), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4)
    )


def test_a_sequential_network_is_cut_at_its_modules():
    network = sequential()
    pieces = get_pieces(network)
    assert [piece.name for piece in pieces] == ["0", "1.0", "1.1", "2", "3", "4"]
    assert [len(piece.parameters) for piece in pieces] == [2, 0, 0, 0, 2, 2]
    stages = [[piece.name for piece in stage] for stage in cut(pieces, ["1.1", "3"])]
    assert stages == [["0", "1.0"], ["1.1", "2"], ["3", "4"]]
    values = torch.randn(3, 6)
    network.eval()
    assert torch.equal(run(pieces, values), network(values))


@pytest.mark.parametrize(
    ("begins", "says"),
    [
        (["5"], "--stage-cut 5: the network has no such piece; its pieces are 0, 1.0, 1.1, 2, 3, 4"),
        (["0"], "0 is the first piece, where the first stage begins anyway"),
        (["3", "2"], "--stage-cut 3,2: 2 is not after 3"),
        (["3", "3"], "3 is not after 3"),
    ],
)
def test_a_wrong_cut_is_named(begins, says):
    with pytest.raises(UserError, match=says.replace("(", r"\(")) as error:
        cut(get_pieces(sequential()), begins)
    assert "\n" not in str(error.value)


def test_a_network_that_does_not_say_its_parts_is_refused():
    class Own(nn.Module):
        def forward(self, x):
            return x

    with pytest.raises(UserError, match=r"Own cannot be cut into stages: it is not an nn\.Sequential and has no"):
        get_pieces(Own())


def test_a_parameter_that_no_piece_holds_is_named():
    class Forgets(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(()))

        def pieces(self):
            return [Piece("first", self.first, (self.first,)), Piece("scale", lambda x: x * self.scale)]

    with pytest.raises(UserError, match="no piece of Forgets holds parameter scale"):
        get_pieces(Forgets())


def test_a_parameter_of_nobody_and_pieces_of_one_name_are_named():
    class Wrong(nn.Module):
        def __init__(self, *pieces):
            super().__init__()
            self.given = pieces

        def pieces(self):
            return self.given

    with pytest.raises(UserError, match="piece 'x' of Wrong holds a parameter that the network does not have"):
        get_pieces(Wrong(Piece("x", abs, (nn.Linear(1, 1),))))
    with pytest.raises(UserError, match=r"pieces\(\) of Wrong returns duplicate names"):
        get_pieces(Wrong(Piece("x", abs), Piece("x", abs)))
    with pytest.raises(UserError, match=r"pieces\(\) of Wrong returns no pieces"):
        get_pieces(Wrong())


def test_what_crosses_is_known_before_anything_is_computed():
    class Counts(nn.Module):
        calls = 0

        def forward(self, x):
            assert type(x) is not torch.Tensor  # it has no values
            Counts.calls += 1
            return x

    network = nn.Sequential(nn.Linear(6, 8), Counts(), nn.Dropout(0.5), nn.Unflatten(1, (4, 2)), nn.Flatten(0, 1))
    state = torch.get_rng_state()
    first, second = trace(cut(get_pieces(network), ["3"]), lambda samples: (torch.zeros(samples, 6),))
    assert [(each.shapes[0].of(0), each.shapes[0].of(5), each.draws) for each in (first, second)] == [
        ([0, 8], [5, 8], True),
        ([0, 2], [20, 2], False),
    ]
    assert first.shapes[0].trained
    assert first.shapes[0].dtype == torch.float32
    assert Counts.calls == 3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda x: x.new_zeros(len(x) ** 2), "a value whose size is not linear in the number of samples"),
        (lambda x: x.t().contiguous().t(), "a value that is not contiguous"),
        (lambda x: {"x": x}, "returns a dict, but only tensors can cross"),
        (lambda x: None, "returns a NoneType, but only tensors can cross"),
    ],
)
def test_what_cannot_cross_is_named(call, says):
    stages = [[Piece("odd", call)], [Piece("end", lambda x: x)]]
    with pytest.raises(UserError, match="piece 'odd' returns") as error:
        trace(stages, lambda samples: (torch.zeros(samples, 4),))
    assert says in str(error.value)


def test_a_tensor_crosses_once_and_without_a_gradient_where_nobody_uses_it():
    stages = [[Piece("begin", lambda x: (x * 2, x, x, x + 1))], [Piece("end", lambda a, b, c, d: b + c + d)]]
    [crossing, _] = trace(stages, lambda samples: (torch.zeros(samples, 4, requires_grad=True),))
    assert crossing.places == [0, 1, 1, 2]
    assert [shape.trained for shape in crossing.shapes] == [False, True, True]
    values = list(torch.arange(4))
    assert crossing.all_of(crossing.once([values[0], values[1], values[1], values[2]])) == [
        values[0],
        values[1],
        values[1],
        values[2],
    ]


def test_what_crosses_under_autocast():
    [first, _] = trace(cut(get_pieces(sequential()), ["3"]), lambda n: (torch.zeros(n, 6),), autocast=torch.bfloat16)
    assert first.shapes[0].dtype == torch.bfloat16


@given(st.lists(st.integers(0, 20), min_size=2, max_size=9), st.integers(2, 4))
def test_the_costliest_stage_costs_as_little_as_it_can(costs, count):
    pieces = [Piece(str(number), lambda x: x) for number in range(len(costs))]
    if len(costs) < count:
        with pytest.raises(UserError, match="too few for"):
            balanced(pieces, costs, count)
        return

    def costliest(at):
        edges = [0, *at, len(costs)]
        return max(sum(costs[a:b]) for a, b in pairwise(edges))

    found = [int(name) for name in balanced(pieces, costs, count)]
    assert costliest(found) == min(map(costliest, combinations(range(1, len(costs)), count - 1)))


def test_stages_begin_with_layers_rather_than_with_what_follows_them():
    pieces = get_pieces(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU()))
    costs = count_flops(pieces, (torch.zeros(2, 8),))
    assert costs == [256, 0, 256, 0]
    assert balanced(pieces, costs, 2) == ["2"]


def test_names_of_a_models_pieces():
    model = DeepFM(schema_of(), 4, seed=1, layers=(8, 6))
    assert [piece.name for piece in get_pieces(model)] == ["input", "deep.0", "deep.1", "deep.2", "deep.3", "output"]


def test_torchs_schedules_are_loaded_where_there_are_stages():
    """They take two seconds, in every process."""
    program = (
        "import sys, hostdev.train.assembly, hostdev.models.dcn\n"
        "sys.exit('torch.distributed.pipelining' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
