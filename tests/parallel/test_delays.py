"""Many small trainings of two and three processes in which every stage comes late at random: the bits of one."""

import pickle

import pytest

from tests.parallel import delayed_loop
from tests.parallel.same import assert_same

SEEDS = 50
WRONG_SEEDS = 12


@pytest.fixture(scope="module")
def alone():
    """What one process comes to, by seed."""
    return {seed: delayed_loop.alone(seed) for seed in range(SEEDS)}


def run(processes, count, seeds, *seam):
    """What all ranks come to, by seed and depth."""
    processes.start_ranks(count, "-m", "tests.parallel.delayed_loop", processes.folder, 0, seeds, *seam)
    for process in processes.ended():
        assert process.code == 0, process
    parts = [pickle.loads((processes.folder / f"rank{rank}.pickle").read_bytes()) for rank in range(count)]
    return {key: [part[key] for part in parts] for key in parts[0]}


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_delays_change_nothing(processes, alone, count):
    found = run(processes, count, SEEDS)
    assert len(found) == SEEDS * len(delayed_loop.DEPTHS)
    for (seed, depth), parts in found.items():
        print("seed", seed, "depth", depth)  # of the one that fails
        assert_same(parts, alone[seed])


@pytest.mark.slow
@pytest.mark.parametrize(("seam", "value"), [("ignore_hazards", "[0, 1, 2, 3]"), ("staleness", "1")])
def test_a_runtime_that_does_not_wait_is_found(processes, alone, seam, value):
    """These trainings see whether rows come that an unfinished batch is going to write."""
    differ = 0
    for (seed, _), parts in run(processes, 2, WRONG_SEEDS, seam, value).items():
        try:
            assert_same(parts, alone[seed])
        except AssertionError:
            differ += 1
    assert differ > WRONG_SEEDS // 4
