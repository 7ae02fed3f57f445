"""Before and after an edit, and two models, against torch and NumPy in this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models import tiny_models
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from trocar._cli import main

NAMES = ("cat", "cup", "dog", "car", "cow")
FLIP = trocar.edit("conv2", "scale", -40.0)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    plain = {**custom(tiny_models.Plain, (3, 8, 8)), "categories": NAMES}
    cranes = ("crane", "crane", "dog", "crane", "dog")
    models = {
        "plain": plain,
        "other": {**plain, "weights": "random:1", "categories": (*reversed(NAMES),)},
        "cranes": {**plain, "categories": cranes},
        "other-cranes": {**plain, "weights": "random:1", "categories": (*reversed(cranes),)},
        "named": {**custom(tiny_models.NamedScores, (3, 8, 8)), "weights": "random:1", "categories": NAMES},
        "structured": custom(tiny_models.Structured, (3,)),
        "half": custom(tiny_models.Half, (7,)),
    }
    with running_server(models=models, device="cpu") as running:
        yield running


def images(count: int = 8) -> Any:
    return np.random.default_rng(1).normal(size=(count, 3, 8, 8)).astype(np.float32)


def values_of(model: Any, x: Any, path: str, factor: float | None = None) -> tuple[Any, Any]:
    """Return a module's value and the softmax of the output, with `conv2` scaled."""
    seen: list[Any] = []
    if factor is not None:
        model.conv2.register_forward_hook(lambda module, args, value: value * factor)
    model.get_submodule(path).register_forward_hook(lambda module, args, value: seen.append(value.clone()))
    with torch.inference_mode():
        scores = model(torch.from_numpy(x)).double().softmax(1)
    return seen[0].double().numpy(), scores.numpy()


def test_values_and_classes_are_those_of_torch(client: trocar.Client) -> None:
    x = images()
    a, scores_a = values_of(rebuilt(tiny_models.Plain), x, "pool")
    b, scores_b = values_of(rebuilt(tiny_models.Plain), x, "pool", -40.0)
    found = client.compare("plain", x, edits=FLIP, batch_size=3)
    row = found["pool"]
    assert row.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-4)
    assert row.max_difference == pytest.approx(np.abs(a - b).max(), rel=1e-4)
    assert (row.mean_a, row.mean_b) == pytest.approx((a.mean(), b.mean()), rel=1e-4)
    assert found["conv"].relative_error == 0
    best = scores_a.argmax(1)
    assert [one.before.name for one in found.classes] == [NAMES[i] for i in best]
    assert [one.after.name for one in found.classes] == [NAMES[i] for i in scores_b.argmax(1)]
    after = [one.before_score_after for one in found.classes]
    assert after == pytest.approx(scores_b[np.arange(len(x)), best].tolist(), rel=1e-4)
    assert len(found.changed) == (best != scores_b.argmax(1)).sum() > 0


async def test_the_asyncio_client_compares_alike(client: trocar.Client, server: RunningServer) -> None:
    async with trocar.aio.connect(server.address) as own:
        found = await own.compare("plain", images(), edits=FLIP, other="other", batch_size=3)
    assert str(found) == str(client.compare("plain", images(), edits=FLIP, other="other", batch_size=3))
    assert found["pool"].relative_error > 0


def test_two_models_pair_their_classes_by_name(client: trocar.Client) -> None:
    x = images()
    torch.manual_seed(1)
    second = tiny_models.Plain().eval()
    with torch.inference_mode():
        scores = second(torch.from_numpy(x)).double().softmax(1).numpy()
    found = client.compare("plain", x, other="other", taps="conv")
    theirs = [NAMES[::-1].index(one.before.name) for one in found.classes]
    moved = [one.before_score_after for one in found.classes]
    assert moved == pytest.approx(scores[np.arange(len(x)), theirs].tolist(), rel=1e-4)
    assert [row.name for row in found.diff.rows] == ["conv", "/out"]
    assert all(one.is_changed == (one.before.name != one.after.name) for one in found.classes)


def test_classes_of_one_name_are_several(client: trocar.Client) -> None:
    x = images(32)
    before, after = (values_of(rebuilt(tiny_models.Plain), x, "pool", factor)[1] for factor in (None, -40.0))
    moved = before.argmax(1) != after.argmax(1)
    found = client.compare("cranes", x, edits=FLIP, taps="conv")
    assert any(one.is_changed and one.before.name == one.after.name for one in found.classes)
    assert [one.is_changed for one in found.classes] == moved.tolist()


def test_of_two_models_the_best_class_of_the_name_is_the_same(client: trocar.Client) -> None:
    found = client.compare("cranes", images(32), other="other-cranes", taps="conv", top=5)
    assert found.after is not None
    for one, after in zip(found.classes, found.after, strict=True):
        assert one.is_changed == (one.before.name != one.after.name)
        named = [other for other in after if other.name == one.before.name]
        assert one.before_score_after == named[0].score
        assert one.number_after == named[0].number


def test_two_models_head_the_columns_and_one_model_has_before_and_after(client: trocar.Client) -> None:
    two = client.compare("plain", images(), other="other", taps="conv")
    one = client.compare("plain", images(), edits=FLIP, taps="conv")
    for shown in (str(two), two._repr_html_()):
        assert "its score in other" in shown
        assert "mean in plain" in shown
        assert "before" not in shown
        assert "after" not in shown
    for shown in (str(one), one._repr_html_()):
        assert "its score after" in shown
        assert "mean before" in shown
    assert [side.name for side in two.sides] == ["plain", "other"]
    assert legend_of(two) == ["plain", "other"]
    assert legend_of(one) == ["before", "after"]


def legend_of(found: trocar.Comparison) -> list[str]:
    (legend,) = [panel.get_legend() for part in found.plot().subfigs[1:] for panel in part.axes]
    assert legend is not None
    return [text.get_text() for text in legend.get_texts()]


@pytest.mark.parametrize("difference", [{"edits": FLIP}, {"other": "other"}])
def test_the_output_is_no_second_row_of_the_module_that_returns_it(
    client: trocar.Client, difference: dict[str, Any]
) -> None:
    def rows(*taps: str) -> list[str]:
        found = client.compare("plain", images(), taps=taps or None, **difference)
        return [row.name for row in found.diff.rows]

    assert rows("fc") == ["fc"]
    assert rows("pool") == ["pool", "/out"]
    assert rows("fc", "/out") == ["fc", "/out"]
    assert rows()[-2:] == ["fc", "/out"]


@pytest.mark.parametrize("taps", [None, "pool", "conv*", "/out"])
@pytest.mark.parametrize("is_turned", [False, True])
def test_outputs_of_other_names_are_compared_and_the_rest_by_name(
    client: trocar.Client, taps: Any, is_turned: bool
) -> None:
    x = images()
    torch.manual_seed(1)
    second = tiny_models.Plain().eval()
    with torch.inference_mode():
        scores = [model(torch.from_numpy(x)).double() for model in (rebuilt(tiny_models.Plain), second)]
    ids, selectors = ["plain", "named"], ["/out", '/out["logits"]']
    if is_turned:
        ids, selectors, scores = ids[::-1], selectors[::-1], scores[::-1]
    found = client.compare(ids[0], x, other=ids[1], taps=taps, batch_size=3)
    row, rows = found.diff.rows[-1], {one.name for one in found.diff.rows[:-1]}
    assert (row.name, row.name_b) == tuple(selectors)
    error = float((scores[0] - scores[1]).norm() / scores[0].norm())
    assert row.relative_error == pytest.approx(error, rel=1e-4)
    assert [one.after.name for one in found.classes] == [NAMES[i] for i in scores[1].argmax(1)]
    assert all(one.name == one.name_b for one in found.diff.rows[:-1])
    assert rows >= {"pool": {"pool"}, "conv*": {"conv", "conv2"}}.get(str(taps), set())
    if taps is None:
        assert rows >= {"conv", "conv2", "pool", "fc", "relu@0"}
        assert "last" in (found.diff.only_a if is_turned else found.diff.only_b)


def test_nothing_changes_by_an_edit_that_does_nothing(client: trocar.Client) -> None:
    found = client.compare("plain", images(), edits=trocar.edit("conv2", "scale", 1.0))
    assert found.changed == ()
    assert found.diff.first_diverging is None
    assert found.before == found.after
    assert "0 of 8 samples have another best class" in str(found)


def test_a_model_without_classes_is_compared_by_its_values(client: trocar.Client) -> None:
    x = np.ones((2, 3), np.float32)
    found = client.compare("structured", x, edits=trocar.edit('/out["out"]', "scale", 2.0), taps="/out")
    assert found.classes == ()
    assert "no classes are compared: structured (custom) returns no scores of classes" in str(found)
    assert found['/out["aux"]'].relative_error == 0
    assert found['/out["out"]'].relative_error == pytest.approx(1)


def test_an_edit_that_makes_nan_leaves_the_values(client: trocar.Client) -> None:
    twice = [trocar.edit("fc", "scale", 1e38)] * 2
    found = client.compare("plain", images(), edits=twice, taps="pool")
    assert found.classes == ()
    assert found["/out"].nonfinite_b == 40
    assert "NaN" in str(found)


def test_a_model_without_modules_is_compared_by_its_output(client: trocar.Client) -> None:
    found = client.compare("half", np.ones((7, 1), np.float32), edits=trocar.edit("/out", "scale", 2.0))
    assert [row.name for row in found.diff.rows] == ["/out"]


def test_a_comparison_needs_a_difference(client: trocar.Client) -> None:
    with pytest.raises(ValueError, match="needs a difference"):
        client.compare("plain", images())


def test_diff_takes_edits_of_both_sides(client: trocar.Client) -> None:
    same = client.diff("plain", "plain", images(), "pool", edits_a=FLIP, edits_b=FLIP)
    assert same.first_diverging is None
    assert client.diff("plain", "plain", images(), "pool", edits_b=FLIP)["pool"].diverges(1e-5)


def run(server: RunningServer, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([*map(str, words), "--server", server.address])
    out, err = capsys.readouterr()
    return ended.value.code, out, err


def test_the_commands_compare_and_draw(
    server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    array, picture = tmp_path / "x.npy", tmp_path / "compared.png"
    np.save(array, images())
    edit = ("--edit", "conv2 scale -40.0")
    code, out, err = run(server, capsys, "compare", "plain", array, *edit, "--plot", picture, "--json")
    assert code == 0, err
    assert picture.stat().st_size > 5_000
    assert {one["before"]["name"] for one in json.loads(out)["classes"]} <= set(NAMES)
    code, out, err = run(server, capsys, "compare", "plain", array, *edit)
    assert code == 0
    assert "another best class" in out
    code, out, err = run(server, capsys, "compare", "plain", array)
    assert code == 2
    assert "--other MODEL" in " ".join(err.split())
    words = ("--tap", "pool", "--tap-other", "pool", "--edit", "conv2 scale -40.0")
    code, out, _ = run(server, capsys, "compare", "plain", array, *words)
    assert code == 0
    assert "first diverging: pool" in out
