"""Families written here: recurrent, time first, convolutions over time, experts, towers, queries."""

from typing import Any

import torch
from torch import nn

from tests.relations.family import Family


class TimeFirstEncoder(nn.Module):
    """Takes (time, samples, width), as torch's encoder does by default."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 20, 0.0), 2, enable_nested_tensor=False
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.encoder(x))


class MaskedEncoder(nn.Module):
    """A batch-first encoder of tokens that reads `attention_mask` and pools."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 20, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 5)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        kept = attention_mask.bool()
        values = self.encoder(self.embed(input_ids), src_key_padding_mask=~kept)
        weights = kept.unsqueeze(-1).to(values.dtype)
        return self.head((values * weights).sum(1) / weights.sum(1))


class Recurrent(nn.Module):
    """A recurrent network of two layers; the state is a value of the recurrent module."""

    def __init__(self, kind: Any, batch_first: bool) -> None:
        super().__init__()
        self.cells = kind(8, 16, 2, batch_first=batch_first)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.cells(x)[0])


class LastState(nn.Module):
    """Classifies by `h_n`, (layers, samples, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 16, 2, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.gru(x)[1][-1])


class Tagger(nn.Module):
    """Convolutions over time: (samples, channels, time)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3, padding=1)
        self.act = nn.ReLU()
        self.second = nn.Conv1d(8, 6, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.act(self.first(x)))


class Volume(nn.Module):
    """Convolutions over clips of video."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm3d(6)
        self.pool = nn.AdaptiveAvgPool3d(1)
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.pool(torch.relu(self.norm(self.conv(x)))).flatten(1))


class ChannelsLast(nn.Module):
    """Blocks of (samples, rows, columns, width), as ConvNeXt's and Swin's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        values = self.norm(self.stem(x).permute(0, 2, 3, 1))
        return self.head((values + torch.nn.functional.gelu(self.mix(values))).mean((1, 2)))


class Unet(nn.Module):
    """Down, up, and a skip between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, 6, 3, 2, 1)
        self.middle = nn.Conv2d(6, 6, 3, 1, 1)
        self.up = nn.ConvTranspose2d(6, 6, 2, 2)
        self.out = nn.Conv2d(9, 4, 1)

    def forward(self, x: torch.Tensor) -> Any:
        low = torch.relu(self.down(x))
        return self.out(torch.cat([self.up(torch.relu(self.middle(low))), x], 1))


class Experts(nn.Module):
    """A mixture of experts: tokens are sent to the best of four."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(4)
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        scores = self.router(x).softmax(-1)
        best, chosen = scores.max(-1)
        values = torch.stack([expert(x) for expert in self.experts], -2)
        mixed = values.gather(-2, chosen[..., None, None].expand(*chosen.shape, 1, 8)).squeeze(-2)
        return self.head(x + best.unsqueeze(-1) * mixed)


class Towers(nn.Module):
    """Tokens with a mask, and patches without one, of equal number by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.words = nn.TransformerEncoderLayer(16, 2, 20, 0.0, batch_first=True)
        self.patches = nn.Conv2d(3, 16, 8, 8)
        self.picture = nn.TransformerEncoderLayer(16, 2, 20, 0.0, batch_first=True)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, pixel_values: torch.Tensor
    ) -> Any:
        kept = attention_mask.bool()
        words = self.words(self.embed(input_ids), src_key_padding_mask=~kept)
        words = (words * kept.unsqueeze(-1)).sum(1) / kept.sum(1, keepdim=True)
        return words * self.picture(self.patches(pixel_values).flatten(2).mT).mean(1)


class Queries(nn.Module):
    """As DETR: learned queries, time first, look at a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 4, 4)
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(16, 2, 20, 0.0), 1, enable_nested_tensor=False
        )
        self.transformer = nn.Transformer(16, 2, 1, 1, 20, 0.0, custom_encoder=encoder)
        self.queries = nn.Parameter(torch.randn(4, 16))
        self.boxes = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        memory = self.backbone(x).flatten(2).permute(2, 0, 1)
        queries = self.queries.unsqueeze(1).expand(-1, x.shape[0], -1)
        return self.boxes(self.transformer(memory, queries)).transpose(0, 1)


class Tuple(nn.Module):
    """Returns a structure: scores, and features by name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Identity(), nn.Linear(12, 12))
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x)
        return {"scores": self.head(features), "features": (features, features.square())}


class Counting(nn.Module):
    """Counts its calls in a buffer, also in evaluation mode, and scales by the count."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.body = nn.Sequential(nn.Linear(8, 12), nn.Tanh())
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> Any:
        self.count += 1
        return self.head(self.body(x) * self.count)


_STEPS = {"x": "lb8"}
_TOKENS = {"input_ids": "bt", "attention_mask": "bt"}
_PICTURE = {"x": "b3hw"}
OWN = [
    Family("time-first-encoder", TimeFirstEncoder, {"x": "lbd"}, {"l": 7, "d": 16}, input_shape=(3, 16)),
    Family("time-first-gru", lambda: Recurrent(nn.GRU, False), _STEPS, {"l": 7}, input_shape=(3, 8)),
    Family("batch-first-gru", lambda: Recurrent(nn.GRU, True), {"x": "bl8"}, {"l": 7}, input_shape=(7, 8)),
    Family("batch-first-lstm", lambda: Recurrent(nn.LSTM, True), {"x": "bl8"}, {"l": 6}, input_shape=(6, 8)),
    Family("last-state", LastState, {"x": "bl8"}, {"l": 6}, input_shape=(6, 8), classes=5),
    Family(
        "masked-encoder",
        MaskedEncoder,
        _TOKENS,
        {"t": 7},
        masks={"t": "attention_mask"},
        sides=("right", "left"),
        says_nothing=True,
        is_fused=True,
        classes=5,
    ),
    Family("tagger", Tagger, {"x": "b4l"}, {"l": 9}, input_shape=(4, 9)),
    Family(
        "volume", Volume, {"x": "b34hw"}, {"h": 6, "w": 6}, input_shape=(3, 4, 6, 6), classes=5, grows=True
    ),
    Family(
        "channels-last",
        ChannelsLast,
        _PICTURE,
        {"h": 16, "w": 12},
        input_shape=(3, 16, 12),
        classes=5,
        grows=True,
    ),
    Family("unet", Unet, _PICTURE, {"h": 8, "w": 12}, input_shape=(3, 8, 12), grows=True),
    Family("experts", Experts, {"x": "bl8"}, {"l": 6}, input_shape=(6, 8)),
    Family(
        "equal-towers",
        Towers,
        {**_TOKENS, "pixel_values": "b3hw"},
        {"t": 4, "h": 16, "w": 16},
        masks={"t": "attention_mask"},
        sides=("right", "left"),
        says_nothing=True,
        is_fused=True,
    ),
    Family("queries", Queries, _PICTURE, {"h": 8, "w": 12}, input_shape=(3, 8, 12), grows=True),
    Family("tuple", Tuple, {"x": "b8"}, {}, input_shape=(8,)),
    Family("counting", Counting, {"x": "b8"}, {}, input_shape=(8,)),
]
"""The families of this file."""
