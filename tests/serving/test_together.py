"""Requests that are encoded together have the ids and numbers that each has alone, and fail alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hostdev
from hostdev.core.errors import UserError
from hostdev.data.batch import concatenate
from hostdev.ext.serving.model import ServedModel
from tests.serving.helpers import FILMS, bits, repeated

INTEGERS = st.integers(-3, 45) | st.sampled_from([2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63)])
NUMBERS = st.floats(-5, 50) | st.sampled_from([0.0, 1.0, 7.0, 1e39, 2.0**60])
TEXTS = st.sampled_from(["", "1", "7", "07", "7.0", "true", "false", " 7 ", "u1", "m0001", "x", "a|b", "ä", "NA"])
LISTS = st.lists(st.sampled_from("abcdefx"), max_size=3) | st.lists(st.integers(1, 3), max_size=3)
VECTORS = st.lists(st.floats(-2, 2), min_size=3, max_size=3) | st.lists(st.integers(-2, 2), min_size=2, max_size=3)
# By column: what most requests have, and what some have.
TYPED = {
    "shop": (st.integers(1, 45), INTEGERS | TEXTS | NUMBERS),
    "is_new": (st.booleans(), st.booleans() | TEXTS | st.integers(0, 1)),
    "price": (st.floats(0, 50), INTEGERS | NUMBERS | TEXTS),
    "tags": (st.lists(st.sampled_from("abcdef"), min_size=1, max_size=3), LISTS),
    "emb": (st.lists(st.floats(-2, 2), min_size=3, max_size=3), VECTORS),
}
FILM = {
    "user": (st.sampled_from(["u1", "u2", "nobody", ""]), TEXTS | INTEGERS),
    "item": (st.sampled_from(["m0001", "m0007", ""]), TEXTS | INTEGERS),
    "age": (st.floats(1, 99), INTEGERS | NUMBERS | TEXTS),
    "genres": (st.sampled_from(["Drama|War", "", "Drama"]), TEXTS | LISTS),
    "history": (st.sampled_from(["m0005 m0007", "m0001"]), TEXTS),
}


@st.composite
def requests_of(draw, columns):
    found = []
    for _ in range(draw(st.integers(2, 5))):
        n = draw(st.integers(1, 4))
        request = {}
        for name, (usual, any_) in columns.items():
            values = any_ if draw(st.integers(0, 9)) == 0 else usual
            if draw(st.integers(0, 4)) == 0:
                values = st.none() | values
            request[name] = draw(st.lists(values, min_size=n, max_size=n))
        found.append(request)
    return found


def compare(predictor, requests):
    """Return whether the requests were encoded together; if so, it must be to the same batch."""
    try:
        whole = predictor.encode_columns(*requests)
    except Exception:
        whole = None
    try:
        alone = concatenate([predictor.encode(request) for request in requests])
    except (UserError, UnicodeError):
        assert whole is None
        return False
    if whole is None:
        return False
    for name in ("dense", "ids"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(alone, name))
        assert getattr(whole, name).dtype == getattr(alone, name).dtype
    assert whole.bags.keys() == alone.bags.keys()
    for name, (values, lengths) in alone.bags.items():
        np.testing.assert_array_equal(whole.bags[name][0], values)
        np.testing.assert_array_equal(whole.bags[name][1], lengths)
    return True


@pytest.mark.parametrize(("run", "columns"), [("film_run", FILM), ("typed_run", TYPED)])
def test_the_same_as_alone(request, run, columns):
    predictor, count = hostdev.Predictor(request.getfixturevalue(run)), [0, 0]

    @settings(max_examples=300, deadline=None)
    @given(requests_of(columns))
    def check(requests):
        count[compare(predictor, requests)] += 1

    check()
    assert count[True] > 10


def test_usual_requests_are_encoded_together(film_run, typed_run, criteo_run):
    predictor = hostdev.Predictor(film_run)
    assert compare(predictor, [FILMS, repeated(FILMS, 1), repeated(FILMS, 70)])
    whole_numbers = {**FILMS, "age": [31, None, 54, 18]}
    assert compare(predictor, [FILMS, whole_numbers])
    typed = {"shop": [3, 99], "is_new": [True, False], "price": [2.5, 7], "tags": [["a"], ["b", "x"]]}
    typed["emb"] = [[0.5, 1.0, 2.0]] * 2
    assert compare(hostdev.Predictor(typed_run), [typed, typed])
    criteo = {f"I{i}": [i, None] for i in range(1, 14)} | {f"C{i}": ["0000000f", ""] for i in range(1, 27)}
    assert compare(hostdev.Predictor(criteo_run), [criteo, criteo, repeated(criteo, 1)])


def test_an_error_of_all_rows_is_left_to_each_request(film_run, monkeypatch):
    """Numbers may be too large only once they are scaled."""
    predictor = hostdev.Predictor(film_run)

    def fail(numbers):
        if np.nanmax(numbers) > 1e30:
            raise UserError("too large")
        return np.zeros_like(numbers, np.float32)

    monkeypatch.setattr(predictor.encoding._scaling, "transform", fail)
    large = {**FILMS, "age": [1.0, 2.0, 1e35, 3.0]}
    batch, [first, error, last] = ServedModel(predictor, print).encode([FILMS, large, FILMS])
    assert (first, str(error), last, len(batch)) == (4, "too large", 4, 8)


def test_a_wrong_value_is_its_own_requests_error(film_run):
    lines = []
    model = ServedModel(hostdev.Predictor(film_run), lines.append)
    wrong = {**FILMS, "age": [1.0, 2.0, 1e39, 3.0]}
    batch, [first, error, last] = model.encode([FILMS, wrong, FILMS])
    assert (str(error), first, last, len(batch)) == ("row 3, column 'age': 1e+39 is too large", 4, 4, 8)
    values = model.predict([FILMS, wrong, FILMS], 1 << 20)
    assert str(values[1]) == str(error)
    assert bits(np.concatenate(values[::2])[:, 0]) == bits(hostdev.Predictor(film_run)(repeated(FILMS, 8)))
    assert [str(each) for each in model.predict([wrong, wrong], 1 << 20)] == [str(error)] * 2
    assert lines == []


def test_a_result_that_is_not_finite_is_its_own_requests_error(film_run, monkeypatch):
    model = ServedModel(hostdev.Predictor(film_run), print)
    compute = model.predictor.logits

    def spoil(batch):
        logits = compute(batch).copy()
        logits[5] = np.inf
        return logits

    expected = model.predict([FILMS] * 3, 1 << 20)
    monkeypatch.setattr(model.predictor, "logits", spoil)
    first, error, last = model.predict([FILMS] * 3, 1 << 20)
    assert isinstance(error, UserError) and str(error).startswith("row 2: the model's result is not a finite number")
    assert (bits(first), bits(last)) == (bits(expected[0]), bits(expected[2]))


def test_nothing_is_computed_for_nobody(film_run):
    """Errors are still told; a single client that waits is enough."""
    model = ServedModel(hostdev.Predictor(film_run), print)
    wrong = {**FILMS, "age": [1.0, 2.0, 1e39, 3.0]}
    gone, error = model.predict([FILMS, wrong], 1 << 20, lambda number: number == 1)
    assert gone is None and isinstance(error, UserError)
    assert all(len(each) == 4 for each in model.predict([FILMS, FILMS], 1 << 20, lambda number: number == 1))
