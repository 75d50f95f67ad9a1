"""A journal that was changed after a kill: the work begins anew from the first line that is not as it was written."""

import json
import random
import shutil

import pytest

from hostdev.data.preprocess import second_pass
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.synthetic import Synthetic, write_text
from hostdev.data.preprocess.work import _mark, _read_journal
from tests.data.test_restart import fail_at
from tests.data.test_sources import contents

OPTIONS = Options(threshold=1, dense="standard", rows_per_shard=400)


def make(text, out):
    return build(CriteoText([text], block_bytes=60_000), out, OPTIONS, threads=1)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A text, its data set, and the folder that a kill in the second pass has left."""
    path = tmp_path_factory.mktemp("journal")
    write_text(Synthetic(2000, 3), path / "rows.tsv")
    make(path / "rows.tsv", path / "straight")
    with pytest.MonkeyPatch.context() as patched:
        fail_at(patched, second_pass, "build_shard", 3, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            make(path / "rows.tsv", path / "out")
    entries = _read_journal(path / ".out.partial/journal.jsonl")
    assert [entry["task"] for entry in entries][-4:] == ["learned", *(f"shard-train-0000{i}" for i in range(3))]
    return path


def goes_on(killed, tmp_path, journal):
    """Go on with this journal; the data set must be the right one, without the files that the killed process wrote."""
    shutil.copytree(killed / ".out.partial", tmp_path / ".out.partial")
    (tmp_path / ".out.partial/journal.jsonl").write_bytes(journal)
    for name in ("train/.part-00000.arrow.partial-0123abcd", "train/part-00009.arrow.partial"):  # the last of 0.1
        (tmp_path / ".out.partial/result" / name).write_bytes(b"half")
    make(killed / "rows.tsv", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(killed / "straight")
    shutil.rmtree(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("many", [8, pytest.param(400, marks=pytest.mark.slow)])
def test_a_digit_that_was_changed(killed, tmp_path, many):
    """It gave another data set, without a word, in 140 of 360; or a traceback, again and again."""
    journal = (killed / ".out.partial/journal.jsonl").read_bytes()
    draw = random.Random(many)
    for _ in range(many):
        content = bytearray(journal)
        place = draw.choice([i for i, byte in enumerate(content) if chr(byte).isdecimal()])
        content[place] = ord(draw.choice([digit for digit in "0123456789" if ord(digit) != content[place]]))
        goes_on(killed, tmp_path, bytes(content))


def test_lines_that_are_missing_or_in_another_order(killed, tmp_path):
    lines = (killed / ".out.partial/journal.jsonl").read_bytes().splitlines(keepends=True)
    goes_on(killed, tmp_path, b"".join(lines[:1] + lines[2:]))
    goes_on(killed, tmp_path, b"".join([lines[1], lines[0], *lines[2:]]))
    goes_on(killed, tmp_path, b"".join(lines[:-1] + lines[-1:] * 2))


def with_marks(entries):
    """A journal of these entries, as if they had been written."""
    last, lines = "", []
    for entry in entries:
        text = entry if isinstance(entry, str) else json.dumps(entry)
        last = _mark(last, text)
        lines.append(f"{last} {text}\n")
    return "".join(lines).encode()


def test_entries_that_no_version_writes(killed, tmp_path):
    entries = _read_journal(killed / ".out.partial/journal.jsonl")
    places = {entry["task"].partition("-")[0]: place for place, entry in reversed([*enumerate(entries)])}

    def changed(kind, **by):
        """The entries with other facts in the result of the first task of a kind."""
        entry = entries[places[kind]]
        result, inside = entry["result"], kind in ("piece", "shard")
        result = {**result, kind: {**result[kind], **by}} if inside else {**result, **by}
        return [*entries[: places[kind]], {**entry, "result": result}, *entries[places[kind] + 1 :]]

    first = entries[places["piece"]]["result"]["piece"]
    for wrong in (
        changed("piece", rows=[1, "2"]),
        changed("piece", rows=[first["rows"][0] + 1, first["rows"][1]]),
        changed("piece", end=3),
        changed("piece", end=[0, first["end"][1] + 1]),
        changed("piece", missing=[[], []]),
        changed("piece", more=1),
    ):
        goes_on(killed, tmp_path, with_marks(wrong))
    for wrong in ({"task": "piece-000000-000000"}, {"other": 1}, {}, {"piece": first, "parsed": True}, "[" * 100_000):
        goes_on(killed, tmp_path, with_marks([*entries[:1], wrong, *entries[1:]]))
    scaling = entries[places["learned"]]["result"]["scaling"]
    for by in (
        {"schema": {}, "scaling": {}, "files": {}},
        {"files": {"result/vocabulary.arrow": 1}},
        {"schema": 5},
        {"scaling": {}},
        {"scaling": {name: values[:-1] for name, values in scaling.items()}},
        {"known_shares": {"C1": "x"}},
    ):
        goes_on(killed, tmp_path, with_marks(changed("learned", **by)))
    goes_on(killed, tmp_path, with_marks(changed("shard", rows="4")))
