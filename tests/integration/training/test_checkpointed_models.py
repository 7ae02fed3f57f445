"""Models that checkpoint parts of themselves, hosted beside the same models without: bit-equal numbers."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

import trocar
from tests.support.models.checkpointed_nets import KINDS, Layers, Repeated

pytestmark = [
    # Of reentrant ones, in passes without gradients.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning"),
    # transformers 5.23; the new name is not in the lowest version.
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning"),
]

WAYS = {"none": None, "reentrant": KINDS["reentrant"], "other": KINDS["not reentrant"]}
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_labels": 3,
}
ROWS = np.random.default_rng(0).normal(size=(7, 6)).astype(np.float32)
DATA = {
    "layers": ROWS,
    "repeated": ROWS,
    "bert": np.random.default_rng(1).normal(size=(4, 5, 16)).astype(np.float32),
    "vit": np.random.default_rng(2).normal(size=(4, 3, 8, 8)).astype(np.float32),
}
INSIDE = {
    "layers": "block.1",
    "repeated": "block.1@1",
    "bert": "model.bert.encoder.layer.0",
    "vit": "model.vit.layers.1.mlp",
}


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = BertForSequenceClassification(
            BertConfig(vocab_size=30, max_position_embeddings=8, **SIZES)
        )

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(inputs_embeds=x).logits


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, **SIZES))

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(pixel_values=x).logits


NETS: dict[str, Callable[[], Any]] = {"layers": Layers, "repeated": Repeated, "bert": Bert, "vit": Vit}


def model(name: str, use_reentrant: bool | None) -> nn.Module:
    torch.manual_seed(0)
    made = NETS[name]()
    if name in ("layers", "repeated"):
        made.use_reentrant = use_reentrant
    elif use_reentrant is not None:
        made.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    return made  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def client() -> Iterator[trocar.Client]:
    models = {
        f"{name}-{way}": {"module": model(name, WAYS[way]), "input_shape": DATA[name].shape[1:]}
        for name in NETS
        for way in WAYS
    }
    with trocar.connect("local", models=models, settings={"device": "cpu"}) as connected:
        yield connected


def compare(name: str, compute: Callable[[str], dict[str, Any]]) -> None:
    expected, *others = (compute(f"{name}-{way}") for way in WAYS)
    for found in others:
        assert found.keys() == expected.keys()
        assert [key for key in expected if not np.array_equal(found[key], expected[key])] == []


def steps(client: trocar.Client, model_id: str, **options: Any) -> dict[str, Any]:
    """Take three steps; gradients, losses and counts of each."""
    inputs, found = DATA[model_id.partition("-")[0]], dict[str, Any]()
    labels = np.arange(len(inputs)) % 3
    with client.train(model_id, **{"trainable": ["**"], "seed": 1, **options}) as trainer:
        for index in range(3):
            result = trainer.forward_backward(inputs, labels)
            found |= {f"{index} {key}": value for key, value in trainer.parameter_gradients().items()}
            found |= {f"{index} loss": result.loss, f"{index} counts": result.changed_counts}
            assert all(result.changed_counts)
            trainer.optimizer_step()
        found |= {"evaluated": trainer.evaluate(inputs, labels).loss}
    return found


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("port", ["grad_out", "grad_in[0]"])
def test_steps_with_a_rule_inside(client: trocar.Client, name: str, port: str) -> None:
    rules = [trocar.training.gradient_edit(f"{INSIDE[name]}/{port}", "scale", factor=0.5)]
    compare(name, lambda model_id: steps(client, model_id, gradient_edits=rules))


@pytest.mark.parametrize("name", NETS)
def test_steps_with_a_loss_inside(client: trocar.Client, name: str) -> None:
    losses = [trocar.training.loss_term("l2_norm", at=INSIDE[name])]
    compare(name, lambda model_id: steps(client, model_id, losses=losses))


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_steps_of_an_adapter(client: trocar.Client, name: str) -> None:
    rules = [trocar.training.gradient_edit(f"{INSIDE[name]}/grad_out", "scale", factor=0.5)]
    options = {"trainable": [], "lora": trocar.training.lora(2), "gradient_edits": rules}
    compare(name, lambda model_id: steps(client, model_id, **options))


@pytest.mark.parametrize("name", NETS)
def test_fits(client: trocar.Client, name: str) -> None:
    rules = [trocar.training.gradient_edit(f"{INSIDE[name]}/grad_out", "clamp", -1e-3, 1e-3)]
    inputs = np.concatenate([DATA[name]] * 3)
    labels = np.arange(len(inputs)) % 3

    def fitted(model_id: str) -> dict[str, Any]:
        with client.train(
            model_id, trainable=["**"], seed=1, accumulation=2, gradient_edits=rules
        ) as trainer:
            trainer.fit((inputs, labels), epochs=2, batch_size=7)
            return dict(trainer.extract(DATA[name], [INSIDE[name]]))

    compare(name, fitted)


@pytest.mark.parametrize("name", NETS)
def test_gradients_of_edited_passes(client: trocar.Client, name: str) -> None:
    inside = INSIDE[name]
    options: dict[str, Any] = {
        "of": trocar.logit(1),
        "at": ["/grad_in", f"{inside}/grad_in[0]", f"{inside}/grad_out"],
    }
    swap = trocar.edit(inside, "swap", source="other")
    sources = {"other": DATA[name][::-1].copy()}
    changes: dict[str, dict[str, Any]] = {
        "none": {},
        "value": {"edits": [trocar.edit(inside, "scale", 3.0)]},
        "gradient": {"edits": [trocar.edit(f"{inside}/grad_out", "scale", 3.0)]},
        "swap": {"edits": [swap], "sources": sources},
    }

    def computed(model_id: str) -> dict[str, Any]:
        return {
            f"{change} {key}": value
            for change, more in changes.items()
            for key, value in client.gradients(model_id, DATA[name], **options, **more).items()
        }

    compare(name, computed)


@pytest.mark.parametrize("name", ["layers", "repeated"])
def test_streams_of_gradients_and_attributions(client: trocar.Client, name: str) -> None:
    at = f"{INSIDE[name]}/grad_out"

    def computed(model_id: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        with client.extract_stream(model_id, [ROWS, ROWS[:3]], [at], of=trocar.logit(1)) as stream:
            for index, result in enumerate(stream):
                assert result.maps is not None
                found[f"{index}"] = result.maps[at]
        found["saliency"] = client.attribute(model_id, ROWS, "saliency", of=trocar.logit(1)).values
        found["integrated"] = client.attribute(
            model_id, ROWS, "integrated_gradients", of=trocar.logit(1), steps=4
        ).values
        return found

    compare(name, computed)
