"""Tasks on streams, the schedules that run them, and the happens-before check.

A task comes after the one before it on its stream, and after the events that its stream has been told to wait for. The
vector clock of a stream says which tasks of other streams come before its next one; what a host thread has seen
finished comes before everything that is queued later. Two uses of the same memory, of which one writes, must be in this
order, however they happened to run: otherwise it is a race.
"""

import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from .settings import config, counters


class RaceError(RuntimeError):
    """Two uses of the same memory, of which the later one does not wait for the earlier."""


class Queue:
    """A stream: its tasks, and its vector clock.

    device  index of its device
    number  its id, as `torch.Stream.stream_id`
    clock   by other stream, the number of its last task that comes before the next one here
    done    the number of the last task that has run
    known   the number of the last task that a host thread has seen finished
    """

    def __init__(self, device: int, number: int) -> None:
        self.device, self.number = device, number
        self.count = self.done = self.known = 0
        self.clock: dict[Queue, int] = {}
        self.tail: Task | None = None
        self.waits: list[Task] = []  # of other streams, before the next task
        self.pending: deque[Task] = deque()  # in the schedules that need to know them
        self.changed = threading.Condition()
        self.worker: threading.Thread | None = None
        self.sources: deque[Source] = deque()
        self.rng = random.Random(config.seed * 1009 + number)

    def __str__(self) -> str:
        return f"stream {self.number}"


class Task:
    """Work in a stream's queue; an event has no work."""

    __slots__ = ("asked", "clock", "done", "end", "inference", "name", "needs", "number", "queue", "run")

    def __init__(self, name: str, run: Callable[[], object] | None, queue: Queue, needs: "list[Task]") -> None:
        self.inference = torch.is_inference_mode_enabled()  # as it is queued, whenever it runs
        self.name, self.run, self.queue, self.needs = name, run, queue, needs
        self.number = queue.count
        self.clock = {other: number for other, number in queue.clock.items() if number > other.known}
        self.done, self.end, self.asked = False, 0.0, 0


class Use(NamedTuple):
    """A record of a task, kept by the memory that it uses."""

    queue: Queue
    number: int
    name: str

    def comes_before(self, queue: Queue) -> bool:
        """Return whether it happens before the next task of a stream."""
        seen = self.queue is queue or self.number <= self.queue.known
        return seen or self.number <= queue.clock.get(self.queue, 0)

    def __str__(self) -> str:
        return f"{self.name} on {self.queue}"


class Memory:
    """Memory that tasks use: its last writer, and the last use of each stream since."""

    def __init__(self) -> None:
        self.writer: Use | None = None
        self.uses: dict[Queue, Use] = {}

    def check(self, name: str, queue: Queue, *, writes: bool) -> None:
        """Raise RaceError unless the next task of a stream may use it."""
        before = [self.writer] if self.writer is not None else []
        if writes:
            before += self.uses.values()
        for use in before:
            if not use.comes_before(queue):
                verb = "writes" if writes else "reads"
                raise RaceError(f"{name} on {queue} {verb} {self} that {use} uses, and nothing makes it wait")

    def note(self, use: Use, *, writes: bool) -> None:
        """Record a use."""
        if writes:
            self.writer = use
            self.uses = {}
        self.uses[use.queue] = use

    def at_rest(self) -> bool:
        """Return whether a host thread has seen the end of every use."""
        return all(use.number <= use.queue.known for use in self.uses.values())

    def is_written(self) -> bool:
        """Return whether a task writes it whose end no host thread has seen."""
        return self.writer is not None and self.writer.number > self.writer.queue.known

    def overlaps(self, other: "Memory") -> bool:
        """Return whether it overlaps other memory."""
        return self is other


class Source(NamedTuple):
    """Host memory that a queued copy reads, until the host has seen the copy's end."""

    use: Use
    memory: Memory
    tensor: torch.Tensor
    snapshot: torch.Tensor

    def check(self) -> None:
        same = torch.equal(self.tensor.reshape(-1).view(torch.uint8), self.snapshot.reshape(-1).view(torch.uint8))
        if not same:
            raise RaceError(f"the host has changed pinned memory that {self.use} reads, and had not waited for that")


_PATIENCE = 50  # times that an event is asked for until a lazy device gets to work

lock = threading.RLock()  # over all that is queued
_running = threading.RLock()  # one host thread at a time runs tasks
_errors: deque[BaseException] = deque()
_unfinished: set[Queue] = set()
_queues: weakref.WeakValueDictionary[int, Queue] = weakref.WeakValueDictionary()
_numbers = 0
_rng = random.Random(0)
_local = threading.local()


# -- streams ---------------------------------------------------------------------------------------------------------
def new_queue(device: int) -> Queue:
    """Return a new stream; numbers begin with one default stream for each device."""
    global _numbers
    with lock:
        queue = _queues[_numbers] = Queue(device, _numbers)
        _numbers += 1
    return queue


defaults = [new_queue(device) for device in range(config.devices)]


def queue_of(number: int) -> Queue:
    """Return the stream of this number."""
    return _queues[number]


def current_device() -> int:
    """Return this thread's device."""
    device: int = getattr(_local, "device", 0)
    return device


def set_current_device(device: int) -> int:
    """Set this thread's device; return the previous one."""
    if not 0 <= device < config.devices:
        raise RuntimeError(f"there is no device {device}; there are {config.devices}")
    before, _local.device = current_device(), device
    return before


def current_queue(device: int | None = None) -> Queue:
    """Return this thread's stream on a device (default: the current device)."""
    device = current_device() if device is None else device
    queues: dict[int, Queue] = getattr(_local, "queues", {})
    return queues.get(device) or defaults[device]


def set_current_queue(queue: Queue) -> Queue:
    """Make a stream current in this thread on its device; return the previous one."""
    before = current_queue(queue.device)
    if not hasattr(_local, "queues"):
        _local.queues = {}
    _local.queues[queue.device] = queue
    return before


# -- queueing --------------------------------------------------------------------------------------------------------
def enqueue(
    name: str,
    run: Callable[[], object] | None,
    queue: Queue,
    reads: Sequence[Memory] = (),
    writes: Sequence[Memory] = (),
    source: torch.Tensor | None = None,
) -> Task:
    """Queue a task that reads and writes memory; RaceError if nothing makes it wait for an earlier use.

    source  host memory that it reads, of `reads[0]`, which is to stay as it is until the host has seen the task's end
    """
    with lock:
        if config.check:  # before anything is changed
            for memory in reads:
                memory.check(name, queue, writes=False)
            for memory in writes:
                memory.check(name, queue, writes=True)
        queue.count += 1
        use = Use(queue, queue.count, name)
        for memory in reads:
            memory.note(use, writes=False)
        for memory in writes:
            memory.note(use, writes=True)
        if source is not None and config.check and not reads[0].is_written():
            queue.sources.append(Source(use, reads[0], source, source.clone()))
        before = [] if queue.tail is None or queue.tail.done else [queue.tail]
        task = Task(name, run, queue, before + [wait for wait in queue.waits if not wait.done])
        queue.waits = []
        queue.tail = task
        _unfinished.add(queue)
        if config.schedule in ("random", "delayed"):
            with queue.changed:
                queue.pending.append(task)
                queue.changed.notify_all()
                if config.schedule == "delayed" and queue.worker is None:
                    queue.worker = threading.Thread(target=_work, args=(queue,), name=f"standin-{queue.number}")
                    queue.worker.daemon = True
                    queue.worker.start()
    if config.schedule == "eager":
        _run_until(task)
    elif config.schedule == "random":
        _run_some()
    return task


def let_change(memory: Memory) -> None:
    """Check, for the last time, the host memory that queued copies read: a task may change it from here on."""
    with lock:
        for queue in [queue for queue in _unfinished if queue.sources]:
            for source in [source for source in queue.sources if source.memory.overlaps(memory)]:
                queue.sources.remove(source)
                source.check()


def make_wait(queue: Queue, task: Task) -> None:
    """Make the next task of a stream wait for a task."""
    with lock:
        queue.waits.append(task)
        for other, number in (*task.clock.items(), (task.queue, task.number)):
            if other is not queue and queue.clock.get(other, 0) < number:
                queue.clock[other] = number


def _execute(task: Task) -> None:
    try:
        if task.run is not None:
            with torch.inference_mode(task.inference), torch.no_grad():
                task.run()
    except BaseException as error:  # as on a device: whoever waits next gets it
        if isinstance(error, RaceError):
            _errors.append(error)
        else:
            wrapped = RuntimeError(f"standin: {task.name}: {error}")
            wrapped.__cause__ = error
            _errors.append(wrapped)
    task.end = time.perf_counter()
    task.run, task.needs, task.done = None, [], True
    task.queue.done = max(task.queue.done, task.number)


def _run_until(task: Task) -> None:
    """Run a task and all tasks that it depends on, in this thread."""
    with _running:
        stack = [task]
        while stack:
            missing = [] if stack[-1].done else [need for need in stack[-1].needs if not need.done]
            if missing:
                stack += missing
                continue
            top = stack.pop()
            if not top.done:
                _execute(top)


def _run_some() -> None:
    """Run a random number of tasks that are ready."""
    with _running:
        for _ in range(_rng.choice((0, 0, 1, 2, 5))):
            ready = []
            with lock:
                queues = sorted(_unfinished, key=lambda queue: queue.number)
            for queue in queues:
                while queue.pending and queue.pending[0].done:
                    queue.pending.popleft()
                if queue.pending and all(need.done for need in queue.pending[0].needs):
                    ready.append(queue.pending[0])
            if not ready:
                return
            _execute(_rng.choice(ready))


def _work(queue: Queue) -> None:
    """A stream's thread: run its tasks, and end when there are none."""
    torch.set_num_threads(torch.get_num_threads())  # or a new thread's first products take more, to other last bits
    while True:
        with queue.changed:
            if not queue.pending:
                queue.worker = None
                return
            task = queue.pending[0]
        for need in task.needs:
            _block(need)
        if task.run is not None:
            time.sleep(queue.rng.choice((0, 0, 0, 0.2, 1)) * queue.rng.random() * config.delay)
        _execute(task)
        with queue.changed:
            queue.pending.popleft()
            queue.changed.notify_all()


def _block(task: Task) -> None:
    with task.queue.changed:
        while not task.done and task.queue.worker is not None:
            task.queue.changed.wait()
    if not task.done:  # it was queued under another schedule, and no thread knows of it
        for need in task.needs:
            _block(need)
        with _running:
            if not task.done:
                _execute(task)


# -- the host --------------------------------------------------------------------------------------------------------
def wait(task: Task | None, kind: str) -> None:
    """Make this host thread wait for a task; raise errors of the device up to then."""
    counters.count_wait(kind)
    if task is not None:
        if config.schedule == "delayed":
            _block(task)
        else:
            _run_until(task)
        _learn(task)
    raise_errors()


def poll(task: Task | None) -> bool:
    """Return whether a task is done, which the host then knows; a lazy task is done after many queries."""
    if task is None:
        return True
    task.asked += 1
    if config.schedule in ("lazy", "random") and task.asked >= _PATIENCE:
        _run_until(task)
    if task.done:
        _learn(task)
    return task.done


def finish(queue: Queue, kind: str) -> None:
    """Make this host thread wait for all tasks of a stream."""
    wait(enqueue("synchronize", None, queue), kind)


def finish_all(kind: str = "device.synchronize", device: int | None = None) -> None:
    """Make this host thread wait for all streams of a device, or of all devices if None."""
    with lock:
        queues = [queue for queue in _unfinished if device is None or queue.device == device]
    for queue in queues:
        finish(queue, kind)


def _learn(task: Task) -> None:
    """Record that the host has seen the end of a task, and so of all tasks before it."""
    with lock:
        for queue, number in (*task.clock.items(), (task.queue, task.number)):
            queue.known = max(queue.known, number)
            while queue.sources and queue.sources[0].use.number <= queue.known:
                try:
                    queue.sources.popleft().check()
                except RaceError as error:
                    _errors.append(error)
            queue.clock = {other: seen for other, seen in queue.clock.items() if seen > other.known}
            if queue.known == queue.count:
                _unfinished.discard(queue)


def report(error: BaseException) -> None:
    """Keep an error for the next host thread that waits."""
    _errors.append(error)


def raise_errors() -> None:
    """Raise the device's first error since the last call, and drop the others."""
    with lock:
        first = _errors[0] if _errors else None
        _errors.clear()
    if first is not None:
        raise first


def configure(**settings: Any) -> None:
    """Wait for all streams, set fields of `config`, and restart the random numbers."""
    finish_all("configure")
    for name, value in settings.items():
        if not hasattr(config, name):
            raise TypeError(f"there is no setting {name!r}")
        setattr(config, name, value)
    _rng.seed(config.seed)
    with lock:
        for queue in _queues.values():
            queue.rng.seed(config.seed * 1009 + queue.number)
