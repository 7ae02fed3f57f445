import pytest

from trocar import ModuleInfo, ModuleTree, OutputInfo
from trocar._cli.commands.inspection.modules_command import tree_table
from trocar._cli.console import show

CALL = (OutputInfo("", "Tensor", (1, 4), "float32", 16),)
NOTHING = (OutputInfo("[0]", "Tensor", (1, 2), "float32", 8), OutputInfo("[1]", "NoneType", None, None, 0))


def module(path: str, *calls: tuple[OutputInfo, ...]) -> ModuleInfo:
    return ModuleInfo(path, "Linear", 1234, calls)


def drawn(capsys: pytest.CaptureFixture[str], *found: ModuleInfo) -> list[str]:
    show(tree_table(list(ModuleTree(found).walk())))
    return capsys.readouterr().out.splitlines()[2:]


def test_tree_shows_type_parameters_calls_and_shape(capsys: pytest.CaptureFixture[str]) -> None:
    lines = drawn(capsys, module("", CALL), module("a", CALL, CALL), module("b", NOTHING))
    assert [line.split() for line in lines] == [
        ["(root)", "Linear", "1,234", "1", "(1,", "4)"],
        ["├─", "a", "Linear", "1,234", "2", "(1,", "4)"],
        ["└─", "b", "Linear", "1,234", "1", "[0]", "(1,", "2),", "[1]", "NoneType"],
    ]


def test_container_that_is_never_called_comes_where_its_first_module_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [module("", CALL), module("a", CALL), module("list.0.x", CALL), module("z", CALL)]
    lines = drawn(capsys, *found, module("list"), module("list.0"))
    assert [line.split("Linear")[0].rstrip() for line in lines] == [
        "(root)",
        "├─ a",
        "├─ list",
        "│  └─ 0",
        "│     └─ x",
        "└─ z",
    ]


def test_module_that_is_never_called_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "never called" in drawn(capsys, module("", CALL), module("unused"))[-1]
