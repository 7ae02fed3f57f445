"""Signatures of transformers' models: from `forward`, the configuration and the embeddings' sizes."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from trocar_server.models.huggingface.family_inputs import Described, family_inputs, family_requires
from trocar_server.models.inputs import (
    BATCH,
    FLATTENED,
    IMAGE_BATCH,
    IMAGE_GRID,
    IMAGES,
    PATCH_MASK,
    SPATIAL_SHAPES,
    TOKEN_IDS,
    InputSignature,
    InputSpec,
)

_SELF_SHIFTING = ("bart", "mbart", "led", "plbart", "mvp", "bigbird_pegasus")
"""Encoder-decoders that make the decoder's ids of the encoder's."""
_TWO_TOWERS = (
    "align",
    "altclip",
    "chinese_clip",
    "clap",
    "clip",
    "groupvit",
    "metaclip_2",
    "owlv2",
    "owlvit",
    "siglip",
    "siglip2",
    "vision-text-dual-encoder",
)
"""Models whose own forward takes text and images at once."""
_SEVERAL_IMAGES = ("idefics2", "idefics3", "smolvlm")
"""Models that take several images, or parts of one, with each text."""
_SAMPLES = 8000
_IMAGE_SIDE = 224
"""Of the example image of a model that takes any size, such as SegFormer and ResNet."""
_FLAG_TYPES = {bool: "flag:bool", int: "flag:int", str: "flag:str"}
_OUTPUTS = ("output_attentions", "output_hidden_states")
_GRIDS: Described = {
    "pixel_values": ("float32", ("patches", "patch_values"), 0),
    IMAGE_GRID: ("int64", ("images", 3), 0),
    "pixel_values_videos": ("float32", ("video_patches", "patch_values"), 0),
    "video_grid_thw": ("int64", ("videos", 3), 0),
    "mm_token_type_ids": ("int64", (BATCH, "tokens"), 3),
}
"""Inputs of models that take patches with their grids, in place of images."""
_NOT_SENT = ("past_key_values", "cache", "encoder_outputs", "return_dict", "use_cache", "cache_position")
_TENSOR_TYPES: dict[type, str] = {
    torch.FloatTensor: "float32",
    torch.LongTensor: "int64",
    torch.IntTensor: "int64",
    torch.BoolTensor: "bool",
}
_WHOLE_NUMBERS = ("bbox", "ids", "labels", "positions", "shapes", "sizes")
"""Last words of names of tensors of whole numbers."""


def transformers_signature(module: Any) -> InputSignature:
    """Return the named inputs of one of transformers' models.

    Args:
        module: A `PreTrainedModel`.
    """
    config = module.config
    inputs = tuple(_specs(module))
    tower = getattr(config, "vision_config", None) or config
    sizes = {"samples": _SAMPLES, "mel_frames": 2 * getattr(config, "max_source_positions", 64), "clips": 1}
    encoder = getattr(config, "encoder", None)  # of an encoder-decoder of images and texts
    side = getattr(tower, "image_size", None) or getattr(encoder, "image_size", None) or _IMAGE_SIDE
    height, width = side if isinstance(side, (list, tuple)) else (side, side)
    sizes |= {"height": int(height), "width": int(width)}
    if _takes_patches(module):
        sizes["patches"] = int(tower.num_patches)
    return InputSignature(inputs, sizes, _largest(module))


def _specs(module: Any) -> Iterator[InputSpec]:
    config = module.config
    known = _known(config, module.main_input_name)
    known["position_ids"] = ("int64", (BATCH, "tokens"), _largest(module, given=True).get("tokens", 0))
    if _takes_patches(module):
        known |= _patches(config)
    parameters = inspect.signature(_forward_of(module)).parameters
    if {TOKEN_IDS, IMAGES} <= set(parameters):  # the mask is of the texts, also where images come first
        known["attention_mask"] = ("int64", (BATCH, "tokens"), 2)
    known |= _other_patches(module) | family_inputs(module)
    required = _required(module)
    for parameter in parameters.values():
        name = parameter.name
        if parameter.kind is parameter.VAR_KEYWORD:
            yield from _outputs(parameter.annotation)
            continue
        if name in _NOT_SENT:
            continue
        if name in known:
            dtype, shape, below = known[name]
            yield InputSpec(name, dtype, shape, name not in required, below, int(name == SPATIAL_SHAPES))
        elif flag := _flag(parameter.annotation):
            yield InputSpec(name, flag, None, is_optional=True)
        elif name.endswith(("embeds", "states")):
            yield InputSpec(name, "float32", None, is_optional=True)
        elif dtype := _tensor_dtype(name, parameter.annotation):
            yield InputSpec(name, dtype, None, is_optional=True)


def _tensor_dtype(name: str, annotation: Any) -> str:
    """Return the dtype of a tensor of any shape, by annotation and name; empty for what is none."""
    if name == "labels":
        return "int64"
    options = [kind for kind in getattr(annotation, "__args__", (annotation,)) if kind is not type(None)]
    if options == [torch.Tensor]:
        is_whole = name.endswith((*_WHOLE_NUMBERS, "mask"))
        return "int64" if is_whole else "float32"
    return _TENSOR_TYPES.get(options[0], "") if len(options) == 1 and isinstance(options[0], type) else ""


def _outputs(annotation: Any) -> Iterator[InputSpec]:
    """Flags among the keywords that most forwards share, `Unpack[TransformersKwargs]`: what is returned."""
    shared = getattr(annotation, "__args__", ())
    if shared and getattr(shared[0], "__name__", "") == "TransformersKwargs":
        for name in _OUTPUTS:
            yield InputSpec(name, "flag:bool", None, is_optional=True)


def _forward_of(module: Any) -> Any:
    """Return the forward that has the names: a sentence model's own takes any."""
    own = next(
        kind
        for kind in type(module).__mro__
        if kind.__module__.startswith("transformers.") and "forward" in vars(kind)
    )
    return vars(own)["forward"]


def _known(config: Any, main: str) -> Described:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    encoded = int(getattr(getattr(config, "encoder", None), "vocab_size", 0) or 0) or vocabulary
    vision = getattr(config, "vision_config", None) or config
    channels = int(getattr(vision, "num_channels", 3) or 3)
    images = IMAGE_BATCH if _is_contrastive(config) or _has_image_tokens(config) else BATCH
    mask_of = {"input_values": "samples", "input_features": "mel_frames", "pixel_values": "patches"}
    tokens = (BATCH, "tokens")
    targets = (BATCH, "target_tokens")
    mel_bins = getattr(config, "num_mel_bins", 0)
    mel_frames = 2 * getattr(config, "max_source_positions", 0) or "mel_frames"
    return {
        "input_ids": ("int64", tokens, encoded),
        "attention_mask": ("int64", (BATCH, mask_of.get(main, "tokens")), 2),
        "token_type_ids": ("int64", tokens, int(getattr(text, "type_vocab_size", 0) or 0)),
        "decoder_input_ids": ("int64", targets, vocabulary),
        "decoder_attention_mask": ("int64", targets, 2),
        "inputs_embeds": (
            "float32",
            (BATCH, "tokens", int(getattr(text, "hidden_size", 0) or 0) or "width"),
            0,
        ),
        "pixel_values": ("float32", (images, channels, "height", "width"), 0),
        "pixel_mask": ("int64", (BATCH, "height", "width"), 2),
        "bool_masked_pos": ("bool", (BATCH, "patches"), 2),
        "input_values": ("float32", (BATCH, "samples"), 0),
        "input_features": ("float32", (BATCH, mel_bins or "mel_bins", mel_frames), 0),
    }


def _other_patches(module: Any) -> Described:
    """Return images in the forms that processors make which the server does not run."""
    config, names = module.config, inspect.signature(_forward_of(module)).parameters
    vision = getattr(config, "vision_config", None) or config
    if IMAGE_GRID in names:
        return _GRIDS
    if FLATTENED in names:  # the mask is a float, as its processor makes it
        width = 2 + int(vision.patch_embed_hidden_size)
        mask = ("float32", (BATCH, "patches"), 0)
        return {FLATTENED: ("float32", (BATCH, "patches", width), 0), "attention_mask": mask}
    if config.model_type in _SEVERAL_IMAGES:
        size = ("height", "width")
        return {
            "pixel_values": ("float32", (BATCH, "images", 3, *size), 0),
            PATCH_MASK: ("int64", (BATCH, "images", *size), 2),
        }
    return {}


def _takes_patches(module: Any) -> bool:
    """Whether a model takes images as patches, with the rows and columns of each: SigLIP 2's NaFlex."""
    return SPATIAL_SHAPES in inspect.signature(_forward_of(module)).parameters and hasattr(
        getattr(module.config, "vision_config", None) or module.config, "num_patches"
    )


def _patches(config: Any) -> Described:
    vision = getattr(config, "vision_config", None) or config
    images = IMAGE_BATCH if _is_contrastive(config) else BATCH
    width = vision.num_channels * vision.patch_size**2
    return {
        "pixel_values": ("float32", (images, "patches", width), 0),
        PATCH_MASK: ("int64", (images, "patches"), 2),
        SPATIAL_SHAPES: ("int64", (images, 2), 0),
    }


def _required(module: Any) -> set[str]:
    """Return the names of what a pass cannot do without."""
    config = module.config
    parameters = inspect.signature(_forward_of(module)).parameters
    plain = [each for each in parameters.values() if each.kind is each.POSITIONAL_OR_KEYWORD]
    names = {module.main_input_name} | {each.name for each in plain[1:] if each.default is each.empty}
    names |= family_requires(module)
    if "decoder_input_ids" in parameters and config.model_type not in _SELF_SHIFTING:
        names.add("decoder_input_ids")
    if _is_contrastive(config) and {"input_ids", "pixel_values"} <= set(parameters):
        names |= {"input_ids", "pixel_values"}
    if config.model_type == "clap" and {"input_ids", "input_features"} <= set(parameters):
        names |= {"input_ids", "input_features"}
    if _takes_patches(module):
        names |= {PATCH_MASK, SPATIAL_SHAPES}
    return names


def _has_image_tokens(config: Any) -> bool:
    """Whether tokens of the texts stand for images, so that a text may have none or several."""
    return any(getattr(config, f"image_token_{word}", None) is not None for word in ("id", "index"))


def _is_contrastive(config: Any) -> bool:
    """Whether a model compares every image with every text, so that these need not be equally many."""
    return config.model_type in _TWO_TOWERS


def _flag(annotation: Any) -> str:
    """Return the type of a flag that a parameter's annotation names: `bool`, or `bool | None`."""
    options = [kind for kind in getattr(annotation, "__args__", (annotation,)) if kind is not type(None)]
    return _FLAG_TYPES.get(options[0], "") if len(options) == 1 and isinstance(options[0], type) else ""


def _largest(module: Any, *, given: bool = False) -> dict[str, int]:
    """Return the most tokens, by the tables of learned positions; or the most positions that may be given."""
    result: dict[str, int] = {}
    for path, part in module.named_modules():
        name = path.rpartition(".")[2]
        is_table = name in ("position_embeddings", "position_embedding", "wpe", "embed_positions")
        if (
            not is_table
            or not isinstance(part, nn.Embedding)
            or "vision" in path
            or (path.startswith("encoder.embed") and module.main_input_name != "input_ids")
        ):
            continue
        # RoBERTa and BART count positions from behind the padding's; OPT also those that a caller gives.
        offset = getattr(part, "offset", 0)
        if part.padding_idx is not None and not given:
            offset = part.padding_idx + 1
        dimension = "target_tokens" if "decoder." in path and _has_encoder(module) else "tokens"
        result[dimension] = part.num_embeddings - offset
    return result


def _has_encoder(module: Any) -> bool:
    return bool(getattr(module.config, "is_encoder_decoder", False))
