"""The options of a training run, and defaults that depend on other options; `TrainConfig` has all of them."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from hostdev.cache.options import AUTO, POLICIES, WINDOW, rows_of
from hostdev.core.addresses import checkpoint_path, data_path, local_path
from hostdev.core.cli import checked
from hostdev.core.memory import format_bytes, parse_bytes
from hostdev.core.micro_batches import EXCHANGES
from hostdev.core.optimizers import OPTIMIZERS
from hostdev.core.options import OptionError, OptionGroup, When, choice, count, option, switch
from hostdev.core.table_dtypes import BF16, EIGHT_BIT, FP32
from hostdev.data import folder
from hostdev.distributed.world import parse_mesh
from hostdev.train.storage_options import CacheOptions, DiskOptions, KeyOptions

REFERENCE_BATCH_SIZE = 16_000
LEAST_OPS_LOG = 1 << 16
BFLOAT16 = "bfloat16"  # the public name; BF16 is still accepted for one release
ORDERS = ("shuffled", "stored")
_WHOLE_TABLE = "l2=table"


@dataclass(frozen=True, kw_only=True)
class ModelOptions(OptionGroup):
    """Data, model and device."""

    section: ClassVar[str] = "model_and_data"
    title: ClassVar[str] = "data, model and device"
    data: Path | None = option(
        "data set written by hostdev preprocess, here or in a store such as s3://BUCKET/DIR (default: a small "
        "synthetic one)",
        checked(data_path),
        is_local=True,
    )
    model: str = option(
        "wide_deep, deepfm, dlrm, dcn, mmoe, shared_bottom, or your own class as package.module:Class",
        str,
        default="wide_deep",
        metavar="NAME",
        is_fixed=True,
    )
    emb_dim: int | None = count(
        "dimension of the embedding tables (default: the model's; 80 for wide_deep)", is_fixed=True, has_effect=True
    )
    host_device_mix: bool = switch("keep the tables in host memory, where the CPU looks up rows and updates them")
    device: str = option(
        "device of the dense layers: auto, cpu, cuda, ...", str, default="auto", metavar="NAME", is_local=True
    )
    precision: str = choice(
        "precision of the dense layers' arithmetic; weights, the last layer and losses stay float32",
        ("fp32", "bf16"),
        default="fp32",
        is_fixed=True,
    )
    tf32: bool = switch(
        "on CUDA, round the inputs of the dense layers' matrix products to TF32",
        excludes={"precision": ""},
        is_fixed=True,
    )

    @property
    def arithmetic(self) -> str:
        """The dense layers' arithmetic, as text."""
        return self.precision + " with TF32" * self.tf32

    def require_data(self) -> None:
        """Raise UserError if `data` is not a data set."""
        if self.data is not None:
            folder.require(self.data)


@dataclass(frozen=True, kw_only=True)
class LengthOptions(OptionGroup):
    """Steps, their order, and what each step does besides the tables' updates."""

    section: ClassVar[str] = "length"
    title: ClassVar[str] = "length and order of the training"
    epochs: int | None = count("passes over the training samples (default 15; 2 without --data)")
    batch_size: int | None = count("samples in a step (default 16000; 1000 without --data)", is_fixed=True)
    max_steps: int | None = count("stop after N steps")
    early_stop: int | None = count(
        "stop when the AUC on the validation samples (test samples if there are none) has not improved for N epochs"
    )
    lr: float | None = option(
        "learning rate of the dense layers' Adam (default: the model's)", float, least=0, is_fixed=True, has_effect=True
    )
    l2: str = choice(
        "L2 regularization of Wide & Deep's table deep: none, batch (the batch's rows) or table (all rows)",
        ("none", "batch", "table"),
        default="none",
        is_fixed=True,
    )
    seed: int = option(
        "seed of the initial values, of the order of the samples, and of layers such as dropout",
        int,
        default=2020,
        least=0,
        is_fixed=True,
    )
    order: str = choice(
        "order of the training samples: shuffled, anew in each epoch; or stored, as in the data, for example in time",
        ORDERS,
        default=ORDERS[0],
        is_fixed=True,
    )
    shuffle_window: int = count(
        "consecutive shards that are shuffled together; preprocess writes 262,144 samples to a shard",
        default=1,
        excludes={"order=stored": ""},
        is_fixed=True,
    )

    def check(self) -> None:
        """Raise OptionError if the training ends before --early-stop can have an effect."""
        if self.early_stop is not None and self.epochs is not None and self.epochs <= self.early_stop + 1:
            raise OptionError(
                "early_stop",
                f" {self.early_stop} has no effect with {self.epochs} epoch{'s' * (self.epochs > 1)}: training can "
                f"stop after epoch {self.early_stop + 1} at the earliest; give more --epochs, or leave out "
                "--early-stop",
            )


@dataclass(frozen=True, kw_only=True)
class EmbeddingOptions(OptionGroup):
    """Optimizer, storage and initial values of the tables."""

    section: ClassVar[str] = "tables_and_optimizer"
    title: ClassVar[str] = "optimizer, storage and start of the tables"
    table_optimizer: str | None = choice(
        "optimizer of the embedding tables (default: the model's)", tuple(OPTIMIZERS), is_fixed=True, has_effect=True
    )
    table_lr: float | None = option(
        "learning rate of the embedding tables (default: their optimizer's)",
        float,
        least=0,
        is_fixed=True,
        has_effect=True,
    )
    table_weight_decay: float = option(
        "weight decay of the embedding tables, applied to every row in each step",
        float,
        default=0.0,
        least=0,
        is_fixed=True,
        has_effect=True,
    )
    table_dtype: str = choice(
        "format of the tables' weights in host memory; bfloat16 rounds stochastically",
        (FP32, BF16),
        default=FP32,
        aliases={BFLOAT16: BF16},
        metavar=f"{{{FP32},{BFLOAT16}}}",
        is_fixed=True,
    )
    table_slots: str = choice(
        "format of the tables' optimizer state in host memory; bfloat16 and 8bit round stochastically",
        (FP32, BF16, EIGHT_BIT),
        default=FP32,
        aliases={BFLOAT16: BF16},
        metavar=f"{{{FP32},{BFLOAT16},{EIGHT_BIT}}}",
        is_fixed=True,
    )
    initial_vectors: str | None = option(
        "files with a vector for each value of a column, with which its embeddings begin, such as item=items.parquet; "
        "separate several by commas",
        str,
        metavar="NAME=FILE",
        is_fixed=True,
    )
    frozen_vectors: str | None = option(
        "columns of --initial-vectors whose embeddings do not change, separated by commas",
        str,
        metavar="NAMES",
        excludes={"l2": "it would change their rows", "table_weight_decay": "it would change their rows"},
        is_fixed=True,
    )

    @property
    def vector_files(self) -> dict[str, Path]:
        """The files of --initial-vectors, by column; raises OptionError if it is malformed."""
        files: dict[str, Path] = {}
        for text in [] if self.initial_vectors is None else self.initial_vectors.split(","):
            name, equals, path = text.partition("=")
            if not (name and equals and path):
                raise OptionError(
                    "initial_vectors", f" {self.initial_vectors}: write it as NAME=FILE or NAME=FILE,NAME=FILE"
                )
            if name in files:
                raise OptionError("initial_vectors", f" names {name!r} twice; name one file for each column")
            files[name] = Path(path)
        return files

    @property
    def frozen_columns(self) -> tuple[str, ...]:
        """The columns of --frozen-vectors."""
        return () if self.frozen_vectors is None else tuple(self.frozen_vectors.split(","))

    def check(self) -> None:
        """Raise OptionError if a frozen column has no file, or --initial-vectors is malformed."""
        files = self.vector_files
        for name in self.frozen_columns:
            if name not in files:
                raise OptionError(
                    "frozen_vectors", f" {name}: the column has no file; give --initial-vectors {name}=FILE"
                )


@dataclass(frozen=True, kw_only=True)
class OutputOptions(OptionGroup):
    """Files of a run."""

    section: ClassVar[str] = "output"
    title: ClassVar[str] = "what the run writes"
    run_dir: Path | None = option(
        "a new folder for logs and summary (default runs/<time>)", checked(local_path), is_local=True
    )
    ops_log: str = option(
        "maximum size of ops.log, such as 100MiB; beyond it, the oldest files are removed; 0 writes no ops.log",
        str,
        default="1GiB",
        metavar="SIZE",
        check=parse_bytes,
        is_local=True,
        is_number=True,
    )
    trace: Path | None = option(
        "a new file for the timeline of all stages, as Chrome trace JSON (open it in Perfetto)",
        checked(local_path),
        metavar="FILE",
        is_local=True,
    )

    @property
    def ops_log_bytes(self) -> int:
        """The maximum size of ops.log in bytes."""
        return parse_bytes(self.ops_log)

    def check(self) -> None:
        """Raise OptionError if the limit of ops.log is too low."""
        if 0 < self.ops_log_bytes < LEAST_OPS_LOG:
            raise OptionError(
                "ops_log", f" must be at least {format_bytes(LEAST_OPS_LOG)}, or 0 for no ops.log, not {self.ops_log}"
            )


@dataclass(frozen=True, kw_only=True)
class CheckpointOptions(OptionGroup):
    """Checkpoints: when to save, where, and from which one to begin."""

    section: ClassVar[str] = "checkpoints"
    title: ClassVar[str] = "checkpoints"
    checkpoint_every: int | None = count("save a checkpoint every N steps and at the end")
    checkpoint_minutes: float | None = option(
        "save a checkpoint every M minutes and at the end", float, metavar="M", above=0
    )
    keep_checkpoints: int | None = count(
        "number of newest checkpoints to keep (default 3)",
        metavar="K",
        needs={When("saves", shown="--checkpoint-every or --checkpoint-minutes"): ""},
    )
    checkpoint_dir: Path | None = option(
        "folder of the checkpoints, or its address in a store (default: checkpoints in the run directory)",
        checked(checkpoint_path),
        needs={When("uses_folder", shown="--checkpoint-every or --checkpoint-minutes"): ""},
        is_local=True,
    )
    resume: str | None = option(
        "resume from DIR or, without DIR, from the run's newest valid checkpoint; start a new run if there is no "
        "checkpoint",
        str,
        metavar="DIR",
        bare="",
    )
    start_from: Path | None = option(
        "start a new run with the tables and layers of a checkpoint; the data set must use the checkpoint's ids",
        checked(checkpoint_path),
        metavar="CHECKPOINT",
        excludes={When("resume_path", shown="--resume DIR"): ""},
    )

    def check(self) -> None:
        """Raise OptionError if --resume has no folder in which it could look for checkpoints."""
        if self.resume == "" and self.checkpoint_dir is None and getattr(self, "run_dir", None) is None:
            raise OptionError(
                "resume",
                " without a folder looks for checkpoints in --checkpoint-dir or --run-dir; give one of these two, or "
                "name a checkpoint: --resume DIR",
            )

    @property
    def saves(self) -> bool:
        """Whether the run saves checkpoints."""
        return self.checkpoint_every is not None or self.checkpoint_minutes is not None

    @property
    def uses_folder(self) -> bool:
        """Whether checkpoints are saved to the folder of checkpoints, or searched there."""
        return self.saves or self.resume == ""

    @property
    def resume_path(self) -> str | None:
        """The checkpoint that --resume names; None without one."""
        return self.resume or None


@dataclass(frozen=True, kw_only=True)
class ProcessOptions(OptionGroup):
    """Several processes that share the samples."""

    section: ClassVar[str] = "processes"
    title: ClassVar[str] = "several processes"
    spawn: int | None = count("start N processes on this host, which share the tables and the micro-batches")
    batch_per_rank: int | None = count(
        "samples per step in each data-parallel process, instead of --batch-size",
        excludes={"batch_size": "it counts the samples of all processes"},
        is_local=True,
        is_shared=True,
    )
    parallel: str | None = choice(
        "none: one process; data: split samples; semi: also split layers by --mesh, --plan and --stage-cut; auto: "
        "measure which mesh, stages and slices are fastest (default: data, or the given --mesh)",
        ("none", "data", "semi", "auto"),
        off=("none",),
    )
    mesh: str | None = option(
        "how processes split the work: data=N by samples, model=N by slices of layers, pipe=N by stages; for example "
        "data=2,pipe=2 (default: data)",
        str,
        metavar="AXES",
        check=parse_mesh,
        is_shared=True,
    )
    micro_batches: int = count(
        "split a batch into M micro-batches, whose gradients are summed in a fixed order; several processes share the "
        "micro-batches",
        default=1,
        metavar="M",
        excludes={_WHOLE_TABLE: "each micro-batch would add the L2 term of the whole table, unlike --l2 batch"},
        is_fixed=True,
    )
    gradients: str | None = choice(
        "how to combine the micro-batches' gradients: mean (over all samples of the batch) or sum (of the "
        "micro-batches' means) (default mean)",
        ("mean", "sum"),
        needs={"micro_batches": ""},
        is_fixed=True,
    )
    dense_exchange: str | None = choice(
        "how processes sum the dense layers' gradients: tree (in the same order for any number of processes) or "
        "all-reduce (as DistributedDataParallel does, NOT EXACT) (default tree)",
        EXCHANGES,
        is_shared=True,
    )
    exchange_levels: int | None = choice(
        "1: each process exchanges data with every other; 2: processes on a host share memory, and one process per "
        "host exchanges data with the other hosts (default: 2 if there are several hosts and a host has several "
        "processes)",
        (1, 2),
        is_shared=True,
        type=int,
    )
    dist_backend: str | None = choice(
        "backend of torch.distributed for the dense layers' gradients (default: the device's, such as nccl, if each "
        "process has its own device, otherwise gloo); rows are always exchanged by gloo",
        ("gloo", "nccl", "xccl"),
        is_local=True,
        is_shared=True,
    )
    dist_url: str | None = choice(
        "rendezvous of the processes: env:// (the default)", ("env://",), is_local=True, is_shared=True
    )
    dist_timeout: float | None = option(
        "seconds to wait for another process in a step (default 600) and in the rendezvous (at most 60)",
        float,
        metavar="S",
        above=0,
        is_local=True,
        is_shared=True,
    )


@dataclass(frozen=True, kw_only=True)
class ThreadOptions(OptionGroup):
    """Threads of the host."""

    section: ClassVar[str] = "threads"
    title: ClassVar[str] = "threads"
    host_threads: int | None = count("threads of the host kernels (default: all CPUs of the process)", is_local=True)
    torch_threads: int | None = count(
        "CPU threads of the dense layers; the number affects the last bits of results (default: all CPUs; 1 with "
        "--micro-batches)",
        is_fixed=True,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(
    ModelOptions,
    LengthOptions,
    EmbeddingOptions,
    KeyOptions,
    DiskOptions,
    CacheOptions,
    OutputOptions,
    CheckpointOptions,
    ProcessOptions,
    ThreadOptions,
):
    """The options of a training run. `resolved` fills in the defaults that depend on other options."""

    def resolved(self) -> Self:
        """Return the settings, with defaults that depend on other options filled in."""
        epochs, batch_size = (15, REFERENCE_BATCH_SIZE) if self.data is not None else (2, 1000)
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
