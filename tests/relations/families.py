"""All families by name."""

from tests.relations.families_own import OWN
from tests.relations.families_text import TEXT
from tests.relations.families_vision import VISION
from tests.relations.family import Family

FAMILIES: dict[str, Family] = {family.name: family for family in (*OWN, *VISION, *TEXT)}


def build(name: str) -> object:
    """Build the model of a family: the factory of hosted models."""
    return FAMILIES[name].build()
