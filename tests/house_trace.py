"""Traces a training step or a served request: how many files of the product run, and how many Python calls.

`python -m tests.house_trace step|request [options of hostdev train]` prints the counts on standard error.
"""

import collections
import runpy
import sys
import threading
from typing import Any

from tests.conftest import ROOT

FIRST, LAST = 20, 24  # steps

_calls: collections.Counter[str] = collections.Counter()
_is_on = False


def _profile(frame: Any, event: str, _: Any) -> None:
    name = frame.f_code.co_filename
    if _is_on and event == "call" and name.startswith(f"{ROOT}/") and ".venv" not in name:
        _calls[name] += 1


def trace_step() -> str:
    """Run `hostdev train` with the remaining options, and count from its 20th step to its 24th."""
    from hostdev.runtime.loop import TrainLoop

    original: Any = TrainLoop.__next__
    steps = 0

    def counted(self: Any) -> Any:
        nonlocal steps
        global _is_on
        steps += 1
        if steps in (FIRST, LAST):
            _is_on = steps == FIRST
        return original(self)

    TrainLoop.__next__ = counted  # type: ignore[method-assign]
    runpy.run_module("hostdev.train", run_name="__main__", alter_sys=True)
    return f"step: {len(_calls)} files, {sum(_calls.values()) // (LAST - FIRST)} calls"


def main() -> None:
    """Trace what the first argument names."""
    threading.setprofile(_profile)
    sys.setprofile(_profile)
    del sys.argv[1]
    try:
        print(trace_step(), file=sys.stderr)
    except SystemExit:
        print(f"step: {len(_calls)} files, {sum(_calls.values()) // (LAST - FIRST)} calls", file=sys.stderr)


if __name__ == "__main__":
    main()
