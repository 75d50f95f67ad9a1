"""What `hostdev train` can do to the bits of a training, and the modes that must not: register a new feature here.

A feature is flags of a training, on one of the data sets of test_modes.py. A mode is when and where the same work is
done. test_modes.py trains each feature in the modes, and compares the digest of the state and the losses of all steps
with those of the first mode.
"""

from typing import NamedTuple

HOST = "--host-device-mix"
CACHE = "--cache-rows"


class Feature(NamedTuple):
    """Flags of a training.

    data      the data set: "small" (Criteo's columns), "films" (bags, shared ids), "events" (raw ids, for keys),
              "targets" (two labels, weights of rows, a bag with weights)
    cached    whether a cache may hold rows
    on_disk   whether its tables may be on disk
    by_key    whether its tables are by key: on the host, with caches that need no counts
    quick     whether the simulated accelerator has it in the quick rung
    """

    data: str
    flags: tuple = ()
    cached: bool = True
    on_disk: bool = True
    by_key: bool = False
    quick: bool = False


DEEPFM = ("--model", "deepfm")
ROUNDED = ("--table-dtype", "bfloat16", "--table-slots", "8bit")
WIDE = ("--emb-dim", 32)  # a table on disk has rows of 64 bytes or more
KEYS = ("--tables", "dynamic", "--capacity", "20MiB", "--order", "stored", *DEEPFM)
VECTORS = ("--initial-vectors", "user=vectors.parquet", "--frozen-vectors", "user")
FEATURES = {
    "plain": Feature("small", quick=True),
    "l2 of batches": Feature("small", ("--l2", "batch")),
    "l2 of tables": Feature("small", ("--l2", "table"), cached=False, on_disk=False, quick=True),
    "dense bfloat16": Feature("small", ("--precision", "bf16", "--l2", "batch"), quick=True),
    "bfloat16 weights": Feature("small", ("--table-dtype", "bfloat16")),
    "slots of 8 bits": Feature("small", ("--table-slots", "8bit", *WIDE)),
    "every row decays": Feature("small", ("--table-optimizer", "adam", "--table-weight-decay", 0.5)),
    "row-wise": Feature(
        "small", (*WIDE, "--table-dtype", "bfloat16", *DEEPFM, "--table-optimizer", "row_wise_adagrad")
    ),
    "micro-batches": Feature("small", ("--micro-batches", 4)),
    "films": Feature("films", DEEPFM),
    "films, stored": Feature("films", (*DEEPFM, *ROUNDED, *WIDE, "--order", "stored")),
    "dlrm": Feature("films", ("--model", "dlrm", "--table-optimizer", "lazy_adam")),
    "dcn": Feature("films", ("--model", "dcn")),
    "labels and weights": Feature("targets", ("--model", "shared_bottom")),
    "vectors that do not change": Feature("targets", ("--model", "mmoe", *VECTORS)),
    "keys": Feature("events", KEYS, by_key=True),
    "keys, admitted and evicted": Feature("events", (*KEYS, "--admit-count", 2, "--evict-unused", 12), by_key=True),
}
MODES = {
    "serial": (HOST, "--pipeline-depth", 0, "--host-threads", 1),
    "two threads": (HOST, "--pipeline-depth", 0, "--host-threads", 2),
    "depth 1": (HOST, "--pipeline-depth", 1),
    "depth 2": (HOST, "--pipeline-depth", 2, "--host-threads", 2),
    "on the device": ("--pipeline-depth", 2),
    "on disk": (HOST, "--pipeline-depth", 2, "--table-dir", "disk", "--table-memory", "9MiB"),
    "a small cache, serial": (HOST, "--pipeline-depth", 0, CACHE, 7, "--cache-policy", "lru"),
    "a cache of no rows": (HOST, "--pipeline-depth", 2, CACHE, 0),
    "a cache that counts": (HOST, "--pipeline-depth", 2, CACHE, "5%", "--cache-policy", "static"),
    "a cache that looks ahead": (HOST, "--pipeline-depth", 2, CACHE, "10%"),
    "strongest": (HOST, "--pipeline-depth", 4, CACHE, "90%", "--cache-window", 2, "--host-threads", 2),
    "strongest without a cache": (HOST, "--pipeline-depth", 4, "--host-threads", 5),
}


def is_possible(feature, mode):
    """Return whether a mode works with a feature."""
    flags = MODES[mode]
    if (CACHE in flags and not feature.cached) or ("disk" in flags and not feature.on_disk):
        return False
    return not feature.by_key or (HOST in flags and "static" not in flags)


def strongest(feature):
    """Return the mode that overlaps and moves most."""
    return "strongest" if feature.cached else "strongest without a cache"
