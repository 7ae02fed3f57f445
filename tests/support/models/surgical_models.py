"""Small models on which edits and gradients are easy to get wrong."""

from typing import Any, ClassVar

import torch
from torch import nn


class Block(nn.Module):
    """A linear layer and an activation that other blocks use, too."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = act

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self.act(self.linear(x)) - 0.1)


class Blocks(nn.Module):
    """Three blocks that share one in-place activation, and so call it six times."""

    def __init__(self) -> None:
        super().__init__()
        act = nn.ELU(inplace=True)
        self.first = Block(act)
        self.second = Block(act)
        self.third = Block(act)
        self.head = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.third(self.second(self.first(x))))


class Tied(nn.Module):
    """An embedding whose weight is that of the head, too; takes whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.norm(self.embedding(tokens)))


class Recurrent(nn.Module):
    """LSTM, GRU and attention, which read their parameters in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 4, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(8, 8, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x, _ = self.gru(self.lstm(x)[0])
        x, _ = self.attention(x, x, x)
        return self.head(self.encoder(x))


class Normed(nn.Module):
    """Batch norm with statistics of its own, an in-place activation, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Conv2d(4, 4, 3, padding=1)
        self.fc = nn.Linear(4, 3)
        for buffer in (self.norm.running_mean, self.norm.running_var):
            assert buffer is not None
            nn.init.uniform_(buffer, 0.5, 1.5)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.relu(self.norm(self.conv(x)))
        z = self.down(y)
        z += y
        return self.fc(self.relu(z).mean((2, 3)))


class Remembers(nn.Module):
    """Multiplies with what the pass before made, kept as a buffer, and with a plain tensor of the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.ones(3))
        self.last: torch.Tensor = torch.ones(3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.linear(x) * self.mean * self.last
        self.mean = torch.ones(3, device=x.device) + 0 * y.mean(0)
        self.last = self.mean * 1
        return y


class _NotedConv(nn.Conv1d):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Noted.cudnn["conv"].append(torch.backends.cudnn.enabled)
        return super().forward(input)


class _NotedLSTM(nn.LSTM):
    def forward(self, input: Any, hx: Any = None) -> Any:
        Noted.cudnn["lstm"].append(torch.backends.cudnn.enabled)
        if not input.is_meta and input.isnan().any():
            raise FloatingPointError("NaN")
        return super().forward(input, hx)


class Noted(nn.Module):
    """A convolution, an LSTM with dropout and a head; notes in which forwards cuDNN may be used."""

    cudnn: ClassVar[dict[str, list[bool]]] = {"conv": [], "lstm": []}

    def __init__(self) -> None:
        super().__init__()
        self.conv = _NotedConv(4, 4, 1)
        self.lstm = _NotedLSTM(4, 6, num_layers=2, dropout=0.5, batch_first=True)
        self.fc = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.conv(x).transpose(1, 2)
        return self.fc(self.lstm(rows)[0][:, -1])

    @classmethod
    def notes(cls) -> dict[str, list[bool]]:
        """Return what was noted, and begin anew."""
        found = {name: list(noted) for name, noted in cls.cudnn.items()}
        for noted in cls.cudnn.values():
            noted.clear()
        return found
