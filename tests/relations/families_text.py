"""Families of transformers: texts, sound, images, and texts with images."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from collections.abc import Mapping
from typing import Any

import transformers as T

from tests.relations.family import Family
from tests.support.models.transformers_folders import FAMILIES

_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 20}
_TEXT = {"vocab_size": 30, "max_position_embeddings": 32, **_SMALL}
_IMAGE = {"image_size": 16, "patch_size": 8, **_SMALL}
_TOKENS = {"input_ids": "bt", "attention_mask": "bt"}
_MASKS = {"t": "attention_mask"}
_BOTH = ("right", "left")


def _shared(name: str) -> Any:
    """Return what builds a family that other tests use, too."""
    kind, config = FAMILIES[name]
    return lambda: kind(config())


def _text(name: str, make: Any, sides: tuple[str, ...] = ("right",), **options: Any) -> Family:
    return Family(
        name, make, _TOKENS, {"t": 7}, masks=_MASKS, sides=sides, optional=("attention_mask",), **options
    )


def _both(name: str, make: Any, tokens: int, axes: Mapping[str, str] | None = None, **options: Any) -> Family:
    """A family of texts and images, 5 tokens of an image or 4 without a class token."""
    given = {**_TOKENS, "pixel_values": "b3hw"} if axes is None else axes
    sizes = {"t": tokens, "h": 16, "w": 16}
    return Family(name, make, given, sizes, masks=_MASKS, sides=("right",), **options)


def _pair(name: str, make: Any) -> Family:
    """An encoder of 7 tokens and a decoder of as many."""
    axes = {**_TOKENS, "decoder_input_ids": "bu"}
    return Family(name, make, axes, {"t": 7, "u": 7}, masks=_MASKS, sides=("right",))


def _clip() -> Any:
    return T.CLIPModel(
        T.CLIPConfig(
            text_config={**_TEXT, "projection_dim": 8, "eos_token_id": 2},
            vision_config={**_IMAGE, "projection_dim": 8},
            projection_dim=8,
        )
    )


def _flava() -> Any:
    return T.FlavaModel(
        T.FlavaConfig(
            image_config=_IMAGE, text_config=_TEXT, multimodal_config=_SMALL, projection_dim=8, hidden_size=16
        )
    )


def _blip() -> Any:
    text = {**_TEXT, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "encoder_hidden_size": 16}
    return T.BlipForConditionalGeneration(
        T.BlipConfig(text_config=text, vision_config=_IMAGE, projection_dim=8)
    )


def _bart() -> Any:
    sides = ("encoder", "decoder")
    blocks = {
        f"{side}_{name}": value
        for side in sides
        for name, value in (("layers", 2), ("attention_heads", 2), ("ffn_dim", 20))
    }
    return T.BartForConditionalGeneration(
        T.BartConfig(d_model=16, vocab_size=30, max_position_embeddings=32, **blocks)
    )


def _wav2vec2() -> Any:
    return T.Wav2Vec2ForCTC(
        T.Wav2Vec2Config(
            **_SMALL,
            vocab_size=20,
            conv_dim=(8, 8),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=4,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
            layerdrop=0.0,
        )
    )


_MAMBA = {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 30, "state_size": 4}
TEXT = [
    _text("bert", lambda: T.BertForTokenClassification(T.BertConfig(**_TEXT, num_labels=5))),
    _text(
        "bert-classes",
        lambda: T.BertForSequenceClassification(T.BertConfig(**_TEXT, num_labels=5)),
        classes=5,
    ),
    _text("roberta", _shared("roberta")),
    _text("distilbert", _shared("distilbert")),
    _text("deberta", _shared("deberta")),
    _text("electra", lambda: T.ElectraModel(T.ElectraConfig(**_TEXT, embedding_size=16))),
    _text("albert", lambda: T.AlbertModel(T.AlbertConfig(**_TEXT, embedding_size=16))),
    _text("gpt2", _shared("gpt2")),
    _text(
        "opt",
        lambda: T.OPTModel(
            T.OPTConfig(
                vocab_size=30,
                hidden_size=16,
                ffn_dim=20,
                num_hidden_layers=2,
                num_attention_heads=2,
                max_position_embeddings=32,
                word_embed_proj_dim=16,
            )
        ),
    ),
    _text(
        "bloom",
        lambda: T.BloomModel(T.BloomConfig(vocab_size=30, hidden_size=16, n_layer=2, n_head=2)),
        _BOTH,
    ),
    _text("llama", _shared("llama"), _BOTH),
    _text("qwen3", _shared("qwen3"), _BOTH),
    _text("gemma3", _shared("gemma3"), _BOTH),
    _text("mistral", _shared("mistral"), _BOTH),
    _text("mixtral", _shared("mixtral"), _BOTH),
    _text("qwen3-moe", _shared("qwen3_moe"), _BOTH),
    _text("modernbert", _shared("modernbert")),
    _text("mamba", lambda: T.MambaModel(T.MambaConfig(**_MAMBA))),
    _pair("t5", _shared("t5")),
    _pair("bart", _bart),
    _both("clip", _clip, 5),
    _both("clip-6", _clip, 6),
    _both("flava", _flava, 5, {"input_ids": "bt", "pixel_values": "b3hw", "attention_mask": "bt"}),
    _both("flava-6", _flava, 6, {"input_ids": "bt", "pixel_values": "b3hw", "attention_mask": "bt"}),
    _both("blip", _blip, 5, {"pixel_values": "b3hw", "input_ids": "bt", "attention_mask": "bt"}),
    _both("vilt", lambda: T.ViltModel(T.ViltConfig(**_TEXT, image_size=16, patch_size=8)), 5, is_random=True),
    Family(
        "wav2vec2",
        _wav2vec2,
        {"input_values": "bs", "attention_mask": "bs"},
        {"s": 100},
        masks={"s": "attention_mask"},
        sides=("right",),
    ),
    Family("hf-vit", _shared("vit"), {"pixel_values": "b3hw"}, {"h": 8, "w": 8}, classes=2),
    Family("dinov2", _shared("dinov2"), {"pixel_values": "b3hw"}, {"h": 8, "w": 8}),
    Family("segformer", _shared("segformer"), {"pixel_values": "b3hw"}, {"h": 64, "w": 64}, grows=True),
    Family("detr", _shared("detr"), {"pixel_values": "b3hw"}, {"h": 64, "w": 64}),
    Family(
        "whisper",
        _shared("whisper"),
        {"input_features": "b8f", "decoder_input_ids": "bu"},
        {"f": 20, "u": 5},
    ),
]
"""The families of this file."""
