"""The size of keys and values as it is planned, against caches that were filled."""

import inspect
from typing import Any

import pytest
import torch
import transformers as T
from transformers import DynamicCache

from tests.support.models.causal_models import CAUSAL
from trocar_server.models import make_meta_replica
from trocar_server.models.huggingface.causal import CausalModel, why_not_causal

CACHES = ("past_key_values", "cache")
"""The argument for keys and values: before transformers 5.24, and since."""


@pytest.fixture(scope="module", params=[*CAUSAL, "half"])
def filled(request: pytest.FixtureRequest) -> tuple[CausalModel, Any]:
    kind, config = CAUSAL["gemma3" if request.param == "half" else request.param]
    torch.manual_seed(0)
    model = kind(config()).to(torch.bfloat16 if request.param == "half" else torch.float32).eval()
    causal = CausalModel(model.config, frozenset(inspect.signature(model.forward).parameters), (), 160, 300)
    return causal, model


def kept(model: Any, *lengths: int) -> int:
    """The bytes of keys and values after passes of these lengths."""
    cache: Any = DynamicCache(config=model.config)
    argument = next(name for name in inspect.signature(model.forward).parameters if name in CACHES)
    with torch.no_grad():
        for length in lengths:
            model(
                **{"input_ids": torch.zeros(1, length, dtype=torch.int64), argument: cache, "use_cache": True}
            )
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def test_the_size_of_a_cache_is_known_before_it_is_filled(filled: tuple[CausalModel, Any]) -> None:
    causal, model = filled
    size = causal.cache_size(make_meta_replica(model))
    for length in (1, 4, 5, 6, 7, 8, 9, 30):
        assert size.of(length) == kept(model, length)
    assert size.of(12) == kept(model, 10, 1, 1)


def test_keys_and_values_go_to_the_argument_that_the_model_has() -> None:
    for name in CACHES:
        causal = CausalModel(None, frozenset(("input_ids", name)), (), None, 300)
        assert causal.arguments([1], 0, "kept", "cpu")[name] == "kept"
        assert set(causal.arguments([1], 0, "kept", "cpu")) == {"input_ids", name}


@pytest.mark.parametrize("argument", ["cache", "cache_params"])
def test_a_model_with_another_state_is_refused(argument: str) -> None:
    config = T.MambaConfig(hidden_size=8, num_hidden_layers=1, vocab_size=30, state_size=4)

    class Renamed(T.MambaForCausalLM):  # type: ignore[misc]
        def forward(self, *args: Any, **given: Any) -> Any:
            return super().forward(*args, **given)

    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    state = inspect.Parameter(argument, inspect.Parameter.KEYWORD_ONLY)
    forward: Any = Renamed.forward
    forward.__signature__ = inspect.Signature([own, state])
    assert "in another way than keys and values" in why_not_causal(Renamed(config))
