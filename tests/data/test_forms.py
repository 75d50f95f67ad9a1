"""How texts are written, against regular expressions."""

import datetime
import re

import pyarrow as pa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hostdev.data.preprocess import forms
from hostdev.data.preprocess.serving import format_texts

TIME = r"([01]\d|2[0-3]):[0-5]\d(:([0-5]\d|60)(\.\d{1,9})?)?"
DATE = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])"
ZONES = ("", "Z", r"\+00:00", r"\+0000", r"\+00", r"[+-]\d\d:\d\d", r"[+-]\d{4}", r"[+-]\d\d")


def precision_of(time):
    if time.count(":") == 1:
        return 0
    return 1 + len(time.partition(".")[2])


def naive(text):
    """Return the form of a text."""
    if text == "":
        return forms.EMPTY
    if not text.isascii():  # other digits do not count
        return forms.TEXT
    if text in forms.MISSING_WORDS:
        return forms.MISSING_WORD + forms.MISSING_WORDS.index(text)
    for form, pair in (
        (forms.TITLE, "True False"),
        (forms.LOWER, "true false"),
        (forms.UPPER, "TRUE FALSE"),
    ):
        if text in pair.split():
            return form
    if re.fullmatch(DATE, text):
        return forms.DATE
    if re.fullmatch(TIME, text):
        return forms.TIME + precision_of(text)
    for number, zone in enumerate(ZONES):
        if found := re.fullmatch(f"{DATE}([ T])({TIME}){zone}", text):
            return forms.timestamp_form(found[3] == "T", precision_of(found[4]), number)
    if re.fullmatch(r"0|-?[1-9]\d*", text):
        return forms.INTEGER
    if re.fullmatch(r"0\d{1,19}", text):
        return forms.PADDED_TO + len(text)
    if re.fullmatch(r"-?\d(\.\d+)?e\+\d\d+", text) and int(text.partition("+")[2]) >= 16:
        return forms.LARGE_FLOAT
    if (found := re.fullmatch(r"(-?(0|[1-9]\d*))\.(\d{1,18})", text)) and not re.fullmatch(r"-0\.0+", text):
        digits = len(found[3])
        if int(found[3]):
            return forms.FRACTION + digits
        return forms.LARGE_FLOAT if digits == 1 and abs(int(found[1])) >= 2**53 else forms.WHOLE + digits
    number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", text)
    return forms.NUMBER if number else forms.TEXT


def found_of(texts, of=None):
    whole = pa.array(["before", *texts, "after"], of or pa.string())
    return forms.each_form(whole.slice(1, len(texts))).tolist()


NUMBERS = st.from_regex(r"\A[+-]?[0-9]{0,19}(\.[0-9]{0,19})?(e[+-]?[0-9]{1,3})?\Z")
STAMPS = st.from_regex(
    r"\A[0-9]{4}-[01][0-9]-[0-3][0-9]([ T][0-2][0-9]:[0-6][0-9](:[0-6][0-9](\.[0-9]{1,10})?)?)?"
    r"(Z|[+-][0-9]{2}(:?[0-9]{2})?)?\Z"
)
TIMES = st.from_regex(r"\A[0-2][0-9]:[0-6][0-9](:[0-6][0-9](\.[0-9]{0,10})?)?\Z")
WORDS = st.sampled_from(["True", "FALSE", "true", "tRue", "NA", "NaN", "<NA>", "-nan", "None", "n/a", "N", "#N/A", "x"])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.one_of(NUMBERS, STAMPS, TIMES, WORDS, st.text("0123456789-+.:eTZ ", max_size=12), st.text())))
@example(["9007199254740991.0", "9007199254740992.0", "-0", "-0.0", "00", "1e+16", "1e+15", "1.5e+300", "-1e+16"])
@example(["2024-12-31", "2024-13-01", "2024-12-31 24:00", "2024-12-31T23:59:58.123456789Z", "2024-12-31 23:59+00"])
@example(["", "-", ".", "1.", ".5", "+1", "1." + "0" * 18, "1." + "0" * 19, "0" * 20, "0" * 21, "9" * 40])
def test_forms(texts):
    expected = [naive(text) for text in texts]
    for of in (pa.string(), pa.large_string()):
        assert found_of(texts, of) == expected, list(zip(texts, expected, found_of(texts), strict=True))


def test_each_example_is_of_its_form():
    assert found_of(forms.EXAMPLES.values()) == list(forms.EXAMPLES)


def test_times_of_day_beside_missing_values_have_one_text():
    """They were refused as ambiguous: words for missing values counted as decimals of the second."""
    written = forms.Written(forms.find_forms(pa.array(["12:30:00", "NA", "01:20:59"])), ("text",))
    found = format_texts(pa.array([datetime.time(12, 30), datetime.time(1, 20, 59)]), written, hashed=True)
    assert [each.to_pylist() for each in found.texts] == [["12:30:00", "01:20:59"]]
