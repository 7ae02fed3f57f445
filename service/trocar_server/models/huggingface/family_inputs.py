"""Inputs of transformers' families whose shapes differ from the rest: choices, sound, videos, series.

family_inputs(module)["input_values"]       # ("float32", ("batch", 1024, 128), 0), of an AST
"""

from typing import Any

from trocar_server.models.inputs import BATCH

Described = dict[str, tuple[str, tuple[int | str, ...], int]]
"""Dtype, shape and the bound of whole numbers (0 for none), by the parameter of `forward`."""

_VIDEOS = ("timesformer", "videomae", "vivit")
_SERIES = ("autoformer", "informer", "time_series_transformer")
_PATCHED_SERIES = ("patchtsmixer", "patchtst")
_WITH_FUTURE = ("future_values", "future_time_features")
_TEXTS_WITH_IMAGES = ("blip", "blip-2", "bridgetower", "clipseg", "vilt")


def family_inputs(module: Any) -> Described:
    """Return the inputs that a model's family has in other shapes; empty for most.

    Args:
        module: A `PreTrainedModel`.
    """
    config = module.config
    kind: str = config.model_type
    if type(module).__name__.endswith("ForMultipleChoice"):
        return _choices(config)
    if kind in _SERIES:
        return _series(config)
    if kind in _PATCHED_SERIES:
        shape = (BATCH, config.context_length, config.num_input_channels)
        return {"past_values": ("float32", shape, 0)}
    if kind in _VIDEOS:
        frames = (BATCH, config.num_frames, config.num_channels, "height", "width")
        return {"pixel_values": ("float32", frames, 0)}
    if kind == "vitmatte":
        channels = config.backbone_config.num_channels
        return {"pixel_values": ("float32", (BATCH, channels, "height", "width"), 0)}
    return _sounds(config)


def family_requires(module: Any) -> frozenset[str]:
    """Return the inputs that a family's passes need although `forward` has a default for them."""
    kind = module.config.model_type
    if kind in _SERIES:
        return frozenset(_WITH_FUTURE)
    return frozenset({"input_ids", "pixel_values"} if kind in _TEXTS_WITH_IMAGES else ())


def _choices(config: Any) -> Described:
    shape = (BATCH, "choices", "tokens")
    return {
        "input_ids": ("int64", shape, config.vocab_size),
        "attention_mask": ("int64", shape, 2),
        "token_type_ids": ("int64", shape, getattr(config, "type_vocab_size", 0)),
        "position_ids": ("int64", shape, 0),
        "inputs_embeds": ("float32", (*shape, config.hidden_size), 0),
    }


def _series(config: Any) -> Described:
    """Return the past, as long as the context and its largest lag, and the future that is predicted."""
    parts = {"past": config.context_length + max(config.lags_sequence), "future": config.prediction_length}
    variates = (config.input_size,) if config.input_size > 1 else ()
    result: Described = {}
    for part, length in parts.items():
        result[f"{part}_values"] = ("float32", (BATCH, length, *variates), 0)
        result[f"{part}_time_features"] = ("float32", (BATCH, length, config.num_time_features), 0)
    return result | {"past_observed_mask": ("float32", (BATCH, parts["past"], *variates), 0)}


def _sounds(config: Any) -> Described:
    """Return features in place of samples, (batch, frames, features) for most."""
    kind = config.model_type
    if kind == "audio-spectrogram-transformer":
        return {"input_values": ("float32", (BATCH, config.max_length, config.num_mel_bins), 0)}
    if kind == "clap":
        return {"input_features": ("float32", ("clips", 1, "frames", config.audio_config.num_mel_bins), 0)}
    if kind == "encodec":
        return {"input_values": ("float32", (BATCH, config.audio_channels, "samples"), 0)}
    if kind == "speech_to_text":
        width = config.input_feat_per_channel * config.input_channels
    else:
        width = getattr(config, "feature_projection_input_dim", 0)
    mask = ("int64", (BATCH, "frames"), 2)
    features = ("float32", (BATCH, "frames", width), 0)
    return {"input_features": features, "attention_mask": mask} if width else {}
