"""What a pattern matches."""

from fnmatch import fnmatchcase

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.files.scale import count
from trocar_server.surgery import parse_selector


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("layer*", "layer4", True),
        ("layer*", "layer4.0", False),
        ("layer*.0", "layer4.0", True),
        ("layer*.0", "layer4.1.0", False),
        ("*", "layer4", True),
        ("*", "layer4.0", False),
        ("*.*", "layer4.0", True),
        ("l*r*", "layer4", True),
        ("l*4*r", "layer4", False),
        ("**", "layer4", True),
        ("**", "layer4.0.conv1", True),
        ("layer4.**", "layer4.0.conv1", True),
        ("layer4.**", "layer4", False),
        ("**.conv1", "conv1", True),
        ("**.conv1", "layer4.0.conv1", True),
        ("**.conv1", "layer4.0.myconv1", False),
        ("layer4.**.conv1", "layer4.conv1", True),
        ("layer4.**.conv1", "layer4.0.1.conv1", True),
        ("layer4.**.conv1", "layer40.conv1", False),
        ("**.**", "layer4", True),
        ("a+b*", "a+bc", True),
        ("a+b*", "aab", False),
        ("*", "größe", True),
    ],
)
def test_stars_match_as_in_gitignore(pattern: str, path: str, matches: bool) -> None:
    assert parse_selector(pattern).matches(path, "Conv2d") is matches


def test_a_type_limits_a_pattern_to_modules_of_this_class() -> None:
    selector = parse_selector("**:Conv2d")
    assert selector.matches("conv1", "Conv2d")
    assert not selector.matches("conv1", "Conv2dNormActivation")


@pytest.mark.parametrize(
    ("text", "is_pattern"), [("layer4", False), ("layer4@*", False), ("layer*", True), ("layer4:ReLU", True)]
)
def test_only_stars_in_the_path_and_types_make_a_pattern(text: str, is_pattern: bool) -> None:
    assert parse_selector(text).is_pattern is is_pattern


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        (r"re:layer[34]\.\d+\.conv\d", "layer3.0.conv1", True),
        (r"re:layer[34]\.\d+\.conv\d", "layer3.0.conv1.weight", False),
        (r"re:layer[34]\.\d+\.conv\d", "my.layer3.0.conv1", False),
        (r're:"layer[34]\\.\\d"', "layer4.1", True),
        ("re:a|ab", "ab", True),
        ("re:(?i)LAYER4", "layer4", True),
        ("re:.*", "größe", True),
        ("re:.", "ß", True),
    ],
)
def test_a_regular_expression_matches_a_whole_path(pattern: str, path: str, matches: bool) -> None:
    assert parse_selector(pattern).matches(path, "Conv2d") is matches


def test_a_regular_expression_may_have_a_class() -> None:
    selector = parse_selector('re:"conv.*":Conv2d')
    assert selector.matches("conv1", "Conv2d")
    assert not selector.matches("conv1", "ReLU")


def test_a_regular_expression_does_not_match_a_name_without_a_form_in_utf_8() -> None:
    assert not parse_selector("re:.*").matches("\ud800", "Conv2d")


def _stands_for(pattern: list[str], names: list[str]) -> bool:
    """Say the same as the guide page, with no thought of time."""
    if not pattern:
        return not names
    first, *rest = pattern
    if first == "**":
        least = 1 if not rest else 0
        return any(_stands_for(rest, names[taken:]) for taken in range(least, len(names) + 1))
    return bool(names) and fnmatchcase(names[0], first) and _stands_for(rest, names[1:])


@settings(max_examples=count(1000))
@given(
    pattern=st.lists(
        st.sampled_from(["**", "*", "a", "b", "a*", "*b", "a*b*", "*a*b"]), min_size=1, max_size=6
    ),
    names=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5),
)
def test_a_pattern_matches_what_the_guide_says(pattern: list[str], names: list[str]) -> None:
    matches = parse_selector(".".join(pattern)).matches(".".join(names), "Conv2d")
    assert matches is _stands_for(pattern, names)
