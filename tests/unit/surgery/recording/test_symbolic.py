"""Symbolic recordings against the meta pass of the same sizes."""

import random
from collections.abc import Callable

import pytest
import torch
import torchvision
from torch import nn

from tests.support.models.sized_models import T5, Bert, Gpt, Halves, Loop, Windows
from tests.support.models.tiny_models import Structured
from trocar_server.models import make_meta_replica
from trocar_server.surgery import Recording, record_calls
from trocar_server.surgery.recording.symbolic import SymbolicRecording, record_symbolic

_Shape = tuple[int, ...]


def small_resnet() -> nn.Module:
    """Build torchvision's own, with one block a stage."""
    made: nn.Module = torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1])
    return made


def on_meta(shape: _Shape) -> torch.Tensor:
    return torch.empty(shape, device="meta", dtype=torch.int64 if len(shape) == 2 else torch.float32)


def symbolic(model: nn.Module, shape: _Shape) -> SymbolicRecording:
    return record_symbolic(make_meta_replica(model), (on_meta(shape),))


def everything(recording: Recording) -> object:
    return list(recording.modules.items()), recording.peak_bytes, recording.is_symbolic


def tokens(rng: random.Random) -> _Shape:
    return rng.randint(2, 40), rng.randint(2, 64)


def images(rng: random.Random) -> _Shape:
    return rng.randint(2, 12), 3, rng.randint(40, 300), rng.randint(40, 300)


@pytest.mark.parametrize(
    ("build", "first", "draw"),
    [
        (Bert, (3, 17), tokens),
        (Gpt, (3, 17), tokens),
        (T5, (3, 17), tokens),
        (Halves, (5, 3, 64, 48), images),
        (small_resnet, (4, 3, 96, 64), images),
        (Structured, (4, 3, 96, 64), images),  # a module returns a size, and no tensor
    ],
)
def test_fifty_random_sizes_are_predicted_as_a_meta_pass_records_them(
    build: Callable[[], nn.Module], first: _Shape, draw: Callable[[random.Random], _Shape]
) -> None:
    model, rng = build().eval(), random.Random(7)
    meta, predicting = make_meta_replica(model), symbolic(model, first)
    for shape in (draw(rng) for _ in range(50)):
        predicted = predicting.recording([shape])
        assert predicted is not None, shape
        assert everything(predicted) == everything(record_calls(meta, (on_meta(shape),))), shape


def test_sizes_beyond_a_table_of_positions_are_not_predicted() -> None:
    predicting = symbolic(Bert().eval(), (3, 17))
    assert predicting.holds([(3, 64)])
    assert predicting.recording([(3, 65)]) is None


def test_a_batch_of_one_is_another_path_which_has_its_own_recording() -> None:
    model = Halves().eval()
    assert symbolic(model, (4, 3, 64, 48)).recording([(1, 3, 64, 48)]) is None
    alone = symbolic(model, (1, 3, 64, 48))
    predicted = alone.recording([(1, 3, 50, 71)])
    assert predicted is not None
    recorded = record_calls(make_meta_replica(model), (on_meta((1, 3, 50, 71)),))
    assert everything(predicted) == everything(recorded)


def test_a_loop_over_tokens_is_predicted_for_the_same_number_of_rounds_only() -> None:
    predicting = symbolic(Loop().eval(), (3, 13, 4))
    found = predicting.recording([(9, 15, 4)])
    assert found is not None
    assert len(found.modules["mix"].calls) == 3
    assert predicting.recording([(3, 16, 4)]) is None


def test_windows_are_predicted_for_lengths_that_need_no_padding_only() -> None:
    predicting = symbolic(Windows().eval(), (3, 24, 4))
    found = predicting.recording([(2, 40, 4)])
    assert found is not None
    assert found.modules["mix"].calls[0].inputs[0].shape == (2, 5, 8, 4)
    assert predicting.recording([(2, 41, 4)]) is None


def test_other_channels_and_other_ranks_are_not_predicted() -> None:
    predicting = symbolic(Halves().eval(), (4, 3, 64, 48))
    assert predicting.recording([(4, 4, 64, 48)]) is None
    assert predicting.recording([(3, 64, 48)]) is None
    assert predicting.recording([(4, 3, 64, 48), (4, 3, 64, 48)]) is None


def test_only_what_is_looked_up_is_made() -> None:
    found = symbolic(Bert().eval(), (3, 17)).recording([(2, 9)])
    assert found is not None
    assert found.modules["model.embeddings"] is found.modules["model.embeddings"]
    assert found.modules.keys() == record_calls(make_meta_replica(Bert()), (on_meta((2, 9)),)).modules.keys()


def test_the_model_itself_stays_as_it_was() -> None:
    model = Halves().eval()
    before = dict(model.named_parameters())
    symbolic(model, (4, 3, 64, 48))
    assert all(model.get_parameter(name) is tensor for name, tensor in before.items())
