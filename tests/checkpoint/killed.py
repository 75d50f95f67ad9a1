"""A training that saves and delivers until it is killed, for `test_flipped`."""

import os

import numpy as np

import hostdev
from hostdev.checkpoint import remote
from hostdev.core.addresses import checkpoint_path
from hostdev.ext.checkpoints import deliver

ROWS = 20_000


def run(place, target, environment, told):
    """Save to `place` and deliver to `target`, unless it is None; send the step of each checkpoint that is there."""
    os.environ.update(environment)
    table = hostdev.HostTable(ROWS, 8, hostdev.LazyAdam(lr=0.1), name="items", seed=1)
    with hostdev.Runtime({"items": table}, device="cpu", depth=0) as runtime:
        try:
            number = runtime.load(place)
        except hostdev.UserError:  # there is none yet
            number = 0
        while True:
            number += 1
            for _, found in runtime.train([{"items": (np.arange(500) + 37 * number) % ROWS}]):
                found["items"].sum().backward()
            step = runtime.save(place, extra=number, keep=2).checkpoint.manifest.step
            if target is not None:
                deliver.deliver(remote.newest(checkpoint_path(place)).chain, checkpoint_path(target), 2)
            told.send(step)
