"""Recordings that a deployment predicts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.support.models.sized_models import Bert, Halves, Loop
from tests.support.models.tiny_models import DataDependent
from tests.unit.engine.deployments import deployment
from trocar_server.engine.host import predictions
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import Signature, TensorSignature
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording.symbolic import record_symbolic

_IMAGES = [(2, 3, 40, 56), (3, 3, 48, 48)]


def signature(*shape: int, dtype: torch.dtype = torch.float32) -> Signature:
    return (TensorSignature("", dtype, (shape,)),)


def prepared(
    model: Deployment, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> Deployment:
    """Record these shapes, and prepare predictions when it is time."""
    for shape in shapes:
        model.record(signature(*shape, dtype=dtype))
        if model.may_extend:
            model.extend_predictions()
    return model


def test_after_two_recorded_sizes_the_next_is_predicted() -> None:
    model = prepared(deployment(Halves, (3, 64, 48)), _IMAGES)
    found = model.record(signature(7, 3, 91, 60))
    assert found.is_predicted
    assert model.recorded_count == len(_IMAGES)
    fresh = deployment(Halves, (3, 64, 48)).record(signature(7, 3, 91, 60))
    assert list(found.modules.items()) == list(fresh.modules.items())
    assert (found.peak_bytes, found.stages) == (fresh.peak_bytes, fresh.stages)


def test_one_recorded_size_is_no_reason_to_prepare_others() -> None:
    model = deployment(Halves, (3, 64, 48))
    model.record(signature(2, 3, 40, 56))
    assert not model.may_extend


def test_a_length_that_the_model_refuses_is_still_refused() -> None:
    model = prepared(deployment(Bert), [(2, 9), (3, 12)], torch.int64)
    assert model.record(signature(4, 64, dtype=torch.int64)).is_predicted
    with pytest.raises(ServiceError, match="cannot take these inputs"):
        model.record(signature(4, 65, dtype=torch.int64))


def test_other_numbers_of_rounds_are_recorded() -> None:
    model = prepared(deployment(Loop, (8, 4)), [(2, 9, 4), (2, 10, 4)])
    assert model.record(signature(5, 11, 4)).is_predicted
    longer = model.record(signature(5, 12, 4))
    assert not longer.is_predicted
    assert len(longer.modules["mix"].calls) == 3


def test_a_wrong_symbolic_recording_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets_its_conditions(*args: object) -> object:
        return replace(record_symbolic(*args), _conditions=lambda *sizes: True)  # type: ignore[arg-type]

    monkeypatch.setattr(predictions, "record_symbolic", forgets_its_conditions)
    model = prepared(deployment(Loop, (8, 4)), [(2, 9, 4), (2, 10, 4)])
    assert model.predictions.attempt_count == 1
    assert not model.record(signature(5, 11, 4)).is_predicted


def test_a_pass_that_differs_ends_the_predictions_of_its_kind() -> None:
    model = prepared(deployment(Halves, (3, 64, 48)), _IMAGES)
    model.record(signature(7, 3, 91, 60))
    model.pass_differed(signature(7, 3, 91, 60))
    assert not model.record(signature(7, 3, 91, 60)).is_predicted
    assert not model.record(signature(6, 3, 91, 60)).is_predicted


def test_what_reads_its_data_is_never_predicted() -> None:
    model = prepared(deployment(DataDependent), [(2, 3), (3, 3), (4, 3), (5, 3)])
    assert model.predictions.attempt_count == 0


def test_nodes_and_functions_are_recorded() -> None:
    model = prepared(deployment(Halves, (3, 64, 48)), _IMAGES)
    found = model.record(signature(7, 3, 91, 60), kinds=frozenset({"fn"}))
    assert not found.is_predicted
    assert found.functions


def test_a_model_that_takes_too_long_is_recorded_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "_LIMIT_S", 0.0)
    model = prepared(deployment(Halves, (3, 64, 48)), _IMAGES)
    assert model.predictions.attempt_count == 1
    assert not model.record(signature(7, 3, 91, 60)).is_predicted
