"""Lines about a data set that its user should read before trusting a model: columns that are probably not as meant."""

from collections.abc import Iterator, Mapping
from typing import Any

UNKNOWN, APART, SQUEEZED = "out_of_vocabulary_by_column", "apart", "squeezed"  # statistics in the manifest
PADDED = "padded"  # statistic: by bag, the value that fills it up, and its share of the training rows' values
_MOST_UNKNOWN = 0.5  # a larger share of unknown values in test rows is said, if it is far above that in training rows


def unknown_lines(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each column whose values are mostly out of vocabulary in test rows, or all in training rows."""
    shares = statistics.get(UNKNOWN, {})
    for name, train in shares.get("train", {}).items():
        test = shares["test"][name]
        if train == 1:
            yield f"{name}: all values are out of vocabulary: each occurs too rarely (--threshold)"
        elif test > max(_MOST_UNKNOWN, 2 * train):
            yield f"{name}: {test:.1%} of the values in test rows are out of vocabulary, {train:.1%} in training rows"


def lines(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each column that is probably not as meant."""
    yield from unknown_lines(statistics)
    for name in statistics.get(SQUEEZED, ()):
        yield (
            f"{name}: a few numbers are so large that 99.9% of the others are nearly equal when scaled; use --dense "
            "log, or clip them in a file of --features"
        )
    for name in statistics.get(APART, ()):
        yield f"{name}: no value is one of the column whose ids it shares (--share); are they written the same way?"
    for name, (value, share) in statistics.get(PADDED, {}).items():
        yield (
            f"{name}: {share:.1%} of its values are {value!r}; if that one only fills up the lists, give "
            f"--padding {name}={value}"
        )
