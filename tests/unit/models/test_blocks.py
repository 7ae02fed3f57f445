"""Stages of blocks against the hidden states that transformers' own models return."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

from typing import Any

import pytest
import torch
import transformers as T

from trocar_server.models.blocks import block_stages

_BLOCKS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT = {**_BLOCKS, "vocab_size": 30, "max_position_embeddings": 16}
_IMAGE = {**_BLOCKS, "image_size": 8, "patch_size": 4}
_CONVOLVED = {"conv_kernel_size": 3, "relative_attention": True, "pos_att_type": ["c2p"]}
_IDS = {"input_ids": torch.arange(4, 11)[None]}
_PIXELS = {"pixel_values": torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)}
_VIDEO = {"pixel_values": torch.linspace(-1, 1, 768).reshape(1, 4, 3, 8, 8)}

FAMILIES: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {
    "bloom": (lambda: T.BloomModel(T.BloomConfig(vocab_size=30, hidden_size=8, n_layer=2, n_head=2)), _IDS),
    "deberta": (lambda: T.DebertaV2Model(T.DebertaV2Config(**_TEXT, **_CONVOLVED)), _IDS),
    "megatron": (lambda: T.MegatronBertModel(T.MegatronBertConfig(**_TEXT)), _IDS),
    "phi": (lambda: T.PhiModel(T.PhiConfig(**_TEXT)), _IDS),
    "timesformer": (lambda: T.TimesformerModel(T.TimesformerConfig(**_IMAGE, num_frames=4)), _VIDEO),
    "vilt": (lambda: T.ViltModel(T.ViltConfig(**_TEXT, image_size=8, patch_size=4)), _IDS | _PIXELS),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(family: str) -> None:
    build, inputs = FAMILIES[family]
    torch.manual_seed(0)
    model = build().eval()
    stages, seen = block_stages(model), dict[str, torch.Tensor]()
    for name in [stage for stage in stages if stage.startswith("hidden")]:
        _keep(model, stages[name], seen)
    with torch.inference_mode():
        own = model(**inputs, output_hidden_states=True).hidden_states
    assert len(own) == 3
    for index, state in enumerate(own):
        assert torch.equal(seen[stages[f"hidden[{index}]"]], state), index


def _keep(model: Any, selector: str, seen: dict[str, torch.Tensor]) -> None:
    """Keep what a selector of a module's output or first input stands for."""
    path, _, port = selector.partition("/")
    module = model.get_submodule(path)

    def keep(value: Any) -> None:
        seen[selector] = (value if isinstance(value, torch.Tensor) else value[0]).clone()

    if port:
        module.register_forward_pre_hook(lambda _, args: keep(args))
    else:
        module.register_forward_hook(lambda _, __, output: keep(output))


def test_blocks_without_attention_have_stages() -> None:
    config = T.MambaConfig(hidden_size=8, num_hidden_layers=2, vocab_size=30, state_size=4)
    stages = block_stages(T.MambaModel(config))
    assert stages == {
        "embed": "embeddings",
        "layer[0]": "layers.0",
        "layer[1]": "layers.1",
        "norm": "norm_f",
    }  # no hidden[k]: its states are numbered from the first block's output


def test_blocks_of_several_sizes_are_numbered_through() -> None:
    sizes = {"hidden_sizes": [4, 8], "depths": [1, 2], "num_attention_heads": [1, 2], "num_encoder_blocks": 2}
    config = T.SegformerConfig(
        **sizes, strides=[4, 2], sr_ratios=[8, 4], patch_sizes=[7, 3], mlp_ratios=[2, 2]
    )
    stages = block_stages(T.SegformerModel(config))
    blocks = [stages[f"layer[{index}]"] for index in range(3)]
    assert [path.rpartition(".")[2] for path in blocks] == ["0", "0", "1"]
    assert len(set(blocks)) == 3
    assert not any(stage.startswith("hidden") for stage in stages)


@pytest.mark.parametrize("stable", [False, True])
def test_a_norm_before_the_blocks_is_no_final_norm(stable: bool) -> None:
    sizes = {"conv_dim": (4,), "conv_kernel": (4,), "conv_stride": (2,), "num_feat_extract_layers": 1}
    config = T.Wav2Vec2Config(
        **_BLOCKS, **sizes, do_stable_layer_norm=stable, num_conv_pos_embedding_groups=2
    )
    assert block_stages(T.Wav2Vec2Model(config)).get("norm") == ("encoder.layer_norm" if stable else None)
