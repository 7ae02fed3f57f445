"""A client whose gradient passes return arrays that a test chooses, with NumPy's statistics of them."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trocar import ExtractionPlan, FeatureMapInfo, FeatureMaps, ServerTiming, Statistics, Tap
from trocar._base.tensors import Array
from trocar.errors import UnknownModuleError, UnknownParameterError


@dataclass
class FakeGradients:
    """One pass: gradients of values by the value's name, and parameters and buffers by theirs."""

    outputs: Mapping[str, Array]
    """In execution order; `relu@1`, `fc/in`, `lstm[0]`."""
    parameters: Mapping[str, tuple[Array, Array | None]] = field(default_factory=dict)
    """Value and gradient of `fc.weight`; a buffer has no gradient."""
    objective: float | None = 2.5
    types: Mapping[str, str] = field(default_factory=dict)
    """Class names by path; "M" for others."""
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Name and arguments of every call."""

    def gradients(self, model_id: str, inputs: Any, **options: Any) -> FeatureMaps:
        self.calls.append(("gradients", {"model_id": model_id, "inputs": inputs, **options}))
        at = [(tap.selector, self._values(tap), tap) for tap in options["at"]]
        own = [(tap.selector, self._parameters(tap), tap) for tap in options.get("taps", ())]
        assert all(not tap.values for _, _, tap in (*at, *own))
        found = {name: (info, array, tap) for _, maps, tap in (*at, *own) for name, info, array in maps}
        return FeatureMaps(
            {},
            info={name: info for name, (info, _, _) in found.items()},
            stats={name: statistics(array, tap.names) for name, (_, array, tap) in found.items()},
            expansions={text: tuple(name for name, _, _ in maps) for text, maps, _ in (*at, *own)},
            timing=ServerTiming(0, 0),
            model_id=model_id,
            objective=self.objective,
        )

    def plan(self, model_id: str, inputs: None, tap: Tap) -> ExtractionPlan:
        self.calls.append(("plan", {"tap": tap}))
        is_order = tap.selector == "**"
        found = self._values(tap, gradient="") if is_order else self._parameters(tap)
        maps = {name: info for name, info, _ in found}
        return ExtractionPlan(model_id, maps, {tap.selector: tuple(maps)}, None, 0, 0, 0, True)

    def _values(self, tap: Tap, gradient: str = "grad_") -> list[tuple[str, FeatureMapInfo, Array]]:
        chosen = [
            name
            for name in self.outputs
            if (tap.selector == "**" and path_of(name) and "/" not in name) or name == tap.selector
        ]
        if not chosen:
            raise UnknownModuleError(f"no module {tap.selector!r}")
        found = []
        for value in chosen:
            before, _, port = value.partition("/")
            before, bracket, pick = before.partition("[")
            port = f"{gradient}{port or 'out'}"
            shown = f"/{port}" if gradient else ""
            name = tap.alias or f"{before}{shown}{bracket}{pick}"
            found.append(
                (
                    name,
                    self._info(name, path_of(value), port, self.outputs[value], value),
                    self.outputs[value],
                )
            )
        return found

    def _parameters(self, tap: Tap) -> list[tuple[str, FeatureMapInfo, Array]]:
        owner, _, port = tap.selector.partition("/")
        assert port in ("param(*)", "param_grad(*)")
        found = []
        for own, (value, gradient) in self.parameters.items():
            path, _, name = own.rpartition(".")
            array = value if port == "param(*)" else gradient
            if array is None or not (path if owner == "**" else path == owner):
                continue
            port_name = port.replace("*", name)
            text = f"{path}/{port_name}"
            found.append((text, self._info(text, path, port_name, array), array))
        if not found:
            raise UnknownParameterError(f"{tap.selector}: none", details={"selector": tap.selector})
        return found

    def _info(self, name: str, path: str, port: str, array: Array, value: str = "") -> FeatureMapInfo:
        call = value.partition("@")[2][:1] if "@" in value else "0"
        return FeatureMapInfo(
            name, path, self.types.get(path, "M"), int(call), port, "", array.shape, str(array.dtype), False
        )


class AsyncFakeGradients:
    """The same for asyncio."""

    def __init__(self, fake: FakeGradients) -> None:
        self.fake = fake

    async def gradients(self, *arguments: Any, **options: Any) -> FeatureMaps:
        await asyncio.sleep(0)
        return self.fake.gradients(*arguments, **options)

    async def plan(self, *arguments: Any) -> ExtractionPlan:
        await asyncio.sleep(0)
        return self.fake.plan(*arguments)


def path_of(name: str) -> str:
    return name.partition("/")[0].partition("@")[0].partition("[")[0]


def statistics(array: Array, names: Sequence[str] | Iterable[str]) -> Statistics:
    """NumPy's statistics, in float64."""
    values = array.astype(np.float64)
    with np.errstate(all="ignore"):
        numbers = {
            "l2": float(np.sqrt((values**2).sum())),
            "zero_fraction": float((values == 0).sum() / values.size) if values.size else float("nan"),
            "nan_count": int(np.isnan(values).sum()),
            "inf_count": int(np.isinf(values).sum()),
            "absmax": float(np.abs(values).max()) if values.size else float("nan"),
        }
    return Statistics({name: numbers[name] for name in names})
