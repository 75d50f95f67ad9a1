"""--parallel: the mesh, stages and slices of a run; `auto` finds them by measuring."""

import itertools
from dataclasses import replace
from pathlib import Path

import torch

from hostdev.core import registry
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.batch import Batch
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader
from hostdev.distributed.world import Layout, Mesh, World, parse_layout, parse_mesh
from hostdev.ext.training.config import CommandConfig
from hostdev.models.model import Model
from hostdev.train.build import device_of, model_of, seed_torch


def resolve_mesh(settings: CommandConfig, ranks: int) -> CommandConfig:
    """Return the settings with the mesh that --parallel selects.

    Raises:
        UserError: --parallel contradicts --mesh or the number of ranks.
    """
    how = settings.parallel
    mesh = None if settings.mesh is None else parse_mesh(settings.mesh)
    if how is None:
        return settings
    if how == "none":
        if ranks > 1:
            raise UserError(
                f"--parallel none requires one process, but {ranks} were started; start one process, or leave out "
                "--parallel"
            )
        return settings
    if ranks == 1:
        raise UserError(
            f"--parallel {how} has no effect in one process; leave out --parallel, or start several processes"
        )
    if how == "data" and mesh is not None and mesh.data != mesh.size:
        raise UserError(
            f"--parallel data splits samples only, unlike --mesh {mesh}; leave out --parallel, or give --parallel semi"
        )
    if how == "semi" and mesh is None:
        return replace(settings, mesh=f"model={ranks}")
    return settings


def require_shares(settings: CommandConfig, ranks: int) -> None:
    """Raise UserError unless this number of processes can share the work."""
    if not settings.host_device_mix:
        raise UserError(f"{ranks} processes can share tables only in host memory; give --host-device-mix")
    if settings.mesh is None and settings.parallel == "auto":  # the chosen mesh will fit
        return
    mesh = Mesh(data=ranks) if settings.mesh is None else parse_mesh(settings.mesh)
    if mesh.size != ranks:
        raise UserError(
            f"--mesh {settings.mesh} needs {mesh.size} processes, the product of its axes, but {ranks} were started; "
            f"start {mesh.size}, or give another --mesh"
        )
    if settings.dense_exchange is not None and mesh.data == 1:
        raise UserError(
            f"--dense-exchange {settings.dense_exchange} has no effect with --mesh {settings.mesh}, whose data axis "
            "has size 1; leave out --dense-exchange"
        )
    M = settings.micro_batches
    if M % mesh.data:
        up = -(-M // mesh.data) * mesh.data
        who = f"{ranks} processes" if mesh.data == ranks else f"the {mesh.data} shares of --mesh {settings.mesh}"
        raise UserError(
            f"--micro-batches {M} cannot be divided equally among {who}; give --micro-batches {up}, or another "
            f"multiple of {mesh.data}"
        )
    count = M // mesh.data
    if settings.schedule == "interleaved" and count % max(1, count // mesh.pipe):
        up = -(-count // mesh.pipe) * mesh.pipe * mesh.data
        raise UserError(
            f"--schedule interleaved takes micro-batches in rounds of {mesh.pipe}, but --micro-batches {M} gives each "
            f"process {count}; give --micro-batches {up}, or another schedule"
        )
    if mesh.data * mesh.pipe > M:
        raise UserError(
            f"--mesh {settings.mesh} has {mesh.pipe} stages, so each process needs at least {mesh.pipe} micro-batches; "
            f"give --micro-batches {mesh.data * mesh.pipe} or more"
        )


def get_layout(settings: CommandConfig) -> Layout:
    """Return the stages and slices into which the options split the model."""
    return parse_layout(settings.schedule, settings.stage_cut, settings.plan)


def get_mesh(settings: CommandConfig) -> Mesh | None:
    """Return the mesh that the options fix, or None."""
    return None if settings.mesh is None else parse_mesh(settings.mesh)


def require_layout(settings: CommandConfig, data: Path) -> None:
    """Raise UserError if the layout does not fit the model's layers; called before processes wait for each other."""
    mesh, searched = get_mesh(settings), settings.parallel == "auto"
    if mesh.data == mesh.size if mesh is not None else not searched:
        return
    model, sample = _model_with_sample(settings, data, manifest.read(data))
    registry.find("network", "parts").require(model, get_layout(settings), mesh, sample, searched=searched)


def choose_layout(
    settings: CommandConfig, data: Path, found: Manifest, world: World
) -> tuple[CommandConfig, list[str]]:
    """Measure layouts; return the settings with the fastest mesh, stages and slices, and lines about the measurements.

    All ranks must call this before anything depends on the axes of the mesh. It also sets `world.mesh`.
    """
    seed_torch(settings.seed)
    model, sample = _model_with_sample(settings, data, found)
    world.mesh, layout, lines = registry.find("network", "parts").choose(
        model,
        get_layout(settings),
        get_mesh(settings),
        sample,
        world=world,
        samples=settings.batch_size,
        micro_batches=settings.micro_batches,
        device=device_of(settings.device, tf32=settings.tf32),
        autocast=torch.bfloat16 if settings.precision == "bf16" else None,
    )
    plan = ",".join(f"{name}={strategy}" for name, strategy in layout.plan)
    cut = ",".join(layout.begins or ())
    return replace(settings, mesh=str(world.mesh), plan=plan or None, stage_cut=cut or None), lines


def _model_with_sample(settings: CommandConfig, data: Path, found: Manifest) -> tuple[Model, Batch]:
    """Return the model, and a batch of one training sample, which has the shapes of the model's inputs."""
    model = model_of(settings, found.schema)
    [sample] = itertools.islice(ShardReader(data, found, "train").batches(1), 1)
    return model, sample
