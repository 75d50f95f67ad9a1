"""Rows of plain Python values have the ids and numbers that Arrow's way gives them, or are left to it."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hostdev.core import cli
from hostdev.core.errors import UserError
from hostdev.data import manifest
from hostdev.data.preprocess import cli as preprocess
from hostdev.data.preprocess.encoding import Encoding
from hostdev.ext.predict.rows import as_batch

TEXTS = ["a", "b", "", "ä", " a", "a|b", "[1, 2]", "x\u2003", "\ud800", "NA"]
LARGE = [2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**40, 10**5000]
NUMBERS = ["1", "2", "01", "1.0", "-3", "", "99", "nan"]
FORMS = {
    "text": {"tags": st.lists(st.sampled_from(TEXTS), max_size=4).map("|".join), "u": st.sampled_from(TEXTS)},
    "numbers": {"tags": st.lists(st.sampled_from(NUMBERS), max_size=4).map("|".join), "u": st.sampled_from(NUMBERS)},
    "lists": {"tags": st.lists(st.none() | st.sampled_from(TEXTS), max_size=4), "u": st.sampled_from(TEXTS)},
    "integers": {
        "tags": st.lists(st.integers(-3, 5) | st.sampled_from(LARGE), max_size=4),
        "u": st.integers(-3, 5) | st.sampled_from(LARGE),
    },
    "odd": {
        "tags": st.lists(st.sampled_from([1, 2, "", None, pd.NA, "a"]) | st.builds(np.arange, st.just(2)), max_size=2),
        "u": st.sampled_from([1, "", pd.NA]),
    },
    "mixed": {
        "tags": st.lists(st.integers(1, 2) | st.sampled_from(["1", True, 1.5]), max_size=3) | st.sampled_from(TEXTS),
        "u": st.sampled_from(["1", 1, 1.0, True, "a"]),
    },
}
TRAINED = {
    "text": (["a|b", "b|a|c", "", "a"], ["a", "b", "ä", "a"]),
    "numbers": (["1|2", "2|-3|1", "", "7"], ["1", "2", "-3", "1"]),
    "lists": ([["a", "b"], ["b", "a", "c"], [], ["a"]], ["a", "b", "ä", "a"]),
    "integers": ([[1, 2], [2, -3, 1], [], [5]], [1, 2, -3, 1]),
}
FORMS["trained numbers"] = {
    "tags": st.lists(st.sampled_from(["1", "2", "-3", ""]), max_size=4).map("|".join),
    "u": st.sampled_from(["1", "2", "-3"]),
}
FORMS["trained integers"] = {
    "tags": st.lists(st.sampled_from([1, 2, -3, 5]), max_size=4),
    "u": st.sampled_from([1, 2, -3]),
}
LABELLED = {"y": [0, 1] * 8, "split": ["train"] * 8 + ["test"] * 8, "x": [1.0, 2.0, 3.0, 4.0] * 4}


def encoding_of(folder, trained, options):
    tags, users = TRAINED[trained]
    pq.write_table(pa.table({**LABELLED, "tags": tags * 4, "u": users * 4}), folder / "t.parquet")
    bag = "tags" if trained in ("lists", "integers") else "tags=|"
    flags = ["--label", "y", "--numeric", "x", "--categorical", "u", "--bag", bag, "--test-column", "split=test"]
    arguments = ["table", folder / "t.parquet", *flags, *options, "--threshold", 0, "--out", folder / "data"]
    if "--hash-buckets" in options:
        arguments[-4:-2] = []
    assert cli.run(preprocess.PROG, preprocess.main, list(map(str, arguments))) == 0
    found = manifest.read(folder / "data")
    return Encoding(found, None if found.vocabulary is None else Path(folder / "data" / found.vocabulary))


def rows_of(served, n):
    numbers = st.integers(-2, 9) | st.floats(-2, 9)
    missing = st.nothing()
    if not served.startswith("trained"):
        numbers |= st.sampled_from([2**53 + 1, 10**40, 1e39])
        missing = st.none()
    columns = {**FORMS[served], "x": numbers}
    return st.fixed_dictionaries(
        {name: st.lists(missing | one, min_size=n, max_size=n) for name, one in columns.items()}
    )


def check(encoding, rows):
    """Return whether `PlainRows` knew the rows; what it gave must be what Arrow's way gives."""
    few = encoding.plain.encode(rows)
    if few is None:
        return False
    expected = encoding.encode(as_batch(rows, encoding))
    np.testing.assert_array_equal(few.ids, expected.ids)
    np.testing.assert_array_equal(few.dense, expected.dense)
    assert few.dense.flags.c_contiguous and few.ids.flags.c_contiguous  # else last bits of predictions may differ
    for name, parts in expected.bags.items():
        for part, right in zip(few.bags[name], parts, strict=True):
            np.testing.assert_array_equal(part, right)
            assert part.dtype == right.dtype
    return True


@pytest.mark.drawn
@pytest.mark.parametrize("options", [(), ("--last", "tags=2"), ("--hash-buckets", 50)], ids=["all", "last", "hashed"])
@pytest.mark.parametrize("trained", TRAINED)
def test_the_same_as_by_arrow(tmp_path, trained, options):
    encoding = encoding_of(tmp_path, trained, options)
    tags, users = TRAINED[trained]
    assert check(encoding, {"tags": tags, "u": users, "x": [1, 2.5, 3, 4]})  # rows as in training are not left to Arrow

    @settings(max_examples=150, deadline=None)
    @given(st.sampled_from(sorted(FORMS)).flatmap(lambda served: rows_of(served, 2)))
    def compare(case):
        check(encoding, case)

    compare()


def test_usual_rows_are_known(tmp_path):
    encoding = encoding_of(tmp_path, "numbers", ())
    assert check(encoding, {"u": ["1", "2"], "tags": ["", "1|2"], "x": [None, 3]})
    assert check(encoding, {"u": [1, 2], "tags": [[], [1, 2]], "x": [None, 3]})
    with pytest.raises(UserError):
        encoding.encode(as_batch({"u": ["1"], "tags": ["1"], "x": [1e39]}, encoding))
    assert encoding.plain.encode({"u": ["1"], "tags": ["1"], "x": [1e39]}) is None
