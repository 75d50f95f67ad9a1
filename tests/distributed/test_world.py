"""A world of one, and the public names of hostdev.distributed and hostdev.parallel."""

import inspect
import subprocess
import sys

import numpy as np
import pytest

import hostdev
from hostdev.distributed.channel import Channel
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.world import ALONE_WORLD, LocalChannel, MeshPlace, World
from tests.conftest import ROOT

GENERIC = {"at", "share", "has_parts", "leads"}  # follow from the mesh and the rank


def test_collectives_of_one_return_their_input():
    channel, values = ALONE_WORLD.control, np.arange(3)
    assert channel.gather(values)[0] is values
    assert channel.share({"a": 1}) == [{"a": 1}]
    channel.broadcast(values)
    channel.barrier()
    with pytest.raises(RuntimeError, match="own"), channel.answering():
        raise RuntimeError("own")


def test_a_world_of_one():
    assert (ALONE_WORLD.rank, ALONE_WORLD.size, ALONE_WORLD.part()) == (0, 1, None)
    assert ALONE_WORLD.at == MeshPlace(0, 0, 0)
    assert ALONE_WORLD.share() == (0, 1)
    assert ALONE_WORLD.leads
    assert not ALONE_WORLD.has_parts
    assert ALONE_WORLD.channel("data") is ALONE_WORLD.device_channel(None) is ALONE_WORLD.slices(None)[0]
    ALONE_WORLD.begin("save", "runtime.save()")
    ALONE_WORLD.agree("save", "runtime.save()")
    ALONE_WORLD.note_loop(None)


@pytest.mark.parametrize(("one", "many"), [(World, Ranks), (LocalChannel, Channel)])
def test_several_ranks_override_every_collective(one, many):
    methods = {name for name, value in vars(one).items() if inspect.isfunction(value) or isinstance(value, property)}
    assert methods - GENERIC - vars(many).keys() == set()


def test_a_join_without_with_is_told(monkeypatch):
    for ranks in ("1", "2"):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        joining = hostdev.join()
        for use in (lambda joining=joining: joining.part(), lambda joining=joining: joining.size):
            with pytest.raises(hostdev.UserError, match=r"with hostdev\.join\(\) as ranks"):
                use()
    monkeypatch.delenv("WORLD_SIZE")
    table = hostdev.HostTable(3, 2, hostdev.SGD(), name="t")
    with pytest.raises(hostdev.UserError, match=r"with hostdev\.join\(\) as ranks"):
        hostdev.Runtime({"t": table}, device="cpu", ranks=hostdev.join())
    assert not hasattr(joining, "__array__")
    with hostdev.join() as ranks:
        assert ranks is None


def test_public_names_need_no_torch():
    code = (
        "import sys, hostdev.distributed, hostdev.parallel\n"
        "assert 'torch' not in sys.modules\n"
        "from hostdev.distributed import join, ranks\n"
        "from hostdev.parallel import Network, sliced\n"
        "import hostdev\n"
        "assert join is hostdev.join\n"
        "for room in (hostdev.distributed, hostdev.parallel):\n"
        "    assert all(getattr(room, name) is not None for name in room.__all__)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
