"""Tables by key on several processes: the bits of one process, in every mode, and from each other's checkpoints."""

import json

import pytest

from tests.distributed import keyed_loop, keyed_refused
from tests.distributed.processes import start_on

FEW = [
    "all 1",
    "count 0",
    "count 3",
    "expires 2",
    "sketch 1",
    "probability 2",
    "norm 1",
    "norm 2",
    "zeros 1",
    "initial 2",
    "full 3",
]
ALIKE = "middle", "end", "losses"


def alone(names, folder=None):
    """Return the results of one process by policy."""
    found = {}
    for policy in dict.fromkeys(keyed_loop.TRAININGS[name][0] for name in names):
        saved = None if folder is None else folder / "alone" / policy
        found[policy] = json.loads(json.dumps(keyed_loop.train(None, policy, 0, saved)))
    return found


def on_ranks(processes, count, names, *, hosts=1):
    places = [rank * hosts // count for rank in range(count)]
    start_on(processes, places, "-m", "tests.distributed.keyed_loop", processes.folder, *names)
    for process in processes.ended():
        assert process.code == 0, process
    return [json.loads((processes.folder / f"rank{rank}.json").read_text()) for rank in range(count)]


def in_order(reports):
    """Return the evictions and the predictions that one process has noted, or all of them, in an order of their own."""
    pairs = [sorted(zip(*one, strict=True)) for one in reports if one[0] != "predicted"]
    predicted = [one for one in reports if one[0] == "predicted"]
    return sorted(pair for each in pairs for pair in each), sorted(predicted)


def compare(parts, expected, names):
    for name in names:
        wanted = expected[keyed_loop.TRAININGS[name][0]]
        for part in parts:
            assert part[name]["losses"] == wanted["losses"], name
        assert [parts[0][name][key] for key in ALIKE] == [wanted[key] for key in ALIKE], name
        reported = in_order([one for part in parts for one in part[name]["evicted"]])
        assert reported == in_order(wanted["evicted"]), name
        for by in ("resumed", "from one"):
            found = parts[0][f"{by} {name}"]
            assert [found[key] for key in ALIKE] == [wanted["middle"], wanted["end"], wanted["losses"][10:]], (by, name)


def test_two_processes_have_the_bits_of_one(processes, tmp_path):
    expected = alone(FEW, processes.folder)
    assert sum(len(in_order(one["evicted"])[0]) for one in expected.values()) > 1_000
    compare(on_ranks(processes, 2, FEW), expected, FEW)
    for name in FEW[1], FEW[4]:
        policy, mode = keyed_loop.TRAININGS[name]
        found = keyed_loop.resume(None, policy, mode, processes.folder / "saved" / name)
        assert [found["middle"], found["end"]] == [expected[policy][key] for key in ALIKE[:2]]


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, len(keyed_loop.POLICIES), 3))
@pytest.mark.parametrize(("count", "hosts"), [(2, 1), (4, 1), (4, 2)])
def test_all_policies_in_all_modes(processes, count, hosts, first):
    policies = list(keyed_loop.POLICIES)[first : first + 3]
    names = [name for name, (policy, _) in keyed_loop.TRAININGS.items() if policy in policies]
    expected = alone(names, processes.folder)
    compare(on_ranks(processes, count, names, hosts=hosts), expected, names)


def test_what_is_refused(processes):
    processes.start_ranks(2, "-m", "tests.distributed.keyed_refused", processes.folder)
    for process in processes.ended():
        assert process.code == 0, process
    first, second = (json.loads((processes.folder / f"rank{rank}.json").read_text()) for rank in range(2))
    one = keyed_refused.fill(None)
    assert one["steps"] > 3 and "its capacity is 150 rows; raise capacity, or give evict=" in one["full"]
    assert one == {name: first[name] for name in one}
    assert (second["full"], second["steps"]) == (one["full"], one["steps"])
    assert first["erased"] == keyed_refused.erase_in_loop(None)
    assert sorted(first["mine"] + second["mine"]) == list(range(100)) and len(first["mine"]) > 20
    for found in first, second:
        assert "its keys are divided among ranks, which a Runtime must train" in found["apply"]
        assert "belongs to another rank; select keys by the table's owns()" in found["foreign"]
        assert found["capacity"].startswith("UnlikeError") and "100" in found["capacity"]
        assert "unknown of table 't' differs between processes: zeros on rank 0; initial on rank 1" in found["unlike"]
        assert found["kind"].startswith("UnlikeError") and "table 't'" in found["kind"], found["kind"]
        step, saved, _ = found["erase"]
        assert "the keys given to erase() differ between ranks" in step
        assert saved.startswith("UnlikeError: runtime.save(): the keys given to erase() of table 'keyed' differ")
    assert first["unknown"] == "nothing"
    assert "has no row, and only rank 0 has the one that such keys use" in second["unknown"]
