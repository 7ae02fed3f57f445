"""Class names: the number of a class by its name, for both ends."""

from collections.abc import Sequence

from trocar_api.value_words import nearest_word


def class_number(name: str, categories: Sequence[str]) -> int:
    """Return the index of a name, in any case.

    Args:
        name: The name.
        categories: All names, by index.

    Raises:
        ValueError: There is no class of this name, or several.
    """
    numbers = [number for number, category in enumerate(categories) if category.lower() == name.lower()]
    if len(numbers) == 1:
        return numbers[0]
    if numbers:
        raise ValueError(f"several classes {name!r}: {', '.join(map(str, numbers))}; give the number")
    if not categories:
        raise ValueError(f"no names of classes on the server; give the number of {name!r}")
    near = nearest_word(name.lower(), [category.lower() for category in categories])
    raise ValueError(f"no class {name!r}" + (f"; nearest: {near}" if near else ""))
