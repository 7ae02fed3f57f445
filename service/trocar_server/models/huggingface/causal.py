"""Causal model: what generation needs to know of a hosted model, or why it cannot generate."""

import inspect
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.hosted import HostedModel

_CACHES = ("cache", "past_key_values")
"""The argument for keys and values: since transformers 5.24, and before."""


class LayerSize(NamedTuple):
    """Bytes of a layer's keys and values."""

    fixed_bytes: int
    """Without any position."""
    position_bytes: int
    """Of each position."""
    window: int | None
    """The most positions that are kept; all when None."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is kept."""
        return not (self.fixed_bytes or self.position_bytes)


@dataclass(frozen=True)
class CacheSize:
    """How large the keys and values of a text become."""

    layers: tuple[LayerSize, ...]

    def of(self, length: int) -> int:
        """Return the bytes for so many positions."""
        return sum(
            fixed + each * (length if window is None else min(length, window))
            for fixed, each, window in self.layers
        )


@dataclass(frozen=True)
class CausalModel:
    """A model that continues texts.

    Attributes:
        config: Its configuration.
        parameters: The names of the arguments of its forward.
        end_ids: Tokens that end a text, by the model's files.
        max_positions: The most positions of a text; None where the model does not tell.
        vocabulary: The number of token ids.
        switch_position: The first position from which the model computes all others anew, by other
            frequencies; None without one.
    """

    config: Any
    parameters: frozenset[str]
    end_ids: tuple[int, ...]
    max_positions: int | None
    vocabulary: int
    switch_position: int | None = None

    @classmethod
    def of(cls, hosted: HostedModel) -> "CausalModel":
        """Return the facts of a model.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it cannot generate text, with the reason.
        """
        module = hosted.module
        config: Any = getattr(module, "config", None)
        if problem := why_not_causal(module):
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT, f"'{hosted.spec.model_id}' cannot generate text: {problem}"
            )
        text = config.get_text_config(decoder=True)
        generation = getattr(module, "generation_config", None)
        own = getattr(generation, "eos_token_id", None)
        ends = own if own is not None else getattr(text, "eos_token_id", None)
        positions = getattr(text, "max_position_embeddings", None)
        return cls(
            config,
            frozenset(inspect.signature(module.forward).parameters),
            tuple(ends) if isinstance(ends, Sequence) else () if ends is None else (int(ends),),
            positions if isinstance(positions, int) and positions > 0 else None,
            int(text.vocab_size),
            _switch_position(module, text),
        )

    def arguments(
        self, ids: Sequence[int], first: int, cache: object, device: torch.device | str
    ) -> dict[str, object]:
        """Return the arguments of a pass, as transformers' own generation gives them.

        Args:
            ids: The tokens of the pass.
            first: The position of the first of them.
            cache: The keys and values of the positions before it.
            device: Of the model.
        """
        end = first + len(ids)
        given: dict[str, object] = {
            "input_ids": torch.tensor([list(ids)], device=device),
            "attention_mask": torch.ones(1, end, dtype=torch.int64, device=device),
            "position_ids": torch.arange(first, end, device=device)[None],
            "logits_to_keep": 1,
            "use_cache": True,
        }
        argument = next(name for name in _CACHES if name in self.parameters)
        return {**{name: given[name] for name in given if name in self.parameters}, argument: cache}

    def cache_size(self, meta: nn.Module) -> CacheSize:
        """Return how large keys and values become, by two passes without data of one and of two positions.

        Of models that read data in a pass, by the configuration; empty where that does not tell either.

        Args:
            meta: A tree of the model on the meta device, for these passes alone.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, layers without keys and values leave others in the model itself,
                which would go from one text into the next.
        """
        before = _plain_tensors(meta)
        size = self._measured(meta)
        after = _plain_tensors(meta)
        kept = sorted(name for name, value in after.items() if value is not before.get(name))
        if kept and any(layer.is_empty for layer in size.layers):
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"{type(meta).__name__} keeps its state in its own modules, for example in {kept[0]}, and "
                "not in keys and values of each text; use `extract`, which computes whole texts",
            )
        return size

    def _measured(self, meta: nn.Module) -> CacheSize:
        for has_mask in (False, True):  # many models read its numbers, some warn without one and read the ids
            with suppress(Exception):
                one, two = (self._cached(meta, count, has_mask=has_mask) for count in (1, 2))
                return CacheSize(
                    tuple(
                        LayerSize(2 * first - second, second - first, most)
                        for (first, most), (second, _) in zip(one, two, strict=True)
                    )
                )
        with suppress(Exception):
            return self._configured(next(meta.parameters()).dtype.itemsize)
        return CacheSize(())

    def _cached(self, meta: nn.Module, count: int, *, has_mask: bool) -> list[tuple[int, int | None]]:
        """Return for each layer the bytes of the keys and values of so many positions, and its window."""
        cache = self.empty_cache()
        arguments = self.arguments([0] * count, 0, cache, "meta")
        if not has_mask:
            arguments.pop("attention_mask", None)
        with torch.no_grad():
            meta(**arguments)
        return [(_byte_count(layer), _window(layer)) for layer in cache.layers]

    def _configured(self, item_bytes: int) -> CacheSize:
        text = self.config.get_text_config(decoder=True)
        heads = text.num_attention_heads
        width = getattr(text, "head_dim", None) or text.hidden_size // heads
        of_position = 2 * (getattr(text, "num_key_value_heads", None) or heads) * width * item_bytes
        layers = self.empty_cache().layers
        return CacheSize(tuple(LayerSize(0, of_position, _window(layer)) for layer in layers))

    def empty_cache(self) -> Any:
        """Return a cache without any position."""
        from transformers import DynamicCache

        return DynamicCache(config=self.config)


def _plain_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of modules that are neither parameters nor buffers, by name."""
    return {
        f"{path}.{name}": value
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, torch.Tensor)
    }


def _byte_count(layer: object) -> int:
    tensors = (value for value in vars(layer).values() if isinstance(value, torch.Tensor) and value.ndim)
    return sum(tensor.nbytes for tensor in tensors)


def _switch_position(module: nn.Module, config: Any) -> int | None:
    """Return where a model of the Phi-3 kind computes its keys and values anew, by long factors."""
    rope = getattr(config, "rope_parameters", None) or {}
    prepare: Any = getattr(module, "prepare_inputs_for_generation", None)
    is_own = getattr(prepare, "__qualname__", "").startswith("Phi")
    if not is_own or rope.get("rope_type") != "longrope":
        return None
    original = rope.get("original_max_position_embeddings")
    return original or getattr(config, "original_max_position_embeddings", None)


def _window(layer: object) -> int | None:
    """Return the most positions that a layer of a cache keeps: a window without the position to come."""
    window = getattr(layer, "sliding_window", None)
    return window - 1 if isinstance(window, int) else None


def why_not_causal(module: nn.Module) -> str:
    """Return why a model cannot generate text; empty where it can."""
    config = getattr(module, "config", None)
    if config is None or not hasattr(module, "can_generate"):
        return "it is no language model of transformers"
    if getattr(config, "is_encoder_decoder", False):
        return "models with an encoder and a decoder are not supported yet"
    can_generate: Any = module.can_generate
    if not can_generate():
        return "it has no head for the next token; load it with #text-generation behind its source"
    # Since transformers 5.24 the states of Mamba are a `cache` too; its configuration has no attention heads.
    has_heads = getattr(config.get_text_config(decoder=True), "num_attention_heads", None)
    takes_cache: Any = getattr(module, "_supports_default_dynamic_cache", lambda: True)
    has_cache = set(_CACHES) & set(inspect.signature(module.forward).parameters)
    if not (has_heads and has_cache and takes_cache()):
        return f"{type(module).__name__} keeps its state in another way than keys and values"
    return ""
