"""Tiny causal language models of many families, and a tokenizer whose tokens are parts of characters."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as T
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = (
    "The river ran past the mill, and the mill turned slowly.",
    "Zwölf Boxkämpfer jagten Eva quer über den Sylter Deich.",
    "日本語の文章を少しだけ書きます。",
    "naïve café — déjà vu 🙂🙃",
)
"""Prompts whose characters are of one to four bytes."""

VOCABULARY = 300
"""256 bytes, an end token, and a few merges."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 160,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 1, "head_dim": 8}
_ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}

CAUSAL: dict[str, tuple[Any, Callable[[], Any]]] = {
    "gpt2": (
        T.GPT2LMHeadModel,
        lambda: T.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=VOCABULARY, n_positions=160, **_ENDS),
    ),
    "llama": (T.LlamaForCausalLM, lambda: T.LlamaConfig(**_SIZES)),
    "qwen3": (T.Qwen3ForCausalLM, lambda: T.Qwen3Config(**_GROUPED)),
    "gemma3": (T.Gemma3ForCausalLM, lambda: T.Gemma3TextConfig(**_GROUPED, sliding_window=8)),
    "mistral": (T.MistralForCausalLM, lambda: T.MistralConfig(**_GROUPED, sliding_window=6)),
    "opt": (
        T.OPTForCausalLM,
        lambda: T.OPTConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=160,
            word_embed_proj_dim=16,
            **_ENDS,
        ),
    ),
    "neox": (T.GPTNeoXForCausalLM, lambda: T.GPTNeoXConfig(**_SIZES)),
    "bloom": (
        T.BloomForCausalLM,
        lambda: T.BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2, **_ENDS),
    ),
    "phi": (T.PhiForCausalLM, lambda: T.PhiConfig(**_SIZES)),
    "mixtral": (T.MixtralForCausalLM, lambda: T.MixtralConfig(**_GROUPED, num_local_experts=2)),
    "glm": (T.GlmForCausalLM, lambda: T.GlmConfig(**_GROUPED)),
    "nemotron": (T.NemotronForCausalLM, lambda: T.NemotronConfig(**_GROUPED)),
    "olmo2": (T.Olmo2ForCausalLM, lambda: T.Olmo2Config(**_SIZES)),
    "smollm3": (T.SmolLM3ForCausalLM, lambda: T.SmolLM3Config(**_SIZES, num_key_value_heads=1)),
    "starcoder2": (T.Starcoder2ForCausalLM, lambda: T.Starcoder2Config(**_SIZES, num_key_value_heads=1)),
}
"""transformers' class and configuration by family."""


class TinyGpt2(T.GPT2LMHeadModel):  # type: ignore[misc]
    """The family "gpt2" as a factory: without a tokenizer."""

    def __init__(self) -> None:
        super().__init__(CAUSAL["gpt2"][1]())


def save_causal(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Save a family's model with random weights and a tokenizer of bytes, and return it in eval mode."""
    kind, config = CAUSAL[family]
    torch.manual_seed(0)
    model = kind(config()).to(dtype).eval().requires_grad_(False)
    with torch.no_grad():  # random weights have nearly equal logits, and repeat one token
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0)
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    own = kind.from_pretrained(str(folder), dtype="auto").eval().requires_grad_(False)
    for tensor in (*own.parameters(), *own.buffers()):  # the file aligns them otherwise, see MKL
        tensor.data = tensor.data.clone()
    return own


def save_byte_tokenizer(folder: Path, texts: Sequence[str] = TEXTS) -> None:
    """Save a byte-level tokenizer with few merges; its token 0 ends a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    make: Any = T.PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", model_max_length=160)
    fast.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    fast.save_pretrained(str(folder))


class Hooked:
    """A model whose modules' outputs are noted, and changed, while transformers generates.

        with Hooked(model, ["model.layers.1"], {"model.layers.0": lambda x: x * 2}) as hooked:
            model.generate(...)
        hooked.rows("model.layers.1")

    Args:
        model: The model.
        paths: Modules whose outputs are noted.
        changes: By module, what its output becomes.
    """

    def __init__(
        self,
        model: Any,
        paths: Sequence[str],
        changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] | None = None,
    ) -> None:
        self._model, self._paths, self._changes = model, paths, changes or {}
        self._seen: dict[str, list[torch.Tensor]] = {path: [] for path in paths}
        self._handles: list[Any] = []

    def __enter__(self) -> "Hooked":
        for path, change in self._changes.items():
            self._hook(path, partial(_changed, change))
        for path in self._paths:
            self._hook(path, partial(_noted, self._seen[path]))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, path: str, act: Callable[[Any], Any]) -> None:
        module = self._model.get_submodule(path)
        self._handles.append(module.register_forward_hook(lambda _, __, output: act(output)))

    def rows(self, path: str) -> Any:
        """Return the rows of a module's output for each computed position, float32."""
        return torch.cat([value[0] for value in self._seen[path]]).float().numpy()


def _changed(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    value = change(_first(output))
    return (value, *output[1:]) if isinstance(output, tuple) else value


def _noted(seen: list[torch.Tensor], output: Any) -> None:
    seen.append(_first(output).clone())


def _first(output: Any) -> torch.Tensor:
    value: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return value
