"""Stage names in selectors: what they stand for, and what may follow them."""

from dataclasses import replace

import pytest

from tests.support.models.tiny_models import Plain, Structured
from tests.unit.surgery.recordings import recorded
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording, parse_selector, resolve

STAGES = {
    "stem": "conv",
    "stage1": "relu@0",
    "stage2": "relu@-1",
    "penultimate": "fc/in",
    "head": "fc",
    "fc": "conv",
    "last": "#-1",
    "broken": "convv",
    "loop": "loop",
}
PLAIN = replace(recorded(Plain, (2, 3, 8, 8)), stages=STAGES)
STRUCTURED = replace(recorded(Structured, (2, 3)), stages={"pair": "both", "second": 'both["second"]'})


def names(selector: str, recording: Recording = PLAIN) -> list[str]:
    (values,) = resolve([parse_selector(selector)], recording)
    return [target.name for target, _ in values]


def refused(selector: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        resolve([parse_selector(selector)], PLAIN)
    return caught.value


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("stem", ["conv"]),
        ("stem/out", ["conv"]),
        ("stem/in", ["conv/in"]),
        ("stem@0/in[0]", ["conv/in"]),
        ("stem#0", ["conv"]),
        ("stem/param(bias)", ["conv/param(bias)"]),
        ("stage1", ["relu@0"]),
        ("stage2/in", ["relu@1/in"]),
        ("penultimate", ["fc/in"]),
        ("penultimate[0]", ["fc/in"]),
        ("head", ["fc"]),
        ("last/in", ["fc/in"]),
    ],
)
def test_a_stage_stands_for_its_selector_with_what_follows(selector: str, expected: list[str]) -> None:
    assert names(selector) == expected


def test_picks_go_on_below_those_of_the_stage() -> None:
    assert names('pair["first"]', STRUCTURED) == ['both["first"]']
    assert names("second", STRUCTURED) == ['both["second"]']
    assert names("second/in", STRUCTURED) == ["both/in"]


def test_a_module_of_that_name_comes_before_the_stage() -> None:
    assert names("fc") == ["fc"]


@pytest.mark.parametrize("selector", ["ste*", '"stem"', "stem:Conv2d", "re:stem", "stem.0"])
def test_only_a_plain_path_is_a_stage(selector: str) -> None:
    assert refused(selector).reason is ErrorReason.UNKNOWN_MODULE


@pytest.mark.parametrize(
    ("selector", "position"), [("stage1@0", 6), ("penultimate/in", 11), ("last#0", 4), ("stage2@*/in", 6)]
)
def test_what_the_stages_selector_says_already_is_refused_where_it_begins(
    selector: str, position: int
) -> None:
    error = refused(selector)
    assert error.reason is ErrorReason.INVALID_SELECTOR
    assert error.details["position"] == str(position)
    assert STAGES[selector[:position]] in error.message


def test_an_error_in_a_stage_says_what_the_stage_is() -> None:
    error = refused("broken")
    assert error.reason is ErrorReason.UNKNOWN_MODULE
    assert error.message.startswith("stage 'broken' is 'convv'")


def test_a_stage_of_a_stage_is_no_module() -> None:
    assert refused("loop").reason is ErrorReason.UNKNOWN_MODULE


def test_near_names_are_also_those_of_stages() -> None:
    assert "stage1" in refused("stage3").message
    assert "penultimate" in refused("penultimat").message


NUMBERED = replace(
    recorded(Plain, (2, 3, 8, 8)),
    stages={"layer[0]": "conv", "layer[1]": "relu@0", "layer[2]": "fc", "text.mlp[0]": "fc", "stem": "conv"},
)


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("layer[*]", ["conv", "relu@0", "fc"]),
        ("layer[1]", ["relu@0"]),
        ("layer[-1]", ["fc"]),
        ("text.mlp[*]", ["fc"]),
    ],
)
def test_a_star_stands_for_the_stages_of_all_blocks(selector: str, expected: list[str]) -> None:
    assert names(selector, NUMBERED) == expected


@pytest.mark.parametrize(
    ("selector", "problem"),
    [
        (
            "block[*]",
            r"no numbered stages 'block\[0\]', ...; it has layer\[\*\], text.mlp\[\*\]; to select modules",
        ),
        ("stem[*]", "no numbered stages"),
        ("conv[*]", "no numbered stages"),
    ],
)
def test_a_star_without_numbered_stages_is_refused(selector: str, problem: str) -> None:
    with pytest.raises(ServiceError, match=problem) as caught:
        resolve([parse_selector(selector)], NUMBERED)
    assert caught.value.reason is ErrorReason.UNKNOWN_MODULE


@pytest.mark.parametrize("selector", ["layer[0][*]", "layer[*", "layer*[*]:Conv2d", "fx:layer[*]", "re:x[*"])
def test_a_star_comes_first_and_alone(selector: str) -> None:
    with pytest.raises(ServiceError) as caught:
        parse_selector(selector)
    assert caught.value.reason is ErrorReason.INVALID_SELECTOR
