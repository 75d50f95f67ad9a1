"""A simulated accelerator for tests: code that is right on it is right on a real one, for the same reasons.

An import registers the device "standin" with torch for the whole process. It uses PrivateUse1 and torch's registration
for backends in Python, a private interface that may change; `unavailable` then names the missing part.

- The CPU cannot read its memory. New memory is NaN.
- Operations and copies are queued on streams and run by a schedule: at the latest legal moment, at once, at random, or
  in threads with random delays. They are torch's CPU kernels, so results equal the CPU's to the bit. A task's error
  is raised at the next wait of a host thread.
- Freed memory is reused at once, in the order of its stream; `record_stream` keeps it.
- A checker with vector clocks raises RaceError for a missing wait, in every schedule: between streams, between a stream
  and freed memory, and where the host changes pinned memory that a queued copy reads. Pinned memory that a
  queued copy writes is NaN until the copy runs, which in the lazy schedule is when the host has waited.
- There are two devices, "standin:0" and "standin:1", each with its own memory and default stream.
- It counts launches, waits of host threads, pinned allocations and device memory.

It does not simulate speed, the rounding of a real device, operations that a device lacks or refuses in deterministic
mode, reuse of freed memory beyond overwriting it, generators, graphs, or more than one process.

settings.py     config and counters
schedule.py     tasks, streams, vector clocks, schedules
memory.py       hidden memory and pinned memory
operations.py   operations and copies
device.py       the device's module for torch, Stream, Event, registration
plugin.py       for pytest: python -m pytest -p tests.standin.plugin
"""

from .settings import SCHEDULES, config, counters

unavailable: str | None = None
try:
    from .device import Event, Stream
    from .memory import NAME, collect
    from .schedule import RaceError, configure, finish_all, raise_errors
except (ImportError, AttributeError) as error:
    unavailable = f"this torch does not let a device be registered from Python: {error}"

__all__ = [
    "NAME",
    "SCHEDULES",
    "Event",
    "RaceError",
    "Stream",
    "collect",
    "config",
    "configure",
    "counters",
    "finish_all",
    "raise_errors",
    "settle",
    "unavailable",
]


def settle() -> None:
    """Let all streams come to rest; raise what went wrong on them that nobody has been told of."""
    collect()
    finish_all("settle")
    raise_errors()
