"""Models whose own functions of autograd call modules again in the backward pass, beside plain ones."""

# transformers is half typed.
# pyright: reportIncompatibleMethodOverride=false, reportOptionalSubscript=false
# pyright: reportAttributeAccessIssue=false

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ReformerConfig, ReformerModelWithLMHead

import trocar
from tests.support.models.rerunning_nets import Plain, Rerunning
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom

ROWS = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
LABELS = np.arange(7) % 3
IDS = np.random.default_rng(1).integers(0, 20, (7, 8))
AGAIN = "is called again in the backward pass, by a function of autograd of the model's own"
INSIDE, AROUND = "block.0", ["first", "fc"]


class Reformer(ReformerModelWithLMHead):  # type: ignore[misc]
    """transformers' own, tiny: its layers are reversible."""

    def __init__(self) -> None:
        sizes: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "attention_head_size": 4}
        super().__init__(
            ReformerConfig(
                **sizes,
                attn_layers=["local"],
                feed_forward_size=8,
                axial_pos_embds=False,
                vocab_size=20,
                max_position_embeddings=16,
                local_attn_chunk_length=4,
                hidden_dropout_prob=0.0,
                is_decoder=True,
            )
        )

    def forward(self, input_ids: torch.Tensor) -> Any:
        return super().forward(input_ids).logits[:, -1]


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models = {
        "again": custom(Rerunning, (6,)),
        "plain": custom(Plain, (6,)),
        "reformer": custom(
            Reformer, inputs={"input_ids": {"dtype": "int64", "shape": ["batch", 8], "below": 20}}
        ),
    }
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as client:
        yield client


@pytest.mark.parametrize("at", AROUND)
def test_gradients_around_the_part_are_those_of_the_plain_model(client: trocar.Client, at: str) -> None:
    edits = [trocar.edit("fc", "scale", 2.0), trocar.edit("first", "scale", 0.5)]
    found, expected = (
        client.gradients(name, ROWS, of=trocar.logit(1), at=["/in", at], edits=edits)
        for name in ("again", "plain")
    )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "edit",
    [
        trocar.edit(INSIDE, "zero"),
        trocar.edit(f"{INSIDE}/in", "scale", 2.0),
        trocar.edit(f"{INSIDE}/param(weight)", "zero"),
        trocar.edit(f"{INSIDE}/grad_out", "zero"),
        trocar.edit("block", "zero"),
    ],
)
def test_gradients_of_edits_in_the_part_are_refused(client: trocar.Client, edit: trocar.Edit) -> None:
    with pytest.raises(trocar.errors.NotDifferentiableError, match=AGAIN):
        client.gradients("again", ROWS, of=trocar.logit(1), at="/in", edits=[edit])
    client.gradients("plain", ROWS, of=trocar.logit(1), at="/in", edits=[edit])


def test_values_of_edits_in_the_part_are_those_of_the_plain_model(client: trocar.Client) -> None:
    edit = trocar.edit(INSIDE, "zero")
    found, expected = (client.extract(name, ROWS, "fc", edits=[edit]) for name in ("again", "plain"))
    np.testing.assert_array_equal(found["fc"], expected["fc"])


def step(client: trocar.Client, name: str, **options: Any) -> dict[str, Any]:
    """Return the loss and the gradients of a step."""
    inputs = IDS if name == "reformer" else ROWS
    with client.train(name, trainable=["**"], seed=1, **options) as trainer:
        result = trainer.forward_backward(inputs, LABELS)
        return {"loss": result.loss, **trainer.parameter_gradients()}


@pytest.mark.parametrize("at", ["fc", "first"])
def test_a_step_with_rules_and_losses_around_the_part_is_that_of_the_plain_model(
    client: trocar.Client, at: str
) -> None:
    options: dict[str, Any] = {
        "gradient_edits": [trocar.training.gradient_edit(f"{at}/grad_out", "scale", factor=0.5)],
        "losses": [trocar.training.loss_term("cross_entropy"), trocar.training.loss_term("l2_norm", at=at)],
    }
    found, expected = (step(client, name, **options) for name in ("again", "plain"))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_edits": [trocar.training.gradient_edit("PLACE/grad_out", "clamp", 0.0, 0.0)]},
        {"gradient_edits": [trocar.training.gradient_edit("PLACE/grad_in", "zero")]},
        {
            "losses": [
                trocar.training.loss_term("cross_entropy"),
                trocar.training.loss_term("l2_norm", at="PLACE"),
            ]
        },
    ],
    ids=["output", "input", "loss"],
)
@pytest.mark.parametrize(
    ("name", "place"), [("again", INSIDE), ("reformer", "reformer.encoder.layers.0.attention.output")]
)
def test_rules_and_losses_in_the_part_are_refused(
    client: trocar.Client, name: str, place: str, options: dict[str, Any]
) -> None:
    at_place = {key: [placed(each, place) for each in given] for key, given in options.items()}
    with pytest.raises(trocar.errors.NotDifferentiableError, match=AGAIN):
        step(client, name, **at_place)
    if name == "again":
        step(client, "plain", **at_place)


def test_edits_in_the_part_are_refused_and_around_it_made(client: trocar.Client) -> None:
    losses = {}
    for name in ("again", "plain"):
        for place in (INSIDE, "first"):
            direction = trocar.Direction.of(np.ones(client.extract(name, ROWS, place)[place].shape[1]))
            client.store_direction(name, "axis", place, direction)
            edits = [trocar.edit(place, "steer", "axis")]
            if (name, place) == ("again", INSIDE):
                with pytest.raises(trocar.errors.NotDifferentiableError, match=AGAIN):
                    step(client, name, edits=edits)
            else:
                losses[name, place] = step(client, name, edits=edits)["loss"]
    assert losses["again", "first"] == pytest.approx(losses["plain", "first"], rel=1e-6)


def placed(rule: Any, place: str) -> Any:
    """Return a rule or loss with its place."""
    texts = {
        key: value.replace("PLACE", place) for key, value in vars(rule).items() if isinstance(value, str)
    }
    return replace(rule, **texts)


def test_a_step_of_reversible_layers_without_rules_is_taken(client: trocar.Client) -> None:
    assert any(
        np.any(value) for key, value in step(client, "reformer").items() if "layers.0.attention" in key
    )
