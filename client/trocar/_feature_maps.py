"""What one extraction returned: arrays by name, statistics, and where each came from."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.numpy import save_file

from trocar._execution import EAGER, ExecutionInfo
from trocar._names import unknown_name
from trocar._statistics import Statistics
from trocar._tensors import Array, dequantize
from trocar._types import ServerTiming

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class CastInfo:
    """How the values of a feature map were cast before they were sent."""

    original_dtype: str
    """What they were."""
    scales: tuple[float, ...]
    """Of int8: value = scale * sent; one, or one per channel. Empty otherwise."""
    channel_dim: int | None
    """The dimension of the scales, from 0, where there is one per channel."""
    max_error: float
    """The largest absolute difference between a finite value and what it is here; of int8, dequantized."""


@dataclass(frozen=True)
class FeatureMapInfo:
    """Where one feature map came from and what it looks like; known even when its values stayed away."""

    name: str
    """The alias, or the selector that stands for this value alone."""
    path: str
    """The module's path; empty for the root."""
    type: str
    """The module's class name, for example "Bottleneck"."""
    call_index: int
    """Which call of the module in the pass, from 0."""
    port: str
    """Where at the module: "out", "in", "param(weight)" and so on; of gradients "grad_out" and so on."""
    pick: str
    """The pick into a structured value; empty for a plain tensor."""
    shape: tuple[int, ...]
    """Size of each dimension."""
    dtype: str
    """The dtype on the server; a "bfloat16" is a float32 array here."""
    has_values: bool
    """Whether the reply has the values."""
    byte_count: int = 0
    """Bytes of the values in the reply."""
    companion_of: str = ""
    """The feature map that this one accompanies, such as the indices of a top-k; empty otherwise."""
    cast: CastInfo | None = None
    """How the values were cast; None when they were not."""

    @property
    def is_gradient(self) -> bool:
        """Whether it is the gradient with respect to a value."""
        return self.port.startswith(("grad_", "param_grad"))


class FeatureMaps(Mapping[str, Array]):
    """The feature maps of one pass: a read-only mapping from name to array.

        maps = client.extract("resnet50", images, taps=["layer4", "layer*.0:Bottleneck"])
        maps["layer4"]                       # numpy array (8, 2048, 7, 7)
        torch.from_numpy(maps["layer4"])     # shares memory, as DLPack does
        maps.expansions["layer*.0:Bottleneck"]   # the names that this selector became

    A selector of the request that stands for exactly one value works as a key, too; the name of a feature
    map comes first. Of `gradients(at="layer4")` the name is "layer4/grad_out", and `maps["layer4"]` is the
    same unless the value itself was tapped, too. Arrays are writable and yours; bfloat16 values come as
    float32, exactly.

    Attributes:
        stats: Statistics by name, for taps that asked for some.
        info: Path, type, call, shape and dtype by name, also where the values stayed on the server.
        expansions: The names that each selector of the request became, in execution order.
        timing: Where the time went: waiting, computing and, of a single call, the rest.
        stopped_at: The module after which the pass was stopped; None when it ran to its end.
        model_id: The model that ran.
        objective: The value of the objective, where gradients were taken of one.
        edit_expansions: The names of the values that each edit's selector became, stored edits included.
        execution: How the pass was run: numerics, engine, the samples of its batch.
    """

    def __init__(  # noqa: PLR0913 - what one reply says, by keyword
        self,
        arrays: Mapping[str, Array],
        *,
        info: Mapping[str, FeatureMapInfo],
        stats: Mapping[str, Statistics],
        expansions: Mapping[str, tuple[str, ...]],
        timing: ServerTiming,
        stopped_at: str | None = None,
        model_id: str = "",
        objective: float | None = None,
        edit_expansions: Mapping[str, tuple[str, ...]] | None = None,
        execution: ExecutionInfo = EAGER,
    ) -> None:
        self._arrays = dict(arrays)
        self.stats: Mapping[str, Statistics] = dict(stats)
        self.info: Mapping[str, FeatureMapInfo] = dict(info)
        self.expansions: Mapping[str, tuple[str, ...]] = dict(expansions)
        self.timing = timing
        self.stopped_at = stopped_at
        self.model_id = model_id
        self.objective = objective
        self.edit_expansions: Mapping[str, tuple[str, ...]] = dict(edit_expansions or {})
        self.execution = execution

    @property
    def is_cached(self) -> bool:
        """Whether nothing was computed: the reply came from the server's feature cache."""
        return self.execution.is_cached

    def __getitem__(self, name: str) -> Array:
        """Return the values of a feature map.

        Raises:
            KeyError: No feature map has this name, its values were not asked for, or the selector
                stands for several; the message says which.
        """
        if name in self._arrays:
            return self._arrays[name]
        names = (name,) if name in self.info else self.expansions.get(name, ())
        if len(names) > 1:
            raise KeyError(f"{name!r} stands for {len(names)} feature maps: {', '.join(names)}")
        if not names:
            raise unknown_name("feature map", name, self.info)
        if names[0] not in self._arrays:
            raise KeyError(f"the values of {name!r} were not asked for (values=False); see .stats and .info")
        return self._arrays[names[0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return self is other  # comparing arrays by value gives arrays, not a truth

    __hash__ = None  # type: ignore[assignment]  # as for every class with an __eq__ of its own

    def dequantized(self, name: str) -> Array:
        """Return the values of a feature map as float32, where they came as int8; others as they are.

        Args:
            name: Which feature map.

        Raises:
            KeyError: As for `maps[name]`.
        """
        values = self[name]
        cast = self.info[self.expansions.get(name, (name,))[0] if name not in self.info else name].cast
        if cast is None or not cast.scales:
            return values
        return dequantize(values, cast.scales, cast.channel_dim)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the arrays to a safetensors file, under their exact names.

        The file's metadata holds, as JSON, what each selector became (`trocar.expansions`) and where
        each array came from (`trocar.info`); where there were some, also what each edit's selector became
        (`trocar.edit_expansions`) and the value of the objective (`trocar.objective`).

        Args:
            path: Where to write; an existing file is replaced.
        """
        info = {name: asdict(entry) for name, entry in self.info.items()}
        metadata = {
            "trocar.model_id": self.model_id,
            "trocar.expansions": json.dumps(self.expansions),
            "trocar.info": json.dumps(info),
        }
        if self.edit_expansions:
            metadata["trocar.edit_expansions"] = json.dumps(self.edit_expansions)
        if self.objective is not None:
            metadata["trocar.objective"] = json.dumps(self.objective)
        target = Path(path)
        target.touch()
        mode = (
            target.stat().st_mode
        )  # safetensors makes a file for its owner only; this one follows the umask
        save_file(self._arrays, target, metadata=metadata)
        target.chmod(mode)

    def plot(
        self, name: str | None = None, *, channels: int = 16, path: str | os.PathLike[str] | None = None
    ) -> "Figure":
        """Draw one feature map of sample 0 as a picture.

        A map of shape (batch, channels, height, width) becomes a grid of its first channels, each on
        its own colour scale; (batch, tokens, width) becomes one image of tokens x width; (batch,
        features) becomes a line.

        Args:
            name: Which feature map; the first when None.
            channels: The most channels to draw.
            path: Where to save the picture; the suffix says the format, for example ".png".

        Returns:
            The matplotlib figure. No display is needed.

        Raises:
            KeyError: No feature map of this name.
            ValueError: There is nothing to draw, or the map's rank is not 2, 3 or 4.
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._plot import draw  # needs matplotlib, which is an extra

        if name is None:
            name = next(iter(self._arrays), None)
        if name is None:
            raise ValueError("there are no values to draw; every tap has values=False")
        figure = draw(self[name], title=f"{self.model_id} {name}".strip(), channels=channels)
        if path is not None:
            figure.savefig(path)
        return figure

    def __repr__(self) -> str:
        lines = [f"FeatureMaps of {self.model_id or 'a model'}:"]
        lines += ["  " + "  ".join(row) for row in self._rows()]
        lines.append(f"  ({self.timing})")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Show name, shape, dtype and size of each feature map in a notebook."""
        head = "<tr><th>name</th><th>shape</th><th>dtype</th><th>bytes</th></tr>"
        cells = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in self._rows())
        return f"<table>{head}{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for name, entry in self.info.items():
            array = self._arrays.get(name)
            size = "statistics only" if array is None else f"{array.nbytes:,}"
            yield name, str(entry.shape), entry.dtype, size
