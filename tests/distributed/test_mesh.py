"""A mesh's arithmetic: who is where, who leads, and what is wrong with a text."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hostdev import UserError
from hostdev.core.micro_batches import get_nodes
from hostdev.distributed.world import AXES, Mesh, parse_mesh

meshes = st.builds(Mesh, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))


@given(meshes)
def test_every_rank_has_a_place_of_its_own(mesh):
    places = [mesh.place(rank) for rank in range(mesh.size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.size))
    assert all(number < size for place in places for number, size in zip(place, mesh, strict=True))
    if mesh.model == 1:
        assert parse_mesh(str(mesh)) == mesh


@given(meshes)
def test_the_order_is_that_of_torch(mesh):
    """torch.distributed.device_mesh counts the last axis first."""
    shape = [getattr(mesh, axis) for axis in AXES]
    ranks = torch.arange(mesh.size).view(shape)
    for number, axis in enumerate(AXES):
        theirs = ranks.movedim(number, -1).reshape(-1, shape[number]).tolist()
        assert sorted(mesh.groups(axis)) == sorted(theirs)


@given(meshes, st.integers(1, 6))
def test_leads_have_all_micro_batches_once_and_in_order(mesh, count):
    nodes = [node for each in mesh.nodes(count) for node in each]
    covered = [number for start, size in nodes for number in range(start, start + size)]
    assert covered == list(range(mesh.data * count))
    assert sum(map(mesh.leads, range(mesh.size))) == mesh.data
    if mesh.model == mesh.pipe == 1:
        assert mesh.nodes(count) == [get_nodes(rank * count, (rank + 1) * count) for rank in range(mesh.size)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("data", "'data' is not data=N, model=N or pipe=N"),
        ("rows=2", "'rows=2' is not data=N"),
        ("data=2,", "'nothing' is not data=N"),
        ("data=2,data=2", "data is given twice"),
        ("pipe=0", "pipe=0 must be a number of processes, 1 or more"),
        ("pipe=two", "pipe=two must be a number"),
        ("model=-1", "model=-1 must be a number"),
        ("", "'nothing' is not data=N"),
    ],
)
def test_a_wrong_text_is_named(text, says):
    with pytest.raises(UserError) as error:
        parse_mesh(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_axes_may_come_in_any_order():
    assert parse_mesh("pipe=2, data=3") == parse_mesh("data=3,pipe=2") == Mesh(data=3, pipe=2)
