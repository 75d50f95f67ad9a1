"""Warnings about suspicious columns of a data set, from the statistics in its manifest."""

from collections.abc import Iterator, Mapping
from typing import Any

UNKNOWN, APART, SQUEEZED = "out_of_vocabulary_by_column", "apart", "squeezed"  # statistics in the manifest
PADDED = "padded"  # statistic: for each bag, a likely padding value and its share of the bag's training values
_MOST_UNKNOWN = 0.5  # warn if the share of unknown values in test rows exceeds this and twice that in training rows


def unknown_lines(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each column with too many out-of-vocabulary values in training or test rows."""
    shares = statistics.get(UNKNOWN, {})
    for name, train in shares.get("train", {}).items():
        test = shares["test"][name]
        if train == 1:
            yield f"{name}: all values are out of vocabulary: each occurs too rarely (--threshold)"
        elif test > max(_MOST_UNKNOWN, 2 * train):
            yield f"{name}: {test:.1%} of the values in test rows are out of vocabulary, {train:.1%} in training rows"


def lines(statistics: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for each suspicious column."""
    yield from unknown_lines(statistics)
    for name in statistics.get(SQUEEZED, ()):
        yield (
            f"{name}: a few numbers are so large that 99.9% of the others are nearly equal when scaled; use --dense "
            "log, or set clip for this column in a --features file"
        )
    for name in statistics.get(APART, ()):
        yield (
            f"{name}: none of its values occurs in the column whose ids it shares (--share); is the spelling the same?"
        )
    for name, (value, share) in statistics.get(PADDED, {}).items():
        yield (
            f"{name}: {share:.1%} of its values are {value!r}; if this value is only padding, give "
            f"--padding {name}={value}"
        )
