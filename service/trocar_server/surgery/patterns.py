"""Matching module paths against `*` and `**`, in time that no pattern can blow up."""

from collections.abc import Sequence

ANY = "**"


def matches_path(pattern: Sequence[str], names: Sequence[str], literal: frozenset[int]) -> bool:
    """Whether a pattern, by component, stands for a module path, by name.

    `**` is any number of components, none included; at the end it is one at least. `*` within a
    component is any text. Components whose position is in `literal` mean themselves.
    """
    reached = {0}  # how many names the components so far can have taken
    for position, component in enumerate(pattern):
        if component == ANY and position not in literal:
            is_last = position == len(pattern) - 1
            reached = set(range(min(reached) + is_last, len(names) + 1))
        else:
            reached = {
                count + 1
                for count in reached
                if count < len(names) and _matches_name(component, names[count], position in literal)
            }
        if not reached:
            return False
    return len(names) in reached


def _matches_name(component: str, name: str, is_literal: bool) -> bool:
    if is_literal or "*" not in component:
        return component == name
    first, *middle, last = component.split("*")
    if len(name) < len(first) + len(last) or not name.startswith(first) or not name.endswith(last):
        return False
    position, end = len(first), len(name) - len(last)
    for part in middle:  # the leftmost place of each part leaves the most room for the next
        found = name.find(part, position, end)
        if found < 0:
            return False
        position = found + len(part)
    return True
