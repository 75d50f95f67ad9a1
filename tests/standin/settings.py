"""The settings and counters, one of each per process, like the registration."""

import threading
from collections import Counter
from dataclasses import dataclass, field

_counting = threading.Lock()
SCHEDULES = ("lazy", "eager", "random", "delayed")


@dataclass
class Config:
    """How the device behaves; change it with `standin.configure`, which first waits for all streams.

    schedule     "lazy": a task runs when somebody waits for it or for one after it, the latest legal moment;
                 "eager": in the thread that queues it, at once; "random": after each queueing some tasks that may run,
                 of any streams; "delayed": in a thread of its stream, after a random delay
    seed         of the random schedules
    delay        of a task in seconds, at most, in the schedule "delayed"
    check        raise RaceError where nothing orders two uses of the same memory
    devices      how many there are
    total_bytes  memory of each
    """

    schedule: str = "lazy"
    seed: int = 0
    delay: float = 0.001
    check: bool = True
    devices: int = 2
    total_bytes: int = 1 << 33


@dataclass
class Counters:
    """Counts since `reset`, for tests and benchmarks.

    launches            tasks with work, by the operation's name: no views, allocations and events
    waits               times that a host thread waited, by what for and the thread's name: event.synchronize,
                        stream.synchronize, device.synchronize, item, copy to device, copy to host, copy of pageable
                        memory (non-blocking; a real device may wait), shape of OPERATION (it depends on values)
    pinned_allocations  number of pinned buffers that were made, and pinned_bytes, their bytes
    device_bytes        allocated now, on all devices, as `standin.collect()` leaves it; device_peak_bytes, at most
    """

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    pinned_allocations: int = 0
    pinned_bytes: int = 0
    device_bytes: int = 0
    device_peak_bytes: int = 0

    def count_launch(self, name: str) -> None:
        with _counting:
            self.launches[name] += 1

    def count_wait(self, kind: str) -> None:
        with _counting:
            self.waits[kind, threading.current_thread().name] += 1

    def waits_of(self, thread: str) -> Counter[str]:
        """Return how often the thread with this name waited, by reason."""
        return Counter({kind: count for (kind, name), count in self.waits.items() if name == thread})

    def reset(self) -> None:
        """Set the counts to zero. Allocated memory stays counted, and is the new peak."""
        self.launches.clear()
        self.waits.clear()
        self.pinned_allocations = self.pinned_bytes = 0
        self.device_peak_bytes = self.device_bytes


config = Config()
counters = Counters()
