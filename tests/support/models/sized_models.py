"""Tiny models whose passes depend on the sizes of their inputs. No network."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, T5Config, T5EncoderModel


class _Text(nn.Module):
    """A model of transformers that takes token ids."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.model(input_ids).last_hidden_state


class Bert(_Text):
    """A BERT of two layers for at most 64 tokens."""

    def __init__(self) -> None:
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        super().__init__(BertModel(BertConfig(vocab_size=15, max_position_embeddings=64, **sizes)))


class MaskedBert(Bert):
    """The same, with a mask, which transformers reads."""

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        return self.model(input_ids, attention_mask=attention_mask).last_hidden_state


class Gpt(_Text):
    """A GPT-2 of two layers."""

    def __init__(self) -> None:
        config = GPT2Config(
            vocab_size=15, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
        )
        super().__init__(GPT2Model(config))


class T5(_Text):
    """The encoder of a T5 of two layers."""

    def __init__(self) -> None:
        config = T5Config(vocab_size=15, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
        super().__init__(T5EncoderModel(config))


class Halves(nn.Module):
    """Convolutions and pools that round sizes down and up; a product of sizes; writes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 20, 5, stride=3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.norm = nn.LayerNorm(20)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        tokens = self.pool(self.relu(self.conv(image))).flatten(2).transpose(1, 2)
        scores = tokens @ tokens.transpose(1, 2)
        found: torch.Tensor = self.norm(scores.softmax(-1) @ tokens)
        return found


class Windows(nn.Module):
    """Pads tokens to a multiple of eight and works on windows, as Longformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        missing = -tokens.shape[1] % 8
        padded = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
        windows: torch.Tensor = self.mix(padded.unflatten(1, (-1, 8)))
        return windows


class Loop(nn.Module):
    """Calls its layer once for every four tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        for _ in range(tokens.shape[1] // 4):
            tokens = self.mix(tokens)
        return tokens
