"""Data sets that keep the ids of an earlier one: against a dictionary in Python, and whatever ends the work."""

import json
import random
import shutil
import signal
import sys
import time
from collections import Counter

import numpy as np
import pytest

from hostdev import UserError
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess import learning, runner, second_pass, words
from hostdev.data.preprocess.build import Options, build
from hostdev.data.preprocess.check import check
from hostdev.data.preprocess.criteo import CriteoText
from hostdev.data.preprocess.earlier_vocabulary import read_earlier
from hostdev.data.preprocess.info import gather
from hostdev.data.preprocess.table import TableSource
from hostdev.data.preprocess.table_options import TableOptions
from hostdev.data.schema import Column, Schema, Space, from_json
from tests import forks
from tests.data import twins
from tests.data.test_check import edit_vocabulary, wrong
from tests.data.test_criteo import line
from tests.data.test_manifest import VERSION_1
from tests.data.test_restart import fail_at
from tests.data.test_sources import contents
from tests.data.test_table import write
from tests.manifests import edit_manifest

HOW = {"label": "label", "numeric": ("x",), "categorical": ("a", "b"), "bags": (("g", None),), "share": (("b", "a"),)}


def rows_of(seed, n, values):
    rng = random.Random(seed)

    def value():
        return rng.choice(["", f"v{int(rng.paretovariate(0.6)) % values}"])

    return {
        "label": [i % 2 for i in range(n)],
        "x": [rng.choice([None, rng.uniform(-9, 9)]) for _ in range(n)],
        "a": [value() for _ in range(n)],
        "b": [value() for _ in range(n)],
        "g": [[value() for _ in range(rng.randrange(4))] for _ in range(n)],
        "part": [rng.choice(["train", "train", "test"]) for _ in range(n)],
    }


def table(path, columns):
    files = twins.write_arrow(path, columns, rows_per_batch=40)
    return TableSource([files], TableOptions(**HOW, test_column=("part", "test")))


class Dictionary:
    """The obvious twin: ids by (space, value), which only ever become more."""

    def __init__(self, dense, spaces):
        self.oov = {space: dense + i for i, space in enumerate(spaces)}
        self.ids, self.fields = {}, [("x", None), *((space, None) for space in spaces)]

    def take_in(self, columns, threshold):
        """Give new values their ids; return the uses of all."""
        uses = {space: Counter() for space in self.oov}
        for row in range(len(columns["label"])):
            if columns["part"][row] == "train":
                uses["a"].update([columns["a"][row], columns["b"][row]])
                uses["g"].update(value for value in columns["g"][row] if value != "")
        for space, found in uses.items() if threshold is not None else ():
            for value, count in found.items():
                if count > threshold and (space, value) not in self.ids:
                    self.ids[space, value] = len(self.fields)
                    self.fields.append((space, value))
        counts = [uses[space][value] for space, value in self.fields[len(self.oov) + 1 :]]
        rare = [
            sum(count for value, count in found.items() if (space, value) not in self.ids)
            for space, found in uses.items()
        ]
        return [columns["part"].count("train"), *rare, *counts]

    def encode(self, columns, row):
        a, b = (self.ids.get(("a", columns[name][row]), self.oov["a"]) for name in "ab")
        return [a, b], [self.ids.get(("g", value), self.oov["g"]) for value in columns["g"][row] if value != ""]


@pytest.mark.parametrize("seed", range(6))
def test_four_days_against_a_dictionary(tmp_path, seed):
    rng, known = random.Random(seed), Dictionary(1, ["a", "g"])
    earlier, first = None, None
    for day in range(4):
        frozen = day == 2
        threshold = rng.randrange(3)
        columns = rows_of(10 * seed + day, rng.choice([60, 150]), 30 * (day + 1))
        options = Options(threshold=threshold, test_fraction=None, rows_per_shard=50, dense="standard")
        out = tmp_path / f"day{day}"
        if earlier is not None:
            earlier = read_earlier(earlier, frozen=frozen)
        found = build(
            table(tmp_path / f"{day}.arrow", columns), out, options, threads=rng.choice([1, 3]), earlier=earlier
        )
        counts = known.take_in(columns, None if frozen else threshold)
        expected = [(*field, count) for field, count in zip(known.fields, counts, strict=True)]
        assert twins.vocabulary(out) == expected
        for split in ("train", "test"):
            mine = [row for row in range(len(columns["label"])) if columns["part"][row] == split]
            read = twins.read(out, split)
            assert [(ids, bags[0]) for _, _, ids, bags in read] == [known.encode(columns, row) for row in mine]
        first = first or found
        statistics = [
            {name: one.statistics[name] for name in ("dense_mean", "dense_deviation")} for one in (first, found)
        ]
        assert statistics[0] == statistics[1]
        assert check(out).wrong == []
        spaces = {space.name: space for space in found.schema.spaces}
        assert {name: space.values for name, space in spaces.items()} == {
            name: sum(key[0] == name for key in known.ids) for name in ("a", "g")
        }
        curves = gather(out).curves
        uses = {name: [n for space, value, n in expected if space == name and value is not None] for name in spaces}
        assert {name: curve.ids for name, curve in curves.items()} == {
            name: sum(n > 0 for n in of_space) for name, of_space in uses.items()
        }
        earlier = out


def test_the_result_does_not_depend_on_threads(tmp_path):
    options = Options(threshold=0, test_fraction=None, rows_per_shard=50)
    build(table(tmp_path / "1.arrow", rows_of(1, 200, 20)), tmp_path / "one", options)
    source = table(tmp_path / "2.arrow", rows_of(2, 300, 60))
    made = []
    for threads in (1, 2, 5):
        build(source, tmp_path / f"two{threads}", options, threads=threads, earlier=read_earlier(tmp_path / "one"))
        made.append(contents(tmp_path / f"two{threads}"))
    assert made[0] == made[1] == made[2]


def criteo_lines(path, values):
    path.write_text("".join(line(str(i % 2), [i], [a, b]) + "\n" for i, (a, b) in enumerate(values)))
    return path


def test_criteo(tmp_path, in_process):
    """C1 has A, B and no value; the next day C is new in C1, and A in C2, whose ids lie after all earlier ones."""
    A, B, C = "0000000a", "0000000b", "FFFFFFFF"
    first = criteo_lines(tmp_path / "1.txt", [(A, B), (B, B), ("", B)] * 20)
    second = criteo_lines(tmp_path / "2.txt", [(C, A), (A, A), (C, B)] * 20)
    flags = ["--threshold", "0", "--rows-per-shard", "9"]
    assert in_process(preprocess, "criteo", first, "--out", tmp_path / "one", *flags)[0] == 0
    code, out, _ = in_process(preprocess, "criteo", second, "--out", tmp_path / "two", "--vocabulary", tmp_path / "one")
    assert code == 0
    ids = [row for row in twins.vocabulary(tmp_path / "two") if row[1] not in (None, "")]
    assert [row[:2] for row in ids] == [("C1", A), ("C1", B), ("C2", B), ("C1", C.lower()), ("C2", A)]
    one, two = (manifest.read(tmp_path / name) for name in ("one", "two"))
    assert f"ids      {one.schema.rows:,} kept from one, 2 new; numbers are scaled as in that data set\n" in out
    assert two.schema.rows == one.schema.rows + 2
    assert two.statistics["dense_max"] == one.statistics["dense_max"]
    assert two.options["threshold"] == 0
    assert two.schema.spaces[0] == Space("C1", 13, 39, 3, ((one.schema.rows, 1),))
    assert check(tmp_path / "two").wrong == []
    code, out, _ = in_process(preprocess, "info", tmp_path / "two", "--out", tmp_path / "two.png")
    assert code == 0
    assert f"ids      {one.schema.rows:,} kept from one, 2 new" in out


def test_version_1_says_nowhere_which_ids_are_whose(tmp_path):
    lines = criteo_lines(tmp_path / "1.txt", [("0000000a", "0000000b")] * 40)
    old = manifest.read(VERSION_1)
    options = Options(threshold=0, dense=old.options["dense"])
    build(CriteoText([lines]), tmp_path / "out", options, earlier=read_earlier(VERSION_1))
    before, after = twins.vocabulary(VERSION_1), twins.vocabulary(tmp_path / "out")
    assert [row[:2] for row in after[: len(before)]] == [row[:2] for row in before]
    assert check(tmp_path / "out").wrong == []


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (second_pass, "write_shard", 1),
        (runner, "write_lists", 1),
        (learning.Learning, "run", 0),
        (words, "write_values", 0),
    ],
)
def test_interrupted_work_goes_on_with_the_same_earlier_ids(tmp_path, monkeypatch, capsys, owner, name, at):
    options = Options(threshold=0, test_fraction=None, rows_per_shard=50)
    for day, values in ((1, 20), (2, 30)):
        build(table(tmp_path / f"{day}.arrow", rows_of(day, 200, values)), tmp_path / f"from{day}", options)
    source = table(tmp_path / "3.arrow", rows_of(3, 300, 60))
    build(source, tmp_path / "straight", options, earlier=read_earlier(tmp_path / "from1"))
    for frozen, begun_from, same in ((False, "from1", True), (False, "from2", False), (True, "from1", False)):
        with monkeypatch.context() as patched:
            fail_at(patched, owner, name, at, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                build(source, tmp_path / "out", options, earlier=read_earlier(tmp_path / begun_from, frozen=frozen))
        capsys.readouterr()
        build(source, tmp_path / "out", options, earlier=read_earlier(tmp_path / "from1"))
        assert ("unfinished work of another command" in capsys.readouterr().err) is not same
        result = contents(tmp_path / "out")
        assert result == contents(tmp_path / "straight")
        (tmp_path / "out").rename(tmp_path / f"done-{begun_from}-{frozen}")


# Kills itself at a random moment of the work.
KILLED = """
import os, signal, sys, threading, time
from pathlib import Path
from tests.data import test_earlier_vocabulary as test

after, folder = float(sys.argv[1]), Path(sys.argv[2])
threading.Thread(target=lambda: (time.sleep(after), os.kill(os.getpid(), signal.SIGKILL)), daemon=True).start()
test.make_third_day(folder, folder / "out")
"""


def make_third_day(folder, out):
    options = Options(threshold=0, test_fraction=None, rows_per_shard=100)
    source = TableSource([folder / "3.arrow"], TableOptions(**HOW, test_column=("part", "test")))
    return build(source, out, options, earlier=read_earlier(folder / "from"))


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path):
    build(table(tmp_path / "1.arrow", rows_of(1, 300, 30)), tmp_path / "from", Options(threshold=0, test_fraction=None))
    twins.write_arrow(tmp_path / "3.arrow", rows_of(3, 6000, 900), rows_per_batch=100)
    start = time.monotonic()
    make_third_day(tmp_path, tmp_path / "straight")
    seconds = time.monotonic() - start
    moments, killed = random.Random(1), 0
    for _ in range(12):
        after = str(moments.uniform(0, 1.5) * seconds)
        done = forks.run([sys.executable, "-c", KILLED, after, tmp_path], capture_output=True, check=False)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        killed += done.returncode != 0
        if (tmp_path / "out").exists():
            assert contents(tmp_path / "out") == contents(tmp_path / "straight")
            for path in (tmp_path / "out", tmp_path / ".out.partial"):
                shutil.rmtree(path, ignore_errors=True)
    if not (tmp_path / "out").exists():
        make_third_day(tmp_path, tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "straight")
    assert killed >= 3


def test_hash_buckets(tmp_path, in_process):
    path = write(tmp_path / "t.csv", "y,c,x\n" + "\n".join(f"{i % 2},v{i % 7},{i}" for i in range(60)) + "\n")
    columns = ["--label", "y", "--categorical", "c", "--numeric", "x"]
    flags = [*columns, "--hash-buckets", "50"]
    assert in_process(preprocess, "table", path, "--out", tmp_path / "one", *flags)[0] == 0
    more = write(tmp_path / "u.csv", "y,c,x\n" + "\n".join(f"{i % 2},v{i % 9},{9 * i}" for i in range(60)) + "\n")
    for given in ([], ["--hash-buckets", "50"]):
        out = tmp_path / f"two{len(given)}"
        code, said, _ = in_process(preprocess, "table", more, "--out", out, "--vocabulary", tmp_path / "one", *given)
        assert code == 0
        assert "ids      hashed into as many buckets as in one; numbers are scaled as in that data set\n" in said
        one, two = manifest.read(tmp_path / "one"), manifest.read(out)
        assert two.schema == one.schema
        assert two.statistics["dense_max"] == one.statistics["dense_max"]
        assert check(out).wrong == []
    for given, message in (
        (["--hash-buckets", "51"], "--hash-buckets 51: {one} has 50 buckets, whose ids --vocabulary keeps; omit"),
        (["--threshold", "3"], "--threshold has no effect with --vocabulary {one}, whose ids are hashed; omit --thr"),
        (["--frozen-vocabulary"], "--frozen-vocabulary has no effect with {one}, whose ids are hashed; omit --fro"),
    ):
        refused(tmp_path, in_process, more, given, message.format(one=tmp_path / "one"))


def refused(tmp_path, in_process, path, given, message, command="table"):
    code, _, error = in_process(
        preprocess, command, path, "--out", tmp_path / "no", "--vocabulary", tmp_path / "one", *given
    )
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--label", "c"], "--label c: {one} has y; leave the flag out: --vocabulary takes the columns from"),
        (["--numeric", "x,z"], "--numeric x, z: {one} has x; leave the flag out"),
        (["--categorical", "c"], "--categorical c: {one} has c, d; leave the flag out"),
        (["--bag", "g=;"], "--bag g=;: {one} has g=|; leave the flag out"),
        (["--share", "d=c"], "--share d=c: {one} has none; leave the flag out"),
        (["--positive", ">3"], "--positive >3: {one} has none; leave the flag out"),
        (["--dense", "log"], "--dense: this command has log, but {one} has max; --vocabulary keeps that data set's"),
        (
            ["--hash-buckets", "9"],
            "--hash-buckets 9: {one} has a vocabulary, whose ids --vocabulary keeps; omit --hash",
        ),
        (
            ["--frozen-vocabulary", "--threshold", "2"],
            "--threshold has no effect with --frozen-vocabulary; leave one of",
        ),
    ],
)
def test_what_differs_from_the_earlier_columns_is_refused(tmp_path, in_process, given, message):
    rows = "\n".join(f"{i % 2},{i},v{i % 7},w{i % 3},a|b{i % 4}" for i in range(60))
    path = write(tmp_path / "t.csv", "y,x,c,d,g\n" + rows + "\n")
    flags = ["--label", "y", "--numeric", "x", "--categorical", "c,d", "--bag", "g=|"]
    assert in_process(preprocess, "table", path, "--out", tmp_path / "one", *flags)[0] == 0
    refused(tmp_path, in_process, path, given, message.format(one=tmp_path / "one"))
    order = ["--categorical", "d,c", "--label", "y"]  # the order is that of the earlier data set
    code, _, error = in_process(
        preprocess, "table", path, "--out", tmp_path / "two", "--vocabulary", tmp_path / "one", *order
    )
    assert (code, error) == (0, "")
    assert manifest.read(tmp_path / "two").schema == manifest.read(tmp_path / "one").schema


def test_other_commands_and_missing_columns(tmp_path, in_process):
    path = write(tmp_path / "t.csv", "y,c\n" + "\n".join(f"{i % 2},v{i % 7}" for i in range(60)) + "\n")
    flags = ["--label", "y", "--categorical", "c"]
    assert in_process(preprocess, "table", path, "--out", tmp_path / "one", *flags)[0] == 0
    made = f"--vocabulary {tmp_path / 'one'}: this data set was made by another command; use preprocess table"
    refused(tmp_path, in_process, path, [], made, "criteo")
    other = write(tmp_path / "u.csv", "y,d\n0,1\n1,2\n")
    refused(tmp_path, in_process, other, [], "u.csv has no column 'c'; it has y, d")
    code, _, error = in_process(preprocess, "table", path, "--out", tmp_path / "no", *flags, "--frozen-vocabulary")
    assert code == 2
    assert "--frozen-vocabulary has no effect without --vocabulary FROM; give both" in error
    code, _, error = in_process(
        preprocess, "table", path, "--out", tmp_path / "no", *flags, "--vocabulary", tmp_path / "x"
    )
    assert code == 2
    assert f"{tmp_path / 'x'} is not a data set" in error


@pytest.fixture
def grown(tmp_path):
    options = Options(threshold=0, test_fraction=None)
    build(table(tmp_path / "1.arrow", rows_of(1, 200, 20)), tmp_path / "one", options)
    build(
        table(tmp_path / "2.arrow", rows_of(2, 300, 60)),
        tmp_path / "data",
        options,
        earlier=read_earlier(tmp_path / "one"),
    )
    return tmp_path / "data"


def test_check_finds_what_is_wrong_with_a_grown_vocabulary(grown):
    schema = manifest.read(grown).schema
    a, g = schema.spaces
    new = a.more[0][0]
    assert check(grown).lines[2].startswith(f"{grown}/vocabulary.arrow: {schema.rows} ids ({new} kept from ")
    edit_vocabulary(grown, lambda columns: columns["value"].__setitem__(new, columns["value"][a.first]))
    assert wrong(grown)[0].startswith(f"vocabulary.arrow: ids {a.first} and {new} both stand for 'a' value ")
    edit_vocabulary(grown, lambda columns: columns["field"].__setitem__(new, "g"))
    assert wrong(grown)[0].startswith(f"vocabulary.arrow: id {new} belongs to 'g', not 'a'")
    with pytest.raises(UserError, match="belongs to 'g', not 'a'; preprocess the data again"):
        read_earlier(grown)
    assert not g.has(np.array([a.first, new, a.oov, g.oov])).any()


def test_an_earlier_vocabulary_with_a_value_twice_is_refused(grown, tmp_path):
    edit_vocabulary(grown, lambda columns: columns["value"].__setitem__(5, columns["value"][4]))
    with pytest.raises(UserError, match="a value of 'a' occurs twice"):
        build(
            table(tmp_path / "3.arrow", rows_of(3, 90, 9)),
            tmp_path / "out",
            Options(test_fraction=None),
            earlier=read_earlier(grown),
        )
    assert not (tmp_path / "out").exists()


SCHEMA = Schema("y", ("x",), (Column("a", "id", "a"),), (Space("a", 1, 2, 3, ((5 + 2, 4), (20, 1))),), 30)


def test_segments():
    [space] = SCHEMA.spaces
    assert space.segments == ((2, 3), (7, 4), (20, 1))
    assert (space.values, space.in_words()) == (8, "2..4, 7..10, 20..20")
    ids = np.arange(30)
    assert ids[space.has(ids)].tolist() == [space.id_at(i) for i in range(8)] == [2, 3, 4, 7, 8, 9, 10, 20]
    assert space.grown(21, 2).segments[-1] == (20, 3)
    assert space.grown(25, 2).segments[-1] == (25, 2)
    assert Space("a", 1, 2, 3).grown(5, 2) == Space("a", 1, 2, 5)
    assert Space("a", 1, 9, 0).grown(20, 2) == Space("a", 1, 20, 2)
    assert from_json(json.loads(json.dumps(SCHEMA.as_json()))) == SCHEMA
    assert "more" not in str(Schema("y", (), (Column("a", "id", "a"),), (Space("a", 0, 1, 3),), 4).as_json())


@pytest.mark.parametrize("more", [[[4, 2]], [[7, 0]], [[7, 30]], [[7, 4], [8, 1]], [7], [[7, "a"]], "x", [[1.5, 2]]])
def test_segments_that_cannot_be(more):
    content = json.loads(json.dumps(SCHEMA.as_json()))
    content["spaces"][0]["more"] = more
    with pytest.raises((ValueError, TypeError)):
        from_json(content)


def test_values_that_were_in_no_space_before(tmp_path):
    """A column whose values were all too rare has no ids on the first day, and gets some on the second."""
    first = write(tmp_path / "1.csv", "label,a,b\n" + "\n".join(f"{i % 2},{i},v{i % 3}" for i in range(40)) + "\n")
    second = write(tmp_path / "2.csv", "label,a,b\n" + "\n".join(f"{i % 2},{i % 4},w{i}" for i in range(40)) + "\n")
    how, options = TableOptions(label="label", categorical=("a", "b")), Options(threshold=2)
    one = build(TableSource([first], how), tmp_path / "one", options)
    assert one.schema.spaces[0].values == 0
    two = build(TableSource([second], how), tmp_path / "two", options, earlier=read_earlier(tmp_path / "one"))
    assert two.schema.spaces == (Space("a", 0, one.schema.rows, 4), one.schema.spaces[1])
    assert check(tmp_path / "two").wrong == []


def change(**values):
    return lambda content: content["options"].update(values)


@pytest.mark.parametrize(
    ("edit", "what"),
    [
        (change(dense="most"), "options.dense is not one of"),
        (change(hash_buckets=5), "vocabulary"),
        (change(threshold="1"), "options.threshold is"),
        (change(label=None), "label"),
        (change(bags={}), "bags"),
        (change(share=[]), "share"),
        (change(numeric="x"), "numeric"),
        (change(categorical=None), "categorical"),
        (lambda content: content["statistics"].update(dense_max=[1.0, 2.0]), "statistics.dense_max .*one value"),
        (lambda content: content["statistics"].update(dense_max=["1"]), "statistics.dense_max.0. is"),
        (lambda content: content["statistics"].pop("dense_max"), "dense_max is missing"),
    ],
)
def test_a_manifest_that_lacks_what_is_kept_is_refused(grown, edit, what):
    edit_manifest(grown, edit)
    with pytest.raises(
        UserError, match=rf"manifest.json is broken \((an invalid value of )?{what}.*\); preprocess the data"
    ):
        read_earlier(grown)


@pytest.mark.parametrize("earlier", [7, {}, {"path": "x"}, {"path": 1, "identity": "", "ids": "1", "frozen": 0}])
def test_what_is_recorded_wrongly_is_not_told(grown, earlier, in_process):
    edit_manifest(grown, change(earlier=earlier))
    assert check(grown).wrong == []
    assert "kept" not in "".join(check(grown).lines)


def test_values_that_are_written_in_another_way_are_told_of(tmp_path, in_process):
    """As pandas writes integers of a column in which some are missing."""
    first = write(tmp_path / "1.csv", "y,u,c\n" + "".join(f"{i % 2},{i % 7},v{i % 3}\n" for i in range(60)))
    second = write(tmp_path / "2.csv", "y,u,c\n" + "".join(f"{i % 2},{i % 7}.0,v{i % 3}\n" for i in range(60)))
    flags = ["--label", "y", "--categorical", "u,c"]
    assert in_process(preprocess, "table", first, "--out", tmp_path / "one", *flags)[0] == 0
    for path, told in ((first, 0), (second, 1)):
        out = tmp_path / f"two{told}"
        code, said, _ = in_process(preprocess, "table", path, "--out", out, "--vocabulary", tmp_path / "one")
        line = (
            "ids      u: only 0.0% of its training occurrences have an id in one; "
            "check that both data sets write its values the same way"
        )
        assert (code, said.count(line)) == (0, told)
        assert manifest.read(out).statistics["known_shares"] == {"u": 1.0 - told, "c": 1.0}
        assert check(out).wrong == []
