"""Recordings that a deployment predicts."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.support.models.sized_models import Bert, Halves, Loop, MaskedBert
from tests.support.models.tiny_models import DataDependent
from tests.unit.engine.deployments import deployment
from trocar_server.engine.host import predictions
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.request.plan import Signature, TensorSignature
from trocar_server.errors import ServiceError
from trocar_server.surgery import Recording
from trocar_server.surgery.recording.recording import ModuleRecord
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


def test_modules_are_predicted_where_attention_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise NotImplementedError

    monkeypatch.setattr(predictions, "record_functions", refuse)
    model, kinds = deployment(Bert), frozenset({"attention"})
    for shape in ((2, 9), (3, 12)):
        model.record(signature(*shape, dtype=torch.int64), kinds=kinds)
    assert model.may_extend
    model.extend_predictions()
    assert model.record(signature(4, 20, dtype=torch.int64)).is_predicted
    assert not model.record(signature(5, 21, dtype=torch.int64), kinds=kinds).is_predicted


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


def test_what_needs_an_answer_from_its_data_is_not_predicted_and_no_longer_tried() -> None:
    model = deployment(DataDependent)
    for name in ("x", "", "x"):  # of two kinds
        for rows in range(2, 20):
            model.record((TensorSignature(name, torch.float32, ((rows, 3),)),))
            if model.may_extend:
                model.extend_predictions()
    assert not model.predictions.symbolic
    assert model.predictions.attempt_count == 2


def test_a_model_that_reads_its_mask_is_predicted_as_it_is_recorded() -> None:
    model = deployment(MaskedBert, (8,))
    for shape in ((2, 9), (3, 12)):
        assert not model.record(masked(*shape)).is_symbolic
        if model.may_extend:
            model.extend_predictions()
    found, recorded = model.record(masked(4, 31)), deployment(MaskedBert, (8,)).record(masked(4, 31))
    assert found.is_predicted
    assert not found.is_symbolic  # another mask takes another path
    assert without_peaks(found) == without_peaks(recorded)
    assert (
        recorded.peak_bytes <= found.peak_bytes <= recorded.peak_bytes + 8 * 4 * 31 * 31
    )  # masks of padding
    assert model.recorded_count == 2


def masked(*shape: int) -> Signature:
    """Return the signature of token ids and their mask."""
    return tuple(TensorSignature(name, torch.int64, (shape,)) for name in ("", "attention_mask"))


def without_peaks(recording: Recording) -> list[ModuleRecord]:
    return [
        replace(record, calls=[replace(call, peak_bytes=0, peak_bytes_before=0) for call in record.calls])
        for record in recording.modules.values()
    ]


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
