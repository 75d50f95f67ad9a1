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
from hostdev.distributed.mesh import parse_mesh
from hostdev.distributed.process_group import Ranks
from hostdev.distributed.session import join
from hostdev.distributed.start import start_processes, wait_for
from hostdev.ext.parallel.auto import choose
from hostdev.ext.training.config import CommandConfig
from hostdev.train.build import device_of, get_layout, model_of, require_layout, seed_torch
from hostdev.train.staged import inputs_like


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
    cut = ",".join(chosen.layout.begins or ())
    return replace(settings, mesh=str(chosen.mesh), plan=plan or None, stage_cut=cut or None), chosen.lines()


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
