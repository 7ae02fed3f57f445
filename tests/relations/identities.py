"""After a change of a model's description, nothing that was kept of before is continued.

Every field of `[models.ID]` has a change that changes answers, or a reason why it cannot.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import trocar
from trocar_server.config import ModelConfig

BASE: dict[str, Any] = {
    "factory": "tests.relations.identities:Changeable",
    "weights": "random:1",
    "input_shape": (3, 8, 8),
    "stages": {"early": "first"},
    "preprocessing": {"resize": [8], "crop": [8]},
    "options": {"power": 1},
}
NEUTRAL = {
    "architecture": "`factory` says it here; an architecture is one more name for a builder",
    "source": "says what `factory` says",
    "arguments": "are options of the builder by position",
    "categories": "are names beside an answer",
    "input_shape": "is an example",
    "inputs": "describe arguments, and change no value",
    "processor": "is read for texts and sound; its files have a digest of their own",
    "replicas": "are copies with equal weights",
    "numerics": "is a default of callers: values are as close as promised",
    "warm_variants": "are built earlier, and answer as later ones",
    "merge": "lets calls share a pass whose rows are independent",
}
"""Fields that cannot change an answer."""
CHANGES: dict[str, Any] = {
    "factory": "tests.relations.identities:Other",
    "weights": "random:2",
    "stages": {"early": "second"},
    "preprocessing": {"resize": [8], "crop": [8], "mean": [0.1, 0.2, 0.3]},
    "options": {"power": 2},
    "dtype": "bf16",
}
"""A change of each field that may."""


class Changeable(nn.Module):
    """Two layers, and a power that no weight tells of."""

    def __init__(self, power: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.power = power

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x.pow(self.power)))


class Other(Changeable):
    """The same weights, and another function of them."""

    def forward(self, x: torch.Tensor) -> Any:
        return -super().forward(x.pow(2))


def unnamed_fields() -> set[str]:
    """Return the fields of a model's configuration that are in neither table."""
    return set(ModelConfig.model_fields) - NEUTRAL.keys() - CHANGES.keys()


@dataclass(frozen=True)
class Kept:
    """Something that a server or a client keeps of a model, and continues.

    Attributes:
        begin: Makes it, with a client of the first model.
        is_continued: Continues it with a client of the changed model; whether it is taken.
    """

    begin: Callable[[trocar.Client, Path], Any]
    is_continued: Callable[[trocar.Client, Path, Any], bool]


_TAPS = [trocar.tap("early", stats=["mean"], values=False, alias="kept")]


def picture() -> Any:
    return np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)


def _begin_stream(client: trocar.Client, _: Path) -> Any:
    with client.extract_stream(
        "m", [picture()], _TAPS, running_statistics=True, checkpoint_interval=1
    ) as stream:
        return list(stream)[-1].checkpoint


def _continue_stream(client: trocar.Client, _: Path, checkpoint: Any) -> bool:
    options: Any = {"running_statistics": True, "checkpoint": checkpoint, "first_batch": 1}
    try:
        with client.extract_stream("m", [picture()], _TAPS, **options) as stream:
            return [result.unwrap() for result in stream] != []
    except trocar.TrocarError:
        return False


KEPT = {"stream": Kept(_begin_stream, _continue_stream)}
"""What is kept, by name."""

STILL_CONTINUED = {
    ("stream", "stages"): "issue 40: a stage that names another module is not in the digest of a stream",
}
"""Today's faults; each must still be one."""
