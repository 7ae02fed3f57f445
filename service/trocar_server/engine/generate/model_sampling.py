"""Model sampling: options of a run from the model's own generation configuration."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.engine.generate.sampling import Sampling
from trocar_server.errors import ServiceError

_USUAL: Mapping[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0}
"""What transformers' generation uses where the configuration has nothing."""

_WITHOUT_EFFECT: Mapping[str, Any] = {
    "num_beams": 1,
    "guidance_scale": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "bad_words_ids": None,
    "sequence_bias": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "top_h": None,
    "penalty_alpha": None,
    "dola_layers": None,
}
"""Options that change which token follows and are not supported, with the value that changes nothing."""


def with_model_sampling(sampling: Sampling, config: Any) -> Sampling:
    """Return options whose unset ones are as the model's generation configuration has them.

    Args:
        sampling: As the caller gave them.
        config: `generation_config` of the model; None where it has no such configuration.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the configuration has an option that is not supported.
    """
    refused = {
        name: value
        for name, neutral in _WITHOUT_EFFECT.items()
        if (value := getattr(config, name, None)) not in (None, neutral)
    }
    if refused:
        named = ", ".join(f"{name}={value!r}" for name, value in refused.items())
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"the model's generation configuration has {named[:300]}, which is not supported; leave "
            "sampling='model' out and give temperature, top_k and the like yourself",
        )

    def own(name: str) -> Any:
        value = getattr(config, name, None)
        return _USUAL.get(name) if value is None else value

    draws = bool(getattr(config, "do_sample", None))
    temperature = sampling.temperature
    if temperature is None:
        temperature = float(own("temperature")) if draws else 0.0
    return replace(
        sampling,
        temperature=temperature,
        top_k=_or(sampling.top_k, own("top_k") or None),
        top_p=_or(sampling.top_p, own("top_p")),
        min_p=_or(sampling.min_p, own("min_p") or None),
        repetition_penalty=_or(sampling.repetition_penalty, own("repetition_penalty")),
    )


def _or(given: Any, otherwise: Any) -> Any:
    return otherwise if given is None else given
