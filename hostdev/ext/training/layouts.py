"""--parallel: the mesh, stages and slices of a run; `auto` finds them by measuring."""

import itertools
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.manifest import Manifest
from hostdev.data.shards import ShardReader
from hostdev.device.backend import describe, select
from hostdev.distributed.mesh import SCHEDULES, Mesh, parse_mesh
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.session import join
from hostdev.distributed.start import start_processes, wait_for
from hostdev.ext.parallel.auto import choose
from hostdev.ext.parallel.layout import Layout, resolve_layout
from hostdev.ext.parallel.pieces import cut, get_pieces
from hostdev.ext.parallel.plan import matched
from hostdev.ext.parallel.plan_text import parse_plan
from hostdev.ext.training.config import CommandConfig
from hostdev.train.build import device_of, model_of, seed_torch
from hostdev.train.network import inputs_like


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
    begins = None if settings.stage_cut is None else settings.stage_cut.split(",")
    return Layout(settings.schedule or SCHEDULES[0], begins, parse_plan(settings.plan) if settings.plan else ())


def require_layout(settings: CommandConfig, data: Path) -> None:
    """Raise UserError if the layout does not fit the model's layers. Call this before processes wait for each other."""
    mesh = None if settings.mesh is None else parse_mesh(settings.mesh)
    is_open = mesh is None and settings.parallel == "auto"
    if not is_open and (mesh is None or mesh.pipe == mesh.model == 1):
        return
    found = manifest.read(data)
    model = model_of(settings, found.schema)
    [sample] = itertools.islice(ShardReader(data, found, "train").batches(1), 1)
    if mesh is None:
        matched(model, get_layout(settings).plan)
        if settings.stage_cut is not None:
            cut(get_pieces(model), settings.stage_cut.split(","))
        return
    is_searched = settings.parallel == "auto"
    resolve_layout(model, get_layout(settings), mesh, partial(inputs_like, model, sample, None), searched=is_searched)


def laid_out(settings: CommandConfig, data: Path, found: Manifest, ranks: Ranks) -> tuple[CommandConfig, list[str]]:
    """Measure layouts; return the settings with the fastest mesh, stages and slices, and lines about the measurements.

    All ranks must call this before anything depends on the axes of the mesh. It also sets `ranks.mesh`.
    """
    assert settings.batch_size is not None
    seed_torch(settings.seed)
    model = model_of(settings, found.schema)
    [sample] = itertools.islice(ShardReader(data, found, "train").batches(1), 1)
    autocast = torch.bfloat16 if settings.precision == "bf16" else None
    chosen = choose(
        model,
        partial(inputs_like, model, sample, autocast),
        ranks,
        samples=settings.batch_size,
        micro_batches=settings.micro_batches,
        given=get_layout(settings),
        mesh=None if settings.mesh is None else parse_mesh(settings.mesh),
        device=device_of(settings.device, tf32=settings.tf32),
        autocast=autocast,
        looked_up=True,
    )
    ranks.mesh = chosen.mesh
    plan = ",".join(f"{name}={strategy}" for name, strategy in chosen.layout.plan)
    begins = ",".join(chosen.layout.begins or ())
    return replace(settings, mesh=str(chosen.mesh), plan=plan or None, stage_cut=begins or None), chosen.lines()


def advise_alone(settings: CommandConfig, processes: int) -> int:
    """Run `hostdev advise` with this process's options in several processes on this host; return the exit code.

    Raises:
        UserError: An option is wrong.
    """
    require_layout(settings, _data(settings))
    command = [sys.executable, "-m", "hostdev.advise", *sys.argv[1:]]
    return wait_for(start_processes(processes, command))


def advise_together(settings: CommandConfig) -> None:
    """Join the other processes, and measure layouts of the model on all of them; rank 0 prints the times."""
    with join() as ranks:
        assert ranks is not None
        torch.set_num_threads(settings.torch_threads or 1)
        found = manifest.read(_data(settings))
        reader = ShardReader(_data(settings), found, "train")
        size = settings.resolved().batch_size
        assert size is not None
        reader.require(size)
        _, lines = laid_out(replace(settings, batch_size=size), _data(settings), found, ranks)
        device = select(settings.device)
        if ranks.rank == 0:
            parts = f"batches of {size:,} in {settings.micro_batches} micro-batches"
            print(f"model    {settings.model}: {parts}, {ranks.size} processes of one thread on {describe(device)}")
            print("\n".join(lines))


def _data(settings: CommandConfig) -> Path:
    assert settings.data is not None
    return settings.data
