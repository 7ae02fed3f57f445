"""Multi-value options: `--trainable layer4 fc`."""

from collections.abc import Iterable, Sequence
from typing import Any

from trocar._cli.help_sections import SectionedCommand

MANY = frozenset({"--trainable", "--augment", "--metric", "--clamp"})
"""These options of `trocar train`."""


class ManyValues(SectionedCommand):
    """Command whose options in `MANY` accept several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the option before each of its values, as click wants it."""
        return super().parse_args(ctx, spread(args, MANY))


def spread(arguments: Sequence[str], options: Iterable[str]) -> list[str]:
    """Return `--trainable a b` as `--trainable a --trainable b`; values end where an option begins."""
    result: list[str] = []
    option: str | None = None
    chosen = set(options)
    is_first = False
    for argument in arguments:
        if argument.startswith("--"):
            name, equals, _ = argument.partition("=")
            option = name if name in chosen else None
            is_first = option is not None and not equals
            result.append(argument)
        elif option is not None and not is_first:
            result += [option, argument]
        else:
            result.append(argument)
            is_first = False
    return result
