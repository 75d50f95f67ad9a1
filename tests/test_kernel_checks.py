"""Kernels have no bounds check: each that indexes memory by values it reads has its place here where these are checked.

A kernel that is missing here, or a check that is gone, fails: whoever adds a kernel says where its indices are checked.
"""

import ast
from importlib import import_module
from pathlib import Path

import pytest

from tests.conftest import ROOT

# Where values from outside are checked, once, before any kernel sees them.
IDS = "hostdev.core.checks:checked_ids"  # given to a table
POSITIONS = "hostdev.core.checks:checked_positions"  # given to a host table, beside ids
REQUESTED = "hostdev.runtime.features:check_ranges"  # what a batch looks up
BAGS = "hostdev.runtime.features:_lengths"  # and how its bags are cut
STORED = "hostdev.checkpoint.ranges:parse_range"  # rows in a checkpoint
COVERED = "hostdev.checkpoint.ranges:require_covered"
SHARDS = "hostdev.data.shard_files:ShardFiles.open"  # ids and lists in a data set
ARROW = "hostdev.core.arrow_files:read_table"  # offsets of texts, indices of dictionaries
TEXTS = "hostdev.data.preprocess.columns:as_text"  # what a program or a file gives, in Arrow
JOURNAL = "hostdev.data.preprocess.runner:Workspace.are_intact"  # pieces that an earlier process has written
LAST = "hostdev.core.checks:require_last"  # the step of a row's last write; kernels also limit it themselves
HASHED = "hostdev.core.hash_ids:_as_arrow"
OWN = ""  # no value from outside is an index: they are the module's own, or are hashed into a range first

CHECKS = {
    "cache.bound": {"_pay": (OWN,)},
    "cache.directory": dict.fromkeys(("_find", "_insert", "_ages", "_forget", "_rebuild"), (OWN,)),
    "cache.likeliest": {"told": (REQUESTED,), "_digits": (OWN,)},
    "cache.planning": {
        "announce": (REQUESTED,),
        "_value": (REQUESTED,),
        "classify": (REQUESTED,),
        **dict.fromkeys(("_chance", "judge", "score", "worst", "divide", "exchange", "take"), (OWN,)),
    },
    "cache.next_uses": {"announce": (REQUESTED,), "advance": (REQUESTED,)},
    "checkpoint.row_index": {
        "_find_ids": (IDS, STORED, COVERED),
        "_find_keys": (STORED,),
        "copy_rows": (IDS, STORED, COVERED),
    },
    "kernels.adagrad": {
        **dict.fromkeys(("sgd", "momentum", "adagrad", "row_wise_adagrad"), (IDS, POSITIONS, REQUESTED)),
        "mean_square": (OWN,),
    },
    "kernels.bags": dict.fromkeys(
        ("_pool", "_pool_scalars", "_add_bags", "_add_scalar_bags", "_divide", "_fill_bags"), (BAGS,)
    ),
    "kernels.bits": {
        "_mark": (IDS, REQUESTED),
        "take": (IDS, REQUESTED),
        "copy_to_columns": (OWN,),
        "gather_rows": (REQUESTED,),
    },
    "kernels.catch_up": dict.fromkeys(("_look_up", "_look_up_flat", "_pack"), (IDS, POSITIONS, REQUESTED, LAST)),
    "kernels.cardinality": {"_note": (OWN,)},
    "kernels.claims": {**dict.fromkeys(("_claim", "_intersect", "_others"), (REQUESTED,)), "_join": (OWN,)},
    "kernels.norm": {"clip_rows": (POSITIONS, REQUESTED)},
    "kernels.disk_records": dict.fromkeys(("read", "find_live", "move"), (OWN,)),
    "kernels.columns": {"_place": (JOURNAL,), "_hash_rows": (OWN,), "_take_lists": (SHARDS,)},
    "kernels.counter": {"_sort_by_hash": (OWN,)},
    "data.preprocess.criteo_lines": {"parse_lines": (OWN,)},
    "ext.serving.json_structure": {"scan": (OWN,)},  # by its own depth, which it limits, and number of cuts
    "data.preprocess.forms": {"_form": (ARROW, TEXTS)},
    "kernels.eight_bits": dict.fromkeys(("_decode", "decode_to_columns"), (OWN,)),
    "kernels.frames": {
        **dict.fromkeys(
            ("count_missing", "pin", "mark_leaving", "mark_staying", "forget", "find", "locate"), (IDS, REQUESTED)
        ),
        **dict.fromkeys(
            ("unpin", "choose_leaving", "release", "release_to", "move_to", "record_saved", "find_records"), (OWN,)
        ),
    },
    "kernels.groups": {
        "_add_hashed": (OWN,),
        "_unique_small": (REQUESTED,),
        "_count_kept": (BAGS,),
        "_copy_kept": (BAGS,),
    },
    "kernels.hash_table": dict.fromkeys(("find_key", "fill"), (OWN,)),
    "kernels.key_order": {"_place": (OWN,), "_number": (OWN,)},
    "kernels.apply": dict.fromkeys(("_lazy_adam", "_row_wise_adam", "_ftrl"), (IDS, POSITIONS, REQUESTED)),
    "kernels.key_use": dict.fromkeys(("_use_row", "_restore", "_collect", "_add_counts"), (OWN,)),
    "kernels.lookup": {"_lookup": (IDS, REQUESTED), "_lookup_into": (IDS, POSITIONS, REQUESTED), "_scale": (OWN,)},
    "kernels.rounding": dict.fromkeys(("_read", "_write"), (IDS, POSITIONS, REQUESTED)),
    "kernels.segment": dict.fromkeys(
        ("sum_part", "sum_scalar_part", "sort_uses", "sum_sorted", "_mark", "_order"), (OWN,)
    ),
    "kernels.shards": {"_locate": (REQUESTED,), "_sort": (OWN,)},
    "kernels.bfloat16": {"_round_rows": (IDS, REQUESTED), "_are_bfloat16": (OWN,)},
    "kernels.strings": {
        **dict.fromkeys(("_add_keys", "_find_keys"), (OWN,)),
        "_hash": (ARROW, TEXTS),
        "_prefetch": (OWN,),
        "_add": (ARROW, TEXTS),
        "_look_for": (ARROW, TEXTS),
        "_take": (OWN,),
    },
    "kernels.tree": {"_sum_rows": (OWN,)},
    "kernels.unique": {
        **dict.fromkeys(("_add", "_find", "_forget", "renumber"), (OWN,)),
        "add_direct": (REQUESTED,),
        "tally": (OWN,),
    },
    "kernels.xxhash": {"_hash": (HASHED,), "_hash_rows": (IDS,)},
}


def indexes_by_values(function: ast.FunctionDef) -> bool:
    """Tell whether a kernel indexes memory by what it has read from memory, at once or by way of a variable."""
    read: set[str] = set()

    def reads(node: ast.AST) -> bool:
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and each.id in read:
                return True
            if isinstance(each, ast.Subscript):
                of = each.value
                if not (isinstance(of, ast.Attribute) and of.attr in ("shape", "strides")):
                    return True
        return False

    def targets(node: ast.AST) -> list[tuple[ast.AST, ast.AST]]:
        if isinstance(node, ast.For):
            return [(node.target, node.iter)]
        if isinstance(node, ast.AugAssign):
            return [(node.target, node.value)]
        return [(target, node.value) for target in node.targets] if isinstance(node, ast.Assign) else []

    before = -1
    while len(read) > before:
        before = len(read)
        for target, value in (pair for node in ast.walk(function) for pair in targets(node)):
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = (
                value.elts if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) else [value] * len(names)
            )
            read |= {
                name.id for name, each in zip(names, values, strict=True) if isinstance(name, ast.Name) and reads(each)
            }
    return any(isinstance(node, ast.Subscript) and reads(node.slice) for node in ast.walk(function))


def kernels_in(path: Path) -> list[ast.FunctionDef]:
    """Return the functions of a file that numba compiles."""
    tree = ast.parse(path.read_text())
    typing = [each.names for each in ast.walk(tree) if isinstance(each, ast.ImportFrom) and each.module == "typing"]
    compiled = {"kernel", "inline", "inline_code", "overload", "njit", "numba.njit"} - {
        each.name for names in typing for each in names
    }
    found = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return [each for each in found if any(ast.unparse(d).split("(")[0] in compiled for d in each.decorator_list)]


def found_kernels() -> set[tuple[str, str]]:
    files = [*(ROOT / "hostdev").rglob("*.py"), *(ROOT / "data").rglob("*.py")]
    return {
        (".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("hostdev."), kernel.name)
        for path in files
        for kernel in kernels_in(path)
        if indexes_by_values(kernel)
    }


def test_each_kernel_that_indexes_by_values_says_where_they_are_checked():
    listed = {(module, kernel) for module, kernels in CHECKS.items() for kernel in kernels}
    found = found_kernels()
    assert found - listed == set(), "say in CHECKS where what these index by is checked"
    assert listed - found == set(), "these are gone, or index by no values any more"


@pytest.mark.parametrize(
    "check", sorted({each for kernels in CHECKS.values() for every in kernels.values() for each in every} - {OWN})
)
def test_the_checks_are_there(check):
    module, name = check.split(":")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    assert callable(found)


def test_what_counts_as_an_index_by_values():
    def of(text):
        return indexes_by_values(ast.parse(f"def f(a, b, n):\n {text}").body[0])

    assert of("return a[b[n]]")
    assert of("i = b[n]\n return a[i + 1]")
    assert of("x, y = b[n], 2\n return a[x]")
    assert not of("x, y = b[n], 2\n return a[y]")
    assert not of("for i in range(b.shape[0]):\n  a[i] = 1")
    assert of("for i in range(b[0]):\n  a[i] = 1")
