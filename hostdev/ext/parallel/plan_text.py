"""Plans in text form, such as `--plan deep.0=colwise,deep.2=rowwise`. Every command imports this small module."""

from collections.abc import Sequence

from hostdev.core.errors import UserError

STRATEGIES = ("colwise", "rowwise", "replicate")
Plan = Sequence[tuple[str, str]]  # a layer's name or a pattern of names, and its strategy


def parse_plan(text: str) -> Plan:
    """Return the plan of a `--plan` value, such as deep.0=colwise,deep.2=rowwise; raise UserError if it is invalid."""
    found: list[tuple[str, str]] = []
    for part in text.split(","):
        name, equals, strategy = (each.strip() for each in part.partition("="))
        if not name or not equals or strategy not in STRATEGIES:
            raise UserError(
                f"--plan {text}: {part.strip() or 'nothing'!r} is not LAYER=STRATEGY with one of "
                f"{', '.join(STRATEGIES)}; give, for example, deep.0=colwise,deep.2=rowwise"
            )
        if name in dict(found):
            raise UserError(f"--plan {text}: {name} is given twice; give each layer once")
        found.append((name, strategy))
    return found
