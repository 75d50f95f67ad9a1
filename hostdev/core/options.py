"""Options as data: the flags, checks, messages and documentation of a group of options come from one dataclass."""

import argparse
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from hostdev.core.addresses import shown_place
from hostdev.core.errors import UserError


class When(NamedTuple):
    """A condition on an option's value, such as that it is given.

    Attributes:
        name: The name of an option, or of a property of the configuration that must be true.
        equal: Only this value meets the condition.
        above: Only values above this number meet the condition.
        shown: The condition in messages (default: the option, with the value if there is a condition on it).
    """

    name: str
    equal: str | None = None
    above: int | None = None
    shown: str = ""

    def holds(self, config: "OptionGroup") -> bool:
        """Return whether a configuration meets the condition; False if it lacks the option."""
        value = getattr(config, self.name, None)
        if self.equal is not None:
            return bool(value == self.equal)
        if self.above is not None:
            return value is not None and bool(value > self.above)
        return config.has(self.name)

    def show(self, config: "OptionGroup") -> str:
        """Return the condition for a message."""
        if self.shown:
            return self.shown
        if self.equal is not None:
            return f"{flag_of(self.name)} {self.equal}"
        if self.above:
            return f"{flag_of(self.name)} above {self.above}"
        return config.show(self.name)


class Option(NamedTuple):
    """How an option is written, what its value may be, and which other options it needs or excludes.

    Attributes:
        help: Text for --help.
        type: Parses the flag's text; None for a switch, which is True if it is given; `list` for a flag that may be
            repeated, whose value is the list of its texts.
        default: The value if the option is not given.
        choices: All allowed values; None for no such list.
        aliases: Other words for some of the choices, as {word: choice}. The configuration contains the choice.
        metavar: The name of the value in --help (default: N, X or DIR for an integer, a number or a folder).
        bare: The value if the flag is given without one; None if it needs a value.
        least: Least value.
        most: Largest value.
        above: The value must be larger than this.
        below: The value must be smaller than this.
        unit: What the value counts, for messages.
        check: Raises UserError if a value has the wrong form.
        off: Values that have the same effect as the default, so that they need and exclude nothing; or a test for them.
        needs: Conditions that must hold if the option is given, with the reason or "".
        excludes: Conditions that must not hold if the option is given, with the reason or "".
        unused_with: Conditions under which the option has no effect, with the reason or "".
        implies: Values of other options, by name, if the option is given.
        is_flag: Whether the option is a flag as well as a key of a file of options. New options are only such keys.
        is_fixed: Whether results depend on the option: a resumed run must have the same value.
        has_effect: Whether a resumed run may have another value of a fixed option if the model stays equal: its default
            may be given or left out.
        is_kind: Whether a run must be resumed with the option exactly if it was started with it.
        is_local: Whether the option may differ between the processes of a run.
        is_shared: Whether the option only has an effect with several processes.
        is_number: Whether a file of options may give an integer in place of text.
    """

    help: str
    type: Callable[[str], Any] | None = None
    default: Any = None
    choices: Sequence[Any] | None = None
    aliases: Mapping[str, str] = {}
    metavar: str | None = None
    bare: Any = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    check: Callable[[Any], object] | None = None
    off: Collection[Any] | Callable[[Any], bool] = ()
    needs: Mapping[str | When, str] = {}
    excludes: Mapping[str | When, str] = {}
    unused_with: Mapping[str | When, str] = {}
    implies: Mapping[str, Any] = {}
    is_flag: bool = True
    is_fixed: bool = False
    has_effect: bool = False
    is_kind: bool = False
    is_local: bool = False
    is_shared: bool = False
    is_number: bool = False

    def is_off(self, value: Any) -> bool:
        """Return whether a value has the same effect as the default."""
        if value is None or value is False or value == self.default:
            return True
        return self.off(value) if callable(self.off) else value in self.off

    def bounds(self) -> str:
        """Return what the value must be, such as "in 0..64"; "" without bounds."""
        number = "a number " if self.type is float else ""
        unit = f" {self.unit}" if self.unit else ""
        if self.below is not None:
            least = f"of at least {self.least:g}" if self.above is None else f"above {self.above:g}"
            return f"{number}{least} and below {self.below:g}{unit}"
        if self.above is not None:
            limit = "" if self.most is None else f", at most {self.most:g}"
            return f"{number}above {self.above:g}{unit}{limit}"
        if self.least is not None and self.most is not None:
            return f"in {self.least}..{self.most}{unit}"
        return "" if self.least is None else f"{number and 'a number of '}at least {self.least:g}{unit}"

    def require(self, name: str, value: Any) -> None:
        """Raise OptionError if a given value is out of bounds, is not among the choices, or has the wrong form."""
        if self.bounds() and not self.is_within(value):
            raise OptionError(name, f" must be {self.bounds()}, not {value}")
        if self.choices is not None and value not in self.choices:
            raise OptionError(name, f" must be one of {', '.join(map(str, self.choices))}, not {value}")
        if self.check is None:
            return
        try:
            self.check(value)
        except OptionError:
            raise
        except UserError as error:
            shown = str(error)
            text = shown.removeprefix(flag_of(name)) if shown.startswith(f"{flag_of(name)} ") else f": {shown}"
            raise OptionError(name, text) from None

    def is_within(self, value: float) -> bool:
        """Return whether a value is within the bounds."""
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.most is None or value <= self.most)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )


class OptionError(UserError):
    """The value of an option is wrong; `name` is the option, `text` what follows it in the message."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__(f"{flag_of(name)}{text}")
        self.name, self.text = name, text


def option(help: str, type: Callable[[str], Any] | None = None, *, default: Any = None, **more: Any) -> Any:
    """Return a field of a dataclass of options; the arguments are those of `Option`."""
    return field(default=default, metadata={"option": Option(help, type, default, **more)})


def count(help: str, **more: Any) -> Any:
    """Return the field of an option that is an integer of at least 1."""
    return option(help, int, **{"least": 1, **more})


def switch(help: str, **more: Any) -> Any:
    """Return the field of an option that is on or off."""
    return option(help, default=False, **more)


def choice(help: str, choices: Sequence[Any], **more: Any) -> Any:
    """Return the field of an option with one of several values; they are texts unless `type` says otherwise."""
    return option(help, choices=choices, **{"type": str, **more})


def flag_of(name: str) -> str:
    """Return the flag of an option."""
    return "--" + name.replace("_", "-")


def parse_when(text: str | When) -> When:
    """Return the condition of a text: NAME (is given), NAME=VALUE, or NAME>NUMBER."""
    if isinstance(text, When):
        return text
    name, equal, value = text.partition("=")
    if equal:
        return When(name, value)
    name, above, value = text.partition(">")
    return When(name, above=int(value) if above else None)


@dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """Base class of groups of options, and of configurations, which inherit from several groups.

    Attributes:
        section: Name of the group as a table in a file of options; no option has this name.
        title: Heading of the group in --help.
    """

    section: ClassVar[str] = ""
    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, item in self.options().items():
            value = getattr(self, name)
            if isinstance(value, str) and value in item.aliases:
                object.__setattr__(self, name, item.aliases[value])
            if value is not None and value is not False:
                for other, implied in item.implies.items():
                    object.__setattr__(self, other, implied)
        for name, item in self.options().items():
            value = getattr(self, name)
            if value is not None and value != item.default:
                item.require(name, value)
        for name, item in self.options().items():
            self._check_needs(name, item)
        for group in self.groups():
            if "check" in vars(group):
                group.check(self)

    def check(self) -> None:
        """Raise UserError if values break a rule of the group that its options do not state themselves."""

    def _check_needs(self, name: str, item: Option) -> None:
        """Raise OptionError if a given option lacks what it needs, is excluded by another option, or has no effect."""
        if item.is_off(getattr(self, name)):
            return
        flag = flag_of(name)
        value = self.show(name).removeprefix(flag)
        for needed, because in item.needs.items():
            condition = parse_when(needed)
            if not condition.holds(self):
                missing = condition.show(self)
                text = f"needs {missing}: {because}" if because else f"has no effect without {missing}"
                raise OptionError(name, f"{value} {text}; leave out {flag}, or give {missing}")
        for excluded, because in item.excludes.items():
            condition = parse_when(excluded)
            if condition.holds(self) and not self._is_harmless(condition):
                text = f"cannot be combined with {condition.show(self)}{because and ': '}{because}"
                raise OptionError(name, f"{value} {text}; leave out one of the two")
        for unused, because in item.unused_with.items():
            condition = parse_when(unused)
            if condition.holds(self):
                text = f"has no effect with {condition.show(self)}{because and ', '}{because}"
                raise OptionError(name, f"{value} {text}; leave one of them out")

    def _is_harmless(self, condition: When) -> bool:
        """Return whether the option of a condition has a value with the same effect as its default."""
        item = self.options().get(condition.name)
        return item is not None and condition.equal is None and item.is_off(getattr(self, condition.name))

    def has(self, name: str) -> bool:
        """Return whether an option is given: it differs from its default, None and False. A property must be true."""
        value, item = getattr(self, name, None), self.options().get(name)
        return bool(value) if item is None else value is not None and value is not False and value != item.default

    def show(self, name: str) -> str:
        """Return an option's flag for messages, with its value if the option has choices or may be a number."""
        item = self.options()[name]
        has_word = item.choices is not None or item.is_number
        return f"{flag_of(name)} {getattr(self, name)}" if has_word else flag_of(name)

    @classmethod
    def groups(cls) -> "list[type[OptionGroup]]":
        """Return the groups of which this configuration consists, in the order of --help."""
        return [group for group in cls.__mro__ if "section" in vars(group) and group is not OptionGroup]

    @classmethod
    def options(cls) -> Mapping[str, Option]:
        """Return the options by name, group by group."""
        known: Mapping[str, Option] | None = vars(cls).get("_options")
        if known is None:
            of = {item.name: item.metadata["option"] for item in fields(cls)}
            known = {name: of[name] for group in cls.groups() for name in group.__annotations__ if name in of}
            cls._options = known  # type: ignore[attr-defined]
        return known

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the default of each option."""
        return {name: item.default for name, item in cls.options().items()}

    @classmethod
    def add_flags(cls, to: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
        """Add the flags of all options, or of the options `names`, under the headings of the groups."""
        headings: dict[str, Any] = {}
        for group in cls.groups():
            for name in cls._names(group, names):
                if group.title not in headings:
                    headings[group.title] = to.add_argument_group(group.title)
                _add_flag(headings[group.title], name, cls.options()[name])

    @classmethod
    def _names(cls, group: "type[OptionGroup]", names: Collection[str] | None) -> Iterator[str]:
        of = cls.options()
        return (
            name for name in group.__annotations__ if name in of and of[name].is_flag and (not names or name in names)
        )

    @classmethod
    def from_flags(
        cls,
        arguments: argparse.Namespace,
        names: Collection[str] | None = None,
        more: Mapping[str, Any] | None = None,
        **values: Any,
    ) -> Self:
        """Return the configuration of the parsed flags, and of `more` values.

        Args:
            arguments: The flags that `add_flags` added.
            names: The options that have flags here; None for all.
            more: Values of options that are no flags.
            values: Values that take precedence.
        """
        of = cls.options()
        given = {name: getattr(arguments, name) for name in names or of if of[name].is_flag}
        return cls(**{**given, **{name: value for name, value in (more or {}).items() if name not in given}, **values})

    def to_flags(self) -> list[str]:
        """Return the flags for this configuration, except for those that have their default values."""
        flags: list[str] = []
        for name, item in self.options().items():
            value = getattr(self, name)
            if value == item.default or not item.is_flag:
                continue
            words = {choice: word for word, choice in item.aliases.items()}
            alone = item.type is None or (item.bare is not None and value == item.bare)
            flags += [flag_of(name)] if alone else [flag_of(name), str(words.get(value, value))]
        return flags

    def file_values(self) -> dict[str, Any]:
        """Return the values of options that are no flags, except for default values."""
        return {
            name: value
            for name, value in self.as_json().items()
            if not self.options()[name].is_flag and value != self.options()[name].default
        }

    def as_json(self) -> dict[str, Any]:
        """Return the options' values by name, for config.json."""
        values = {name: getattr(self, name) for name in self.options()}
        return {name: shown_place(value) if isinstance(value, Path) else value for name, value in values.items()}


_METAVARS: Mapping[Any, str] = {int: "N", float: "X"}  # default metavars by type; DIR for other types


def _add_flag(to: Any, name: str, item: Option) -> None:
    if item.type is None:
        to.add_argument(flag_of(name), action="store_true", help=item.help)
        return
    more: dict[str, Any] = {} if item.bare is None else {"nargs": "?", "const": item.bare}
    if item.choices is not None:
        more["choices"] = (*item.choices, *item.aliases)
    more["metavar"] = item.metavar
    if item.metavar is None and item.choices is None and item.type is not str:
        more["metavar"] = _METAVARS.get(item.type, "DIR")
    shown = item.help if item.default is None else f"{item.help} (default {item.default})"
    how = {"action": "append"} if item.type is list else {"type": item.type}
    to.add_argument(flag_of(name), default=item.default, help=shown, **how, **more)


def describe(groups: Iterable[type[OptionGroup]]) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """Yield each group's section with its options: name, what the value may be, and help text; for the reference."""
    for group in groups:
        yield group.section, [(name, _describe_value(item), item.help) for name, item in group.options().items()]


def _describe_value(item: Option) -> str:
    if item.type is None:
        return "true or false"
    if item.choices is not None:
        return " or ".join(map(str, item.choices))
    kinds = {int: "integer", float: "number"}
    kind = kinds.get(item.type, "text or integer" if item.is_number else "text")  # type: ignore[call-overload]
    return f"{kind} {item.bounds().removeprefix('a number ').removeprefix('of ')}".strip()
