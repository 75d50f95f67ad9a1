"""Preprocessing options that all sources of rows share, and their flags."""

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from hostdev.core.errors import UserError
from hostdev.core.keys import RAW, is_raw
from hostdev.data.preprocess.dense import MODES

FLAGS = ("threshold", "hash_buckets", "dense", "test_fraction", "validation_fraction", "rows_per_shard")


def ids_in_words(ids: int) -> str:
    """Return the number of ids of a data set as text."""
    return "raw ids" if is_raw(ids) else f"{ids:,} ids"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options for the conversion of rows to shards."""

    threshold: int | None = 100  # values seen at most this often in training rows are out of vocabulary; None if hashed
    hash_buckets: int | None = None  # number of hash buckets; None for a vocabulary
    dense: str = "max"  # scaling of the numeric columns: "max", "log" or "standard"
    test_fraction: float | None = 0.1  # share of test rows, drawn by seed and row number; None if the source decides
    validation_fraction: float | None = None  # share of validation rows, drawn in the same way; None for no rows
    seed: int = 2020
    rows_per_shard: int = 1 << 18

    def __post_init__(self) -> None:
        if self.threshold is not None and self.threshold < 0:
            raise UserError(f"--threshold must be at least 0, not {self.threshold}")
        if self.hash_buckets is not None and not 1 <= self.hash_buckets <= 2**62:
            raise UserError(f"--hash-buckets must be from 1 to 2^62, not {self.hash_buckets}")
        if self.dense not in MODES:
            raise UserError(f"--dense must be one of {', '.join(MODES)}, not {self.dense}")
        if self.test_fraction is not None and not 0 <= self.test_fraction < 1:
            raise UserError(f"--test-fraction must be at least 0 and less than 1, not {self.test_fraction}")
        if self.validation_fraction is not None:
            if not 0 < self.validation_fraction < 1:
                raise UserError(
                    f"--validation-fraction must be more than 0 and less than 1, not {self.validation_fraction}"
                )
            if self.validation_fraction + (self.test_fraction or 0) >= 1:
                raise UserError("--test-fraction and --validation-fraction together leave no rows for training")
        if self.rows_per_shard < 1:
            raise UserError(f"--rows-per-shard must be at least 1, not {self.rows_per_shard}")

    def as_json(self) -> dict[str, Any]:
        """Return the options for the manifest, without those that have no effect."""
        found = asdict(self)
        if self.validation_fraction is None:
            del found["validation_fraction"]
            if self.test_fraction is None:
                del found["seed"]
        if self.test_fraction is None:
            del found["test_fraction"]
        return found


def add_options(to: argparse.ArgumentParser, default: Options | None = None) -> None:
    """Add flags for all fields of `Options` but the seed; the value of an absent flag is None."""
    default = default or Options()
    to.add_argument(
        "--threshold",
        type=int,
        metavar="N",
        help=f"a value seen at most N times in training rows is out of vocabulary (default {default.threshold})",
    )
    to.add_argument(
        "--hash-buckets", type=int, metavar="N", help="hash values into N ids instead of using a vocabulary"
    )
    to.add_argument(
        "--ids",
        choices=("vocabulary", "raw"),
        help="raw: hash values into 62 bits instead of using a vocabulary, for hostdev train --tables dynamic (default "
        "vocabulary)",
    )
    to.add_argument("--dense", choices=MODES, help=f"scaling of the numeric columns (default {default.dense})")
    to.add_argument(
        "--test-fraction",
        type=float,
        metavar="F",
        help=f"share of the rows for testing, 0 for none (default {default.test_fraction})",
    )
    to.add_argument(
        "--validation-fraction",
        type=float,
        metavar="F",
        help="share of the rows for validation; training evaluates on these rows instead of test rows (default: none)",
    )
    to.add_argument(
        "--rows-per-shard", type=int, metavar="N", help=f"maximum rows per file (default {default.rows_per_shard})"
    )


def add_seed(to: argparse.ArgumentParser, default: int | None) -> None:
    """Add the flag --seed."""
    to.add_argument(
        "--seed",
        type=int,
        metavar="N",
        default=default,
        help=f"seed of the test split and of synthetic rows (default {Options().seed})",
    )


def parse_options(arguments: argparse.Namespace, **defaults: object) -> Options:
    """Build `Options` from parsed flags; `defaults` override the fields' defaults."""
    given = {name: getattr(arguments, name) for name in FLAGS if getattr(arguments, name) is not None}
    option = "--hash-buckets"
    if arguments.ids is not None:
        option = f"--ids {arguments.ids}"
        if "hash_buckets" in given:
            raise UserError(f"--hash-buckets has no effect with {option}; leave out one of the two")
        if arguments.ids == "raw":
            given["hash_buckets"] = RAW
    if "hash_buckets" in given:
        if "threshold" in given:
            raise UserError(f"--threshold has no effect with {option}; leave out one of the two")
        given["threshold"] = None
    if arguments.seed is not None:
        given["seed"] = arguments.seed
    return Options(**{**defaults, **given})
