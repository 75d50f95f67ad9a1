"""Files of options: TOML, or the config.json of a run."""

import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from hostdev.core import json_files
from hostdev.core.errors import UserError, in_words
from hostdev.core.options import Option, OptionError, OptionGroup

_MOST_BYTES = 1 << 24


class OptionFile(NamedTuple):
    """The options of a file.

    Attributes:
        path: The file.
        keys: Each option's key in the file: NAME, or TABLE.NAME if it is in a table.
        values: Each option's value.
    """

    path: Path = Path()
    keys: Mapping[str, str] = {}
    values: Mapping[str, Any] = {}

    def explain(self, error: OptionError, values: Mapping[str, Any]) -> UserError:
        """Return the error; name the file and the key if the wrong value comes from the file.

        `values` has the final values of all options, because a flag may have replaced the file's value.
        """
        name = error.name
        if name not in self.values or values.get(name) != self.values[name]:
            return error
        return UserError(f"{self.path}: {self.keys[name]}{error.text}")


def read_options(path: Path, config: type[OptionGroup], records: Collection[str] = ()) -> OptionFile:
    """Return the options in a file, by name; the options may stand in tables named after their groups.

    Args:
        path: The file; JSON if it ends with .json, else TOML.
        config: The options that the file may have.
        records: Keys of a JSON file that are not options; they are ignored.

    Raises:
        UserError: The file cannot be read, or a key or the type of a value is wrong; the message names file and key.
    """
    try:
        if path.suffix == ".json":
            content = json_files.read(path, _MOST_BYTES)
            content = {name: value for name, value in content.items() if name not in records}
        else:
            with path.open("rb") as file:
                content = tomllib.load(file)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from None
    except (ValueError, AttributeError) as error:  # AttributeError: the JSON is not an object
        raise UserError(f"--config {path} is not a file of options: {in_words(error)}") from None
    options = config.options()
    keys: dict[str, str] = {}
    values: dict[str, Any] = {}
    for name, key, value in _flatten(path, content, config):
        if name in keys:
            raise UserError(f"{path}: {key} is given twice, also as {keys[name]}; give it once")
        if value is not None:  # null in JSON: not given
            keys[name], values[name] = key, _convert(path, key, value, options[name])
    return OptionFile(path, keys, values)


def _flatten(path: Path, content: Mapping[str, Any], config: type[OptionGroup]) -> Iterator[tuple[str, str, Any]]:
    """Yield each option's name, its key in the file, and its value."""
    options = config.options()
    sections = {group.section: [name for name in group.__annotations__ if name in options] for group in config.groups()}
    for name, value in content.items():
        is_table = isinstance(value, dict)
        known = sections if is_table else options
        if name not in known:
            what = "table" if is_table else "option"
            raise UserError(f"{path}: there is no {what} {name}{_suggest(name, known)}")
        for inner, item in value.items() if is_table else ():
            if inner not in sections[name]:
                raise UserError(f"{path}: there is no option {inner} in {name}{_suggest(inner, options)}")
            yield inner, f"{name}.{inner}", item
        if not is_table:
            yield name, name, value


def _suggest(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name.replace("-", "_"), names, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _convert(path: Path, key: str, value: Any, item: Option) -> Any:
    """Convert a value of a file to the option's type; raise UserError if the value is wrong."""
    wanted = item.type
    kinds: tuple[type, ...] = (str,)
    what = "text"
    if wanted is None:
        kinds, what = (bool,), "true or false"
    elif wanted is int:
        kinds, what = (int,), "an integer"
    elif wanted is float:
        kinds, what = (int, float), "a number"
    elif item.is_number:
        kinds, what = (str, int), "text or an integer"
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise UserError(f"{path}: {key} must be {what}, not {value!r}")
    words = (*(item.choices or ()), *item.aliases)
    if words and value not in words:
        raise UserError(f"{path}: {key} must be {' or '.join(map(str, words))}, not {value!r}")
    if wanted is None or wanted is int:
        return value
    try:
        return wanted(str(value))
    except Exception as error:
        raise UserError(f"{path}: {key}: {error}") from None
