import json

from trocar_server.training.fit.events import FitEvent
from trocar_server.training.fit.fit_state import FitState


def test_only_what_is_set_is_sent() -> None:
    event = FitEvent(number=7, kind="step", step=8, epoch=0, loss=1.25, learning_rates=(0.1,))
    assert event.to_json() == {
        "number": 7,
        "kind": "step",
        "step": 8,
        "epoch": 0,
        "loss": 1.25,
        "learning_rates": [0.1],
    }


def test_what_is_not_finite_is_text() -> None:
    event = FitEvent(
        number=0, kind="evaluation", step=0, epoch=0, loss=float("nan"), metrics={"f1": [float("inf")]}
    )
    text = json.dumps(event.to_json(), allow_nan=False)
    assert json.loads(text)["loss"] == "NaN"
    assert json.loads(text)["metrics"] == {"f1": ["Infinity"]}


def test_state_comes_back_from_json_bit_equal() -> None:
    state = FitState(
        phase="evaluate",
        epoch=3,
        step=17,
        loss_sum=0.1 + 0.2,
        best=1 / 3,
        history=({"epoch": 0, "loss": 0.1},),
    )
    assert FitState.from_json(json.loads(json.dumps(state.to_json()))) == state
