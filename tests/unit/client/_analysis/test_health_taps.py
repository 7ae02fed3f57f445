"""Whose parameters belong to a place."""

import pytest

from trocar._analysis.health_taps import gradient_taps, owners_of


@pytest.mark.parametrize(
    ("selector", "owner"),
    [
        ("layer4", "layer4"),
        ("layer4.0.relu@1", "layer4.0.relu"),
        ("layer4.0.relu@-1/in[0]", "layer4.0.relu"),
        ("fc/in", "fc"),
        ("fc/grad_out", "fc"),
        ("attention[0]", "attention"),
        ("**:Conv2d", "**:Conv2d"),
        ("layer*.**:BatchNorm2d@*", "layer*.**:BatchNorm2d"),
        ("/out", ""),
        ("/in[0]", ""),
        ('parts."a/b#c@d"/in', 'parts."a/b#c@d"'),
        (r'"a\"/b"@0', r'"a\"/b"'),
        (r"re:layer[34]\.\d/x", r're:"layer[34]\\.\\d/x"'),
        (r're:"layer[34]\\.0"@-1/in', r're:"layer[34]\\.0"'),
    ],
)
def test_the_owner_is_what_a_selector_says_of_modules(selector: str, owner: str) -> None:
    assert owners_of(gradient_taps(selector)) == [owner]


@pytest.mark.parametrize(
    "selector", ["#-1", "#3:7/in", "**:ReLU#-1", "layer4.**@0#1", "fx:add", "fn:softmax@3"]
)
def test_places_without_modules_of_their_own_have_no_owner(selector: str) -> None:
    assert owners_of(gradient_taps(selector)) == []


def test_everything_has_the_models_own_parameters_too() -> None:
    assert owners_of(gradient_taps(["**", "fc", "fc/in"])) == ["**", "", "fc"]
