import io
import re
import threading

import numpy as np
import pytest

from hostdev import FTRL, HostTable, LazyAdam
from hostdev.core import primitive
from hostdev.core.primitive import OpLog, PartialCall
from hostdev.ops import EmbeddingLookup, FusedSparseFtrl, FusedSparseLazyAdam, Primitive

LINE = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO (cpu|device) kernel: (\S+) costs (\d+) us\.$")


class FixedClock:
    """Says that every call took 1.5 ms, at once or when asked."""

    def __init__(self, late=False):
        self.late = late
        self.waiting = []

    def begin(self):
        return None

    def end(self, mark, report):
        self.waiting.append(report)
        if not self.late:
            self.drain()

    def drain(self):
        for report in self.waiting:
            report(1_500_000)
        self.waiting = []


def test_lines_of_the_log():
    file = io.StringIO()
    log = OpLog(clocks={"CPU": FixedClock()})
    log.write_to(file)
    table = HostTable(10, 4, LazyAdam(), name="deep")
    lookup = EmbeddingLookup(scope="deep", log=log).add_prim_attr("primitive_target", "CPU")
    update = FusedSparseLazyAdam(scope="deep", log=log).add_prim_attr("primitive_target", "CPU")
    other = Primitive("Adam", lambda: None, log=log)
    rows = lookup(table, np.array([1, 2]))
    update(table, np.array([1, 2]), rows)
    lookup(table, np.array([1]))
    other()
    log.close()
    lines = [LINE.match(line).groups() for line in file.getvalue().splitlines()]
    assert lines[:3] == [
        ("cpu", "Default/deep/EmbeddingLookup-op1", "1500"),
        ("cpu", "Default/deep/FusedSparseLazyAdam-op2", "1500"),
        ("cpu", "Default/deep/EmbeddingLookup-op1", "1500"),
    ]
    assert lines[3][:2] == ("device", "Default/Adam-op3")


class SlowFile:
    """Takes lines when it may."""

    def __init__(self):
        self.lines, self.threads = [], set()
        self.may = threading.Event()

    def writelines(self, lines):
        assert self.may.wait(30)
        self.threads.add(threading.current_thread().name)
        self.lines += lines

    def flush(self):
        pass


class FullDisk(SlowFile):
    """Takes none."""

    def writelines(self, lines):
        raise OSError(28, "No space left on device")


def test_lines_are_written_behind_and_none_is_left_out(monkeypatch):
    """An op waits where too many lines do, and for nothing else."""
    monkeypatch.setattr(primitive, "_MOST_WAITING", 100)
    monkeypatch.setattr(primitive, "_EVERY_SECONDS", 0.001)
    file, log = SlowFile(), OpLog(clocks={"DEVICE": FixedClock()})
    log.write_to(file)
    op = Primitive("Step", lambda: None, log=log)
    calls = [0]

    def call():
        for _ in range(1000):
            op()
            calls[0] += 1

    caller = threading.Thread(target=call)
    caller.start()
    caller.join(0.2)
    assert caller.is_alive()
    assert calls[0] < 300  # those that wait, and those that were on their way to the file
    file.may.set()
    caller.join(30)
    assert file.threads == {"hostdev-ops-log"}
    log.close()
    assert len(file.lines) == calls[0] == 1000
    assert "hostdev-ops-log" not in {thread.name for thread in threading.enumerate()}
    op()  # not written any more
    assert (len(file.lines), log.summary()["Step"]["count"]) == (1000, 1001)


def test_what_writing_meets_is_raised_and_keeps_no_op_waiting(monkeypatch):
    monkeypatch.setattr(primitive, "_MOST_WAITING", 10)
    log = OpLog(clocks={"DEVICE": FixedClock()})
    log.write_to(FullDisk())
    op = Primitive("Step", lambda: None, log=log)
    for _ in range(50):
        op()
    with pytest.raises(OSError, match="No space left"):
        log.flush()
    with pytest.raises(OSError, match="No space left"):
        log.check()
    with pytest.raises(OSError, match="No space left"):
        log.close()
    assert log.summary()["Step"]["count"] == 50


def test_summary_by_name_and_scope():
    log = OpLog(clocks={"CPU": FixedClock()})
    tables = {name: HostTable(10, dim, FTRL(), name=name) for name, dim in (("deep", 4), ("wide", 1))}
    ops = {name: EmbeddingLookup(scope=name, log=log).add_prim_attr("primitive_target", "CPU") for name in tables}
    for name in ("deep", "wide", "wide"):
        ops[name](tables[name], np.arange(3))
    update = FusedSparseFtrl(scope="wide", log=log).add_prim_attr("primitive_target", "CPU")
    update(tables["wide"], np.arange(3), np.ones((3, 1), np.float32))
    summary = log.summary()
    assert summary["EmbeddingLookup"]["count"] == 3
    assert summary["EmbeddingLookup"]["total_us"] == 4500
    assert summary["EmbeddingLookup"]["mean_us"] == summary["EmbeddingLookup"]["p99_us"] == 1500
    assert summary["EmbeddingLookup"]["bytes"] == 3 * (4 + 1 + 1) * 2 * 4  # read and written
    assert summary["EmbeddingLookup"]["by_scope"]["wide"]["count"] == 2
    assert summary["FusedSparseFtrl"]["bytes"] == 3 * (1 + 2 * 3) * 4  # gradient; weights and two slots both ways
    assert "by_scope" not in summary["FusedSparseFtrl"]


def test_a_clock_may_report_late():
    clock = FixedClock(late=True)
    log = OpLog(clocks={"DEVICE": clock})
    op = Primitive("Step", lambda x: x + 1, log=log)
    assert op(1) == 2
    assert log.summary() == {}
    clock.drain()
    assert log.summary()["Step"]["count"] == 1


def test_targets():
    lookup = EmbeddingLookup()
    assert lookup.primitive_target == "DEVICE"
    table = HostTable(10, 4, LazyAdam(), name="deep")
    with pytest.raises(ValueError, match="EmbeddingLookup has primitive_target 'DEVICE', but table 'deep' has 'CPU'"):
        lookup(table, np.array([1]))
    assert lookup.add_prim_attr("primitive_target", "CPU") is lookup
    assert lookup(table, np.array([1])).shape == (1, 4)
    for change in (lambda: lookup.add_prim_attr("primitive_target", "DEVICE"), lambda: lookup.times):
        change()  # after a call on this table
        with pytest.raises(ValueError, match="EmbeddingLookup has primitive_target 'DEVICE'"):
            lookup(table, np.array([1]))
        assert lookup.nbytes(table, np.array([1])) > 0
    with pytest.raises(ValueError, match="must be one of"):
        lookup.add_prim_attr("primitive_target", "GPU")
    with pytest.raises(ValueError, match="FusedSparseFtrl cannot update table 'deep'.* LazyAdam"):
        FusedSparseFtrl().add_prim_attr("primitive_target", "CPU")(table, np.array([1]), np.ones((1, 4), np.float32))


def test_a_call_in_parts_counts_when_it_ends():
    log = OpLog()
    lookup = EmbeddingLookup(log=log).add_prim_attr("primitive_target", "CPU")
    table = HostTable(10, 4, LazyAdam(), name="deep")
    given_up, whole = PartialCall(lookup), PartialCall(lookup)
    for part in (given_up, whole, whole):
        part(table, np.array([1, 2]))
    whole.end()
    found = log.summary()["EmbeddingLookup"]
    assert (found["count"], found["bytes"]) == (1, 2 * 2 * 4 * 8)


def test_a_failing_call_is_not_counted():
    log = OpLog()
    lookup = EmbeddingLookup(log=log).add_prim_attr("primitive_target", "CPU")
    with pytest.raises(ValueError, match="outside"):
        lookup(HostTable(10, 4, LazyAdam(), name="deep"), np.array([10]))
    assert log.summary() == {}
    with pytest.raises(NotImplementedError, match="Nothing has no implementation"):
        Primitive("Nothing")()
