"""Events of a fit: converted, saved, read again, drawn, logged."""

import copy
import json
import math
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct

import trocar
from trocar._result.history import failure, fit_event
from trocar.training import FitEvent, History
from trocar_api.v1 import fit_pb2


def event(number: int, kind: str, **facts: Any) -> FitEvent:
    return FitEvent(number, kind, 1.7e9 + number / 4, {"step": number, "epoch": 0, **facts})


@pytest.fixture
def history() -> History:
    return History(
        [
            FitEvent(0, "started", 1.7e9, {"step": 0, "epoch": 0, "total_epochs": 2, "total_steps": 4}),
            event(1, "step", loss=2.5, learning_rates=[0.1, 0.01], gradient_norm=3),
            event(2, "step", loss=math.nan, is_skipped=True, learning_rates=[0.1, 0.01]),
            event(3, "evaluation", loss=1.5, metrics={"accuracy": 0.5, "confusion_matrix": [[1, 2], [3, 4]]}),
            event(4, "step", loss=-1, learning_rates=[0.05, 0.01], changed={"0": 12}),
            event(5, "evaluation", loss=math.inf, metrics={"accuracy": 0.75}),
            event(6, "evaluation", loss=0.25, metrics={"accuracy": 0.75, "auroc": math.nan}),
            event(7, "finished", message='all epochs are "done" \u2028'),
        ]
    )


def same(one: History, other: History) -> bool:
    """Compare with NaN equal to itself."""
    return repr([(e.number, e.kind, e.time_s, e.facts) for e in one]) == repr(
        [(e.number, e.kind, e.time_s, e.facts) for e in other]
    )


def test_an_event_is_converted_with_whole_numbers_as_ints() -> None:
    facts = Struct()
    facts.update(
        {"step": 3, "loss": "NaN", "metrics": {"f1": [0.5, "-Infinity"]}, "is_best": True, "x": 1e300}
    )
    found = fit_event(fit_pb2.FitEvent(number=4, kind="evaluation", time_s=1.5, facts=facts))
    assert (found.number, found.kind, found.time_s, found["step"]) == (4, "evaluation", 1.5, 3)
    assert type(found["step"]) is int
    assert math.isnan(found["loss"])
    assert found["metrics"] == {"f1": [0.5, -math.inf]}
    assert found["is_best"] is True
    assert (found.get("nothing"), found.get("nothing", 3)) == (None, 3)


def test_what_is_saved_is_read_as_it_was(history: History, tmp_path: Path) -> None:
    history.save(tmp_path / "h.jsonl")
    found = History.load(str(tmp_path / "h.jsonl"))
    assert same(found, history)
    assert isinstance(found[0], FitEvent)
    first = json.loads((tmp_path / "h.jsonl").read_text().splitlines()[0])
    assert first == {"number": 0, "kind": "started", "time_s": 1.7e9, "step": 0, "epoch": 0,
                     "total_epochs": 2, "total_steps": 4}  # fmt: skip


def test_an_empty_history_is_saved_too(tmp_path: Path) -> None:
    History().save(tmp_path / "h.jsonl")
    assert History.load(tmp_path / "h.jsonl") == History()


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "3", "{}", '{"number": 1.5, "kind": "step", "time_s": 1}', "[" * 100_000]
)
def test_a_line_that_is_no_event_is_named(history: History, tmp_path: Path, line: str) -> None:
    history.save(tmp_path / "h.jsonl")
    with (tmp_path / "h.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ValueError, match=r"h.jsonl, line 9: it is not an event of a fit"):
        History.load(tmp_path / "h.jsonl")


def test_a_history_is_a_sequence_of_its_events(history: History) -> None:
    assert len(history) == 8
    assert [e.number for e in history[1:3]] == [1, 2]
    assert isinstance(history[1:3], History)
    assert history[-1].kind == "finished"
    assert [e.kind for e in history.of_kind("step")] == ["step"] * 3
    assert str(history.losses) == "[2.5, nan, -1.0]"
    assert repr(history) == "History(3 steps, 3 evaluations, finished)"
    assert History(list(history)[:3]).outcome == "running"
    assert History().outcome == "running"


def test_a_history_can_be_copied_compared_and_pickled(history: History) -> None:
    assert same(pickle.loads(pickle.dumps(history)), history)
    assert copy.copy(history) == history
    assert history != History()
    assert history != list(history)
    taken = copy.deepcopy(history)
    taken.add(event(8, "step", loss=1))
    assert (len(taken), len(history)) == (9, 8)
    with pytest.raises(TypeError):
        hash(history)


def test_the_best_evaluation_is_the_first_of_equals_and_nan_never_is(history: History) -> None:
    assert history.best()["loss"] == 0.25
    assert history.best("accuracy").number == 5
    assert history.best("accuracy", higher_is_better=False).number == 3
    assert history.best("loss", higher_is_better=True)["loss"] == math.inf
    with pytest.raises(
        ValueError, match="no evaluation has a number 'confusion_matrix'; available: accuracy"
    ):
        history.best("confusion_matrix")
    with pytest.raises(ValueError, match="auroc"):
        history.best("auroc")
    with pytest.raises(ValueError, match="available: none"):
        History().best()


def test_a_plot_has_the_losses_and_the_metrics(history: History) -> None:
    figure = history.plot()
    left, right = figure.axes
    lines: dict[str, Any] = {
        str(line.get_label()): line for axes in (left, right) for line in axes.get_lines()
    }
    assert lines.keys() == {"loss of a step", "loss, evaluation", "accuracy", "auroc"}
    assert list(lines["loss of a step"].get_xdata()) == [1, 2, 4]
    assert list(lines["accuracy"].get_ydata()) == [0.5, 0.75, 0.75]
    assert list(lines["loss, evaluation"].get_xdata()) == [3, 5, 6]
    assert left.get_ylim()[0] < -1  # a loss below zero is not cut off
    figure.canvas.draw()


@pytest.mark.parametrize("count", [0, 1, 2])
def test_a_plot_of_little_is_drawn(history: History, count: int) -> None:
    figure = History(list(history)[:count]).plot()
    figure.canvas.draw()
    assert len(figure.axes) == 1


def test_a_log_for_tensorboard_has_every_number_at_its_step(history: History, tmp_path: Path) -> None:
    history.to_tensorboard(tmp_path / "log")
    (path,) = (tmp_path / "log").iterdir()
    found = scalars(path)
    assert found["train/loss"] == {1: 2.5, 2: pytest.approx(math.nan, nan_ok=True), 4: -1.0}
    assert found["train/gradient_norm"] == {1: 3.0}
    assert found["train/learning_rate/0"][4] == pytest.approx(0.05)
    assert found["train/learning_rate/1"].keys() == {1, 2, 4}
    assert found["evaluation/loss"] == {3: 1.5, 5: math.inf, 6: 0.25}
    assert found["evaluation/accuracy"] == {3: 0.5, 5: 0.75, 6: 0.75}
    assert "evaluation/confusion_matrix" not in found


def scalars(path: Path) -> dict[str, dict[int, float]]:
    """Read an event file: length, checksum, record, checksum."""
    from tensorboardX.proto import event_pb2

    content, found = path.read_bytes(), dict[str, dict[int, float]]()
    while content:
        (size,) = struct.unpack_from("<Q", content)
        message: Any = vars(event_pb2)["Event"].FromString(content[12 : 12 + size])
        content = content[16 + size :]
        for value in message.summary.value:
            found.setdefault(value.tag, {})[message.step] = value.simple_value
    return found


def test_a_failure_is_the_exception_of_its_reason() -> None:
    found = failure(event(3, "failed", reason="NON_FINITE_STEP", message="the loss is NaN"))
    assert isinstance(found, trocar.errors.NonFiniteStepError)
    assert str(found) == "the loss is NaN"
    for reason in ("A_NEW_ONE", None):
        assert type(failure(event(3, "failed", reason=reason))) is trocar.TrainerError
