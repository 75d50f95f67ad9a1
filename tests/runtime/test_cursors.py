"""A cursor of an endless iterator belongs to the batches whose steps are in a checkpoint, not to those read ahead."""

import itertools
import json
import runpy
import sys

import numpy as np
import pytest

from tests import forks
from tests.conftest import ROOT, environment
from tests.runtime.cases import MODES, BodyError, Case, batches_of, differing, ids, overlapped, send, wanted_of

COUNT = 14
SAVED, LEFT = (5, 9, COUNT), (7, 12, COUNT)  # steps


def stream(first=0, batches=None, read=None):
    """An endless stream; each batch knows its number."""
    batches = batches or batches_of(COUNT)
    for number in itertools.count(first):
        if read is not None:
            read.append(number)
        yield {**batches[number % COUNT], "number": number}


def get_ids(batch):
    return ids({name: value for name, value in batch.items() if name != "number"})


def cursor_of(batch):
    return {"next": batch["number"] + 1, "text": "a"}


def loop_of(case, batches, **options):
    how = {"ids": get_ids, "send": send, "cursor": cursor_of, **options}
    return case.runtime.train(batches, read_ahead=None if options.get("background") else True, **how)


def state_extra(case):
    return {"model": case.model.state_dict(), "adam": case.adam.state_dict()}


@overlapped
@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_resumes_from_cursors_equals_one(device, depth, cache, background, tmp_path):
    """At each save, the cursor is that of the body's batch, although later ones have been read."""
    first = 0
    for part in range(3):
        case = Case(device, options={"depth": depth, "cache": cache}, seed=3)
        assert case.runtime.cursor is None
        if part:
            extra = case.runtime.load(tmp_path / "saved")
            case.model.load_state_dict(extra["model"])
            case.adam.load_state_dict(extra["adam"])
            assert case.runtime.cursor == {"next": first, "text": "a"}
        read = []
        for label, rows in loop_of(case, stream(first, read=read), background=background):
            case.step(label, rows)
            done = first + rows.step
            if done == SAVED[part]:
                case.runtime.save(tmp_path / "saved", extra=state_extra(case))
                assert case.runtime.cursor["next"] == done
            if done == LEFT[part]:  # the steps after the save are lost, as in a kill
                break
        del label, rows
        assert max(read) >= LEFT[part] - 1
        first = SAVED[part]
    assert differing(case.state(), wanted_of(device, batches_of(COUNT))) == []


@pytest.mark.parametrize(("depth", "cache"), MODES[:4])
def test_when_a_cursor_moves(depth, cache, tmp_path):
    case = Case(options={"depth": depth, "cache": cache})
    source = stream()
    loop = loop_of(case, source)
    label, rows = next(loop)
    case.runtime.save(tmp_path / "saved", extra=None)  # the step is not taken yet
    assert case.runtime.cursor is None
    case.step(label, rows)
    assert case.runtime.cursor is None  # the batch is the body's until the loop, or `save`, finishes it
    case.runtime.save(tmp_path / "saved", extra=None)
    assert case.runtime.cursor["next"] == 1
    label, rows = next(loop)  # a batch without a step changes nothing, and is done
    next(loop)
    assert case.runtime.cursor["next"] == 2
    loop.close()  # the third had no step
    assert case.runtime.cursor["next"] == 2
    with pytest.raises(BodyError):
        for label, rows in loop_of(case, source):
            case.step(label, rows)
            if rows.step == 3:
                raise BodyError
    assert case.runtime.cursor["next"] == 6  # the step was taken before the error
    with case.runtime.predict(batches_of(2), ids=ids) as other:
        next(other)
    plain = batches_of(3)
    case.train(plain)
    assert case.runtime.cursor["next"] == 6  # a loop without cursors leaves it


def test_a_step_of_several_batches_has_the_last_cursor(tmp_path):
    case = Case(options={"depth": 3})
    for number, (label, rows) in enumerate(loop_of(case, stream(), accumulate=3)):
        loss = rows and case.model(rows).sum() * 0.01 + label.sum() * 0
        loss.backward()
        if number % 3 == 2:
            case.adam.step()
            case.adam.zero_grad()
            case.runtime.save(tmp_path / "saved", extra=None)
            assert case.runtime.cursor["next"] == number + 1
        if number == 5:
            break


def test_a_cursor_that_cannot_be_saved(tmp_path):
    case = Case(options={"depth": 0})
    loop = case.runtime.train(stream(), ids=get_ids, send=send, cursor=lambda batch: object())
    case.step(*next(loop))
    with pytest.raises(TypeError, match="cursor"):
        case.runtime.save(tmp_path / "saved", extra=None)
    loop.close()


def test_values_of_a_cursor(tmp_path):
    """Whatever a checkpoint can hold."""
    given = {"offsets": {3: 2**60, 11: 0}, "names": ["a", ("b", None)], "at": np.arange(3)}
    case = Case(options={"depth": 2})
    with case.runtime.train(stream(), ids=get_ids, send=send, cursor=lambda batch: given, read_ahead=True) as loop:
        case.step(*next(loop))
        case.runtime.save(tmp_path / "saved", extra=1)
    other = Case(options={"depth": 2})
    assert other.runtime.load(tmp_path / "saved") == 1
    found = other.runtime.cursor
    assert found.pop("at").tolist() == [0, 1, 2]
    assert found == {"offsets": {3: 2**60, 11: 0}, "names": ["a", ("b", None)]}
    plain = Case(options={"depth": 2})
    plain.train(batches_of(1))
    plain.runtime.save(tmp_path / "without", extra=2)
    assert other.runtime.load(tmp_path / "without") == 2 and other.runtime.cursor is None


PROGRAM = """
import os, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.runtime.test_cursors import *

def main(steps, kill):
    case = Case(options={{"depth": 3, "cache": "20%"}})
    first = 0
    if any(Path("saved").glob("step-*")):
        extra = case.runtime.load("saved")
        case.model.load_state_dict(extra["model"])
        case.adam.load_state_dict(extra["adam"])
        first = case.runtime.cursor["next"]
    for label, rows in loop_of(case, stream(first)):
        case.step(label, rows)
        done = first + rows.step
        if done % 4 == 0 or done == steps:
            case.runtime.save("saved", extra=state_extra(case), wait=done == steps)
        if done == kill:
            os.kill(os.getpid(), 9)
        if done == steps:
            break
    del label, rows
    np.save(sys.argv[1], np.concatenate([value.numpy().ravel() for value in case.model.state_dict().values()]))

main(int(sys.argv[2]), int(sys.argv[3]))
"""


def test_killed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM.format(root=str(ROOT)))
    for name, kills in (("parts", [6, 11, 0]), ("whole", [0])):
        (tmp_path / name).mkdir()
        for kill in kills:
            command = [sys.executable, tmp_path / "program.py", "out.npy", "14", str(kill)]
            done = forks.run(
                command, cwd=tmp_path / name, env=environment(tmp_path), capture_output=True, text=True, check=False
            )
            assert done.returncode == (-9 if kill else 0), done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "parts" / "out.npy"), np.load(tmp_path / "whole" / "out.npy"))


class Message:
    """As confluent_kafka's."""

    def __init__(self, partition, offset, value):
        self._values = partition, offset, value

    def error(self):
        return None

    def partition(self):
        return self._values[0]

    def offset(self):
        return self._values[1]

    def value(self):
        return self._values[2]


class Broker:
    """A topic of three partitions whose records a consumer gets in an order of its own each time."""

    def __init__(self, rows):
        rng = np.random.default_rng(0)
        self.records = {
            partition: [
                json.dumps(
                    {"user": f"u{rng.integers(50)}", "item": f"i{rng.integers(80)}", "label": int(rng.integers(2))}
                ).encode()
                for _ in range(rows)
            ]
            for partition in range(3)
        }


class Consumer:
    """The methods of confluent_kafka.Consumer that the example calls."""

    def __init__(self, broker, seed):
        self._records, self._rng = broker.records, np.random.default_rng(seed)
        self._paused, self._at = set(), {}

    def assign(self, partitions):
        self._at = {partition: offset for _, partition, offset in partitions}

    def pause(self, partitions):
        self._paused |= {partition for _, partition, _ in partitions}

    def resume(self, partitions):
        self._paused -= {partition for _, partition, _ in partitions}

    def consume(self, count, timeout):
        made = []
        for _ in range(self._rng.integers(0, count)):
            partition = int(self._rng.choice([0, 0, 0, 0, 1, 2]))  # the first sends most
            at = self._at[partition]
            if partition not in self._paused and at < len(self._records[partition]):
                made.append(Message(partition, at, self._records[partition][at]))
                self._at[partition] = at + 1
        return made

    def commit(self, *arguments, **options):
        raise AssertionError("offsets are in the checkpoint, and are not committed")


@pytest.mark.parametrize("in_turns", [True, False])
def test_the_example_of_a_kafka_topic(tmp_path, in_turns):
    """A restarted program continues at the offsets of the last step saved, whatever was read ahead."""
    example = runpy.run_path(str(ROOT / "examples" / "kafka.py"))
    broker, seeds, begun = Broker(8_000), itertools.count(), []

    def make_records(cursor):
        begun.append(dict(cursor["offsets"]))
        consumer = Consumer(broker, next(seeds))
        return example["Records"](consumer, lambda *each: each, "events", cursor, in_turns=in_turns)

    first = {"offsets": dict.fromkeys(range(3), 0), "turn": 0}
    whole = example["train"](make_records, first, tmp_path / "whole", steps=30, every=10)
    for steps in (10, 25, 30):
        parts = example["train"](make_records, first, tmp_path / "parts", steps=steps, every=10)
    assert [sum(each[1]["offsets"].values()) for each in (whole, parts)] == [30 * example["BATCH"]] * 2
    assert [sum(each.values()) for each in begun[1:]] == [0, 10 * 256, 25 * 256]
    if in_turns:
        assert whole == parts
