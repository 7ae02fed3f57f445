import pytest

import trocar
from tests.unit.client.fake_server import modules
from trocar._result.modules import ModuleInfo, ModuleTree, OutputInfo
from trocar._wire.from_wire import module_tree

TREE = module_tree(modules())


def test_it_prints_as_a_tree_with_children_below_their_parents() -> None:
    assert str(TREE).splitlines() == [
        "module      type        parameters  calls  output",
        "(root)      ResNet          11,000      1  (1, 1000)",
        "  layer1    Sequential       1,500      1  (1, 64, 56, 56)",
        "    0       BasicBlock       1,500      1  (1, 64, 56, 56)",
        "      relu  ReLU                        2  (1, 64, 56, 56)",
        "      drop  Dropout                        never called",
        "  fc        Linear           9,500      1  (1, 1000)",
    ]


def test_dimensions_are_told_where_they_are_known() -> None:
    axes = ("batch", "", "channels")
    pair = (
        OutputInfo("[0]", "Tensor", (1, 2, 3), "float32", 24, axes),
        OutputInfo("[1]", "Tensor", (1,), "float32", 4),
    )
    tree = ModuleTree([ModuleInfo("", "Net", 0, (pair,))])
    assert str(tree).splitlines() == [
        "module  type  parameters  calls  output                   dimensions",
        "(root)  Net                   1  [0] (1, 2, 3), [1] (1,)  batch - channels; ?",
    ]


def test_it_is_a_sequence_in_execution_order() -> None:
    assert [module.path for module in TREE][-2:] == ["fc", "layer1.0.drop"]
    assert TREE[0].type == "ResNet"
    assert len(TREE[1:3]) == 2
    assert "fc" in TREE  # type: ignore[comparison-overlap]  # paths are in it, too
    assert TREE.is_symbolic


def test_modules_are_found_by_path() -> None:
    relu = TREE["layer1.0.relu"]
    assert (relu.call_count, relu.output_shape, relu.depth) == (2, (1, 64, 56, 56), 3)
    assert TREE["layer1.0.drop"].output_shape is None


def test_an_unknown_path_names_the_nearest() -> None:
    with pytest.raises(KeyError, match="nearest: layer1"):
        TREE["layer5"]


def test_the_repr_is_short_and_html_is_escaped() -> None:
    assert repr(TREE) == "<ModuleTree of ResNet: 6 modules>"
    assert TREE._repr_html_() == (
        '<ul><li><details open><summary><b title="">(root)</b> ResNet, 11,000 parameters, (1, 1000)</summary>'
        '<ul><li><details><summary><b title="layer1">layer1</b> Sequential, 1,500 parameters, '
        '(1, 64, 56, 56)</summary><ul><li><details><summary><b title="layer1.0">0</b> BasicBlock, '
        "1,500 parameters, (1, 64, 56, 56)</summary><ul>"
        '<li><b title="layer1.0.relu">relu</b> ReLU, (1, 64, 56, 56)</li>'
        '<li><b title="layer1.0.drop">drop</b> Dropout, never called</li>'
        "</ul></details></li></ul></details></li>"
        '<li><b title="fc">fc</b> Linear, 9,500 parameters, (1, 1000)</li></ul></details></li></ul>'
    )
    assert "<i>" not in trocar.ModuleTree([trocar.ModuleInfo("", "<i>", 0, ())])._repr_html_()
