"""Folders of tiny random transformers models, one of each common family, as `save_pretrained` writes them."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from numpy.typing import NDArray
from PIL import Image

_BLOCKS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
_TEXT = {**_BLOCKS, "vocab_size": 30}
_IMAGE = {**_BLOCKS, "image_size": 8, "patch_size": 4}
_GROUPED = {**_TEXT, "num_key_value_heads": 1, "head_dim": 4}
_EXPERTS = {**_GROUPED, "num_local_experts": 2}
_SPEECH_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
_SPEECH = {
    **_SPEECH_IDS,
    "d_model": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "vocab_size": 30,
    "num_mel_bins": 8,
    "max_source_positions": 10,
    "max_target_positions": 12,
}
_WAVES = {
    "conv_dim": (4, 4),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
_DETR = {
    **{
        name: _SPEECH[name]
        for name in _SPEECH
        if name.startswith(("encoder_", "decoder_")) or name == "d_model"
    },
    "num_queries": 3,
    "num_labels": 2,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
}
_SMALL_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "out_features": ["stage2"]}
_T5 = {"d_model": 8, "num_layers": 2, "num_heads": 2, "d_ff": 16, "d_kv": 4, "vocab_size": 30}

FAMILIES: dict[str, tuple[Any, Any]] = {
    "bert": (T.BertModel, lambda: T.BertConfig(**_TEXT)),
    "roberta": (T.RobertaForMaskedLM, lambda: T.RobertaConfig(**_TEXT)),
    "distilbert": (
        T.DistilBertModel,
        lambda: T.DistilBertConfig(dim=8, n_layers=2, n_heads=2, hidden_dim=16, vocab_size=30),
    ),
    "gpt2": (
        T.GPT2LMHeadModel,
        lambda: T.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=30, n_positions=16),
    ),
    "llama": (T.LlamaForCausalLM, lambda: T.LlamaConfig(**_TEXT)),
    "qwen3": (T.Qwen3ForCausalLM, lambda: T.Qwen3Config(**_GROUPED)),
    "gemma3": (T.Gemma3ForCausalLM, lambda: T.Gemma3TextConfig(**_GROUPED)),
    "mistral": (T.MistralModel, lambda: T.MistralConfig(**_GROUPED)),
    "mixtral": (T.MixtralForCausalLM, lambda: T.MixtralConfig(**_EXPERTS)),
    "qwen3_moe": (
        T.Qwen3MoeForCausalLM,
        lambda: T.Qwen3MoeConfig(**_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8),
    ),
    "deberta": (
        T.DebertaV2ForSequenceClassification,
        lambda: T.DebertaV2Config(**_TEXT, relative_attention=True, pos_att_type=["c2p", "p2c"]),
    ),
    "modernbert": (
        T.ModernBertForMaskedLM,
        lambda: T.ModernBertConfig(
            **{**_TEXT, "hidden_size": 16}, pad_token_id=0, cls_token_id=2, sep_token_id=3
        ),
    ),
    "segformer": (
        T.SegformerForSemanticSegmentation,
        lambda: T.SegformerConfig(
            hidden_sizes=[4, 4, 8, 8],
            depths=[1, 1, 1, 1],
            num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=8,
            num_labels=3,
        ),
    ),
    "detr": (
        T.DetrForObjectDetection,
        lambda: T.DetrConfig(**{**_DETR, "backbone_config": T.ResNetConfig(**_SMALL_RESNET)}),
    ),
    "t5": (T.T5ForConditionalGeneration, lambda: T.T5Config(**_T5)),
    "vit": (T.ViTForImageClassification, lambda: T.ViTConfig(**_IMAGE)),
    "dinov2": (
        T.Dinov2Model,
        lambda: T.Dinov2Config(
            hidden_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
        ),
    ),
    "clip": (T.CLIPModel, lambda: T.CLIPConfig(text_config=_TEXT, vision_config=_IMAGE)),
    "siglip": (T.SiglipModel, lambda: T.SiglipConfig(text_config=_TEXT, vision_config=_IMAGE)),
    "whisper": (T.WhisperForConditionalGeneration, lambda: T.WhisperConfig(**_SPEECH)),
    "wav2vec2": (T.Wav2Vec2Model, lambda: T.Wav2Vec2Config(**_TEXT, **_WAVES)),
}
"""transformers' class and configuration by family."""


def save_family(name: str, folder: Path) -> Any:
    """Save a family's model with random weights into a folder, and return it in eval mode."""
    kind, config = FAMILIES[name]
    torch.manual_seed(0)
    model = kind(config()).eval()
    model.save_pretrained(folder)
    return model


def family_inputs(name: str, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Inputs of a family's model: two samples, the second text shorter by padding."""
    random = np.random.default_rng(seed)
    ids = random.integers(4, 30, (2, 7))
    mask = np.array([[1] * 7, [1] * 4 + [0] * 3])
    side = 64 if name in ("segformer", "detr") else 8
    pixels = random.standard_normal((2, 3, side, side), np.float32)
    match name:
        case "vit" | "dinov2" | "segformer" | "detr":
            return {"pixel_values": pixels}
        case "clip" | "siglip":
            return {"input_ids": ids, "pixel_values": pixels}
        case "whisper":
            sound = random.standard_normal((2, 8, 20), np.float32)
            return {"input_features": sound, "decoder_input_ids": ids}
        case "wav2vec2":
            return {"input_values": random.standard_normal((2, 800), np.float32)}
        case "t5":
            return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, :5]}
    return {"input_ids": ids, "attention_mask": mask}


def save_image_processor(name: str, folder: Path) -> Any:
    """Save a family's image processor for images of the tiny model's size, and return it."""
    square, settings = (
        {"height": 8, "width": 8},
        {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.3, 0.2, 0.1]},
    )
    made: dict[str, Any] = {
        "clip": lambda: T.CLIPImageProcessorPil(size={"shortest_edge": 9}, crop_size=square, **settings),
        "siglip": lambda: T.SiglipImageProcessorPil(size=square),
        "vit": lambda: T.ViTImageProcessorPil(size=square, **settings),
        "dinov2": lambda: T.BitImageProcessorPil(size={"shortest_edge": 9}, crop_size=square),
        "segformer": lambda: T.SegformerImageProcessorPil(size={"height": 64, "width": 64}),
        "detr": lambda: T.DetrImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 70}),
    }
    processor = made[name]()
    processor.save_pretrained(folder)
    return processor


def loaded_by_transformers(kind: Any, folder: Path) -> Any:
    """Load a model of a folder without our code, with kernels and bits as on a server."""
    model = kind.from_pretrained(folder).eval()
    return realigned(model.requires_grad_(False))  # with gradients torch chooses other kernels


def realigned(model: Any) -> Any:
    """Return a model with parameters aligned as torch allocates them, which decides the last bits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def images_of(sizes: Sequence[tuple[int, int]]) -> list[NDArray[np.uint8]]:
    """Return random pictures of these sizes, each (height, width, 3)."""
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for size in sizes]


def processed_images(folder: Path, pictures: Sequence[NDArray[np.uint8]]) -> dict[str, Any]:
    """Return what the image processor of a folder makes of pictures, without our code."""
    processor = T.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return dict(processor([Image.fromarray(each) for each in pictures], return_tensors="pt"))
