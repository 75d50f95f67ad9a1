"""python -m tests.mutations [NAME ...]: which planted mistakes the quick tests notice.

Each mistake changes one place of a copy of the repository, in which the tests beside it then run. Prints a line for
each, and exits with 1 if one was not noticed. Takes about a minute for each: a changed kernel is compiled again.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.copies import copy_of

ROOT = Path(__file__).resolve().parent.parent
LONGEST = 600.0  # seconds; a mistake may make a test wait forever


class Mutation(NamedTuple):
    """A mistake: `old` stands once in the file, and is replaced by `new`; `tests` are to fail then."""

    file: str
    old: str
    new: str
    tests: str


UPDATES = "tests/host/test_updates.py tests/host/test_catch_up.py"
BAGS = "tests/kernels/test_bags.py tests/kernels/test_groups.py"
CACHES = "tests/cache tests/test_pipeline.py"
OVERLAP = "tests/kernels/test_claims.py tests/test_pipeline.py tests/runtime/test_random_programs.py"
KEYS = "tests/kernels/test_key_directory.py tests/runtime/test_keyed_tables.py"
FILES = "tests/checkpoint"
DATA = "tests/data"
MUTATIONS = {
    # kernels
    "ftrl adds g": Mutation("hostdev/kernels/apply.py", "n1 = n + g * g", "n1 = n + g", UPDATES),
    "ftrl has the other sign": Mutation(
        "hostdev/kernels/apply.py", "l1 if z > zero else -l1", "l1 if z < zero else -l1", UPDATES
    ),
    "adam forgets nesterov": Mutation(
        "hostdev/kernels/apply.py",
        "one_minus_beta1 * g if nesterov else m",
        "one_minus_beta1 * g if False else m",
        UPDATES,
    ),
    "late moments do not decay": Mutation(
        "hostdev/kernels/apply.py",
        "first[j] = m * decay1",
        "first[j] = m",
        "tests/host tests/runtime/test_every_row.py",
    ),
    "row-wise adam forgets eps": Mutation(
        "hostdev/kernels/apply.py", "divisor = np.sqrt(v) + eps", "divisor = np.sqrt(v)", UPDATES
    ),
    "parts lose an id": Mutation(
        "hostdev/kernels/unique.py", "if first < last:", "if first < last - 1:", "tests/kernels/test_unique.py"
    ),
    "a map that grew is empty": Mutation(
        "hostdev/kernels/unique.py",
        "        self.add(ids)\n",
        "        self.add(ids[:-1])\n",
        "tests/kernels/test_unique.py",
    ),
    "the first key found is the right one": Mutation(
        "hostdev/kernels/hash_table.py", "keys[np.uint64(position)] != key", "False", "tests/kernels"
    ),
    "sums forget weights": Mutation(
        "hostdev/kernels/bags.py", "total[j] += grad[j] * weight", "total[j] += grad[j]", BAGS
    ),
    "means count one more": Mutation(
        "hostdev/kernels/bags.py",
        "n = np.float32(end - begin)\n            for j in range(D):\n                grad[j] /= n",
        "n = np.float32(end - begin + 1)\n            for j in range(D):\n                grad[j] /= n",
        BAGS,
    ),
    # hazards
    "the first batch is not waited for": Mutation(
        "hostdev/kernels/claims.py", "np.uint64(before != 0)", "np.uint64(before > 1)", OVERLAP
    ),
    "a batch waits for too late a one": Mutation(
        "hostdev/kernels/claims.py", "= min(earlier, newest)", "= earlier", OVERLAP
    ),
    "tags are cleared too early": Mutation(
        "hostdev/kernels/claims.py", "self._made[0] < number - MOST_UNFINISHED", "self._made[0] < number", OVERLAP
    ),
    "filters forget an id": Mutation(
        "hostdev/kernels/claims.py",
        "    for j in range(np.uint64(len(others))):",
        "    for j in range(np.uint64(1), np.uint64(len(others))):",
        "tests/kernels/test_join.py tests/runtime/test_forwarding.py",
    ),
    "a row is read before its update": Mutation(
        "hostdev/pipeline/scheduling/in_flight.py",
        "if number <= self.updated:",
        "if number <= self.updated + 1:",
        OVERLAP,
    ),
    "late rows are not asked for": Mutation(
        "hostdev/pipeline/scheduling/in_flight.py", "batch.missing += 1\n", "batch.missing += 0\n", OVERLAP
    ),
    "forwarded rows are mixed up": Mutation(
        "hostdev/pipeline/forwarding.py",
        "place[earlier.target] =",
        "place[earlier.source] =",
        "tests/runtime/test_forwarding.py",
    ),
    "evicted rows are not written": Mutation(
        "hostdev/pipeline/stages/plan.py",
        "written = np.concatenate([written, ",
        "_ = np.concatenate([written, ",
        CACHES,
    ),
    "shared rows are updated twice": Mutation(
        "hostdev/pipeline/stages/update.py", "batch.writes.all if shared is None", "batch.writes.all if True", OVERLAP
    ),
    "conflicting rows are not looked up again": Mutation(
        "hostdev/pipeline/stages/look_up.py",
        "subsets, n_rows = context.offsets.split(subset, reads.starts), len(subset)",
        "conflicts.subsets.clear()",
        OVERLAP,
    ),
    # planner and cache
    "freed slots count as filled": Mutation(
        "hostdev/cache/planner.py", "self.filled += len(slots) - len(leaving)", "self.filled += len(slots)", CACHES
    ),
    "a restored planner knows old slots": Mutation(
        "hostdev/cache/planner.py", "known[:, planning.SLOT] = -1", "known[:0, planning.SLOT] = -1", CACHES
    ),
    "renumbering counts no hits": Mutation(
        "hostdev/cache/planner.py", "self.statistics.hits += hits", "self.statistics.hits += 0", CACHES
    ),
    "evicted slots keep their row": Mutation(
        "hostdev/cache/cache.py", "self._resident[table][plan.evicted_slots] = -1", "pass", CACHES
    ),
    "rows on their way are not brought back": Mutation(
        "hostdev/cache/cache.py", "        self._bring_back()\n        self._settle()", "        self._settle()", CACHES
    ),
    "refresh takes the other table": Mutation(
        "hostdev/cache/cache.py",
        "changed is not None and table is not changed",
        "changed is not None and table is changed",
        "tests/cache tests/runtime/test_tables_in_loops.py",
    ),
    "a cached row is not held": Mutation(
        "hostdev/cache/cache.py",
        "held |= np.isin(rows, plan.evicted)",
        "held |= False",
        "tests/cache tests/runtime/test_keyed_tables.py",
    ),
    "keys of the pass stay": Mutation("hostdev/pipeline/keys.py", "        self._keys.rollback()\n", "", KEYS),
    # checkpoint
    "equal ids ascend": Mutation("hostdev/checkpoint/ranges.py", "ids[1:] > ids[:-1]", "ids[1:] >= ids[:-1]", FILES),
    "a longer file is right": Mutation(
        "hostdev/checkpoint/folder.py", "if size != file.bytes:", "if size < file.bytes:", FILES
    ),
    "any parent is the parent": Mutation(
        "hostdev/checkpoint/folder.py", "found.manifest.checksum != parent.sha256", "not parent.sha256", FILES
    ),
    "missing rows are no gap": Mutation(
        "hostdev/checkpoint/ranges.py", "any(file.rows != file.stop - file.start for", "any(False for", FILES
    ),
    "ranks write rows in one place": Mutation(
        "hostdev/checkpoint/writer.py",
        "start, stop, ids = start + first, stop + first,",
        "start, stop, ids = start, stop,",
        "tests/distributed/test_checkpoints.py tests/checkpoint",
    ),
    "segments have the first numbers": Mutation(
        "hostdev/checkpoint/ranges.py",
        "if each.first_row <= start][-1]",
        "if each.first_row <= start][0]",
        "tests/checkpoint tests/distributed",
    ),
    "one checkpoint more is kept": Mutation(
        "hostdev/checkpoint/writer.py",
        "folder.prune(self._path, self._keep, self._best_steps)",
        "folder.prune(self._path, self._keep + 1, self._best_steps)",
        FILES,
    ),
    # encoding
    "logarithms lose their sign": Mutation(
        "data/preprocess/scaling.py",
        "numbers = np.copysign(np.log1p(np.abs(numbers)), numbers)",
        "numbers = np.log1p(np.abs(numbers))",
        DATA,
    ),
    "variances are merged wrongly": Mutation(
        "data/preprocess/scaling.py", "step**2 * self._count * share", "step * self._count * share", DATA
    ),
    "large negative numbers pass": Mutation(
        "data/preprocess/encoding.py",
        "np.flatnonzero(np.abs(numbers[:, i]) > self._most[i])",
        "np.flatnonzero(numbers[:, i] > self._most[i])",
        "tests/data tests/checkpoint/test_raw_rows.py",
    ),
    "weights of unknown values stay": Mutation(
        "data/preprocess/encoding.py",
        "kept, _ = reading.known(given.weights, lengths, ~missing)",
        "kept = given.weights[: len(known)]",
        "tests/data tests/checkpoint/test_raw_rows.py",
    ),
    "a bag keeps its unknown values": Mutation(
        "data/preprocess/encoding.py",
        "reading.known(known, lengths, ~missing)",
        "reading.known(known, lengths, missing)",
        "tests/data tests/checkpoint/test_raw_rows.py",
    ),
}


def apply(root: Path, mutation: Mutation) -> str:
    """Change the file in a copy; return its former text."""
    path = root / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file} has {mutation.old!r} {text.count(mutation.old)} times"
    path.write_text(text.replace(mutation.old, mutation.new))
    return text


def notice(root: Path, mutation: Mutation) -> tuple[str, float]:
    """Return the first test that fails, or "" if all pass, and the seconds taken."""
    before, start = apply(root, mutation), time.monotonic()
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", "--tb=no", "-n", "2"]
    command += ["-m", "not slow", *mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(root), "HOSTDEV_DRAW": "all"}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=False, timeout=LONGEST
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        noticed = "" if done.returncode == 0 else failed[0].partition(" - ")[0] if failed else f"exit {done.returncode}"
    except subprocess.TimeoutExpired:
        noticed = f"no end after {LONGEST:.0f} s"
    (root / mutation.file).write_text(before)
    return noticed, time.monotonic() - start


def main() -> int:
    """Try the mistakes whose names are given, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *MUTATIONS], metavar="NAME")
    chosen = parser.parse_args().names or list(MUTATIONS)
    missed = []
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of(ROOT, Path(folder))
        for name in chosen:
            noticed, seconds = notice(root, MUTATIONS[name])
            print(f"{name}: {noticed or 'NOT NOTICED'} ({seconds:.0f} s)", flush=True)
            missed += [] if noticed else [name]
    print(f"{len(chosen) - len(missed)} of {len(chosen)} noticed{': not ' if missed else ''}{', '.join(missed)}")
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
