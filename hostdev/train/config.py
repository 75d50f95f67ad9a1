"""The options of a training run, and their command-line flags."""

import argparse
import math
from collections.abc import Collection
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hostdev.cache.options import AUTO, POLICIES, WINDOW, rows_of
from hostdev.core.addresses import checkpoint_path, data_path, local_path, shown_place
from hostdev.core.cli import checked
from hostdev.core.disk_storage import Disk
from hostdev.core.errors import UserError
from hostdev.core.keys import UNKNOWN
from hostdev.core.memory import format_bytes, parse_bytes
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.optimizers import OPTIMIZERS
from hostdev.core.table_dtypes import BF16, EIGHT_BIT, FP32
from hostdev.data import folder
from hostdev.distributed.mesh import SCHEDULES, parse_mesh, parse_plan
from hostdev.ext.report.extra import require_extra
from hostdev.train import config_checks
from hostdev.train.config_checks import option_name as _option
from hostdev.train.follow_options import FollowOptions, check_follow
from hostdev.train.option_fields import flag as _flag
from hostdev.train.option_groups import add_in_groups
from hostdev.train.tracking_options import TrackingOptions, check_tracking

REFERENCE_BATCH_SIZE = 16_000
MOST_DEPTH = 64  # reading further ahead does not help
LEAST_OPS_LOG = 1 << 16
_DTYPES = ("table_dtype", "table_slots")
BFLOAT16 = "bfloat16"  # the public name; BF16 is still accepted for one release
_AT_LEAST_1 = (
    *("epochs", "batch_size", "batch_per_rank", "micro_batches", "max_steps", "early_stop", "shuffle_window"),
    *("emb_dim", "host_threads", "torch_threads", "spawn", "checkpoint_every", "keep_checkpoints", "follow_window"),
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(FollowOptions, TrackingOptions):
    """The options of `hostdev train`. `resolved` fills in the defaults that depend on other options."""

    data: Path | None = _flag(
        "data set written by hostdev preprocess, here or in a store such as s3://BUCKET/DIR (default: a small "
        "synthetic one)",
        kind=checked(data_path),
        metavar="DIR",
    )
    host_device_mix: bool = _flag(
        "keep the tables in host memory, where the CPU looks up rows and updates them", default=False
    )
    device: str = _flag("device of the dense layers: auto, cpu, cuda, ...", default="auto", kind=str, metavar="NAME")
    epochs: int | None = _flag("passes over the training samples (default 15; 2 without --data)", kind=int, metavar="N")
    batch_size: int | None = _flag("samples in a step (default 16000; 1000 without --data)", kind=int, metavar="N")
    model: str = _flag(
        "wide_deep, deepfm, dlrm, dcn, mmoe, shared_bottom, or your own class as package.module:Class",
        default="wide_deep",
        kind=str,
        metavar="NAME",
    )
    emb_dim: int | None = _flag(
        "dimension of the embedding tables (default: the model's; 80 for wide_deep)", kind=int, metavar="N"
    )
    table_optimizer: str | None = _flag(
        "optimizer of the embedding tables (default: the model's)", kind=str, choices=tuple(OPTIMIZERS)
    )
    table_lr: float | None = _flag(
        "learning rate of the embedding tables (default: their optimizer's)", kind=float, metavar="X"
    )
    table_weight_decay: float = _flag(
        "weight decay of the embedding tables, applied to every row in each step",
        default=0.0,
        kind=float,
        metavar="X",
    )
    table_dtype: str = _flag(
        "format of the tables' weights in host memory; bfloat16 rounds stochastically",
        default=FP32,
        kind=str,
        choices=(FP32, BFLOAT16, BF16),
        metavar=f"{{{FP32},{BFLOAT16}}}",
    )
    table_slots: str = _flag(
        "format of the tables' optimizer state in host memory; bfloat16 and 8bit round stochastically",
        default=FP32,
        kind=str,
        choices=(FP32, BFLOAT16, BF16, EIGHT_BIT),
        metavar=f"{{{FP32},{BFLOAT16},{EIGHT_BIT}}}",
    )
    lr: float | None = _flag("learning rate of the dense layers' Adam (default: the model's)", kind=float, metavar="X")
    l2: str = _flag(
        "L2 regularization of Wide & Deep's table deep: none, batch (the batch's rows) or table (all rows)",
        default="none",
        kind=str,
        choices=("none", "batch", "table"),
    )
    precision: str = _flag(
        "precision of the dense layers' arithmetic; weights, the last layer and losses stay float32",
        default="fp32",
        kind=str,
        choices=("fp32", "bf16"),
    )
    tf32: bool = _flag("on CUDA, round the inputs of the dense layers' matrix products to TF32", default=False)
    host_threads: int | None = _flag(
        "threads of the host kernels (default: all CPUs of the process)", kind=int, metavar="N"
    )
    batch_per_rank: int | None = _flag(
        "samples per step in each data-parallel process, instead of --batch-size",
        kind=int,
        metavar="N",
    )
    micro_batches: int = _flag(
        "split a batch into M micro-batches, whose gradients are summed in a fixed order; several processes share the "
        "micro-batches",
        default=1,
        kind=int,
        metavar="M",
    )
    gradients: str | None = _flag(
        "how to combine the micro-batches' gradients: mean (over all samples of the batch) or sum (of the "
        "micro-batches' means) (default mean)",
        kind=str,
        choices=("mean", "sum"),
    )
    parallel: str | None = _flag(
        "none: one process; data: split samples; semi: also split layers by --mesh, --plan and --stage-cut; auto: "
        "measure which mesh, stages and slices are fastest (default: data, or the given --mesh)",
        kind=str,
        choices=("none", "data", "semi", "auto"),
    )
    mesh: str | None = _flag(
        "how processes split the work: data=N by samples, model=N by slices of layers, pipe=N by stages; for example "
        "data=2,pipe=2 (default: data)",
        kind=str,
        metavar="AXES",
    )
    schedule: str | None = _flag(
        "order of the micro-batches in the stages of --mesh pipe=N (default 1f1b)", kind=str, choices=SCHEDULES
    )
    stage_cut: str | None = _flag(
        "the modules that begin the second and later stages, for example deep.2,deep.4 (default: stages of equal cost)",
        kind=str,
        metavar="NAMES",
    )
    plan: str | None = _flag(
        "how --mesh model=N slices layers, by the layers' names or patterns: colwise slices outputs, rowwise slices "
        "inputs; for example deep.0=colwise,deep.2=rowwise; other layers are replicated",
        kind=str,
        metavar="STRATEGIES",
    )
    torch_threads: int | None = _flag(
        "CPU threads of the dense layers; the number affects the last bits of results (default: all CPUs; 1 with "
        "--micro-batches)",
        kind=int,
        metavar="N",
    )
    spawn: int | None = _flag(
        "start N processes on this host, which share the tables and the micro-batches", kind=int, metavar="N"
    )
    dense_exchange: str | None = _flag(
        "how processes sum the dense layers' gradients: tree (in the same order for any number of processes) or "
        "all-reduce (as DistributedDataParallel does, NOT EXACT) (default tree)",
        kind=str,
        choices=EXCHANGES,
    )
    exchange_levels: int | None = _flag(
        "1: each process exchanges data with every other; 2: processes on a host share memory, and one process per "
        "host exchanges data with the other hosts (default: 2 if there are several hosts and a host has several "
        "processes)",
        kind=int,
        choices=(1, 2),
    )
    dist_backend: str | None = _flag(
        "backend of torch.distributed for the dense layers' gradients (default: the device's, such as nccl, if each "
        "process has its own device, otherwise gloo); rows are always exchanged by gloo",
        kind=str,
        choices=("gloo", "nccl", "xccl"),
    )
    dist_url: str | None = _flag("rendezvous of the processes: env:// (the default)", kind=str, choices=("env://",))
    dist_timeout: float | None = _flag(
        "seconds to wait for another process in a step (default 600) and in the rendezvous (at most 60)",
        kind=float,
        metavar="S",
    )
    pipeline_depth: int = _flag(
        "batches to read and look up ahead of the step; 0 runs the stages one after another",
        default=2,
        kind=int,
        metavar="N",
    )
    staleness: int = _flag(
        "let lookups miss the updates of the last N batches; NOT EXACT above 0", default=0, kind=int, metavar="N"
    )
    cache_rows: str | None = _flag(
        "cached rows of each table on the device: a number, a share such as 5%%, or auto for the shortest steps "
        "(default 0: no cache)",
        kind=str,
        metavar="N",
    )
    cache_policy: str | None = _flag(f"which rows to cache (default {POLICIES[0]})", kind=str, choices=POLICIES)
    cache_window: int | None = _flag(
        f"batches that the policy lookahead knows in advance (default {WINDOW})", kind=int, metavar="N"
    )
    tables: str = _flag(
        "vocabulary: a row for each id of the data; dynamic: tables by key, which grow as ids come",
        default=config_checks.TABLES[0],
        kind=str,
        choices=config_checks.TABLES,
    )
    capacity: str | None = _flag(
        "most keys of --tables dynamic, or their memory, such as 8GiB (default: what is free)", kind=str, metavar="X"
    )
    admit_count: int | None = _flag("give a key a row at its N-th use (default: at once)", kind=int, metavar="N")
    unknown_ids: str | None = _flag(
        "what ids without a row read: shared, a row of their column, which is trained; zeros; or initial, their own "
        "initial values (default shared)",
        kind=str,
        choices=UNKNOWN,
    )
    evict_unused: int | None = _flag("remove keys that N steps have not used (default: never)", kind=int, metavar="N")
    table_dir: Path | None = _flag(
        "folder on a disk for the rows of embedding tables that do not fit in --table-memory; empty again at the end",
        kind=checked(local_path),
        metavar="DIR",
    )
    table_memory: str | None = _flag(
        "memory for the rows of the tables in --table-dir, in each process, such as 4GiB", kind=str, metavar="X"
    )
    table_window: int | None = _flag(
        "batches that are read ahead to know which rows of the tables in --table-dir to keep in memory "
        f"(default {Disk.window})",
        kind=int,
        metavar="N",
    )
    initial_vectors: str | None = _flag(
        "files with a vector for each value of a column, with which its embeddings begin, such as item=items.parquet; "
        "separate several by commas",
        kind=str,
        metavar="NAME=FILE",
    )
    frozen_vectors: str | None = _flag(
        "columns of --initial-vectors whose embeddings do not change, separated by commas", kind=str, metavar="NAMES"
    )
    early_stop: int | None = _flag(
        "stop when the AUC on the validation samples (test samples if there are none) has not improved for N epochs",
        kind=int,
        metavar="N",
    )
    seed: int = _flag(
        "seed of the initial values, of the order of the samples, and of layers such as dropout",
        default=2020,
        kind=int,
        metavar="N",
    )
    shuffle_window: int = _flag(
        "consecutive shards that are shuffled together; preprocess writes 262,144 samples to a shard",
        default=1,
        kind=int,
        metavar="N",
    )
    order: str = _flag(
        "order of the training samples: shuffled, anew in each epoch; or stored, as in the data, for example in time",
        default=config_checks.ORDERS[0],
        kind=str,
        choices=config_checks.ORDERS,
    )
    max_steps: int | None = _flag("stop after N steps", kind=int, metavar="N")
    run_dir: Path | None = _flag(
        "a new folder for logs and summary (default runs/<time>)", kind=checked(local_path), metavar="DIR"
    )
    ops_log: str = _flag(
        "maximum size of ops.log, such as 100MiB; beyond it, the oldest files are removed; 0 writes no ops.log",
        default="1GiB",
        kind=str,
        metavar="SIZE",
    )
    checkpoint_every: int | None = _flag("save a checkpoint every N steps and at the end", kind=int, metavar="N")
    checkpoint_minutes: float | None = _flag(
        "save a checkpoint every M minutes and at the end", kind=float, metavar="M"
    )
    keep_checkpoints: int | None = _flag("number of newest checkpoints to keep (default 3)", kind=int, metavar="K")
    checkpoint_dir: Path | None = _flag(
        "folder of the checkpoints, or its address in a store (default: checkpoints in the run directory)",
        kind=checked(checkpoint_path),
        metavar="DIR",
    )
    resume: str | None = _flag(
        "resume from DIR or, without DIR, from the run's newest valid checkpoint; start a new run if there is no "
        "checkpoint",
        kind=str,
        metavar="DIR",
        nargs="?",
        const="",
    )
    start_from: Path | None = _flag(
        "start a new run with the tables and layers of a checkpoint; the data set must use the checkpoint's ids",
        kind=checked(checkpoint_path),
        metavar="CHECKPOINT",
    )
    report: bool = _flag("at the end, write report.html in the run directory: charts and tables", default=False)
    trace: Path | None = _flag(
        "a new file for the timeline of all stages, as Chrome trace JSON (open it in Perfetto)",
        kind=checked(local_path),
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if self.report:
            require_extra("--report")
        for name in _DTYPES:
            if getattr(self, name) == BFLOAT16:
                object.__setattr__(self, name, BF16)  # the name in files
        if self.follow is not None:  # new ids come, so the tables grow
            object.__setattr__(self, "tables", "dynamic")
            object.__setattr__(self, "host_device_mix", True)
        for name in _AT_LEAST_1:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{_option(name)} must be at least 1, not {value}")
        for name in ("seed", "pipeline_depth", "staleness"):
            if getattr(self, name) < 0:
                raise UserError(f"{_option(name)} must be at least 0, not {getattr(self, name)}")
        if self.early_stop is not None and self.epochs is not None and self.epochs <= self.early_stop + 1:
            raise UserError(
                f"--early-stop {self.early_stop} has no effect with {self.epochs} epoch{'s' * (self.epochs > 1)}: "
                f"training can stop after epoch {self.early_stop + 1} at the earliest; give more --epochs, or leave "
                "out --early-stop"
            )
        for name in ("table_lr", "lr"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise UserError(f"{_option(name)} must be a number of at least 0, not {value}")
        if not (math.isfinite(self.table_weight_decay) and self.table_weight_decay >= 0):
            raise UserError(f"--table-weight-decay must be a number of at least 0, not {self.table_weight_decay}")
        if self.pipeline_depth > MOST_DEPTH:
            raise UserError(f"--pipeline-depth must be at most {MOST_DEPTH}, not {self.pipeline_depth}")
        if self.batch_per_rank is not None and self.batch_size is not None:
            raise UserError(
                "--batch-size counts the samples of all processes, --batch-per-rank the samples of each process; give "
                "only one of the two"
            )
        if self.dist_timeout is not None and not (math.isfinite(self.dist_timeout) and self.dist_timeout > 0):
            raise UserError(f"--dist-timeout must be a number above 0, not {self.dist_timeout}")
        is_open = self.parallel in ("semi", "auto") and self.mesh is None
        if not is_open and (self.mesh is None or parse_mesh(self.mesh).pipe == 1):
            for name in ("schedule", "stage_cut"):
                if getattr(self, name) is not None:
                    raise UserError(f"{_option(name)} has no effect without --mesh pipe=N; leave out {_option(name)}")
        if self.plan is not None:
            parse_plan(self.plan)  # raises UserError
            if not is_open and (self.mesh is None or parse_mesh(self.mesh).model == 1):
                raise UserError("--plan has no effect without --mesh model=N; leave out --plan")
        if self.gradients is not None and self.micro_batches == 1:
            raise UserError(
                f"--gradients {self.gradients} has no effect without --micro-batches; leave out --gradients"
            )
        if self.l2 == "table" and self.micro_batches > 1:
            raise UserError(
                "--l2 table cannot be combined with --micro-batches: each micro-batch would add the L2 term of the "
                "whole table; use --l2 batch"
            )
        if self.tf32 and self.precision != "fp32":
            raise UserError(f"--tf32 has no effect with --precision {self.precision}; leave out --tf32")
        if self.staleness and not (self.host_device_mix and self.pipeline_depth):
            missing = "a --pipeline-depth above 0" if self.host_device_mix else "--host-device-mix"
            raise UserError(f"--staleness {self.staleness} has no effect without {missing}; leave out --staleness")
        if 0 < self.ops_log_bytes < LEAST_OPS_LOG:
            raise UserError(
                f"--ops-log must be at least {format_bytes(LEAST_OPS_LOG)}, or 0 for no ops.log, not {self.ops_log}"
            )
        config_checks.check_cache(self)
        self._check_checkpoints()
        config_checks.check_vectors(self)
        config_checks.check_order(self)
        config_checks.check_keys(self)
        config_checks.check_disk(self)
        check_follow(self)
        check_tracking(self)

    def _check_checkpoints(self) -> None:
        minutes = self.checkpoint_minutes
        if minutes is not None and not (math.isfinite(minutes) and minutes > 0):
            raise UserError(f"--checkpoint-minutes must be a number above 0, not {minutes}")
        if not self.saves:
            for name in ("keep_checkpoints", *(("checkpoint_dir",) if self.resume != "" else ())):
                if getattr(self, name) is not None:
                    raise UserError(
                        f"{_option(name)} has no effect without --checkpoint-every or --checkpoint-minutes; leave out "
                        f"{_option(name)}"
                    )
        if self.resume and self.start_from is not None:
            raise UserError(f"--start-from has no effect with --resume {self.resume}; leave out one of the two")
        if self.resume == "" and self.run_dir is None and self.checkpoint_dir is None:
            raise UserError(
                "--resume without a folder looks for checkpoints in --checkpoint-dir or --run-dir; give one of these "
                "two, or name a checkpoint: --resume DIR"
            )

    @property
    def vector_files(self) -> dict[str, Path]:
        """The files of --initial-vectors, by column; raises UserError if it is malformed."""
        found: dict[str, Path] = {}
        if self.initial_vectors is None:
            return found
        for text in self.initial_vectors.split(","):
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise UserError(
                    f"--initial-vectors {self.initial_vectors}: write it as NAME=FILE or NAME=FILE,NAME=FILE"
                )
            if name in found:
                raise UserError(f"--initial-vectors names {name!r} twice; name one file for each column")
            found[name] = Path(path)
        return found

    @property
    def frozen_columns(self) -> tuple[str, ...]:
        """The columns of --frozen-vectors."""
        return () if self.frozen_vectors is None else tuple(self.frozen_vectors.split(","))

    @property
    def ops_log_bytes(self) -> int:
        """The maximum size of ops.log in bytes; raises UserError if --ops-log is not a size."""
        try:
            return parse_bytes(self.ops_log)
        except UserError as error:
            raise UserError(f"--ops-log: {error}") from None

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.checkpoint_every is not None or self.checkpoint_minutes is not None

    def require_data(self) -> None:
        """Raise UserError if `data` is not a data set."""
        if self.data is not None:
            folder.require(self.data)

    def resolved(self) -> "TrainConfig":
        """Return the settings, with defaults that depend on other options filled in."""
        epochs, batch_size = (15, REFERENCE_BATCH_SIZE) if self.data is not None else (2, 1000)
        epochs = 1 if self.follow is not None else epochs
        filled = replace(self, epochs=self.epochs or epochs, batch_size=self.batch_size or batch_size)
        if self.micro_batches > 1:  # results must not depend on the number of processes
            filled = replace(filled, torch_threads=self.torch_threads or 1, gradients=self.gradients or "mean")
        if self.cache_rows == AUTO:
            return filled
        if self.cache_rows is None or not rows_of(self.cache_rows, 1 << 30):
            return replace(filled, cache_rows="0", cache_policy=None, cache_window=None)
        policy = self.cache_policy or POLICIES[0]
        window = WINDOW if self.cache_window is None else self.cache_window
        return replace(filled, cache_policy=policy, cache_window=window if policy == "lookahead" else None)

    @property
    def arithmetic(self) -> str:
        """The dense layers' arithmetic, as text."""
        return self.precision + " with TF32" * self.tf32

    def as_json(self) -> dict[str, Any]:
        """Return the options by name, for config.json."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: shown_place(value) if isinstance(value, Path) else value for name, value in values.items()}


def _fields(names: Collection[str] | None) -> "list[Field[Any]]":
    found = [item for item in fields(TrainConfig) if names is None or item.name in names]
    return sorted(found, key=lambda item: item.name in FollowOptions.__dataclass_fields__)  # these come last


def add_flags(to: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add a flag for every field of `TrainConfig`, or for the fields `names`."""
    add_in_groups(to, _fields(names), _option)


def from_flags(arguments: argparse.Namespace, names: Collection[str] | None = None, **more: Any) -> TrainConfig:
    """Build the configuration from the parsed flags of `add_flags`, and from `more` options."""
    return TrainConfig(**{item.name: getattr(arguments, item.name) for item in _fields(names)}, **more)


def to_flags(settings: TrainConfig) -> list[str]:
    """Return the command-line flags for these settings, except for those that have their default values."""
    flags: list[str] = []
    for item in fields(TrainConfig):
        value = getattr(settings, item.name)
        if value == item.default:
            continue
        if item.name in _DTYPES and value == BF16:
            value = BFLOAT16
        alone = item.metadata["type"] is None or value == item.metadata.get("const")
        flags += [_option(item.name)] if alone else [_option(item.name), str(value)]
    return flags
