"""Which models give the same answer to the same question."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.models import chancy_models as chancy
from tests.support.models.odd_models import InPlaceOnInput, TokenModel
from tests.support.models.tiny_models import DataDependent, Plain, Structured
from tests.support.models.writing_models import STATEFUL, WRITING, Counts, Remembers, tensor_bits
from tests.unit.engine.deployments import hosted, hosted_by_name
from trocar_server.engine.host.repeatable import examine, watching_draws

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [Structured, DataDependent, InPlaceOnInput, chancy.DropsInTraining])
def test_models_that_compute_alone_are_repeatable(kind: type[nn.Module]) -> None:
    assert examine(hosted(kind))


@pytest.mark.parametrize("name", ["vit_b_32", "squeezenet1_1", "ssdlite320_mobilenet_v3_large"])
def test_models_with_attention_dropout_and_boxes_are_repeatable(name: str) -> None:
    assert examine(hosted_by_name(name))


@pytest.mark.parametrize(
    "kind",
    [
        chancy.Draws,
        chancy.DropsAlways,
        chancy.DrawsFromNumpy,
        chancy.DrawsFromPython,
        chancy.DrawsFromItsOwn,
        Counts,
        Remembers,
    ],
)
def test_models_that_draw_or_count_are_not(kind: type[nn.Module]) -> None:
    assert not examine(hosted(kind))


@pytest.mark.parametrize("kind", [*WRITING, chancy.CountsCalls])
def test_models_that_write_to_their_tensors_are_as_each_call_has_its_own(kind: type[nn.Module]) -> None:
    model = hosted(kind, (4,))
    before = tensor_bits(model.module)
    assert examine(model)
    assert not model.pristine.is_stateful
    assert tensor_bits(model.module) == before


@pytest.mark.parametrize("kind", STATEFUL)
def test_state_in_attributes_is_found(kind: type[nn.Module]) -> None:
    model = hosted(kind, (4,))
    examine(model)
    assert model.pristine.is_stateful


@pytest.mark.parametrize("kind", [Plain, Structured, DataDependent, chancy.Draws])
def test_other_models_have_none(kind: type[nn.Module]) -> None:
    model = hosted(kind)
    examine(model)
    assert not model.pristine.is_renewed


def test_a_model_that_takes_tokens_is_asked_with_tokens() -> None:
    assert examine(hosted(TokenModel, (4,)))


def test_a_model_that_cannot_be_asked_is_not_repeatable() -> None:
    assert not examine(hosted(Plain, (7, 8, 8)))


def test_asking_leaves_buffers_as_they_were() -> None:
    model = hosted(chancy.CountsCalls)
    examine(model)
    assert [buffer.item() for buffer in model.module.buffers()] == [0.0]


def test_draws_from_the_default_generator_are_seen() -> None:
    with watching_draws(CPU) as draws:
        torch.rand(1)
    assert draws.has_drawn


def test_draws_from_other_generators_are_none() -> None:
    with watching_draws(CPU) as draws:
        torch.rand(1, generator=torch.Generator().manual_seed(0))
        np.random.default_rng(0).random()
    assert not draws.has_drawn
