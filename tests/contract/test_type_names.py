"""Names for type checkers of the client are those that the server's schema takes."""

from typing import Any, Literal, get_args

import pytest

from trocar._request.training.trainer_losses import LossName, regularizer
from trocar._request.training.trainer_optimizers import schedule
from trocar._wire.trainer_requests import TrainerOptions
from trocar_server.training.spec.trainer_spec import LossSpec, RegularizerSpec, ScheduleSpec, TrainerSpec


@pytest.mark.parametrize(
    ("annotation", "model", "field"),
    [
        (LossName, LossSpec, "name"),
        (schedule.__annotations__["name"], ScheduleSpec, "name"),
        (schedule.__annotations__["per"], ScheduleSpec, "per"),
        (regularizer.__annotations__["norm"], RegularizerSpec, "norm"),
        (TrainerOptions.__annotations__["precision"], TrainerSpec, "precision"),
        (TrainerOptions.__annotations__["on_nonfinite"], TrainerSpec, "on_nonfinite"),
    ],
)
def test_the_client_types_what_the_server_takes(annotation: Any, model: Any, field: str) -> None:
    typed = eval(annotation, {"Literal": Literal}) if isinstance(annotation, str) else annotation
    assert set(get_args(typed)) == set(get_args(model.model_fields[field].annotation))
