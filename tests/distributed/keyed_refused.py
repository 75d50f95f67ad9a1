"""What two processes refuse of tables by key, each with the same message; run by test_keyed.py.

    python -m tests.distributed.keyed_refused FOLDER

Writes the messages, and what must equal one process's, to FOLDER/rankN.json.
"""

import hostdev.core.environment  # isort: skip

import json
import os
import sys
from pathlib import Path

import numpy as np

import hostdev
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.rank_environment import find_rank_environment
from tests.distributed import keyed_loop


def message(call, *arguments, **options):
    """Return what a call raises."""
    try:
        call(*arguments, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def fill(ranks):
    """Train until the table is full; return the message and what has been trained."""
    program = keyed_loop.Program(ranks, 1, capacity=150)
    told = message(program.train, keyed_loop.batches())
    found = {"full": told, "steps": len(program.losses), "digest": program.digest()}
    program.runtime.close()
    return found


def erase_in_loop(ranks):
    """Erase keys in the loop's body, and write some."""
    program = keyed_loop.Program(ranks, 0, **keyed_loop.POLICIES["count"])

    def after(step):
        if step == 5:
            program.keyed.erase(np.arange(80))
            keys = np.arange(1_000, 1_010)
            keys = keys[program.keyed.owns(keys)]
            program.keyed.write_rows(
                keys, np.ones((len(keys), 3, keyed_loop.DIM), np.float32), np.empty((len(keys), 0), np.float32)
            )

    program.train(keyed_loop.batches(), 0, 9, after)
    digest = program.digest()
    program.runtime.close()
    return digest


def erase_others(ranks, folder):
    """Erase other keys on each rank."""
    program = keyed_loop.Program(ranks, 0)
    program.keyed.erase([1, 2 + ranks.rank])
    told = message(program.train, keyed_loop.batches())
    saved = message(program.runtime.save, folder)
    program.runtime.close()
    return told, saved, len(program.losses)


def main(folder):
    place = find_rank_environment()
    ranks = Ranks(place, lambda rank, why: os._exit(3))
    found = fill(ranks) | {"erased": erase_in_loop(ranks)}
    table = hostdev.HostTable(None, 2, hostdev.SGD(lr=1.0), name="t", seed=1, part=ranks.part(), capacity=100)
    keys = np.arange(100)
    found["mine"] = keys[table.owns(keys)].tolist()
    found["apply"] = message(table.apply, keys[:1], np.ones((1, 2), np.float32))
    found["foreign"] = message(table.lookup, keys)
    found["unknown"] = message(table.lookup, found["mine"][:1])
    other = hostdev.HostTable(
        None, 2, hostdev.SGD(lr=1.0), name="t", seed=1, part=ranks.part(), capacity=100 + place.rank
    )
    found["capacity"] = message(hostdev.Runtime, {"a": other}, device="cpu", ranks=ranks)
    unknown = ("zeros", "initial")[place.rank]
    other = hostdev.HostTable(
        None, 2, hostdev.SGD(lr=1.0), name="t", seed=1, part=ranks.part(), capacity=100, unknown=unknown
    )
    found["unlike"] = message(hostdev.Runtime, {"a": other}, device="cpu", ranks=ranks)
    kind = {"rows": (None, 100)[place.rank], "name": "t", "seed": 1, "part": ranks.part()}
    other = hostdev.HostTable(dim=2, optimizer=hostdev.SGD(lr=1.0), **kind)
    found["kind"] = message(hostdev.Runtime, {"a": other}, device="cpu", ranks=ranks)
    found["erase"] = erase_others(ranks, folder)
    (Path(folder) / f"rank{place.rank}.json").write_text(json.dumps(found))
    ranks.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
