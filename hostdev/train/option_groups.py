"""The groups in which `--help` shows the options of training; `TrainConfig` and its bases define the options."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field
from typing import Any

GROUPS: Mapping[str, tuple[str, ...]] = {
    "data, model and device": ("data", "model", "emb_dim", "host_device_mix", "device", "precision", "tf32"),
    "length and order of the training": (
        *("epochs", "batch_size", "max_steps", "early_stop", "lr", "l2", "seed", "order", "shuffle_window"),
    ),
    "optimizer, storage and start of the tables": (
        *("table_optimizer", "table_lr", "table_weight_decay", "table_dtype", "table_slots"),
        *("initial_vectors", "frozen_vectors"),
    ),
    "tables by key": ("tables", "capacity", "admit_count", "unknown_ids", "evict_unused"),
    "tables on disk": ("table_dir", "table_memory", "table_window"),
    "prefetching and the cache": ("pipeline_depth", "staleness", "cache_rows", "cache_policy", "cache_window"),
    "what the run writes": ("run_dir", "report", "log_to", "callback", "ops_log", "trace"),
    "checkpoints": (
        *("checkpoint_every", "checkpoint_minutes", "keep_checkpoints", "checkpoint_dir", "resume", "start_from"),
    ),
    "files that arrive": (
        *("follow", "follow_until", "follow_mark", "follow_poll", "follow_quiet", "follow_grown", "follow_window"),
    ),
    "several processes": (
        *("spawn", "batch_per_rank", "micro_batches", "gradients", "dense_exchange", "exchange_levels"),
        *("dist_backend", "dist_url", "dist_timeout"),
    ),
    "networks in parts": ("parallel", "mesh", "schedule", "stage_cut", "plan"),
    "threads": ("host_threads", "torch_threads"),
}


def add_in_groups(to: argparse.ArgumentParser, items: Iterable[Field[Any]], name_of: Callable[[str], str]) -> None:
    """Add a flag for each field of options to its group.

    Args:
        to: The parser.
        items: The fields, as `option_fields.flag` makes them.
        name_of: Returns the flag of a field's name.
    """
    by_name = {item.name: item for item in items}
    grouped = {name for names in GROUPS.values() for name in names}
    others = tuple(name for name in by_name if name not in grouped)
    for title, names in {**GROUPS, "others": others}.items():
        present = [by_name[name] for name in names if name in by_name]
        group = to.add_argument_group(title) if present else to
        for item in present:
            options = {key: value for key, value in item.metadata.items() if value is not None}
            if options.get("type") is None:
                group.add_argument(name_of(item.name), action="store_true", help=options["help"])
                continue
            if item.default is not None:
                options["help"] += f" (default {item.default})"
            group.add_argument(name_of(item.name), default=item.default, **options)
