"""Edits and the states that transformers captures with forward hooks of its own."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as T

from trocar_server.models import make_replica
from trocar_server.surgery import EditSession, EditTarget, TapSession, Target
from trocar_server.tensors.edits import Edit, Scale

SIZES = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
IDS = {"input_ids": torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])}
PIXELS = {"pixel_values": torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))}
CASES: dict[str, tuple[Callable[[], Any], str, dict[str, torch.Tensor]]] = {
    "bert": (lambda: T.BertModel(T.BertConfig(**SIZES, vocab_size=30)), "encoder.layer", IDS),
    "gpt2": (lambda: T.GPT2Model(T.GPT2Config(n_embd=8, n_layer=3, n_head=2, vocab_size=30)), "h", IDS),
    "llama": (lambda: T.LlamaModel(T.LlamaConfig(**SIZES, vocab_size=30)), "layers", IDS),
    "vit": (lambda: T.ViTModel(T.ViTConfig(**SIZES, image_size=8, patch_size=4)), "layers", PIXELS),
}


def built(family: str) -> tuple[Any, str, dict[str, torch.Tensor]]:
    build, blocks, inputs = CASES[family]
    torch.manual_seed(0)
    return build().eval().requires_grad_(False), blocks, inputs


def states(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    with torch.inference_mode():
        found: tuple[torch.Tensor, ...] = model(**inputs, output_hidden_states=True).hidden_states
    return found


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("passes_before", [0, 1, 2])
def test_an_edit_shows_in_the_captured_states_in_every_pass(family: str, passes_before: int) -> None:
    model, blocks, inputs = built(family)
    own, _, _ = built(family)
    own.get_submodule(f"{blocks}.0").register_forward_hook(lambda _, __, output: output * 0.5)
    expected = states(own, inputs)  # transformers installs its hooks after this one
    for _ in range(passes_before):
        states(model, inputs)
    replica = make_replica(model)
    edit = EditTarget(Target("mine", f"{blocks}.0", 0), Edit(Scale(0.5)))
    for _ in range(2):
        with EditSession(replica, [edit]):
            found = states(replica, inputs)
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    plain = states(replica, inputs)
    torch.testing.assert_close(plain[1] * 0.5, expected[1], rtol=0, atol=0)


def test_a_tap_still_sees_what_other_hooks_of_the_model_return() -> None:
    model, blocks, inputs = built("bert")
    states(model, inputs)
    block = model.get_submodule(f"{blocks}.1")
    block.register_forward_hook(lambda _, __, output: output + 1)
    with TapSession(model, [Target("mine", f"{blocks}.1", 0)]) as session, torch.inference_mode():
        model(**inputs)
    plain = states(built("bert")[0], inputs)
    torch.testing.assert_close(session.values["mine"], plain[2] + 1, rtol=0, atol=0)
