"""The changed journal of a killed preparation, with corrected checksums of its lines."""

import json
import shutil
from pathlib import Path
from random import Random

from hostdev.data.preprocess import second_pass
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.work import _mark, _read_journal
from tests.fuzz.mutations import change_bytes, change_json

OPTIONS = Options(threshold=0, rows_per_shard=30)


def _build(base: Path, out: Path) -> None:
    build(CriteoText([base / "rows.tsv"], block_bytes=8000), out, OPTIONS, threads=1)


def make(base: Path) -> None:
    """Leave the files of a process that was killed in the second pass."""
    write_text(Synthetic(120, 3), base / "rows.tsv")
    build_shard, calls = second_pass.build_shard, []

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return build_shard(*arguments, **options)

    second_pass.build_shard = fail
    try:
        _build(base, base / "out")
    except KeyboardInterrupt:
        pass
    finally:
        second_pass.build_shard = build_shard
    assert (base / ".out.partial/journal.jsonl").exists()


def load(base: Path) -> None:
    """Continue the preparation once."""
    case = base.parent / "load"
    shutil.rmtree(case, ignore_errors=True)  # of a child before this one
    case.mkdir()
    shutil.copytree(base / ".out.partial", case / ".out.partial")
    _build(base, case / "out")


def run(base: Path, case: Path, draw: Random) -> None:
    """Change the journal, and continue the preparation."""
    shutil.copytree(base / ".out.partial", case / ".out.partial")
    path = case / ".out.partial/journal.jsonl"
    if draw.random() < 0.2:
        path.write_bytes(change_bytes(path.read_bytes(), draw))
    else:
        entries = _read_journal(path)
        at = draw.randrange(len(entries))
        entries[at] = change_json(entries[at], draw)
        last, lines = "", []
        for entry in entries:
            text = json.dumps(entry)
            last = _mark(last, text)
            lines.append(f"{last} {text}\n")
        path.write_text("".join(lines))
    _build(base, case / "out")
