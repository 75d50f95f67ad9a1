"""Options for the roles of a table's columns and for reading their values."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from typing import Any

from hostdev.core.errors import UserError
from hostdev.data.preprocess.delimited import TextFormat
from hostdev.data.preprocess.lists import Vector, with_elements
from hostdev.data.preprocess.naming import listed
from hostdev.data.preprocess.raw import SourceLayout
from hostdev.data.preprocess.reading import ReadSettings
from hostdev.data.preprocess.scaling import ColumnScaling
from hostdev.data.schema import SINGLE_LABEL, Column, Targets

_ALWAYS = {  # options that the manifest has even if they have their default values
    *("label", "positive", "numeric", "categorical", "bags", "share", "test_column", "test_after"),
    *("columns", "delimiter", "quotes"),
}


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """Options for the roles of a table's columns and for reading their values."""

    label: str
    positive: str | None = None  # condition for positive labels, such as ">3"; None if labels are 0/1 or false/true
    numeric: tuple[str, ...] = ()
    categorical: tuple[str, ...] = ()
    bags: tuple[tuple[str, str | None], ...] = ()  # name, and the separator of values in text; None for lists
    share: tuple[tuple[str, str], ...] = ()  # a column, and the column whose ids it shares
    test_column: tuple[str, str] | None = None  # a column, and its value in test rows
    test_after: tuple[str, str] | None = None  # a column and a value; test rows have a larger or later one
    validation_column: tuple[str, str] | None = None  # a column, and its value in validation rows; test rows excepted
    validation_after: tuple[str, str] | None = None  # a column and a value; validation rows have a larger or later one
    test_files: tuple[str, ...] = ()  # files of test rows
    validation_files: tuple[str, ...] = ()  # files of validation rows
    columns: tuple[str, ...] | None = None  # names for text without a header
    delimiter: str | None = None  # the separator in text files; None: a comma or a tab, by the suffix or the first line
    quotes: bool = True  # whether values in text files may be in double quotes
    encoding: str = "utf-8"  # encoding of text files
    skipped_lines: int = 0  # lines to skip at the beginning of each text file
    missing: tuple[str, ...] = ()  # missing-value markers in all columns
    decimal: str = "."  # the decimal separator of numbers in text
    trimmed: bool = True  # whether surrounding whitespace is removed; data sets of earlier versions kept it
    features: Mapping[str, ReadSettings] = field(default_factory=dict)  # reading settings by feature
    thresholds: Mapping[str, int] = field(default_factory=dict)  # by feature with ids, in place of --threshold
    scaling: Mapping[str, ColumnScaling] = field(default_factory=dict)  # by numeric feature, in place of --dense
    targets: Targets = SINGLE_LABEL  # other labels, labels that are numbers, and the weight
    positives: Mapping[str, str] = field(default_factory=dict)  # conditions by label, in place of `positive`
    vectors: Mapping[str, Vector] = field(default_factory=dict)  # by feature; `numeric` has the names of their elements

    def __post_init__(self) -> None:
        with_ids = [*self.categorical, *(name for name, _ in self.bags)]
        names = [*self.targets.names(self.label), *self.numeric, *with_ids]
        if twice := next((name for name, count in Counter(names).items() if count > 1), None):
            raise UserError(
                f"column {twice!r} is named twice among --label, --weight, --numeric, --categorical and --bag; name it "
                "once"
            )
        if self.positive is not None and len(self.targets.numeric) == len(self.labels()):
            raise UserError("--positive has no effect on labels of --task regression; leave out --positive")
        if not with_ids:
            raise UserError("no column has ids; name at least one with --categorical or --bag")
        owners = dict(self.share)
        for name, owner in self.share:
            for one in (name, owner):
                if one not in with_ids:
                    raise UserError(
                        f"--share {name}={owner}: {one!r} is not a column of --categorical or --bag; those "
                        f"are {listed(with_ids)}"
                    )
            if name == owner:
                raise UserError(f"--share {name}={owner}: a column cannot share its own ids; name another column")
            if owner in owners:
                raise UserError(
                    f"--share {name}={owner}: {owner!r} itself shares another column's ids; name that column instead"
                )
        if len(owners) < len(self.share):
            raise UserError("--share names the same column twice before =; name it once")
        for name, separator in self.bags:
            if separator == "":
                raise UserError(f"--bag {name}=: the separator is empty; leave out = for lists in Parquet and Arrow")
        for name, reading in self.features.items():
            if reading.weights is not None and reading.weights in ("", dict(self.bags).get(name)):
                what = "empty" if not reading.weights else "also the separator of its values"
                raise UserError(f"bag {name!r}: the separator of weights is {what}; give another, such as ':'")
        _ = self.text  # raises UserError for invalid settings of text files
        for name, vector in self.vectors.items():
            if vector.separator == "":
                raise UserError(f"vector {name!r}: the separator is empty; leave it out for lists and commas")
        for settings, among in (
            (self.features, [*names, *self.vectors]),
            (self.thresholds, with_ids),
            (self.scaling, self.numeric),
        ):
            for name in settings:
                if name not in among:
                    raise UserError(f"{name!r} has settings, but is not one of the columns {listed(among) or '(none)'}")
        for name in self.thresholds:
            if name in owners:
                raise UserError(
                    f"{name!r} shares the ids of {owners[name]!r}; set the threshold of that column instead"
                )

    @property
    def text(self) -> TextFormat:
        """How text files are written."""
        return TextFormat(**{one.name: getattr(self, one.name) for one in fields(TextFormat)})

    def layout(self) -> SourceLayout:
        """Return the columns of the data set."""
        owners = dict(self.share)

        def of(kind: str, names: Iterable[str]) -> tuple[Column, ...]:
            weighted = {name for name, one in self.features.items() if one.is_weighted}
            return tuple(Column(name, kind, owners.get(name, name), name in weighted) for name in names)

        return SourceLayout(
            self.label,
            self.numeric,
            of("id", self.categorical),
            of("bag", (name for name, _ in self.bags)),
            thresholds=self.thresholds,
            scaling=self.scaling,
            targets=self.targets,
        )

    def labels(self) -> tuple[str, ...]:
        """Return the names of all labels."""
        return self.targets.labels(self.label)

    def reading(self, name: str) -> ReadSettings:
        """Return the reading settings of a label, the weight or a feature, including those for all columns."""
        own, separator = self.features.get(name, ReadSettings()), dict(self.bags).get(name)
        return own.within(self.missing, self.decimal, separator, trimmed=self.trimmed)

    def readings(self) -> dict[str, ReadSettings]:
        """Return the reading settings of all labels, the weight and all features."""
        return with_elements({name: self.reading(name) for name in self.roles()}, self.vectors, self.features)

    def column(self, name: str) -> str:
        """Return the name of the column that a label, the weight or a feature is read from."""
        owner = self._owners.get(name, name)
        return self.features.get(owner, ReadSettings()).column or owner

    @cached_property
    def _owners(self) -> dict[str, str]:
        """The vector's name, for each numeric feature that is an element of a vector."""
        return {part: name for name, vector in self.vectors.items() for part in vector.names(name)}

    def roles(self) -> tuple[str, ...]:
        """Return the names of all labels, the weight and all features."""
        return (*self.targets.names(self.label), *self.numeric, *self.categorical, *(name for name, _ in self.bags))

    def used(self) -> tuple[str, ...]:
        """Return the names of all columns that are read."""
        weights = [one.weights_column for one in self.features.values() if one.weights_column is not None]
        return tuple(dict.fromkeys([*map(self.column, self.roles()), *weights, *self.split()]))

    def split(self) -> tuple[str, ...]:
        """Return the names of the columns that select test or validation rows."""
        pairs = (self.test_column, self.test_after, self.validation_column, self.validation_after)
        return tuple(pair[0] for pair in pairs if pair is not None)

    def has_validation(self) -> bool:
        """Return whether these options choose rows for validation."""
        return bool(self.validation_files or self.validation_column or self.validation_after)

    def as_json(self) -> dict[str, Any]:
        """Return the manifest's entry: options of `_ALWAYS`, others if not at their default, and `trimmed` if true."""
        found = {**vars(self), "bags": dict(self.bags), "share": dict(self.share)}
        found["features"] = {name: settings for name, one in self.features.items() if (settings := one.as_json())}
        found["targets"] = self.targets.as_json()
        found["vectors"] = {name: vector.as_json() for name, vector in self.vectors.items()}
        found.pop("_owners", None)
        found["scaling"] = {name: one.as_json() for name, one in self.scaling.items()}
        usual = {one.name: {} if one.default is MISSING else one.default for one in fields(self)}
        usual |= {"trimmed": False, "targets": {}}
        return {name: value for name, value in found.items() if name in _ALWAYS or value != usual[name]}
