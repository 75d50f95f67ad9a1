"""hostdev.train where torch has the simulated accelerator, and a backend for its tensors; what it came to, at the end.

One argument before the flags: the schedule, and "-" with it where torch is to have no such backend.
"""

import hostdev.core.environment  # isort: skip  # noqa: F401  (before torch)

import os
import sys

import torch

from hostdev.core import cli
from hostdev.ext.training import cli as train

UNAVAILABLE = 77  # the code where torch does not let the device be registered


def main():
    from tests import standin  # registers it for the whole process

    if standin.unavailable is not None:
        print(standin.unavailable, file=sys.stderr)
        return UNAVAILABLE
    from tests.standin import group

    schedule, *flags = sys.argv[1:]
    torch.set_num_threads(1)
    if not schedule.endswith("-"):
        group.register()
    standin.configure(schedule=schedule.removesuffix("-"), seed=1, check=True)
    code = cli.run(train.PROG, train.main, flags)
    standin.settle()
    return code


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as `hostdev.train` does: libraries' threads are still there
