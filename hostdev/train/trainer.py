"""Training, evaluation and checkpoints of a model with its tables, on top of `hostdev.Runtime`."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hostdev.checkpoint.folder import Chain
from hostdev.checkpoint.loading import load_tables, require_tables, values_of
from hostdev.checkpoint.manager import CheckpointManager
from hostdev.checkpoint.state import to_tree
from hostdev.checkpoint.writer import AsyncWriter, Content
from hostdev.core.errors import UserError
from hostdev.core.primitive import OpLog
from hostdev.data.batch import Batch
from hostdev.data.schema import Schema
from hostdev.device.backend import is_accelerator
from hostdev.device.table import DeviceTable
from hostdev.distributed.averages import require_own_averages
from hostdev.distributed.dense import DenseState
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.host.table import HostTable, ParameterServer
from hostdev.models.model import Model, TargetLoss
from hostdev.runtime.digest import names_in_checkpoint, state_sha256
from hostdev.runtime.runtime import Runtime
from hostdev.runtime.spec import CacheSpec, Feature, TableSpec
from hostdev.train.build import agree_on_capacity, freeze_columns
from hostdev.train.network import DEEP, DenseNetwork, MicroBatches, Result, Setup, Table, WholeNetwork
from hostdev.train.options import TrainConfig
from hostdev.train.room import HostBudget, estimate_host_memory, make_host_budget, require_copies, require_room
from hostdev.train.target_scores import Evaluation, TargetScores, collect_scores, evaluation_of


class StepSettings(NamedTuple):
    """How a step is computed from a batch.

    Attributes:
        seed: Seed of the tables' initial values, and of layers such as dropout in micro-batches.
        l2: Regularization of the table "deep": "none", "batch" or "table".
        precision: "fp32", or "bf16" for the dense layers' arithmetic over float32 weights.
        lr: Learning rate of the dense layers' Adam; None for the model's `lr`.
        micro_batches: Micro-batches per batch; the order in which gradients are summed depends only on this number.
        gradients: "mean" to weight each micro-batch's mean loss by its number of samples; "sum" to add the mean losses.
        frozen: Columns whose embeddings do not change; requires a schema.
    """

    seed: int
    l2: str = "none"
    precision: str = "fp32"
    lr: float | None = None
    micro_batches: int = 1
    gradients: str = "mean"
    frozen: Sequence[str] = ()

    @classmethod
    def of(cls, config: TrainConfig) -> "StepSettings":
        """Return the settings that the options of a training run give."""
        names = ("seed", "l2", "precision", "lr", "micro_batches")
        return cls(
            **{name: getattr(config, name) for name in names},
            gradients=config.gradients or "mean",
            frozen=config.frozen_columns,
        )


class Trainer:
    """Trains, evaluates and saves a model with its tables.

    Args:
        model: Declares its tables, and computes logits from dense columns and rows. The model is moved to the device.
        host_device_mix: Whether to place the tables, and the ops on them, on the host.
        device: The device of the dense layers.
        steps: How a step is computed.
        most_uses: Maximum number of ids in a batch, for the memory estimate.
        saves: Whether checkpoints will be saved, for the memory estimate.
        schema: The data's schema, which describes the labels; None for a single label of 0 or 1.
        make_network: Returns the dense layers of this rank; None if each rank has the whole model.
        cache, depth: As for `Runtime`.
        world: Processes that share the micro-batches and the tables' rows.
        runtime: Other arguments of `Runtime`, such as `log`, `timeline`, `dense_exchange` and `hooks`.
    """

    def __init__(
        self,
        model: Model,
        *,
        host_device_mix: bool,
        device: torch.device,
        steps: StepSettings,
        most_uses: int = 0,
        saves: bool = False,
        schema: Schema | None = None,
        make_network: Callable[[Setup, Mapping[str, Any]], DenseNetwork] | None = None,
        cache: CacheSpec | dict[str, CacheSpec] | None = None,
        depth: int = 0,
        world: World = ALONE_WORLD,
        log: OpLog | None = None,
        **runtime: Any,
    ) -> None:
        _require_options(model, steps.l2, cached=bool(cache), micro_batches=steps.micro_batches)
        require_own_averages(model)
        log = log or OpLog()
        self.model, self._device = model, device
        self._world = world
        agree_on_capacity(model, world)
        share, part = world.share(), world.part()
        self._micro_batches = MicroBatches(steps.micro_batches, steps.gradients, steps.seed, device, share)
        free = require_room(model.tables, host_device_mix, device, part)
        self.host_budget = HostBudget(free, {})
        uses = -(-most_uses // share[1])
        if host_device_mix:
            kept = estimate_host_memory(model, cache, part, device, depth=depth, uses=uses, saves=saves)
            self.host_budget = make_host_budget(kept)
        if host_device_mix and is_accelerator(device):
            require_copies(model.tables, uses, depth + 2, free, cached=bool(cache))
        self._make_tables(steps.seed, part if host_device_mix else None, on_host=host_device_mix)
        features = {name: _bind(feature, self.tables, steps.precision) for name, feature in model.features.items()}
        self.runtime = Runtime(features, device=device, cache=cache, depth=depth, ranks=world, log=log, **runtime)
        frozen = None if schema is None or not steps.frozen else freeze_columns(model, schema, steps.frozen)
        self._loss = TargetLoss() if schema is None else TargetLoss(schema.labels, schema.targets)
        rate = model.lr if steps.lr is None else steps.lr
        how = steps.l2, steps.precision, rate
        setup = Setup(model, self.runtime, self._micro_batches, world, *how, self.tables, log, self._loss, frozen)
        reading = {"ids": model.ids, "send": _get_tensors, "background": True}  # neither function draws random numbers
        self._network: DenseNetwork
        self._network = WholeNetwork(setup, reading) if make_network is None else make_network(setup, reading)
        self.adam, self.cut = self._network.adam, self._network.description

    def _make_tables(self, seed: int, part: tuple[int, int] | None, *, on_host: bool) -> None:
        """Create the tables on the host or on the device."""
        self.server = ParameterServer()
        self.tables: dict[str, Table] = {}
        for name, spec in self.model.tables.items():
            if on_host:
                self.tables[name] = self.server.add(_make_host_table(name, spec, seed, part))
                continue
            shape = (spec.rows, spec.dim, spec.optimizer)
            how: Any = {"name": name, "seed": seed, "init": spec.init, "dtype": spec.dtype, "slots": spec.slots}
            self.tables[name] = DeviceTable(*shape, self._device, **how)

    @property
    def caches(self) -> list[Any]:
        """The caches of the table groups."""
        return self.runtime.caches

    def exchanged_bytes(self) -> dict[str, int]:
        """Return the bytes sent to other ranks in training, by `Runtime` and between the parts of a network."""
        sent = self._network.sent_bytes
        return {**self.runtime.exchanged_bytes(), **({} if sent is None else {"parts": sent})}

    @property
    def steps(self) -> int:
        """Number of steps whose updates are finished."""
        return self.runtime.pipeline.steps

    def train(self, batches: Iterable[Batch]) -> Generator[Result, None, None]:
        """Take a step per batch and yield the step's result, with the losses before the update.

        Closing the generator finishes the steps that are queued.

        Raises:
            NonFiniteLossError: A loss or gradient is not finite. This step and later ones update nothing.
        """
        self.model.train()
        yield from self._network.train(self._micro_batches.divide(batches))

    def evaluate(
        self,
        batches: Iterable[Batch],
        progress: Callable[[], object] = lambda: None,
        folder: Path | None = None,
        scored: Callable[[Any, Any], object] = lambda logits, labels: None,
        counted: Callable[[Any, Any], object] = lambda logits, labels: None,
    ) -> Evaluation | None:
        """Return the quality of the predictions for batches, or None if the batches have no samples.

        The model then returns to its previous mode (training or evaluation).

        Args:
            progress: Called after each batch.
            folder: Receives scores that do not fit in memory, as for `Scores`.
            scored: Called with the outputs and the labels of each micro-batch of this rank, as for `TargetScores.add`.
            counted: Called on rank 0 with the outputs and the labels of all ranks, in the same form.
        """
        training = self.model.training
        self.model.eval()
        try:
            with (
                torch.no_grad(),
                TargetScores(self._loss.labels, self._loss.targets, folder, counted=counted) as scores,
                closing(self._network.score(self._micro_batches.divide(batches))) as results,
            ):
                to = collect_scores(self._world, scores, len(self._loss.labels))
                for number, (logits, batch) in enumerate(results, 1):
                    if logits is not None:
                        to.add(logits, batch.label)
                        scored(logits, batch.label)
                    if number % self._micro_batches.here == 0:
                        to.end_batch(batch.step_rows)
                        progress()
                found = to.figures()
        finally:
            self.model.train(training)
        rows, not_finite = found[0].rows, max(each.not_finite for each in found)
        if not rows:
            return None
        if not_finite:
            raise UserError(f"{not_finite} of {rows} predictions are not finite; the model has diverged")
        return evaluation_of(found)

    def state_sha256(self) -> str:
        """Return the digest of the tables and the dense state."""
        self.runtime.write_back()
        return state_sha256(self.tables.values(), self.dense_state(), self._world)

    def dense_state(self) -> DenseState:
        """Return the dense state. If the network is split over ranks, ranks above 0 get an empty state."""
        return self._network.state()

    def save(
        self, to: CheckpointManager, step: int, more: Any, files: Mapping[str, Path], *, state_sha256: str | None = None
    ) -> AsyncWriter:
        """Start saving the state after the last step as a checkpoint; an open loop must be between two steps.

        Args:
            more: Further values to store in the checkpoint.
            files: Files to store in the checkpoint, by their names there.
        """
        self.runtime.write_back()
        tensors: dict[str, Tensor] = {}
        whole = self.dense_state()
        seeded = self._micro_batches.count > 1  # each micro-batch is then seeded, so no states are saved
        random = {} if seeded else _get_random_states(self._device)
        state = {
            "dense": to_tree({"model": whole.model, "optimizer": whole.optimizer}, tensors),
            "random": to_tree(random, tensors, "random"),
            "more": to_tree(more, tensors, "more"),
        }
        content = Content(state, tensors, dict(files), names_in_checkpoint(whole))
        return to.save(self.tables.values(), step, content, state_sha256=state_sha256)

    def load(self, chain: Chain, *, check: bool = False) -> Any:
        """Load a checkpoint, and return the values that `save` received as `more`.

        Args:
            check: Whether to verify the checksums of rows, as in `load_tables`.

        Raises:
            UserError: The checkpoint is from another model, in which case no table was changed; or a file is damaged.
        """
        require_tables(chain, self.tables)
        values = values_of(chain)
        self.load_dense(chain, values["dense"])
        load_tables(chain, self.tables, check=check)
        step = chain[-1].manifest.step
        self.runtime.pipeline.steps = step
        self._micro_batches.start_after(step)
        _set_random_states(values["random"], self._device)
        return values["more"]

    def close(self) -> None:
        """Remove the files of tables on disk; the trainer cannot be used afterwards."""
        for table in self.tables.values():
            if isinstance(table, HostTable):
                table.close()

    def load_dense(self, chain: Chain, dense: Any) -> None:
        """Load a checkpoint's dense weights and Adam state; raise UserError if they are from another model."""
        try:
            self._network.load(dense["model"], dense["optimizer"])
        except (RuntimeError, UserError) as error:
            raise UserError(f"{chain[-1].path} is from another model: {' '.join(str(error).split())[:300]}") from None


def _require_options(model: Model, l2: str, *, cached: bool, micro_batches: int) -> None:
    """Raise UserError for options that cannot be combined with the model, or with each other."""
    if l2 != "none" and DEEP not in model.tables:
        raise UserError(f"--l2 {l2} requires Wide & Deep's table 'deep', which this model lacks; leave out --l2")
    if cached and l2 == "table":
        raise UserError(
            "--l2 table reads the whole table in every step, so with --cache-rows all cached rows would be written "
            "back each time; use --l2 batch, or leave out --cache-rows"
        )
    if l2 == "table" and micro_batches > 1:
        raise UserError(
            "--l2 table cannot be combined with --micro-batches: each micro-batch would add the L2 term of the whole "
            "table; use --l2 batch"
        )


def _make_host_table(name: str, spec: TableSpec, seed: int, part: tuple[int, int] | None) -> HostTable:
    """Return an embedding table on the host, by row or by key."""
    about: Any = {"name": name, "seed": seed, "init": spec.init, "part": part, "dtype": spec.dtype, "slots": spec.slots}
    about["storage"] = spec.disk
    if spec.keys is None:
        return HostTable(spec.rows, spec.dim, spec.optimizer, **about)
    keys = spec.keys
    rules: Any = {"capacity": spec.rows, "admit": keys.admit, "evict": keys.evict, "unknown": keys.unknown}
    return HostTable(None, spec.dim, spec.optimizer, **about, **rules)


def _bind(feature: Feature, tables: Mapping[str, Table], precision: str) -> Feature:
    """Return the feature with tables instead of their names; embeddings have the dense layers' precision."""
    names = (feature.tables,) if feature.is_single else tuple(feature.tables)
    found = tuple(tables[name] for name in names)
    dtypes = tuple("bfloat16" if precision == "bf16" and table.dim > 1 else "float32" for table in found)
    single = feature.is_single
    return replace(feature, tables=found[0] if single else found, dtype=dtypes[0] if single else dtypes)


def _get_tensors(batch: Batch) -> tuple[Batch, Tensor, Tensor, Tensor | None]:
    """Return a batch, and its dense columns, labels and weights as tensors to send to the device."""
    given = getattr(batch, "weight", None)  # other kinds of batches have none
    weight = None if given is None else torch.from_numpy(given)
    return batch, torch.from_numpy(batch.dense), torch.from_numpy(batch.label), weight


def _has_generator(device: torch.device) -> bool:
    return is_accelerator(device) and hasattr(torch.get_device_module(device), "set_rng_state")


def _get_random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's random generators, which layers such as dropout use."""
    states = {"cpu": torch.get_rng_state()}
    if _has_generator(device):
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def _set_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if _has_generator(device) and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)
