import pytest

from trocar import FeatureMapInfo
from trocar._analysis.ordering import in_execution_order

EXECUTED = [
    "stem",
    "block.conv@0",
    "block.relu@0",
    "block@0",
    "block.conv@1",
    "block.relu@1",
    "block@1",
    "head",
]


def info(name: str, port: str = "out") -> FeatureMapInfo:
    path, _, call = name.partition("/")[0].partition("@")
    return FeatureMapInfo(name, path, "Module", int(call or 0), port, "", (1,), "float32", True)


def ordered(*names: str) -> list[str]:
    known = {name: info(name, name.partition("/")[2] or "out") for name in names}
    return in_execution_order(names, known, [info(name) for name in EXECUTED])


def test_outputs_come_as_their_calls_end() -> None:
    assert ordered(*reversed(EXECUTED)) == EXECUTED


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("block@0", "block/in", "stem"), ["stem", "block/in", "block@0"]),
        (("block.conv@0", "block/in"), ["block/in", "block.conv@0"]),
        (("block@0", "block@1/in", "block.conv@1"), ["block@0", "block@1/in", "block.conv@1"]),
        (("head", "head/in(query)"), ["head/in(query)", "head"]),
        (("head", "/out", "/in", "stem"), ["/in", "stem", "head", "/out"]),
    ],
)
def test_inputs_come_before_what_the_module_computes(names: tuple[str, ...], expected: list[str]) -> None:
    assert ordered(*names) == expected


def test_what_has_no_place_stays_behind_what_it_followed() -> None:
    assert ordered("head", "fx:add", "stem", "fx:mul") == ["stem", "fx:mul", "head", "fx:add"]
    assert ordered("fx:add", "head", "stem") == ["fx:add", "stem", "head"]


def test_without_an_order_names_stay_as_they_were() -> None:
    names = ["b", "a"]
    assert in_execution_order(names, {name: info(name) for name in names}, []) == names
