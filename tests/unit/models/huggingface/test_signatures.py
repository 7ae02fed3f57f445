"""Signatures of families whose inputs differ: each example is one that transformers' own model takes."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportPrivateImportUsage=false

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers as T

from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.signatures import transformers_signature

_BLOCKS = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT = {**_BLOCKS, "vocab_size": 30, "max_position_embeddings": 16}
_IMAGE = {**_BLOCKS, "image_size": 8, "patch_size": 4}
_LAYERS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "d_model": 8,
}
_SERIES = {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
_TOWERS = {"text_config": _TEXT, "vision_config": _IMAGE, "projection_dim": 8}
_BLIP = {"text_config": {**_TEXT, "encoder_hidden_size": 8, "sep_token_id": 3}, "vision_config": _IMAGE}
_READER = {"vocab_size": 30, "d_model": 8, "decoder_layers": 1, "decoder_attention_heads": 2}

FAMILIES: dict[str, Any] = {
    "ast": lambda: T.ASTModel(T.ASTConfig(**_BLOCKS, patch_size=4, max_length=24, num_mel_bins=8)),
    "bert-choices": lambda: T.BertForMultipleChoice(T.BertConfig(**_TEXT)),
    "blip": lambda: T.BlipForConditionalGeneration(T.BlipConfig(**_BLIP)),
    "owlvit": lambda: T.OwlViTForObjectDetection(T.OwlViTConfig(**_TOWERS)),
    "patchtst": lambda: T.PatchTSTModel(
        T.PatchTSTConfig(
            num_input_channels=2, context_length=16, patch_length=4, patch_stride=4, num_hidden_layers=1
        )
    ),
    "series": lambda: T.TimeSeriesTransformerModel(T.TimeSeriesTransformerConfig(**_LAYERS, **_SERIES)),
    "speech2text": lambda: T.Speech2TextModel(
        T.Speech2TextConfig(**_LAYERS, vocab_size=30, input_feat_per_channel=8, conv_channels=8)
    ),
    "trocr": lambda: T.VisionEncoderDecoderModel(
        T.VisionEncoderDecoderConfig(
            encoder=T.ViTConfig(**_IMAGE).to_dict(), decoder=T.TrOCRConfig(**_READER).to_dict()
        )
    ),
    "videomae": lambda: T.VideoMAEModel(T.VideoMAEConfig(**_IMAGE, num_frames=4, tubelet_size=2)),
    "wav2vec2-bert": lambda: T.Wav2Vec2BertModel(
        T.Wav2Vec2BertConfig(**_BLOCKS, feature_projection_input_dim=6, vocab_size=30)
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_example_is_one_that_the_model_takes(family: str) -> None:
    model = FAMILIES[family]().eval()
    with torch.inference_mode():
        output = model(**transformers_signature(model).example(2))
    assert any(torch.is_tensor(value) and value.numel() for value in output.values())


_OPT = {
    **{name: value for name, value in _TEXT.items() if name != "intermediate_size"},
    "ffn_dim": 16,
    "word_embed_proj_dim": 8,
}
POSITIONS: dict[str, Any] = {
    "bert": lambda: T.BertModel(T.BertConfig(**_TEXT)),
    "roberta": lambda: T.RobertaModel(T.RobertaConfig(**_TEXT)),
    "gpt2": lambda: T.GPT2Model(T.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=30, n_positions=16)),
    "clip": lambda: T.CLIPTextModel(T.CLIPTextConfig(**_TEXT)),
    "opt": lambda: T.OPTModel(T.OPTConfig(**_OPT)),
}


@pytest.mark.parametrize("family", POSITIONS)
def test_positions_are_below_those_that_the_model_has(family: str) -> None:
    model, ids = POSITIONS[family]().eval(), torch.full((1, 3), 4)
    below = transformers_signature(model).find("position_ids", 0).below
    with torch.inference_mode():
        model(input_ids=ids, position_ids=torch.tensor([[0, 1, below - 1]]))
        with pytest.raises((IndexError, RuntimeError)):  # torch's, of an embedding or a gather
            model(input_ids=ids, position_ids=torch.tensor([[0, 1, below]]))


def test_rotary_positions_may_be_any() -> None:
    model = T.LlamaModel(T.LlamaConfig(**_TEXT))
    assert transformers_signature(model).find("position_ids", 0).below == 0


def test_an_encoder_takes_no_more_tokens_than_it_has_positions_for() -> None:
    model = T.BartModel(T.BartConfig(**_LAYERS, vocab_size=30, max_position_embeddings=16)).eval()
    signature, decoded = transformers_signature(model), torch.full((1, 2), 4)
    for count, raised in ((16, None), (17, IndexError)):
        with pytest.raises(raised) if raised else nullcontext():
            model(input_ids=torch.full((1, count), 4), decoder_input_ids=decoded)
        with pytest.raises(ServiceError) if raised else nullcontext():
            signature.check([("input_ids", torch.int64, (1, count))])


def test_tensors_that_only_one_family_has_may_be_given_in_any_shape() -> None:
    model = T.LayoutLMModel(T.LayoutLMConfig(**_TEXT))
    signature = transformers_signature(model)
    assert str(signature.find("bbox", 0)) == "bbox: int64, optional"
    signature.check([("input_ids", torch.int64, (2, 5)), ("bbox", torch.int64, (2, 5, 4))])
    with pytest.raises(ServiceError, match="takes int64"):
        signature.check([("input_ids", torch.int64, (2, 5)), ("bbox", torch.float32, (2, 5, 4))])


def test_a_model_with_tokens_for_images_takes_more_images_than_texts() -> None:
    vision, text = T.CLIPVisionConfig(**_IMAGE), T.LlamaConfig(**_TEXT)
    model = T.LlavaForConditionalGeneration(
        T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=29)
    )
    signature = transformers_signature(model)
    signature.check([("input_ids", torch.int64, (1, 12)), ("pixel_values", torch.float32, (2, 3, 8, 8))])
