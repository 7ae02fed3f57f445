"""A client for the commands of edits and gradients: keeps what it was asked, answers with NumPy arrays."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Self

import numpy as np

import trocar
from tests.unit.client._analysis.gradient_fake import FakeGradients, statistics
from trocar import FeatureMapInfo, FeatureMaps, ServerTiming
from trocar._base.tensors import Array
from trocar._request.stored.stored_edits import StoredEdits
from trocar._sync.analysis.analyses import Analyses

CATEGORIES = ("tench, Tinca tinca", "goldfish", "great white shark", "crane", "crane")
GRADIENT = np.array([[0.0, 3.0], [-4.0, 0.0]], np.float32)
STORED = StoredEdits("m", "ablate-3", ("edit('layer3', 'zero')",), 16, datetime(2026, 1, 2, tzinfo=UTC))


@dataclass
class SurgeryClient:
    """Answers like `trocar.Client`."""

    scores: Array | None = field(default_factory=lambda: np.array([[0.0, 1.0]]))
    """The model's output; None for a model with two of them."""
    categories: tuple[str, ...] = CATEGORIES
    stored: list[StoredEdits] = field(default_factory=lambda: [STORED])
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Name and arguments of every call."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Nothing is open."""

    def model(self, model_id: str) -> trocar.Model:
        self.calls.append(("model", {}))
        return trocar.Model(
            model_id, "loaded", "custom", "", "", 0, 0, "cpu", "float32", None, self.categories, (2,)
        )

    def extract(self, model_id: str, inputs: Any, taps: str, *, adapter: str = "") -> FeatureMaps:
        assert taps == "/out"
        self.calls.append(("extract", {"inputs": inputs, "adapter": adapter}))
        one = {} if self.scores is None else {"/out": self.scores}
        return maps(one or {'/out["a"]': np.zeros((1, 2)), '/out["b"]': np.zeros((1, 2))})

    def gradients(self, model_id: str, inputs: Any, **options: Any) -> FeatureMaps:
        self.calls.append(("gradients", {"inputs": inputs, **options}))
        found = {f"{tap.selector}/grad_out": tap for tap in options["at"]}
        return maps(dict.fromkeys(found, GRADIENT), found)

    def health(self, model_id: str, inputs: Any, of: trocar.Objective, **options: Any) -> trocar.Health:
        self.calls.append(("health", {"inputs": inputs, "of": of, **options}))
        fake: Any = FakeGradients({"conv": GRADIENT, "relu": 0 * GRADIENT})
        return Analyses(fake, fake).health(model_id, inputs, of)

    def plan(self, model_id: str, inputs: Any, taps: Any, **options: Any) -> trocar.ExtractionPlan:
        self.calls.append(("plan", options))
        return trocar.ExtractionPlan(model_id, {}, {}, None, 0, 0, 0, True, {"conv*": ("conv1", "conv2")})

    def store_edits(self, model_id: str, name: str, edits: Any, *, replace: bool = False) -> StoredEdits:
        self.calls.append(
            ("store_edits", {"model_id": model_id, "name": name, "edits": edits, "replace": replace})
        )
        return STORED

    def stored_edits(self, model_id: str | None = None) -> list[StoredEdits]:
        self.calls.append(("stored_edits", {"model_id": model_id}))
        return self.stored

    def delete_edits(self, model_id: str, name: str) -> None:
        self.calls.append(("delete_edits", {"model_id": model_id, "name": name}))


def maps(arrays: dict[str, Array], taps: dict[str, trocar.Tap] | None = None) -> FeatureMaps:
    """Feature maps of these arrays; with the values and the statistics that taps ask for."""
    info = {
        name: FeatureMapInfo(name, "m", "M", 0, "out", "", array.shape, str(array.dtype), True)
        for name, array in arrays.items()
    }
    return FeatureMaps(
        {name: array for name, array in arrays.items() if taps is None or taps[name].values},
        info=info,
        stats={name: statistics(arrays[name], tap.names) for name, tap in (taps or {}).items()},
        expansions={},
        timing=ServerTiming(0, 0),
        model_id="m",
        objective=1.25,
    )
