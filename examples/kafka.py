"""Training on records of a Kafka topic, with the offsets in the checkpoint: python kafka.py SERVERS TOPIC FOLDER.

Nothing is committed to the broker. After a restart, each partition goes on after the last record of the last step in
the checkpoint: no record counts twice, and none is left out.
"""

import json
import sys
from collections import deque
from pathlib import Path

import torch
from torch import nn

import hostdev

BATCH = 256
FEATURES = ("user", "item")


class Records:
    """An endless iterator over a topic's records, as pairs of a value and the cursor after it.

    A cursor has the offset of each partition's next record, and the index of the partition that is next in turn.

    Args:
        consumer: A confluent_kafka.Consumer, or what has its methods `assign`, `consume`, `pause` and `resume`.
        make_partition: Makes what `assign` takes, from topic, partition and offset: confluent_kafka.TopicPartition.
        cursor: Where to begin.
        in_turns: Take a record from each partition in turn, whichever the broker sends first, so that a restarted
            program gets the records in the same order, and the same bits. A partition without new records then stops
            the others. False takes records as they come, in which case none is lost or counted twice, either.
    """

    def __init__(self, consumer, make_partition, topic, cursor, *, in_turns=True):
        self._consumer, self._in_turns = consumer, in_turns
        self._offsets, self._turn = dict(sorted(cursor["offsets"].items())), cursor["turn"]
        self._waiting = {partition: deque() for partition in self._offsets}
        self._partitions = {each[0]: make_partition(topic, *each) for each in self._offsets.items()}
        self._paused = set()
        consumer.assign(list(self._partitions.values()))

    def __iter__(self):
        order = list(self._waiting)
        while True:
            partition = order[self._turn % len(order)]
            while not self._waiting[partition] and (self._in_turns or not any(self._waiting.values())):
                self._read()
            self._turn = (self._turn + 1) % len(order)
            if self._waiting[partition]:
                offset, value = self._waiting[partition].popleft()
                self._offsets[partition] = offset + 1
                yield value, {"offsets": dict(self._offsets), "turn": self._turn}

    def _read(self):
        """Read some records, but none of partitions of which many are waiting."""
        full = {partition for partition, records in self._waiting.items() if len(records) >= 10 * BATCH}
        for change, some in ((self._consumer.pause, full - self._paused), (self._consumer.resume, self._paused - full)):
            if some:
                change([self._partitions[partition] for partition in some])
        self._paused = full
        for message in self._consumer.consume(BATCH, timeout=1.0):
            if message.error() is not None:
                raise RuntimeError(f"partition {message.partition()}: {message.error()}")
            self._waiting[message.partition()].append((message.offset(), message.value()))


def batches(records):
    """Yield batches of records, each with the cursor after its last record."""
    rows = []
    for value, cursor in records:
        rows.append(json.loads(value))
        if len(rows) == BATCH:
            batch = {name: hostdev.hash_ids([row[name] for row in rows]) for name in FEATURES}
            batch["label"] = torch.tensor([float(row["label"]) for row in rows])
            batch["cursor"] = cursor
            yield batch
            rows = []


def train(make_records, first, folder, steps=None, every=100):
    """Train on an endless stream; return the last loss and the cursor after the last step.

    Args:
        make_records: Called with the cursor to begin from; returns an iterable like `Records`.
        first: The cursor of the first run.
        folder: Where checkpoints are, if there are any.
        steps: Steps to take before the end, for tests; None for no end.
        every: Steps between two checkpoints.
    """
    torch.manual_seed(0)
    make = {"capacity": 1 << 16, "admit": hostdev.MinCount(2)}  # a key gets a row when it is seen the second time
    tables = {name: hostdev.HostTable(None, 8, hostdev.LazyAdam(lr=0.01), name=name, **make) for name in FEATURES}
    runtime = hostdev.Runtime(tables, device="cpu")
    model = nn.Linear(16, 1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    done, cursor = 0, first
    if any(Path(folder).glob("step-*")):
        extra = runtime.load(folder)
        model.load_state_dict(extra["model"])
        adam.load_state_dict(extra["adam"])
        done, cursor = extra["done"], runtime.cursor
        print(f"goes on after step {done}, at {cursor['offsets']}")
    with runtime:
        stream = batches(make_records(cursor))
        ids = lambda batch: {name: batch[name] for name in FEATURES}  # noqa: E731
        for batch, rows in runtime.train(stream, ids=ids, cursor=lambda batch: batch["cursor"], read_ahead=True):
            logits = model(torch.cat([rows[name] for name in FEATURES], 1)).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
            adam.zero_grad()
            loss.backward()
            adam.step()
            done += 1
            if done % every == 0 or done == steps:
                extra = {"model": model.state_dict(), "adam": adam.state_dict(), "done": done}
                runtime.save(folder, extra=extra, wait=done == steps)  # with the cursor after this step's batch
                print(f"step {done}: loss {loss.item():.4f}, saved at {runtime.cursor['offsets']}", flush=True)
            if done == steps:
                break
        return loss.item(), runtime.cursor


def main(servers, topic, folder):
    """Train on a topic of a broker, from its first records, without an end."""
    from confluent_kafka import Consumer, TopicPartition  # pip install confluent-kafka

    consumer = Consumer({"bootstrap.servers": servers, "group.id": "hostdev", "enable.auto.commit": False})
    partitions = consumer.list_topics(topic, timeout=10).topics[topic].partitions
    first = {number: consumer.get_watermark_offsets(TopicPartition(topic, number))[0] for number in partitions}
    begin = {"offsets": first, "turn": 0}
    train(lambda cursor: Records(consumer, TopicPartition, topic, cursor), begin, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
