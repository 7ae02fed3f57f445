"""Small models of tokens that read their mask, as those of transformers do: a pass without data cannot."""

import torch
from torch import nn

VOCABULARY, WIDTH = 11, 6


class Block(nn.Module):
    """A layer and a residual sum."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + self.linear(x)
        return found


class _Tokens(nn.Module):
    """Embeds tokens; what is read of a mask is up to the subclass. Without a mask nothing is read."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.embed(tokens)
        if attention_mask is not None:
            x = self.masked(x, attention_mask)
        for block in self.blocks:
            x = block(x)
        pooled: torch.Tensor = self.head(x.mean(-2))
        return pooled

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class AsksWhetherAll(_Tokens):
    """Skips the mask where it masks nothing, as transformers' `masking_utils` does."""

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x if mask.all() else x * mask[..., None]


class CutsToLongest(_Tokens):
    """Cuts the batch to its longest sample."""

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        length = int(mask.sum(-1).max().item())
        return x[:, :length]


class Unpads(_Tokens):
    """Packs what is not masked into one row, as flash attention does."""

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.nonzero(mask.flatten()).flatten()
        return x.flatten(0, 1)[positions]


class RefusesFull(_Tokens):
    """Cannot take a mask that masks nothing."""

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool(mask.all()):
            raise ValueError("mask something")
        return x * mask[..., None]


class CallsAsOften(_Tokens):
    """Calls its first block once for each token that is not masked."""

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for _ in range(int(mask.sum().item())):
            x = self.blocks[0](x)
        return x


class WaitsForever(_Tokens):
    """Goes on until the mask's sum is that of one token: a mask of ones never ends."""

    def masked(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        while mask.sum().item() != 1:
            x = self.blocks[0](x)
        return x


class Encoder(nn.Module):
    """PyTorch's own encoder in its default options: padded samples are nested tensors inside."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        x = self.encoder(self.embed(tokens), src_key_padding_mask=padding)
        scores: torch.Tensor = self.head(x)
        return scores
