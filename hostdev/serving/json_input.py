"""JSON of requests: strict, and every error is a `RefusedError`."""

import json
from typing import Any, NoReturn

from hostdev.serving.refused import bad


def parse_json(content: bytes | str, what: str = "the body") -> Any:
    """Parse JSON in UTF-8; `what` names it in messages.

    Raises:
        RefusedError: It is not JSON, has NaN or Infinity, a name twice in an object or an integer of thousands of
            digits, or is nested too deeply.
    """
    try:
        text = content.decode() if isinstance(content, bytes) else content
        return json.loads(text, parse_constant=_reject, object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise bad(f"{what} is not UTF-8, from byte {error.start + 1}") from None
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise bad(f"{what} is not JSON: {error.msg} at {where}") from None
    except RecursionError:
        raise bad(f"{what} is not accepted: its JSON is nested too deeply") from None
    except ValueError:  # Python's limit to the digits of an integer
        raise bad(f"{what} is not accepted: its JSON has an integer of thousands of digits") from None


def _reject(word: str) -> NoReturn:
    raise bad(f"{word} is not JSON; write null for a missing number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise bad(f"the name {twice!r} occurs twice in one JSON object")
    return found
