"""Module path patterns with `*` and `**`, matched without exponential backtracking."""

from collections.abc import Sequence
from dataclasses import dataclass

ANY = "**"


@dataclass(frozen=True)
class Component:
    """One component of a pattern, between two dots.

    Attributes:
        text: A name, with stars in it, or `**`.
        is_literal: Whether it is literal, stars included.
    """

    text: str
    is_literal: bool = False

    @property
    def is_any(self) -> bool:
        """Whether it matches any number of names."""
        return self.text == ANY and not self.is_literal

    def matches(self, name: str) -> bool:
        """Whether it matches this one name."""
        if self.is_literal or "*" not in self.text:
            return self.text == name
        first, *middle, last = self.text.split("*")
        if len(name) < sum(map(len, (first, *middle, last))):
            return False
        if not name.startswith(first) or not name.endswith(last):
            return False
        position, end = len(first), len(name) - len(last)
        for part in middle:  # the leftmost match of each part leaves the most text for the next
            result = name.find(part, position, end)
            if result < 0:
                return False
            position = result + len(part)
        return True


def simplified(components: Sequence[Component]) -> tuple[Component, ...]:
    """Collapse several `**` in a row to one, which is equivalent."""
    following = (*components[1:], None)
    return tuple(
        component
        for component, after in zip(components, following, strict=True)
        if not (component.is_any and after is not None and after.is_any)
    )


def matches_path(pattern: Sequence[Component], names: Sequence[str]) -> bool:
    """Whether a simplified pattern matches the names of a module path.

    `**` matches any number of names, none included; at the end at least one. `*` within a
    component matches any text.
    """
    if sum(not component.is_any for component in pattern) > len(names):
        return False
    reached = {0}  # counts of names that the components so far can match
    for position, component in enumerate(pattern):
        if component.is_any:
            is_last = position == len(pattern) - 1
            reached = set(range(min(reached) + is_last, len(names) + 1))
        else:
            reached = {
                count + 1 for count in reached if count < len(names) and component.matches(names[count])
            }
        if not reached:
            return False
    return len(names) in reached
