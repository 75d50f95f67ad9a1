"""python -m hostdev.checkpoint: look at checkpoints, check them, merge them, take them elsewhere."""

if __name__ == "__main__":  # first of all, as the imports take seconds: Ctrl-C ends these, too, with one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.checkpoint.__main__"))

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from hostdev.checkpoint import compact, diff, export, folder, reshard
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import damaged, newest_whole
from hostdev.checkpoint.manifest import BrokenCheckpointError
from hostdev.checkpoint.state import state_digest, tensors_of
from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.core.memory import gib
from hostdev.core.progress import counted, note
from hostdev.core.table_dtypes import FP32

PROG = "hostdev.checkpoint"


def main(argv: Sequence[str]) -> int:
    """Run one of the commands."""
    parser = cli.parser(PROG, "Look at checkpoints, check them, merge them, take them elsewhere.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], help: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=help, description=help[0].upper() + help[1:] + ".", allow_abbrev=False)
        made.set_defaults(run=run)
        cli.add_debug(made)
        made.add_argument(
            "path",
            type=Path,
            metavar="DIR",
            help="a checkpoint, or a folder of them, or a run directory: the newest there",
        )
        return made

    add("info", _info, "say what checkpoints hold")
    add(
        "verify",
        _verify,
        "read every file of all checkpoints there, compare checksums, and compute the digest of the newest's state",
    )
    of_diff = add("diff", _diff, "say how a checkpoint differs from another one; exit code 1 if it does")
    of_diff.add_argument("other", type=Path, metavar="OTHER", help="the other one")
    of_compact = add("compact", _compact, "merge a checkpoint and all that it adds to into one")
    of_compact.add_argument(
        "--keep", type=int, metavar="K", help="then remove all but the K newest checkpoints and what they add to"
    )
    of_merge = add("merge", _merge, "write a checkpoint of several processes as one of one process")
    of_reshard = add("reshard", _reshard, "write a checkpoint for another number of processes")
    of_reshard.add_argument("--ranks", type=int, required=True, metavar="N", help="processes that are to load it")
    for made in (of_merge, of_reshard):
        made.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for it, without checkpoints")
    export.add_flags(add("export", _export, "write tables and dense layers as files that others read"))
    arguments = parser.parse_args(argv)
    result: int = arguments.run(arguments)
    return result


def _info(arguments: argparse.Namespace) -> int:
    found = list(reversed(folder.candidates(arguments.path)))
    print(f"{'checkpoint':<24}{'step':>10}  {'holds':<36}{'bytes':>10}  created")
    code = 0
    chain: folder.Chain | None = None
    for path in found:
        try:
            chain = folder.chain_of(path)
        except BrokenCheckpointError as error:
            print(f"{path.name:<24}{'':>10}  {error}")
            code = cli.EXIT_ERROR
            continue
        of_it = chain[-1].manifest
        rows = sum(file.rows for table in of_it.tables for file in table.files)
        holds = "all rows" if of_it.parent is None else f"{counted(rows, 'row')} since {of_it.parent.name}"
        print(f"{path.name:<24}{of_it.step:>10,}  {holds:<36}{gib(of_it.nbytes):>10}  {of_it.created}")
    if chain is None:
        return code
    newest = chain[-1]
    print(f"\n{newest.path}: hostdev {newest.manifest.versions['hostdev']}, torch {newest.manifest.versions['torch']}")
    for table in newest.manifest.tables:
        slots = ", ".join([*table.slots, *table.row_slots]) or "none"
        weights = "" if table.dtype == FP32 else f", weights {table.dtype}"
        print(f"table {table.name}: {table.rows:,} x {table.dim}, {table.optimizer} (slots {slots}){weights}, step "
              f"{table.step:,}")  # fmt: skip
    print(f"state_sha256 {newest.manifest.state_sha256 or 'not computed; verify does it'}")
    return code


def _verify(arguments: argparse.Namespace) -> int:
    found = list(reversed(folder.candidates(arguments.path)))
    chains: dict[Path, folder.Chain] = {}
    wrong: dict[Path, str] = {}
    for path in found:
        try:
            chains[path] = folder.chain_of(path)
        except UserError as error:
            wrong[path] = str(error)
    for owner, damage in damaged(list(chains.values())):
        for path, chain in chains.items():
            if owner in (checkpoint.path for checkpoint in chain):
                wrong.setdefault(path, str(damage))
    digest = ""
    newest = next((path for path in reversed(found) if path not in wrong), None)
    if newest is not None:
        digest, noted = _digest(chains[newest]), chains[newest][-1].manifest.state_sha256
        if noted not in (None, digest):
            wrong[newest] = f"{newest}: state_sha256 is {digest}, not {noted} as it says"
        digest += "" if noted is None else ", as the manifest says"
    if len(found) == 1 and wrong:
        raise BrokenCheckpointError(wrong[found[0]])
    for path in dict.fromkeys([*(each.path for each in chains.get(found[0], [])), *found]):  # one's parents, too
        if path in wrong:
            print(f"{path}: NOT WHOLE: {wrong[path]}")
        else:
            about = (chains.get(path) or [each for each in chains[found[0]] if each.path == path])[-1].manifest
            print(f"{path}: {counted(len(about.files), 'file')}, {gib(about.nbytes)}: whole")
    if wrong:
        names = ", ".join(path.name for path in wrong)
        are = "are" if len(wrong) > 1 else "is"
        raise BrokenCheckpointError(
            f"{len(wrong)} of {len(found)} checkpoints in {found[0].parent} {are} not whole: {names}: "
            f"{next(iter(wrong.values()))}"
        )
    print(f"state_sha256 {digest}")
    return 0


def _digest(chain: folder.Chain) -> str:
    layers = Layers(chain)
    state = chain[-1].manifest.state
    names = [(name, key) for name, key in state.get("digest", [])] if isinstance(state, dict) else []
    return state_digest(layers, names, tensors_of(layers))


def _newest(path: Path) -> folder.Chain:
    """Return the newest checkpoint, and say on standard error which ones were passed over."""
    found = folder.newest(path)
    for line in found.notes():
        note(f"{PROG}: {line}")
    return found.chain


def _diff(arguments: argparse.Namespace) -> int:
    lines = diff.differences(_newest(arguments.path), _newest(arguments.other))
    for line in lines:
        print(line)
    if not lines:
        print("equal")
    return 1 if lines else 0


def _compact(arguments: argparse.Namespace) -> int:
    if arguments.keep is not None and arguments.keep < 1:
        raise UserError(f"--keep must be at least 1, not {arguments.keep}")
    found = newest_whole(arguments.path)
    for line in found.notes():
        note(f"{PROG}: {line}")
    print(compact.compact(found.chain, arguments.keep))
    return 0


def _merge(arguments: argparse.Namespace) -> int:
    return _rewrite(arguments, None)


def _reshard(arguments: argparse.Namespace) -> int:
    if arguments.ranks < 1:
        raise UserError(f"--ranks must be at least 1, not {arguments.ranks}")
    return _rewrite(arguments, arguments.ranks)


def _rewrite(arguments: argparse.Namespace, ranks: int | None) -> int:
    found = newest_whole(arguments.path)
    for line in found.notes():
        note(f"{PROG}: {line}")
    print(reshard.rewrite(found.chain, arguments.out, ranks))
    return 0


def _export(arguments: argparse.Namespace) -> int:
    for line in export.export(_newest(arguments.path), export.options_of(arguments)):
        print(line)
    return 0
