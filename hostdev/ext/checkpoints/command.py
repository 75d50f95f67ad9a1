"""Runs `hostdev checkpoint info`, `verify` and the other sub-commands, once their flags are parsed."""

import argparse
from functools import partial
from pathlib import Path

from hostdev.checkpoint import folder, remote
from hostdev.checkpoint.layers import Layers
from hostdev.checkpoint.loading import damaged, find_newest_valid, verify
from hostdev.checkpoint.manifest import FILE_NAME, VERSION, BrokenCheckpointError
from hostdev.checkpoint.state import read_dense_tensors, state_digest
from hostdev.core import cli
from hostdev.core.addresses import address_of, shown_place
from hostdev.core.errors import HostdevError, UserError
from hostdev.core.memory import format_bytes
from hostdev.core.printable import printable
from hostdev.core.progress import counted, note
from hostdev.core.sync import sending
from hostdev.core.table_dtypes import FP32
from hostdev.ext.checkpoints import compact, deliver, diff


def _info(arguments: argparse.Namespace) -> int:
    found = list(reversed(remote.candidates(arguments.path, everything=True)))
    print(f"{'checkpoint':<24}{'step':>10}  {'holds':<36}{'bytes':>10}  created")
    code = 0
    chain: folder.Chain | None = None
    for path in found:
        try:
            chain = folder.read_chain(path)
        except BrokenCheckpointError as error:
            print(f"{path.name:<24}{'':>10}  {printable(str(error), 400)}")
            code = cli.EXIT_ERROR
            continue
        of_it = chain[-1].manifest
        rows = sum(file.rows for table in of_it.tables if table.segments is None for file in table.files)
        holds = "all rows" if of_it.parent is None else f"{counted(rows, 'row')} since {of_it.parent.name}"
        print(
            f"{path.name:<24}{of_it.step:>10,}  {holds:<36}{format_bytes(of_it.nbytes):>10}  "
            f"{printable(of_it.created, 40)}"
        )
    if chain is None:
        return code
    newest = chain[-1]
    versions = (f"{name} {newest.manifest.versions.get(name, 'unknown')}" for name in ("hostdev", "torch"))
    print()
    print(printable(f"{shown_place(newest.path)}: {', '.join(versions)}"))
    for table in newest.manifest.tables:
        slots = ", ".join([*table.slots, *table.row_slots]) or "none"
        weights = "" if table.dtype == FP32 else f", weights {table.dtype}"
        weights += "" if table.slots_dtype == FP32 else f", slots {table.slots_dtype}"
        size = f"{table.rows:,}" if table.keys is None else f"{table.keys.count:,} keys"
        about = f"{size} x {table.dim}, {table.optimizer} (slots {slots}){weights}, step {table.step:,}"
        print(printable(f"table {table.name}: {about}"))
        if (state := table.segments) is not None:
            size = format_bytes(sum(file.bytes for file in state.files))
            print(f"  rows in {counted(len(state.files), 'segment')}, {size}, shared with others by hard links")
        if (keys := table.keys) is not None:
            rules = f"admit {keys.admit or 'at once'}, evict {keys.evict or 'never'}, unknown {keys.unknown_values}"
            print(printable(f"  capacity {keys.capacity:,} keys, {keys.waiting_keys:,} wait for a row; {rules}"))
    digest = newest.manifest.state_sha256 or "not computed; verify computes it"
    old = f" (as version {newest.manifest.version} defines it)" if newest.manifest.version < VERSION else ""
    print(f"state_sha256 {printable(digest, 80)}{old}")
    return code


def _verify(arguments: argparse.Namespace) -> int:
    found = list(reversed(remote.candidates(arguments.path, everything=True)))
    chains: dict[Path, folder.Chain] = {}
    wrong: dict[Path, str] = {}
    for path in found:
        try:
            chains[path] = folder.read_chain(path)
        except HostdevError as error:
            wrong[path] = str(error)
    for owner, damage in damaged(list(chains.values())):
        for path, chain in chains.items():
            if owner in (checkpoint.path for checkpoint in chain):
                wrong.setdefault(path, str(damage))
    digests: list[str] = []
    newest = next((path for path in reversed(found) if path not in wrong), None)
    if newest is not None:
        try:
            digests = _digests(chains[newest])
        except BrokenCheckpointError as error:
            wrong[newest] = str(error)
    if len(found) == 1 and wrong:
        raise BrokenCheckpointError(wrong[found[0]])
    for path in dict.fromkeys([*(each.path for each in chains.get(found[0], [])), *found]):  # parents first
        if path in wrong:
            print(printable(f"{shown_place(path)}: damaged: {wrong[path]}"))
        else:
            about = (chains.get(path) or [each for each in chains[found[0]] if each.path == path])[-1].manifest
            print(f"{shown_place(path)}: {counted(len(about.files), 'file')}, {format_bytes(about.nbytes)}: intact")
    if wrong:
        names = ", ".join(path.name for path in wrong)
        are = "are" if len(wrong) > 1 else "is"
        raise BrokenCheckpointError(
            f"{len(wrong)} of {len(found)} checkpoints in {found[0].parent} {are} damaged: {names}: "
            f"{next(iter(wrong.values()))}"
        )
    for line in digests:
        print(line)
    return 0


def _digests(chain: folder.Chain) -> list[str]:
    """Return a line with a checkpoint's digest and, for an old format version, a line with that version's digest.

    Raises:
        BrokenCheckpointError: The manifest has a different digest than the checkpoint's content.
    """
    newest, layers = chain[-1], Layers(chain)
    state, noted, version = newest.manifest.state, newest.manifest.state_sha256, newest.manifest.version
    names = [(name, key) for name, key in state.get("digest", [])] if isinstance(state, dict) else []
    tensors = read_dense_tensors(layers)
    found = state_digest(layers, names, tensors, version=version)
    if noted not in (None, found):
        raise BrokenCheckpointError(f"{newest.path}: state_sha256 is {found}, but the manifest says {noted}")
    as_noted = f"{found}{'' if noted is None else ', as the manifest says'}"
    if version >= VERSION:
        return [f"state_sha256 {as_noted}"]
    return [
        f"state_sha256 {state_digest(layers, names, tensors)}",
        f"state_sha256 as version {version} defines it: {as_noted}",
    ]


def _newest(path: Path, prog: str) -> folder.Chain:
    """Return the newest valid checkpoint, with its parents; report newer, damaged checkpoints on standard error."""
    return _report(remote.newest(path), prog)


def _report(found: folder.Found, prog: str) -> folder.Chain:
    """Return the checkpoint that was found, with its parents; report newer, damaged checkpoints on standard error."""
    for line in found.notes():
        note(f"{prog}: {line}")
    return found.chain


def _diff(arguments: argparse.Namespace) -> int:
    lines = diff.differences(_newest(arguments.path, arguments.prog), _newest(arguments.other, arguments.prog))
    for line in lines:
        print(line)
    if not lines:
        print("equal")
    return 1 if lines else 0


def _compact(arguments: argparse.Namespace) -> int:
    if (address := address_of(arguments.path)) is not None:
        raise UserError(
            f"compact changes a folder of this machine, not {address}; merge {address} --out DIR writes a new one"
        )
    chain = _report(find_newest_valid(arguments.path, partial(verify, segments=True)), arguments.prog)
    print(compact.compact(chain, arguments.keep))
    return 0


def _rewrite(arguments: argparse.Namespace) -> int:
    """Write the newest valid checkpoint again: `reshard` for --ranks processes, `merge` for one process."""
    chain = _report(find_newest_valid(arguments.path, partial(verify, segments=True)), arguments.prog)
    with sending(arguments.out, FILE_NAME):
        line = compact.rewrite(chain, arguments.out, getattr(arguments, "ranks", None))
    print(line)
    return 0


def _deliver(arguments: argparse.Namespace) -> int:
    if arguments.target == arguments.path:
        raise UserError(
            f"{shown_place(arguments.target)} is both where to deliver from and where to; name another folder"
        )
    while True:
        chain = _newest(arguments.path, arguments.prog)
        try:
            found = deliver.deliver(chain, arguments.target, arguments.keep)
        except BrokenCheckpointError:
            if chain[-1].path.is_dir() or _newest(arguments.path, arguments.prog)[-1].path == chain[-1].path:
                raise
            continue  # the run has replaced the checkpoint meanwhile
        print(deliver.describe(chain, arguments.target, found))
        return 0


_COMMANDS = {
    "info": _info,
    "verify": _verify,
    "diff": _diff,
    "compact": _compact,
    "merge": _rewrite,
    "reshard": _rewrite,
    "deliver": _deliver,
}


def run(arguments: argparse.Namespace) -> int:
    """Run the command named by the parsed flags, and return its exit code."""
    return _COMMANDS[arguments.command](arguments)
