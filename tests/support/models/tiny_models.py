"""Small models with the habits that make hooks difficult."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


class Plain(nn.Module):
    """A convolution, an in-place ReLU that is called twice, a never-called layer, a linear head."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1)
        self.unused = nn.Linear(4, 4)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4, classes)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.relu(self.conv(x))
        x = self.relu(self.conv2(x))
        return self.fc(self.pool(x).flatten(1))


class LateImages(nn.Module):
    """A classifier whose images are not its first parameter, as FLAVA's are not."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.relu = nn.ReLU()
        self.fc = nn.Linear(4, 5)

    def forward(
        self, input_ids: torch.Tensor | None = None, pixel_values: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert pixel_values is not None
        means: torch.Tensor = self.relu(self.conv(pixel_values)).mean((2, 3))
        if input_ids is not None:
            means = means + self.words(input_ids).mean(1)
        scores: torch.Tensor = self.fc(means)
        return scores


class ImagesFirst(LateImages):
    """The same, without words."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(None, pixel_values)


def of_images(kind: type[LateImages]) -> dict[str, Any]:
    """Configure one of the two, for images."""
    image = {"resize": [16], "crop": [16, 16], "mean": [0.5, 0.4, 0.3], "std": [1.0, 1.0, 1.0]}
    pixels = {"dtype": "float32", "shape": ["batch", 3, 16, 16]}
    return {
        "factory": f"{kind.__module__}:{kind.__qualname__}",
        "input_shape": (3, 16, 16),
        "weights": "random:0",
        "inputs": {"pixel_values": pixels},
        "preprocessing": image,
    }


class NamedScores(Plain):
    """Returns the scores of `Plain` as `logits` among others, by one module more."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__(classes)
        self.last = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        scores = super().forward(x)
        return {"hidden": self.last(scores) * 2, "logits": scores}


@dataclass
class Pair:
    """What `Structured.both` returns."""

    first: torch.Tensor
    second: torch.Tensor


class Both(nn.Module):
    """Returns a dataclass."""

    def forward(self, x: torch.Tensor) -> Pair:
        return Pair(x + 1, x * 2)


class Split(nn.Module):
    """Returns a tuple with something that is no tensor in it."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, None, int]:
        return x * scale, None, 7


class Count(nn.Module):
    """Returns no tensor at all."""

    def forward(self, x: torch.Tensor) -> int:
        return x.shape[0]


class Structured(nn.Module):
    """Tuples, dicts, dataclasses, keyword inputs and modules without tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.both = Both()
        self.split = Split()
        self.count = Count()

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        pair = self.both(x)
        scaled, _, _ = self.split(pair.first, scale=pair.second)
        batch = self.count(x)
        out = scaled / batch
        return {"out": out if bias is None else out + bias, "aux": pair.second}


class DataDependent(nn.Module):
    """Calls `late` only for inputs whose sum is positive; needs data, so it cannot run on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.late = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.first(x)
        return self.late(y) if x.sum().item() > 0 else y


class Half(nn.Module):
    """Computes in bfloat16 and returns a transposed view."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0, 3, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.scale).to(torch.bfloat16).transpose(0, 1)


class HalfPrecision(nn.Module):
    """Has its weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 4).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)  # type: ignore[no-any-return]


class Words(nn.Module):
    """Looks numbers up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)  # type: ignore[no-any-return]
