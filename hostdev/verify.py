"""python -m hostdev.verify: train a few steps in every mode on the user's data, and compare all bits of every step."""

import argparse
import gc
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hostdev.cache.cache import CacheTooLargeError
from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.primitive import OpLog
from hostdev.core.progress import bar
from hostdev.data import lookalike, manifest
from hostdev.data.batch import WideBatch as Batch
from hostdev.data.batch import wide_batches
from hostdev.data.shards import ShardReader
from hostdev.device import backend
from hostdev.kernels.buffers import identity
from hostdev.kernels.fingerprint import hash_rows
from hostdev.kernels.pool import host_threads, set_host_threads
from hostdev.pipeline.rows import Embedding
from hostdev.train import config
from hostdev.train.config import TrainConfig
from hostdev.train.trainer import Trainer

PROG = "hostdev.verify"
OPTIONS = ("data", "device", "batch_size", "emb_dim", "l2", "precision", "tf32", "host_threads", "seed")
DEPTHS = (1, 2, 4)
EXIT_DIFFERENT = 1
_FAULT_SECONDS = 0.03  # by which an update is held up, so that a lookup that does not wait for it comes before it

Hashes = npt.NDArray[np.uint64]
Step = dict[str, tuple[npt.NDArray[Any], Hashes]]  # by tensor: ids of rows, in no order, and a hash of each row


class Mode(NamedTuple):
    """One way to train."""

    host_device_mix: bool
    depth: int
    threads: int
    cache: str | None = None  # the share of rows
    policy: str = "lookahead"

    def __str__(self) -> str:
        tables = "host tables" if self.host_device_mix else "device tables"
        cache = f"cache {self.cache} {self.policy}" if self.cache is not None else ""
        threads = f"{self.threads} host thread{'s' * (self.threads > 1)}"
        return f"{tables:<14}{f'depth {self.depth}':<10}{threads:<16}{cache:<21}"


class Record(NamedTuple):
    """What a run left behind: per step, each tensor's ids of rows, and a hash of each row; the losses; the digest."""

    steps: list[Step]
    losses: list[tuple[float, ...]]
    digest: str


class Difference(NamedTuple):
    """The first place in which two runs differ."""

    step: int
    tensor: str
    row: int | None

    def __str__(self) -> str:
        row = "" if self.row is None else f", row {self.row}"
        return f"first difference: step {self.step}, {self.tensor}{row}"


def modes(threads: int) -> Iterator[Mode]:
    """Yield the ways to train, the reference first."""
    yield Mode(True, 0, threads)
    if threads > 1:
        yield Mode(True, 0, 1)
    for depth in DEPTHS:
        yield Mode(True, depth, threads)
    if threads > 1:
        yield Mode(True, DEPTHS[1], 1)
    for depth in (0, DEPTHS[1]):
        yield Mode(True, depth, threads, "10%")
    for cache, policy in (
        ("1%", "lookahead"),
        ("100%", "lookahead"),
        ("10%", "lru"),
        ("10%", "lfu"),
        ("10%", "static"),
    ):
        yield Mode(True, DEPTHS[1], threads, cache, policy)
    if threads > 1:
        yield Mode(True, DEPTHS[1], 1, "10%")
    yield Mode(False, 0, threads)
    yield Mode(False, DEPTHS[1], threads)


def train(settings: TrainConfig, mode: Mode, batches: Sequence[Batch], rows: int, *, fault: bool) -> Record:
    """Train on batches and record every step.

    fault  break the rule that a batch sees a row only after every earlier batch's update of it
    """
    set_host_threads(mode.threads)
    record = Record([{} for _ in batches], [], "")
    embeddings: list[Embedding] = []  # the trainer itself would keep itself, and its tables, until they are collected

    def after_update(number: int, ids: Any, places: list[tuple[Any, Any]]) -> None:
        for embedding, (block, at) in zip(embeddings, places, strict=True):
            _add_rows(record.steps[number - 1], embedding, ids, block, at)

    def hold_up(stage: str, number: int) -> None:
        if stage == "update":
            time.sleep(_FAULT_SECONDS)

    broken: dict[str, Any] = {"staleness": mode.depth + 2, "before_stage": hold_up}
    cache: dict[str, Any] | None = None
    if mode.cache is not None:
        counts = _count(batches, rows) if mode.policy == "static" else None
        cache = {"capacity_rows": mode.cache, "policy": mode.policy, "counts": counts}
    trainer = Trainer(
        rows, settings.emb_dim, host_device_mix=mode.host_device_mix, device=backend.select(settings.device),
        l2=settings.l2, precision=settings.precision, seed=settings.seed, log=OpLog(), depth=mode.depth, cache=cache,
        after_update=after_update, **(broken if fault else {}),
    )  # fmt: skip
    embeddings += [trainer.wide, trainer.deep]
    with bar(len(batches), str(mode), "step") as progress:
        for number, result in enumerate(trainer.train(batches)):
            record.losses.append(tuple(result.value))
            record.steps[number] |= _hash_dense(trainer)
            progress.update()
    return record._replace(digest=trainer.state_sha256())


def _count(batches: Sequence[Batch], rows: int) -> npt.NDArray[np.int64]:
    """How often each row is used."""
    return sum((np.bincount(batch.ids.ravel(), minlength=rows) for batch in batches), np.zeros(rows, np.int64))


def _add_rows(step: Step, embedding: Embedding, ids: Any, block: Any, at: Any) -> None:
    """Add rows' hashes to a step's: some are on the host, others in a cache."""
    if isinstance(block, torch.Tensor):
        block = block.index_select(0, at.to(block.device)).cpu().numpy()
        at = identity(len(block))
    if isinstance(ids, torch.Tensor):
        ids = ids.cpu().numpy()
    hashes = hash_rows(block, at)
    for i, name in enumerate(["weights", *embedding.table.slots]):
        key = f"{embedding.name}/{name}"
        before = step.get(key, (ids[:0], hashes[:0, i]))
        step[key] = (np.concatenate([before[0], ids]), np.concatenate([before[1], hashes[:, i]]))


def _hash_dense(trainer: Trainer) -> Step:
    tensors: Step = {}
    for name, parameter in trainer.network.named_parameters():
        parts = {"": parameter.detach(), **{f"/{key}": value for key, value in trainer.adam.state[parameter].items()}}
        for key, value in parts.items():
            rows = value.float().cpu().numpy().reshape(value.shape[0] if value.ndim else 1, 1, -1)
            ids = identity(len(rows))
            tensors[f"dense/{name}{key}"] = (ids, hash_rows(np.ascontiguousarray(rows), ids)[:, 0])
    return tensors


def compare(reference: Record, other: Record) -> Difference | None:
    """Return the first step, tensor and row in which another run differs; None if there is none."""
    for step, (ours, theirs) in enumerate(zip(reference.steps, other.steps, strict=True), 1):
        for tensor in ours:
            (ids, hashes), (their_ids, their_hashes) = _in_order(ours[tensor]), _in_order(theirs[tensor])
            wrong = np.flatnonzero(hashes != their_hashes) if np.array_equal(ids, their_ids) else identity(1)
            if len(wrong):
                return Difference(step, tensor, int(ids[wrong[0]]))
        if reference.losses[step - 1] != other.losses[step - 1]:
            return Difference(step, "losses", None)
    if reference.digest != other.digest:
        return Difference(len(reference.steps), "a row that no batch uses", None)
    return None


def _in_order(rows: tuple[npt.NDArray[Any], Hashes]) -> tuple[npt.NDArray[Any], Hashes]:
    order = np.argsort(rows[0], kind="stable")
    return rows[0][order], rows[1][order]


def verify(settings: TrainConfig, steps: int, *, fault: bool, report: Callable[[str], None] = print) -> int:
    """Train in every mode and report how each compares with the serial run; return how many differ."""
    data = settings.data or lookalike.ensure()[0]
    found = manifest.read(data)
    reader = ShardReader(data, found, "train")
    reader.require(settings.batch_size or 1)
    size = settings.batch_size or min(config.REFERENCE_BATCH_SIZE, -(-reader.rows // steps))
    threads = settings.host_threads or host_threads()
    device = backend.select(settings.device)
    backend.set_tf32(device, settings.tf32)
    backend.make_deterministic(device)
    epochs = (wide_batches(reader, size, seed=settings.seed, epoch=epoch) for epoch in itertools.count(1))
    batches = list(itertools.islice(itertools.chain.from_iterable(epochs), steps))
    report(f"data     {data}: {steps} steps of {size:,} rows, {found.vocabulary_size:,} ids")
    report(f"dense    {settings.arithmetic} on {backend.describe(device)}; D = {settings.emb_dim}, l2 {settings.l2}\n")
    if settings.l2 == "table":
        report("--l2 table does not go with a cache: no mode with one is run\n")
    report(f"{'tables':<14}{'pipeline':<10}{'':<37}state_sha256")
    reference, *others = [mode for mode in modes(threads) if mode.cache is None or settings.l2 != "table"]
    expected = train(settings, reference, batches, found.vocabulary_size, fault=False)
    report(f"{reference!s}{expected.digest[:16]}  the reference")
    different = 0
    for mode in others:
        if fault and not (mode.host_device_mix and mode.depth):
            continue
        gc.collect()  # torch's first steps leave frames behind, which keep tables; there are up to 16 modes
        try:
            record = train(settings, mode, batches, found.vocabulary_size, fault=fault)
        except CacheTooLargeError as error:
            report(f"{mode!s}not run: {error}")
            continue
        difference = compare(expected, record)
        different += difference is not None
        report(f"{mode!s}{record.digest[:16]}  {difference or 'equal'}")
    return different


def main(argv: Sequence[str]) -> int:
    """Parse the command line, verify, and return the exit code: 1 if a mode differs."""
    parser = cli.parser(PROG, "Show on your own data that training gives the same bits in every mode.")
    config.add_flags(parser, OPTIONS)
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="steps per mode (default 20)")
    parser.add_argument("--inject-fault", action="store_true", help=
        "test the test: let lookups run ahead of the updates that they need, which must be caught")  # fmt: skip
    arguments = parser.parse_args(argv)
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Verify as the parsed flags say."""
    settings = config.from_flags(arguments, OPTIONS)
    if arguments.steps < 2:
        raise UserError(f"--steps must be at least 2, not {arguments.steps}")
    different = verify(settings, arguments.steps, fault=arguments.inject_fault)
    if arguments.inject_fault:
        if not different:
            raise UserError("the injected fault was not caught: no two neighbouring batches share a row; use more rows")
        print(f"\nthe injected fault was caught in {different} modes")
    elif different:
        print(f"\n{different} modes differ from the serial run")
    else:
        print("\nall modes agree in every bit of every step")
    return EXIT_DIFFERENT if different else 0


if __name__ == "__main__":
    raise SystemExit(cli.run(PROG, main))
