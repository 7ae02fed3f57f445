"""Folders of tiny random models that take images with texts, each with its own processor."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = ["hello", "cat", "what", "is", ":", "user", "assistant", ".", "a"]
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
IDEFICS_TOKENS = [
    *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
]
_TEMPLATE = (
    "{%% for message in messages %%}{{ message.role }} : "
    "{%% if message.content is string %%}{{ message.content }}{%% else %%}{%% for part in message.content %%}"
    "{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%} {%% endfor %%}{%% endif %%} . "
    "{%% endfor %%}{%% if add_generation_prompt %%}assistant :{%% endif %%}"
)
_BLOCKS = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16}
_PATCHES = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
PLACEHOLDERS = {
    "qwen2": "<|vision_start|><|image_pad|><|vision_end|>",
    "qwen25": "<|vision_start|><|image_pad|><|vision_end|>",
    "idefics3": "<image>",
    "pix2struct": "",
}
"""What stands for an image in a text, by model."""


def save_image_text_model(name: str, folder: Path) -> Any:
    """Save a model of `PLACEHOLDERS` with random weights and its processor, and return its class."""
    kind, config = {"qwen2": _qwen2, "qwen25": _qwen25, "idefics3": _idefics3, "pix2struct": _pix2struct}[
        name
    ]()
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    _processor(name).save_pretrained(folder)
    return kind


def _tokenizer(tokens: Sequence[str], **options: Any) -> Any:
    words = ["[PAD]", "[UNK]", "</s>", *tokens, *WORDS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = T.PreTrainedTokenizerFast  # untyped (transformers 5.23)
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "eos_token": "</s>"}
    fast = make(tokenizer_object=tokenizer, model_max_length=256, **special, **options)
    fast.add_special_tokens({"additional_special_tokens": list(tokens)})
    return fast


def _processor(name: str) -> Any:
    template = _TEMPLATE % PLACEHOLDERS[name]
    if name.startswith("qwen"):
        size = {"shortest_edge": 16 * 16, "longest_edge": 32 * 32}
        kind = T.Qwen2VLProcessor if name == "qwen2" else T.Qwen2_5_VLProcessor
        images = T.Qwen2VLImageProcessorPil(**_PATCHES, size=size)
        videos = T.Qwen2VLVideoProcessor(**_PATCHES, size=size)
        return kind(images, _tokenizer(QWEN_TOKENS, padding_side="left"), videos, chat_template=template)
    if name == "idefics3":
        images = T.Idefics3ImageProcessorPil(size={"longest_edge": 16}, max_image_size={"longest_edge": 8})
        return T.Idefics3Processor(
            images, _tokenizer(IDEFICS_TOKENS), image_seq_len=1, chat_template=template
        )
    images = T.Pix2StructImageProcessorPil(patch_size={"height": 4, "width": 4}, is_vqa=False)
    return T.Pix2StructProcessor(images, _tokenizer([]))


def _qwen(config: Any, **vision: Any) -> Any:
    text = {
        **_BLOCKS,
        "num_hidden_layers": 2,
        "num_key_value_heads": 1,
        "vocab_size": 60,
        "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10_000.0},
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    patches = {"patch_size": 4, "in_channels": 3, "spatial_merge_size": 2, "temporal_patch_size": 2}
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    ids = dict(zip(names, range(3, 7), strict=True))
    return config(text_config=text, vision_config={"num_heads": 2, **patches, **vision}, **ids)


def _qwen2() -> tuple[Any, Any]:
    config = _qwen(T.Qwen2VLConfig, depth=2, embed_dim=16, hidden_size=16, mlp_ratio=2)
    return T.Qwen2VLForConditionalGeneration, config


def _qwen25() -> tuple[Any, Any]:
    vision = {"depth": 2, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 16}
    config = _qwen(T.Qwen2_5_VLConfig, **vision, window_size=16, fullatt_block_indexes=[1])
    return T.Qwen2_5_VLForConditionalGeneration, config


def _idefics3() -> tuple[Any, Any]:
    text = T.LlamaConfig(
        **_BLOCKS, num_hidden_layers=2, num_key_value_heads=1, vocab_size=60, max_position_embeddings=256
    )
    vision = {**_BLOCKS, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
    place = 3 + IDEFICS_TOKENS.index("<image>")
    return T.Idefics3ForConditionalGeneration, T.Idefics3Config(
        vision_config=vision, text_config=text, image_token_id=place, scale_factor=2, pad_token_id=0
    )


def _pix2struct() -> tuple[Any, Any]:
    attention = {"hidden_size": 16, "d_kv": 8, "d_ff": 16}
    text = {**attention, "num_layers": 2, "num_heads": 2, "vocab_size": 30}
    vision = {**attention, "patch_embed_hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return T.Pix2StructForConditionalGeneration, T.Pix2StructConfig(
        text_config=text, vision_config={**vision, "seq_len": 2048}
    )
