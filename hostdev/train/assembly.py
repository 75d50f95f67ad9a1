"""Build a training run from its options, its data, and the parts that its command chooses."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from hostdev.core.errors import UserError
from hostdev.core.machine import available_cpus
from hostdev.core.micro_batches import EXCHANGES
from hostdev.data.schema import Schema
from hostdev.device import backend
from hostdev.distributed.world import ALONE_WORLD, World
from hostdev.kernels.pool import set_host_threads
from hostdev.models.model import Model
from hostdev.pipeline.context import PipelineHooks
from hostdev.train import checkpointing
from hostdev.train.build import device_of, estimate_uses, make_cache_specs, seed_torch, warm_up_kernels
from hostdev.train.network import DenseNetwork
from hostdev.train.options import TrainConfig
from hostdev.train.processes import ProcessSession, make_run_dir
from hostdev.train.rundir import RunLogs, get_trace_path
from hostdev.train.session import BatchSource, Session, TrainingData
from hostdev.train.trainer import StepSettings, Trainer

_SAMPLE = 1000  # samples of the batch that is inspected before the first step
_COMPILING = 8  # maximum number of processes that compile kernels


class RunParts(NamedTuple):
    """Parts of a run that its command chooses.

    Attributes:
        make_source: Returns the source of batches.
        make_model: Returns the model for data with a schema.
        make_network: Returns the dense layers, given `Trainer`'s arguments for them, and as `sample` a batch with the
            shapes of the model's inputs; None if each rank has the whole model.
        load: Loads tables and layers into a new run, and returns lines about them; None for initial values.
    """

    make_source: Callable[[Any, TrainingData], BatchSource]
    make_model: Callable[[Any, Schema], Model]
    make_network: Callable[..., DenseNetwork] | None = None
    load: Callable[[Trainer], list[str]] | None = None


def build(
    config: TrainConfig,
    data: TrainingData,
    parts: RunParts,
    start: checkpointing.Start | None = None,
    processes: ProcessSession[Any] | None = None,
) -> Session:
    """Return a training run that is ready for its first step.

    Args:
        config: The options, resolved.
        data: The data set.
        parts: Parts that the command chooses.
        start: The checkpoint to resume from; None for a new run.
        processes: This process and the other ranks; None for a single process.

    Raises:
        UserError: The input or the options are wrong; no file is left.
    """
    world: World = ALONE_WORLD if processes is None else processes.ranks
    source = parts.make_source(config, data)
    device = _prepare_device(config)
    trace = get_trace_path(config.trace, world)
    files = make_run_dir(config, processes)
    logs = RunLogs(files, device, trace, world.label)
    try:
        trainer = _make_trainer(config, data, parts, device, logs, world)
        session = Session(config, data, source, logs, trainer, processes)
        session.load(start, parts.load)
    except BaseException:
        logs.discard()
        raise
    session.begin()
    return session


def _prepare_device(config: TrainConfig) -> torch.device:
    """Return the device, and set its arithmetic and the numbers of threads."""
    device = device_of(config.device, tf32=config.tf32)
    if config.host_threads is not None:
        if not config.host_device_mix and backend.is_accelerator(device):
            raise UserError(
                "--host-threads has no effect on an accelerator without --host-device-mix; leave out --host-threads"
            )
        set_host_threads(config.host_threads)
    if config.torch_threads is not None:
        torch.set_num_threads(config.torch_threads)
    return device


def _make_trainer(
    config: TrainConfig,
    data: TrainingData,
    parts: RunParts,
    device: torch.device,
    logs: RunLogs,
    world: World,
) -> Trainer:
    """Return the trainer with its model and tables, after the kernels are compiled."""
    assert config.batch_size is not None
    sample = next(data.train.batches(min(config.batch_size, _SAMPLE)))
    seed_torch(config.seed)
    model = parts.make_model(config, data.manifest.schema)
    cache = make_cache_specs(config, model, data.root, data.manifest, data.train)
    warm_up_kernels(
        model,
        sample,
        data.manifest.id_type,
        bf16=config.precision == "bf16",
        cached=bool(cache),
        squares=config.l2 == "table",
        processes=min(_COMPILING, available_cpus()) if world.size == 1 else 1,
    )
    make = parts.make_network
    return Trainer(
        model,
        host_device_mix=config.host_device_mix,
        device=device,
        steps=StepSettings.of(config),
        most_uses=estimate_uses(model, sample, config.batch_size),
        saves=config.saves,
        schema=data.manifest.schema,
        make_network=None if make is None else partial(make, sample=sample),
        cache=cache,
        depth=config.pipeline_depth,
        log=logs.ops,
        hooks=PipelineHooks(staleness=config.staleness),
        timeline=logs.timeline,
        world=world,
        dense_exchange=config.dense_exchange or EXCHANGES[0],
    )
