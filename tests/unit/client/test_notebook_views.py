"""What a notebook shows of an object, and its repr: short, well formed, with every name escaped."""

import base64
import io
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trocar
from trocar import DiffRow, FeatureMapInfo, ModuleInfo, OutputInfo
from trocar._base.tables import Listing
from trocar._base.types import MODEL_COLUMNS, Feature
from trocar._request.stored.stored_edits import EDITS_COLUMNS
from trocar._result.trainer_types import CHECKPOINT_COLUMNS, TRAINER_COLUMNS
from trocar._wire.stored_datasets import DATASET_COLUMNS
from trocar.training import FitEvent

EVIL = "<script>alert('x')</script>"
MANY = 500
NOW = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
TIMING = trocar.ServerTiming(0.0, 0.1)
UNCLOSED = {"img", "br"}


class Checker(HTMLParser):
    """Reads HTML, and remembers its tags and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.attributes: dict[str, str | None] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.attributes |= dict(attrs)
        if tag not in UNCLOSED:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def read(html: str) -> Checker:
    """Read HTML, and check that every tag is closed and that nothing in it runs or sets colours."""
    found = Checker()
    found.feed(html)
    found.close()
    assert not found.open
    assert not {"script", "style"} & set(found.seen)
    assert not {"style", "class"} & set(found.attributes)
    return found


def shown(view: Any) -> Checker:
    return read(view._repr_html_())


def model(name: str = EVIL, **given: Any) -> trocar.Model:
    facts: dict[str, Any] = {
        "model_id": name,
        "state": "loaded",
        "family": "classification",
        "architecture": EVIL,
        "weights": "file",
        "parameter_count": 11_000,
        "byte_count": 44_000,
        "device": "cpu",
        "dtype": "float32",
        "preprocessing": None,
        "categories": (EVIL,) * MANY,
        "input_shape": (3, 8, 8),
    }
    return trocar.Model(**{**facts, **given})


def status() -> trocar.ServerStatus:
    callers = [trocar.CallerStatus(f"{EVIL}{number}", 2, 1, 4000, 0.5, 3.0) for number in range(MANY)]
    queues = tuple(trocar.QueueStatus(f"{EVIL}{number}", 1, 1, 3, 0.5) for number in range(MANY))
    total = trocar.CallerStatus("", 2 * MANY, MANY, 4000 * MANY, 0.5 * MANY, 3.0 * MANY)
    return trocar.ServerStatus(queues, tuple(callers), total, (trocar.CacheStatus(EVIL, 1, 2, 3, 4, 5),))


def limits() -> trocar.ServerLimits:
    return trocar.ServerLimits(*range(1, 14))


def trainer_info() -> trocar.training.TrainerInfo:
    return trocar.training.TrainerInfo(
        trainer_id="t1",
        model_id=EVIL,
        state="ready",
        created_at=NOW,
        expires_at=NOW,
        next_number=3,
        update_count=2,
        accumulated_count=0,
        trainable=tuple(f"{EVIL}.{index}" for index in range(MANY)),
        trainable_element_count=1000,
        frozen_element_count=5,
        byte_count=4000,
        head_path="",
        train_mode=(EVIL,) * MANY,
        learning_rates=(0.1,) * MANY,
        checkpoint_number=4,
        notices=(EVIL,),
    )


def checkpoint() -> trocar.training.Checkpoint:
    return trocar.training.Checkpoint(4, NOW, 2, 4000, "00", EVIL)


def dataset() -> trocar.StoredDataset:
    targets = {EVIL: trocar.DatasetTarget("int64", (), 0, 9, 10)}
    return trocar.StoredDataset(
        dataset_id="d1",
        name=EVIL,
        is_complete=True,
        is_listed=False,
        sample_count=1234,
        byte_count=5678,
        has_images=True,
        inputs=None,
        targets=targets,
        categories=(EVIL,) * MANY,
        stored_at=NOW,
    )


def stored_edits() -> trocar.StoredEdits:
    return trocar.StoredEdits(EVIL, EVIL, (EVIL,) * 256, 0, NOW)


def statistics() -> trocar.Statistics:
    rng = np.random.default_rng(0)
    counts = trocar.Histogram(np.arange(MANY), np.linspace(0, 1, MANY + 1))
    return trocar.Statistics(
        {"mean": rng.standard_normal(MANY), "count": 3, "std": 0.5, "histogram": counts}, over="channel"
    )


def info(name: str) -> FeatureMapInfo:
    return FeatureMapInfo(name, name, EVIL, 0, "out", "", (2, 3), "float32", True, 24)


def names() -> list[str]:
    return [f"{EVIL}{index}" for index in range(MANY)]


def feature_maps() -> trocar.FeatureMaps:
    arrays = {name: np.zeros((2, 3), np.float32) for name in names()}
    return trocar.FeatureMaps(
        arrays,
        info={name: info(name) for name in arrays},
        stats={EVIL: statistics()},
        expansions={},
        timing=TIMING,
        model_id=EVIL,
    )


def plan() -> trocar.ExtractionPlan:
    maps = {name: info(name) for name in names()}
    return trocar.ExtractionPlan(EVIL, maps, {}, EVIL, 1, 2, 3, True, {EVIL: tuple(maps)})


def history() -> trocar.training.History:
    events = [FitEvent(0, "started", 0.0, {"step": 0, "epoch": 0})]
    for epoch in range(MANY):
        facts = {"step": epoch, "epoch": epoch, "loss": 1 / (epoch + 1)}
        events += [
            FitEvent(0, "step", 0.0, facts),
            FitEvent(0, "epoch", 0.0, facts),
            FitEvent(0, "evaluation", 0.0, {**facts, "metrics": {"accuracy": 0.5, EVIL: 1.0}}),
        ]
    return trocar.training.History(events)


def tree() -> trocar.ModuleTree:
    output = OutputInfo("", "Tensor", (1, 4), "float32", 16)
    paths = ["", "a", f"a.{EVIL}", f"a.{EVIL}.c", "b", *(f"b.{index}" for index in range(MANY))]
    return trocar.ModuleTree([ModuleInfo(path, EVIL, 10, ((output,),), EVIL) for path in paths])


def predictions() -> trocar.Predictions:
    scores = tuple(trocar.ClassScore(number, EVIL, 0.5) for number in range(5))
    return trocar.Predictions(tuple(trocar.Prediction(EVIL, scores) for _ in range(MANY)), EVIL, "softmax", 9)


def diff() -> trocar.Diff:
    rows = tuple(DiffRow(name, name, (1,), (1,), 1.0, 0.5, 0.1, 0, 0, 1.0, 2.0) for name in names())
    return trocar.Diff(rows, (EVIL,), (), EVIL, EVIL, 1e-3, 1)


def comparison() -> trocar.Comparison:
    best = trocar.ClassScore(1, EVIL, 0.5)
    change = trocar.ClassChange(EVIL, best, best, 0.5)
    return trocar.Comparison(diff(), (change,) * MANY, predictions(), predictions(), EVIL)


def attribution(**given: Any) -> trocar.Attribution:
    rng = np.random.default_rng(0)
    values = rng.standard_normal((2, 3, 12, 10)).astype(np.float32)
    facts = {"values": values, "method": "saliency", "at": EVIL, "model_id": EVIL, "inputs": values}
    return trocar.Attribution(**{**facts, "classes": (1, 2), "class_names": (EVIL, EVIL), **given})


def processed() -> trocar.ProcessedInput:
    sample = trocar.ProcessedSample(MANY, tuple(range(MANY)), (EVIL,) * MANY)
    return trocar.ProcessedInput((sample,) * MANY, MANY, False, (EVIL,), "00")


VIEWS = {
    "model": model(),
    "models": Listing([model()] * MANY, MODEL_COLUMNS),
    "no models": Listing([], MODEL_COLUMNS),
    "server": trocar.ServerInfo("1", "2", EVIL, limits(), features=(Feature(EVIL, False, EVIL),) * 12),
    "trainer": trainer_info(),
    "trainers": Listing([trainer_info()], TRAINER_COLUMNS),
    "step": trocar.training.StepResult(1.0, {EVIL: 1.0}, 8, 1, True, False, 1, (0.1,), 0.5, (), 0, 0, 0.1),
    "evaluation": trocar.training.Evaluation(1.0, {EVIL: 1.0}, 8, 4),
    "checkpoint": Listing([checkpoint()], CHECKPOINT_COLUMNS),
    "data set": dataset(),
    "data sets": Listing([dataset()], DATASET_COLUMNS),
    "edits": stored_edits(),
    "lists of edits": Listing([stored_edits()], EDITS_COLUMNS),
    "statistics": statistics(),
    "feature maps": feature_maps(),
    "plan": plan(),
    "history": history(),
    "module": tree()["a"],
    "modules": tree(),
    "prediction": predictions()[0],
    "predictions": predictions(),
    "diff": diff(),
    "comparison": comparison(),
    "server status": status(),
    "attribution": attribution(),
    "texts": processed(),
}

views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@views
def test_the_html_is_well_formed_and_every_name_is_escaped(view: Any) -> None:
    assert shown(view).seen


@views
def test_the_repr_is_short(view: Any) -> None:
    text = repr(view)
    assert len(text.splitlines()) <= 8
    assert len(text) < 1200


@views
def test_no_table_is_longer_than_sixty_rows(view: Any) -> None:
    tables = view._repr_html_().split("<table>")[1:]
    assert all(table.count("<tr>") <= 62 for table in tables)


def test_a_list_of_models_is_a_table_of_them() -> None:
    found = shown(
        Listing([model("resnet18"), model("vit", state="failed", error_message="no file")], MODEL_COLUMNS)
    )
    assert found.seen.count("tr") == 3
    assert "resnet18" in found.text
    assert "no file" in found.text


def test_a_model_shows_its_facts() -> None:
    found = shown(model("resnet18", categories=tuple("abcdefg")))
    assert "a, b, c, d, e and 2 more" in found.text
    assert repr(model("resnet18")) == "<Model resnet18: loaded, 11,000 parameters on cpu>"


def test_a_model_of_named_inputs_is_not_said_to_take_arrays_only() -> None:
    texts = trocar.ModelInput("input_ids", "int64", ("batch", "tokens"))
    assert "arrays only" not in shown(model(inputs=(texts,))).text
    assert "arrays only" in shown(model()).text


def test_a_module_tree_folds_below_its_first_level() -> None:
    html = tree()._repr_html_()
    found = read(html)
    assert found.seen.count("li") == 5 + MANY
    assert found.seen.count("details") == 4
    assert html.count("<details open>") == 1
    assert found.text.count("(root)") == 1


def test_a_history_has_a_row_for_each_epoch() -> None:
    found = shown(trocar.training.History(history()[:7]))
    assert found.seen.count("tr") == 3
    assert "eval accuracy" in found.text
    assert str(trocar.training.History(history()[:4])).splitlines()[:2] == [
        f"epoch  loss  eval loss  eval accuracy  eval {EVIL}",
        f"    1     1          1            0.5  {'1':>{len(EVIL) + 5}}",
    ]


def test_a_history_without_the_loss_of_an_epoch_shows() -> None:
    skipped = FitEvent(1, "epoch", 0.0, {"step": 1, "epoch": 0})
    assert "epoch" in shown(trocar.training.History([skipped])).text


def test_many_statistics_show_as_their_range() -> None:
    text = shown(statistics()).text
    assert "(500,): " in text
    assert "500 bins from 0 to 1, 124,750 inside" in text


def test_an_attribution_is_its_picture() -> None:
    found = shown(attribution())
    assert found.seen == ["img"]
    kind, _, data = str(found.attributes["src"]).partition(",")
    assert kind == "data:image/png;base64"
    with Image.open(io.BytesIO(base64.b64decode(data))) as picture:
        assert picture.format == "PNG"
        assert min(picture.size) > 100


@pytest.mark.parametrize("missing", ["matplotlib", "positions"])
def test_an_attribution_without_a_picture_is_text(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    if missing == "matplotlib":
        monkeypatch.delitem(sys.modules, "trocar._attribution.heat_map_pictures", raising=False)
        monkeypatch.delitem(sys.modules, "trocar._base.figures", raising=False)
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    else:
        given = {"values": np.zeros((2, 7)), "inputs": np.zeros((2, 7))}
    found = shown(attribution(**given))
    assert found.seen == ["p"]
    assert "saliency" in found.text
