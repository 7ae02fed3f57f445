"""Which models give the same answer to the same question."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.models import chancy_models as chancy
from tests.support.models.odd_models import InPlaceOnInput, TokenModel
from tests.support.models.tiny_models import DataDependent, Plain, Structured
from tests.unit.engine.deployments import hosted, hosted_by_name
from trocar_server.engine.host.repeatable import is_repeatable, watching_draws

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", [Structured, DataDependent, InPlaceOnInput, chancy.DropsInTraining])
def test_models_that_compute_alone_are_repeatable(kind: type[nn.Module]) -> None:
    assert is_repeatable(hosted(kind))


@pytest.mark.parametrize("name", ["vit_b_32", "squeezenet1_1", "ssdlite320_mobilenet_v3_large"])
def test_models_with_attention_dropout_and_boxes_are_repeatable(name: str) -> None:
    assert is_repeatable(hosted_by_name(name))


@pytest.mark.parametrize(
    "kind",
    [
        chancy.Draws,
        chancy.DropsAlways,
        chancy.DrawsFromNumpy,
        chancy.DrawsFromPython,
        chancy.DrawsFromItsOwn,
        chancy.CountsCalls,
    ],
)
def test_models_that_draw_or_count_are_not(kind: type[nn.Module]) -> None:
    assert not is_repeatable(hosted(kind))


def test_a_model_that_takes_tokens_is_asked_with_tokens() -> None:
    assert is_repeatable(hosted(TokenModel, (4,)))


def test_a_model_that_cannot_be_asked_is_not_repeatable() -> None:
    assert not is_repeatable(hosted(Plain, (7, 8, 8)))


def test_asking_leaves_buffers_as_they_were() -> None:
    model = hosted(chancy.CountsCalls)
    is_repeatable(model)
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
