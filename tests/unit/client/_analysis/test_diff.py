import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.unit.client._analysis.conftest import Analyse
from tests.unit.client._analysis.fake_client import FakeModels
from trocar import DiffRow
from trocar._base.tensors import Array
from trocar._request.nested_inputs import copied


def images(count: int = 10) -> Array:
    return np.random.default_rng(0).standard_normal((count, 3, 4, 4)).astype(np.float32)


MODELS = {
    "a": {
        "conv": lambda x: x * 2,
        "block.relu@0": lambda x: np.maximum(x, 0),
        "block.relu@1": lambda x: np.maximum(x * 2, 0),
        "block": lambda x: x + 1,
        "only_a": lambda x: x,
        "fc": lambda x: x.reshape(len(x), -1)[:, :5],
    },
    "b": {
        "conv": lambda x: x * 2,
        "block.relu@0": lambda x: np.maximum(x, 0) * np.float32(1 + 1e-4),
        "block.relu@1": lambda x: np.maximum(x * 2, 0),
        "block": lambda x: x - 1,
        "fc": lambda x: x.reshape(len(x), -1)[:, :6],
        "only_b": lambda x: x,
    },
}


def test_numbers_are_those_of_numpy_over_all_samples(analyse: Analyse) -> None:
    x = images()
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", x, batch_size=3)
    for name in ("conv", "block.relu@0", "block"):
        a, b = (MODELS[model][name](x).astype(np.float64).ravel() for model in "ab")
        row = diff[name]
        assert row.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-12)
        assert row.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-12)
        assert row.max_difference == np.abs(a - b).max()
    assert diff.batch_count == 4


def test_the_first_diverging_row_is_the_first_above_the_tolerance(analyse: Analyse) -> None:
    found = analyse(FakeModels(MODELS), "diff", "a", "b", images())
    assert found.first_diverging is found["block.relu@0"]
    coarse = analyse(FakeModels(MODELS), "diff", "a", "b", images(), tolerance=1e-3)
    assert coarse.first_diverging is coarse["block"]
    same = analyse(FakeModels(MODELS), "diff", "a", "a", images(), tolerance=0)
    assert same.first_diverging is None


def test_rows_of_several_taps_are_in_execution_order(analyse: Analyse) -> None:
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", images(), ["block", "block.relu*", "conv"])
    assert [row.name for row in diff.rows] == ["conv", "block.relu@0", "block.relu@1", "block"]


def test_another_shape_diverges_and_has_no_numbers(analyse: Analyse) -> None:
    row = analyse(FakeModels(MODELS), "diff", "a", "b", images(), "fc")["fc"]
    assert (row.shape_a, row.shape_b, row.shapes_differ) == ((10, 5), (10, 6), True)
    assert all(math.isnan(number) for number in (row.cosine, row.relative_error, row.max_difference))
    assert row.diverges(math.inf)


def test_a_shape_that_differs_in_a_later_batch_only_is_noticed(analyse: Analyse) -> None:
    models = {"a": {"x": lambda x: x}, "b": {"x": lambda x: x[:, :, : 4 if len(x) == 2 else 3]}}
    diff = analyse(FakeModels(models), "diff", "a", "b", iter([images(2), images(3)]), "x")
    assert (diff["x"].shape_a, diff["x"].shape_b) == ((3, 3, 4, 4), (3, 3, 3, 4))


def test_feature_maps_of_one_side_are_listed(analyse: Analyse) -> None:
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", images())
    assert (diff.only_a, diff.only_b) == (("only_a",), ("only_b",))
    assert "only in a: only_a" in str(diff)
    assert "only in b: only_b" in diff._repr_html_()


def test_models_without_a_common_name_do_not_agree_but_are_told_to_pair(analyse: Analyse) -> None:
    models = {"a": {f"a{index}": lambda x: x for index in range(20)}, "b": {"b": lambda x: x}}
    diff = analyse(FakeModels(models), "diff", "a", "b", images(2))
    assert diff.first_diverging is None
    assert "agree" not in str(diff)
    assert "pair them with taps_a and taps_b" in str(diff)
    assert "a7 and 12 more\n" in str(diff)
    assert len(diff.only_a) == 20


@pytest.mark.parametrize(
    ("taps", "taps_b"),
    [
        (["conv", "block"], ["block", "conv"]),
        (["conv", "block"], {"conv": "block", "block": "conv"}),
        (["conv", trocar.tap("block")], [trocar.tap("block", alias="other"), "conv"]),
    ],
)
def test_other_names_are_paired(analyse: Analyse, taps: Any, taps_b: Any) -> None:
    x = images()
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", x, taps, taps_b=taps_b)
    row = diff["conv"]
    assert row.name_b in ("block", "other")
    assert row.max_difference == np.abs((x * 2).astype(np.float64) - (x - 1)).max()
    assert (diff.only_a, diff.only_b) == ((), ())


def test_patterns_are_paired_in_execution_order(analyse: Analyse) -> None:
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", images(), ["block.relu*"], taps_b=["block.relu*"])
    assert [(row.name, row.name_b) for row in diff.rows] == [("block.relu@0",) * 2, ("block.relu@1",) * 2]


def test_what_a_mapping_leaves_out_is_listed(analyse: Analyse) -> None:
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", images(), ["conv", "block"], taps_b={"conv": "conv"})
    assert ([row.name for row in diff.rows], diff.only_a) == (["conv"], ("block",))


@pytest.mark.parametrize(
    ("taps", "taps_b", "message"),
    [
        (["conv"], ["conv", "block"], "taps has 1 entries and taps_b 2"),
        (["conv"], {"block": "conv"}, "'block' of taps_b is not a feature map of a"),
        (["block.relu*"], ["conv"], "stands for 2 feature maps of a and 'conv' for 1 of b"),
        (["conv"], [], "taps is empty"),
        ([], None, "taps is empty"),
        ([trocar.tap("conv", stats=["mean"], values=False)], None, "values=False"),
    ],
)
def test_taps_that_do_not_pair_up_are_refused(analyse: Analyse, taps: Any, taps_b: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("*", r"\*")):
        analyse(FakeModels(MODELS), "diff", "a", "b", images(), taps, taps_b=taps_b)


@pytest.mark.parametrize("tolerance", [-1e-9, float("nan")])
def test_a_tolerance_that_is_none_is_refused(analyse: Analyse, tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance"):
        analyse(FakeModels(MODELS), "diff", "a", "b", images(), tolerance=tolerance)


def test_nan_on_one_side_diverges_and_is_counted(analyse: Analyse) -> None:
    models = {"a": {"x": lambda x: x}, "b": {"x": lambda x: np.where(x == x.max(), np.nan, x)}}
    diff = analyse(FakeModels(models), "diff", "a", "b", images(), tolerance=1.0)
    assert (diff["x"].nonfinite_a, diff["x"].nonfinite_b) == (0, 1)
    assert diff["x"].relative_error == math.inf
    assert diff.first_diverging is diff["x"]
    assert "0 / 1" in str(diff)


def test_an_unknown_module_says_of_which_model(analyse: Analyse) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError) as caught:
        analyse(FakeModels(MODELS), "diff", "a", "b", images(), "only_a")
    assert caught.value.__notes__ == ["of b"]


def test_a_batch_that_fails_says_which_of_which_model(analyse: Analyse) -> None:
    fake = FakeModels(MODELS, failing={("b", 1): trocar.errors.InputRejectedError("too small")})
    with pytest.raises(trocar.errors.InputRejectedError) as caught:
        analyse(fake, "diff", "a", "b", images(), "conv", batch_size=4)
    assert caught.value.__notes__ == ["in samples 4 to 7, b"]


def test_inputs_that_break_off_are_an_error_and_no_short_diff(analyse: Analyse) -> None:
    def broken() -> Iterator[Array]:
        yield images(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        analyse(FakeModels(MODELS), "diff", "a", "b", broken(), "conv")


def test_no_inputs_are_refused(analyse: Analyse) -> None:
    with pytest.raises(ValueError, match="empty"):
        analyse(FakeModels(MODELS), "diff", "a", "b", iter([]), "conv")


def test_both_models_see_every_batch_once(analyse: Analyse) -> None:
    fake = FakeModels(MODELS)
    x = images()
    analyse(fake, "diff", "a", "b", (x[start : start + 2] for start in range(0, 10, 2)), "conv")
    np.testing.assert_array_equal(np.concatenate(fake.batches[::2]), x)
    np.testing.assert_array_equal(np.concatenate(fake.batches[1::2]), x)


def test_diff_prints_as_a_table_with_a_verdict(analyse: Analyse) -> None:
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", images(), ["conv", "block", "fc"])
    lines = str(diff).splitlines()
    assert lines[0].split()[:2] == ["feature", "map"]
    assert lines[1].split() == ["conv", "(10,", "3,", "4,", "4)", "1.000000", "0", "0"]
    assert lines[2].split()[-1] == "diverges"
    assert lines[3].split()[1:] == ["(10,", "5)", "/", "(10,", "6)", "diverges"]
    assert lines[4].startswith("a and b: first diverging: block (relative error")
    same = analyse(FakeModels(MODELS), "diff", "a", "a", images(), "conv")
    assert str(same).splitlines()[-1].endswith("all 1 feature maps agree within a relative error of 1e-05")


def test_unknown_rows_name_the_nearest(analyse: Analyse) -> None:
    diff = analyse(FakeModels(MODELS), "diff", "a", "b", images(), "conv")
    with pytest.raises(KeyError, match="nearest: conv"):
        diff["con"]


def test_names_are_escaped_in_notebooks(analyse: Analyse) -> None:
    models = {"a": {"<b>": lambda x: x}}
    assert "<b>" not in analyse(FakeModels(models), "diff", "a", "a", images(), "<b>")._repr_html_()


@pytest.mark.parametrize("other", ["a", "b"])
def test_the_plot_is_a_picture(analyse: Analyse, tmp_path: Path, other: str) -> None:
    pytest.importorskip("matplotlib")
    diff = analyse(FakeModels(MODELS), "diff", "a", other, images(), "**")
    figure = diff.plot(tmp_path / "diff.png")
    assert (tmp_path / "diff.png").read_bytes().startswith(b"\x89PNG")
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == [row.name for row in diff.rows]


def test_of_many_feature_maps_the_farthest_apart_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    errors = [k / 100 for k in range(35)]
    errors[5] = float("nan")
    rows = tuple(
        DiffRow(f"m{k}", f"m{k}", (1,), (1,), 1.0, error, 0.0, 0, 0) for k, error in enumerate(errors)
    )
    diff = trocar.Diff(rows, (), (), "a", "b", 1e-5, 1)
    figure = diff.plot()
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert names == ["m5", *(f"m{k}" for k in range(34, 5, -1))]
    assert "30 of 35 modules, sorted by relative error" in figure.get_suptitle()
    labels = [label for label in figure.axes[0].get_yticklabels() if label.get_text()]
    figure.savefig(tmp_path / "diff.png")
    boxes = [label.get_window_extent() for label in labels]
    assert all(below.y1 <= above.y0 for above, below in itertools.pairwise(boxes))
    assert len(diff.plot(all_rows=True).axes[0].get_yticklabels()) == 35


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x,), lambda x: [x[0], x[1]]])
def test_a_buffer_that_is_used_for_every_batch_is_read_before_the_next(analyse: Analyse, pack: Any) -> None:
    def batches() -> Iterator[Any]:
        buffer = np.empty((2, 3), np.float32)
        for number in range(6):
            buffer[:] = number
            yield pack(buffer)

    models = {"a": {"x": _rows}, "b": {"x": lambda x: _rows(x) + 1}}
    found = analyse(FakeModels(models), "diff", "a", "b", batches(), "x")
    values = np.repeat(np.arange(6.0), 6)
    assert found["x"].max_difference == 1
    assert found["x"].relative_error == pytest.approx(np.sqrt(36) / np.linalg.norm(values))


def _rows(given: Any) -> Any:
    """The rows of a batch, however it is packed."""
    rows = np.array(given, np.float32)
    return rows.reshape(len(rows), -1)


def test_copies_of_named_arguments_are_of_their_own_memory() -> None:
    given: Any = {"x": np.zeros(3), "more": [torch.zeros(3), "text"], "flag": True}
    copy = copied(given)
    given["x"] += 1
    given["more"][0] += 1
    assert np.array_equal(copy["x"], np.zeros(3))
    assert torch.equal(copy["more"][0], torch.zeros(3))
    assert (copy["more"][1], copy["flag"]) == ("text", True)
