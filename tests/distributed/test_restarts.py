"""torchrun --max-restarts: where a process is killed all are started anew, and go on from the newest checkpoint."""

import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.distributed.conftest import Trained, flags_of
from tests.distributed.processes import wait_until
from tests.ports import free_port

pytestmark = pytest.mark.slow

FLAGS = ("--emb-dim", 4, "--max-steps", 40, "--epochs", 3, "--checkpoint-every", 5, "--resume")


def kill(parent, rank, but=()):
    """Kill the process that torchrun has started as this rank; return its pid, which must not be in `but`."""

    def found():
        for child in psutil.Process(parent.pid).children(recursive=True):
            environment = child.environ()
            if environment.get("RANK") == str(rank) and child.pid not in but:
                return child
        return None

    wait_until(found, 60)
    child = found()
    child.kill()
    return child.pid


def steps_saved(folder):
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)


@pytest.mark.parametrize("killed", [(1,), (0,), (0, 1)], ids=str)
def test_all_start_anew_and_go_on(alone, processes, small_data, killed):
    folder, port = processes.folder / "run", free_port()
    options = ("--nproc-per-node", 2, "--master-port", port, "--max-restarts", 2)
    flags = flags_of(small_data, folder, *FLAGS)
    parent = processes.start(Path(sys.executable).parent / "torchrun", *options, "-m", "hostdev.train", *flags)
    pids, saved = [], 0
    for rank in killed:
        wait_until(lambda: steps_saved(folder) > saved or parent.poll() is not None, told=processes._told)  # noqa: B023
        assert parent.poll() is None, processes.ended()
        saved = steps_saved(folder)
        pids.append(kill(parent, rank, pids))
    [done] = processes.ended()
    assert done.code == 0, done
    gone_on = re.findall(r"resume +\S*/step-(\d+), after step", done.out)
    assert len(gone_on) == len(killed), done.out
    assert 5 <= int(gone_on[0]) < 40
    reference = alone(small_data, *FLAGS[:-3])
    first = Trained(folder)
    assert (first.sha256, first.losses) == (reference.sha256, reference.losses)
