"""Feature maps of one extraction: arrays by name, statistics, and the source of each."""

import copy
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from safetensors.numpy import save_file

from trocar._base.dimensions import TokenGrid, samples_dim, tokens_dim
from trocar._base.names import unknown_name
from trocar._base.replacement import replacement, safetensors_path
from trocar._base.tables import MOST_ROWS, first_lines, html_fold, html_table
from trocar._base.tensors import Array, dequantize
from trocar._base.types import ServerTiming
from trocar._request.execution import EAGER, ExecutionInfo
from trocar._result.likely_tokens import IDS, LikelyToken, lens_name, likely_tokens, own_names
from trocar._result.plain_table import is_table_path
from trocar._result.processed import ProcessedInput
from trocar._result.statistics import Statistics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHOWN_ROWS = 6
"""Feature maps in the text of a cell; `print` shows more."""


_TOKEN_RANK = 3


@dataclass(frozen=True)
class CastInfo:
    """Cast of a feature map's values before they were sent."""

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
    """Source, shape and dtype of one feature map; known even when its values were not sent."""

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
    token_positions: tuple[tuple[int, ...], ...] = ()
    """Of `tokens=` as spans or roles: which tokens of each sample of the batch were chosen, without padding;
    `maps.tokens.samples[i].tokens[position]` spells them."""
    axes: tuple[str, ...] = ()
    """What each dimension means: "batch", "channels", "heads", or the name of an axis of the model's inputs,
    as "tokens" or "height"; with "*" between them where several are one dimension; "" for a dimension of
    constants, "?" where it is not known. Empty where nothing is known, for companions, and after
    reductions."""
    token_grids: tuple[TokenGrid, ...] = ()
    """The dimensions whose tokens are the patches of a picture."""
    token_texts: Mapping[int, str] = field(default_factory=dict)
    """Of the indices of a `trocar.lens(...)`: the texts of these tokens, by id."""

    @property
    def channel_dim(self) -> int | None:
        """The dimension of the channels; None where that is not known, or there are several."""
        return self.axes.index("channels") if self.axes.count("channels") == 1 else None

    @property
    def is_gradient(self) -> bool:
        """Whether it is the gradient with respect to a value."""
        return self.port.startswith(("grad_", "param_grad"))


Entry = TypeVar("Entry")


class BySelector(dict[str, Entry]):
    """Facts of feature maps by name, and by a selector of the request that matches exactly one of them.

    Attributes:
        expansions: The names that each selector matched.
    """

    expansions: Mapping[str, tuple[str, ...]]

    def __missing__(self, name: str) -> Entry:
        return dict.__getitem__(self, self.name_of(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return the entry of a name or a selector, or the default."""
        try:
            return self[name]
        except KeyError:
            return default

    def name_of(self, name: str) -> str:
        """Return a name, or the name that a selector stands for.

        Raises:
            KeyError: It is neither, or the selector stands for several.
        """
        if name in self:
            return name
        names = own_names(self.expansions.get(name, ()))
        if len(names) > 1:
            raise KeyError(f"{name!r} stands for {len(names)} feature maps: {', '.join(names)}")
        if not names or names[0] not in self:
            raise unknown_name("feature map", name, self)
        return names[0]


def by_selector(entries: Mapping[str, Entry], expansions: Mapping[str, tuple[str, ...]]) -> BySelector[Entry]:
    """Return facts by name that are found by selectors, too."""
    result = BySelector(entries)
    result.expansions = expansions
    return result


class FeatureMaps(Mapping[str, Array]):
    """The feature maps of one pass: a read-only mapping from name to array.

        maps = client.extract("resnet50", images, taps=["layer4", "layer*.0:Bottleneck"])
        maps["layer4"]                       # numpy array (8, 2048, 7, 7)
        torch.from_numpy(maps["layer4"])     # shares memory, as DLPack does
        maps.expansions["layer*.0:Bottleneck"]   # the feature maps of this selector

    A selector of the request that matches exactly one value is also a key; names of feature maps have
    priority. For `gradients(at="layer4")` the name is "layer4/grad_out", and `maps["layer4"]` is the same
    unless the value itself was also tapped. Arrays are writable; bfloat16 values are converted to float32,
    exactly.

    Attributes:
        stats: Statistics by name or selector, for taps that asked for some.
        info: Path, type, call, shape and dtype by name or selector, also if the values were not sent.
        expansions: The names of the feature maps that each selector matched, in execution order.
        timing: Time breakdown: waiting, computing and, for a single call, the rest.
        stopped_at: The module after which the pass was stopped; None when it ran to its end.
        model_id: The model that ran.
        objective: The value of the objective, if gradients were computed.
            edit_expansions: The names of the values that each edit's selector became, stored edits included.
        execution: Execution of the pass: numerics, engine, the samples of its batch.
        processed: What the model's processor made of texts and sound, in the order of the inputs.
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
        processed: Sequence[ProcessedInput] = (),
    ) -> None:
        self._arrays = dict(arrays)
        self.expansions: Mapping[str, tuple[str, ...]] = dict(expansions)
        self.stats: BySelector[Statistics] = BySelector(stats)
        self.info: BySelector[FeatureMapInfo] = BySelector(info)
        self.stats.expansions = self.info.expansions = self.expansions
        self.timing = timing
        self.stopped_at = stopped_at
        self.model_id = model_id
        self.objective = objective
        self.edit_expansions: Mapping[str, tuple[str, ...]] = dict(edit_expansions or {})
        self.execution = execution
        self.processed: tuple[ProcessedInput, ...] = tuple(processed)

    @property
    def is_cached(self) -> bool:
        """Whether nothing was computed: the reply came from the server's feature cache."""
        return self.execution.is_cached

    @property
    def tokens(self) -> ProcessedInput:
        """The tokens of the texts; of the first input if several are texts.

        Raises:
            ValueError: No input was a text.
        """
        result = next((entry for entry in self.processed if entry.padded_length), None)
        if result is None:
            raise ValueError("there are no tokens: no input of this call was a text")
        return result

    def samples(self, name: str, axis: int | None = None) -> list[Array]:
        """Return the values of a feature map sample by sample, without padding.

            maps.samples("encoder.layer.3")      # a list of arrays (tokens, 384)

        With spans or roles as `tokens=`, these are the chosen tokens of each sample.

        Args:
            name: Which feature map.
            axis: The dimension of its tokens. The first one when None; where nothing is known of the value,
                the first behind the batch with the padded length.

        Raises:
            KeyError: As for `maps[name]`.
            ValueError: No input was a text, or the values have no dimension for tokens.
        """
        tokens, values = self.tokens, self[name]
        counts = [len(positions) for positions in self._info_of(name).token_positions]
        if counts and values.ndim == _TOKEN_RANK and values.shape[:2] == (len(counts), max(counts)):
            return [value[:count] for value, count in zip(values, counts, strict=True)]
        rows, along = self._token_axes(name, axis)
        count, length = values.shape[rows], values.shape[along]
        if along == rows or (count, length) != (len(tokens.samples), tokens.padded_length):
            raise ValueError(f"dimension {along} of {name!r}, shape {values.shape}, has no tokens")
        pairs = zip(tokens.mask, np.moveaxis(values, rows, 0), strict=True)
        return [np.compress(kept, value, axis=along - (along > rows)) for kept, value in pairs]

    def without(self, names: Collection[str]) -> "FeatureMaps":
        """Return the same without some feature maps."""

        def kept(entries: Mapping[str, Entry]) -> dict[str, Entry]:
            return {name: entry for name, entry in entries.items() if name not in names}

        result = copy.copy(self)
        result._arrays = kept(self._arrays)
        result.info = by_selector(kept(self.info), self.expansions)
        result.stats = by_selector(kept(self.stats), self.expansions)
        return result

    def lens(self, name: str) -> list[list[tuple[LikelyToken, ...]]]:
        """Return what a `trocar.lens(...)` read: of each sample, at each position, the likely tokens.

            maps = client.extract("llama", "The capital of France is", [trocar.lens("layer[20]")])
            maps.lens("layer[20]")[0][-1][0].text

        Of texts and of `positions=` without padding and filling; of arrays every position.

        Raises:
            KeyError: No lens has this name.
        """
        name = lens_name(name, self._arrays, self.expansions)
        texts, counts = self.info[f"{name}{IDS}"].token_texts, self.info[name].token_positions
        parts: list[list[Array]] = [list(self[name]), list(self[f"{name}{IDS}"])]
        if not texts:
            raise KeyError(f"{name!r} is no lens")
        if counts:
            parts = [[row[: len(at)] for row, at in zip(part, counts, strict=True)] for part in parts]
        elif any(entry.padded_length == self[name].shape[1] for entry in self.processed):
            parts = [[row[kept] for row, kept in zip(part, self.tokens.mask, strict=True)] for part in parts]
        return [likely_tokens(values, ids, texts) for values, ids in zip(*parts, strict=True)]

    def _token_axes(self, name: str, axis: int | None) -> tuple[int, int]:
        """Return the dimensions of the samples and of the tokens of a feature map.

        Raises:
            ValueError: It has no dimension for tokens.
        """
        shape, axes = self[name].shape, self._info_of(name).axes
        rows = samples_dim(axes)
        if axis is not None:
            return 0 if rows is None else rows, axis % len(shape)
        if len(axes) != len(shape) or "?" in axes:
            return 0, self.tokens.token_axis(shape)
        along = tokens_dim(axes, shape, self.tokens.padded_length)
        if rows is None or along is None:
            shown = ", ".join(one or "-" for one in axes)
            raise ValueError(f"{name!r} of shape {shape} is ({shown}): it has no dimension for the tokens")
        return rows, along

    def span(self, name: str, start: int, stop: int, *, sample: int = 0, axis: int | None = None) -> Array:
        """Return the values of the tokens that contain characters `start` to `stop` of one text.

            text = "the cat sat"
            maps.span("encoder.layer.3", text.index("cat"), text.index("cat") + 3)    # (tokens, 384)

        With spans or roles as `tokens=`, only the chosen tokens count.

        Args:
            name: Which feature map.
            start: The first character, from 0; for a chat in `maps.tokens.samples[sample].rendered`.
            stop: The position after the last character.
            sample: Which text.
            axis: As for `samples`.

        Raises:
            KeyError: As for `maps[name]`.
            ValueError: As for `samples`; no token, or no chosen one, holds one of these characters, or the
                tokenizer does not tell which characters its tokens hold.
        """
        result = self.tokens.samples[sample]
        if not result.spans:
            raise ValueError(
                "the tokenizer of this model does not tell which characters its tokens hold; choose rows of "
                "maps.samples(name) by maps.tokens.samples[sample].tokens"
            )
        places = [
            place
            for place, (begin, end) in enumerate(result.spans)
            if begin < stop and start < end and not result.is_special[place]
        ]
        chosen = self._info_of(name).token_positions
        if chosen:
            places = [row for row, place in enumerate(chosen[sample]) if place in places]
        if not places:
            raise ValueError(f"no token of text {sample} holds one of the characters {start} to {stop}")
        rows, along = (0, 1) if chosen else self._token_axes(name, axis)
        return np.take(self.samples(name, along)[sample], places, axis=along - (along > rows))

    def __getitem__(self, name: str) -> Array:
        """Return the values of a feature map.

        Raises:
            KeyError: No feature map has this name, its values were not asked for, or the selector
                stands for several; the message says which.
        """
        if name in self._arrays:
            return self._arrays[name]
        own = self.info.name_of(name)
        if own not in self._arrays:
            raise KeyError(f"the values of {name!r} were not asked for (values=False); see .stats and .info")
        return self._arrays[own]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __eq__(self, other: object) -> bool:
        return self is other  # comparing arrays by value gives arrays, not a truth

    __hash__ = None  # type: ignore[assignment]  # as for every class with an __eq__ of its own

    def dequantized(self, name: str) -> Array:
        """Return the values of a feature map as float32 if they were sent as int8; others unchanged.

        Args:
            name: Which feature map.

        Raises:
            KeyError: As for `maps[name]`.
        """
        values = self[name]
        cast = self._info_of(name).cast
        if cast is None or not cast.scales:
            return values
        return dequantize(values, cast.scales, cast.channel_dim)

    def _info_of(self, name: str) -> FeatureMapInfo:
        return self.info[name]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame: a row for each sample, a column for each number.

            client.extract("resnet50", images, ["fc"]).to_pandas()      # columns sample, fc[0], fc[1], ...

        Columns are called by the feature map and the place of the number, `layer4[3,0,1]`; sizes of 1 have no
        place. At most 16,384 columns; reduce larger values first.

        Raises:
            ValueError: There are more numbers for a sample, a feature map has no row for each sample, or one
                for each token of texts.
            MissingExtraError: pandas is missing: pip install "trocar[pandas]".
        """
        from trocar._result.feature_tables import feature_map_table

        return feature_map_table(self).to_pandas()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the arrays to a safetensors file, under their exact names; or a table.

        A file whose name ends in `.csv` or `.parquet` gets the columns of `to_pandas`. The metadata of a
        safetensors file has, as JSON, the names that each selector matched (`trocar.expansions`) and the
        source of each array (`trocar.info`); if there are any, also the names that each edit's selector
        matched (`trocar.edit_expansions`), the value of the objective (`trocar.objective`) and the processed
        texts and sound (`trocar.processed`).

        Args:
            path: The file; an existing one is replaced once the new one is complete, which gets its mode.

        Raises:
            OSError: The file cannot be written; an existing one is as it was.
            ValueError: The file's name ends in none of these; or, of a table, as `to_pandas`.
            MissingExtraError: pyarrow is missing, for Parquet: pip install "trocar[pandas]".
        """
        if is_table_path(path):
            from trocar._result.feature_tables import feature_map_table

            feature_map_table(self).save(path)
            return
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
        if self.processed:
            metadata["trocar.processed"] = json.dumps([asdict(entry) for entry in self.processed])
        with replacement(safetensors_path(path)) as partial:
            save_file(self._arrays, partial, metadata=metadata)

    def plot(
        self, name: str | None = None, *, channels: int = 16, path: str | os.PathLike[str] | None = None
    ) -> "Figure":
        """Draw one feature map of sample 0 as a picture.

        A map with channels and two dimensions of positions, or patches, becomes a grid of its first channels,
        each with its own colour scale; one with channels and other positions, such as (batch, tokens, width),
        one image of positions x channels; (batch, features) a line. Where nothing is known of a map, it is
        (batch, channels, height, width) or (batch, tokens, width).

        Args:
            name: Which feature map; the first when None.
            channels: The maximum number of channels to draw.
            path: The file of the picture; the suffix sets the format, for example ".png".

        Returns:
            The matplotlib figure. No display is needed.

        Raises:
            KeyError: No feature map of this name.
            ValueError: There is nothing to draw, or the map has more dimensions of positions.
            ImportError: matplotlib is missing: pip install "trocar[plot]".
        """
        from trocar._base.figures import save_figure  # needs matplotlib, which is an extra
        from trocar._result.plot import draw

        if name is None:
            name = next(iter(self._arrays), None)
        if name is None:
            raise ValueError("there are no values to draw; every tap has values=False")
        title = f"{self.model_id} {name}".strip()
        figure = draw(self[name], title=title, channels=channels, described=self._info_of(name))
        if path is not None:
            save_figure(figure, path)
        return figure

    def __repr__(self) -> str:
        return self._text(_SHOWN_ROWS)

    def __str__(self) -> str:
        return self._text(MOST_ROWS)

    def _text(self, most: int) -> str:
        rows = first_lines("\n".join("  " + "  ".join(row) for row in self._rows()), most)
        title = f"FeatureMaps of {self.model_id or 'a model'}:"
        return "\n".join([title, *([rows] if rows else []), f"  ({self.timing})"])

    def _repr_html_(self) -> str:
        """Show name, shape, dtype and size of each feature map in a notebook, statistics folded."""
        table = html_table(
            ("name", "shape", "dtype", "bytes"), self._rows(), f"{self.model_id} ({self.timing})"
        )
        shown = list(self.stats.items())[:MOST_ROWS]
        return table + "".join(html_fold(f"statistics of {name}", one._repr_html_()) for name, one in shown)

    def _rows(self) -> Iterator[tuple[str, str, str, str]]:
        for name, entry in self.info.items():
            array = self._arrays.get(name)
            size = "statistics only" if array is None else f"{array.nbytes:,}"
            yield name, str(entry.shape), entry.dtype, size
