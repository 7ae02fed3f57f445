"""Direction: vectors at one place of a model, with how they were made; and the file that has them.

# Note: [Direction file]
A safetensors file with `vectors` (vectors, channels) and `bias` (vectors,), float64; its metadata have one
entry, `trocar.direction`, with the other fields as JSON. Several in one file, as in the store, number their
tensors (`vectors.0`), and the entry is a list.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeAlias, get_type_hints

import numpy as np
import safetensors
from numpy.typing import NDArray
from safetensors.numpy import save

from trocar_server.storage.durable import DamagedError

Floats: TypeAlias = NDArray[np.float64]

METADATA = "trocar.direction"
_MAX_VECTORS, _MAX_CHANNELS = 1 << 12, 1 << 20


@dataclass(frozen=True)
class About:
    """What is known of a direction, beside its numbers. Every field has a JSON type."""

    kind: str
    """A `DirectionKind`, or `given`."""
    place: str
    """The name of the feature map there."""
    model_digest: str = ""
    """Of the model that it was fitted on, in hex; empty for any."""
    classes: list[str] = field(default_factory=list)
    """In the order of the vectors; of two classes the only vector points to the second. Empty without any."""
    mean_norm: float = 0.0
    """The mean Euclidean norm of the value's channel vectors; 0 where not known."""
    scale: list[float] = field(default_factory=list)
    """The standard deviation of each vector's number over the samples; empty where not known."""
    sample_count: int = 0
    score_name: str = ""
    """`accuracy`, `r2` or `explained_variance_ratio`; empty without a score."""
    score: float | None = None
    """The mean of `fold_scores`; of PCA the share of the variance."""
    fold_scores: list[float] = field(default_factory=list)
    auc: float | None = None
    """Of two classes: the mean over the folds of the area under the ROC curve."""
    data_digest: str = ""
    """SHA-256 of the values and labels, in hex."""
    positions: str = ""
    """The message `Positions` in hex, over which values were averaged; empty for all."""


@dataclass(frozen=True, eq=False)
class Direction:
    """Vectors at one place.

    Attributes:
        vectors: Of shape (vectors, channels).
        bias: Of shape (vectors,).
        about: The rest.
    """

    vectors: Floats
    bias: Floats
    about: About

    def __post_init__(self) -> None:
        shape = self.vectors.shape
        if len(shape) != 2 or self.bias.shape != shape[:1]:
            raise ValueError("vectors are of shape (vectors, channels), with one bias for each")
        if not (1 <= shape[0] <= _MAX_VECTORS and 1 <= shape[1] <= _MAX_CHANNELS):
            raise ValueError(f"1 to {_MAX_VECTORS:,} vectors of 1 to {_MAX_CHANNELS:,} channels are allowed")
        if not (np.isfinite(self.vectors).all() and np.isfinite(self.bias).all()):
            raise ValueError("a number is NaN or infinite")

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything in it, in hex."""
        content = hashlib.sha256(json.dumps(asdict(self.about), sort_keys=True).encode())
        for array in (self.vectors, self.bias):
            content.update(repr(array.shape).encode())
            content.update(np.ascontiguousarray(array, "<f8").tobytes())
        return content.hexdigest()

    @property
    def unit(self) -> Floats:
        """The first vector, divided by its norm.

        Raises:
            ValueError: It is zero.
        """
        vector: Floats = self.vectors[0]
        norm = float(np.linalg.norm(vector))
        if norm == 0.0:
            raise ValueError("its vector is zero")
        return vector / norm

    def of_model(self, place: str, model_digest: str) -> "Direction":
        """Return the direction for a place of a model."""
        return replace(self, about=replace(self.about, place=place, model_digest=model_digest))


def encoded(directions: Sequence[Direction], extra: Mapping[str, str] | None = None) -> bytes:
    """Return the content of a file with several directions; see Note: [Direction file]."""
    tensors = {}
    for index, direction in enumerate(directions):
        tensors[f"vectors.{index}"] = np.ascontiguousarray(direction.vectors, np.float64)
        tensors[f"bias.{index}"] = np.ascontiguousarray(direction.bias, np.float64)
    listed = [{**asdict(each.about), "digest": each.digest} for each in directions]
    return save(tensors, {METADATA: json.dumps(listed), **(extra or {})})


def encoded_alone(direction: Direction) -> bytes:
    """Return the content of a file with one direction."""
    tensors = {
        "vectors": np.ascontiguousarray(direction.vectors, np.float64),
        "bias": np.ascontiguousarray(direction.bias, np.float64),
    }
    return save(tensors, {METADATA: json.dumps({**asdict(direction.about), "digest": direction.digest})})


def decoded(content: bytes) -> list[Direction]:
    """Read the content of a file with one or several directions.

    Raises:
        DamagedError: It is not as it was written, or of another version.
    """
    try:
        tensors = {name: _array(entry) for name, entry in _entries(content)}
        about = json.loads(metadata_of(content)[METADATA])
        listed = about if isinstance(about, list) else [about]
        suffixes = [f".{index}" for index in range(len(listed))] if isinstance(about, list) else [""]
        directions = [
            Direction(tensors[f"vectors{suffix}"], tensors[f"bias{suffix}"], about_of(entry))
            for suffix, entry in zip(suffixes, listed, strict=True)
        ]
    except (
        safetensors.SafetensorError,
        KeyError,
        ValueError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise DamagedError(f"it cannot be read ({str(error)[:200]})") from None
    for direction, entry in zip(directions, listed, strict=True):
        if entry.get("digest", direction.digest) != direction.digest:
            raise DamagedError("its content differs from its digest")
    return directions


def metadata_of(content: bytes) -> dict[str, str]:
    """Return the metadata of a safetensors file.

    Raises:
        ValueError: Its header cannot be parsed.
    """
    length = int.from_bytes(content[:8], "little")
    metadata: dict[str, str] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
    return metadata


_HINTS = get_type_hints(About)


def about_of(entry: Mapping[str, Any]) -> About:
    """Return what JSON says of a direction; fields that are not known are left out.

    Raises:
        TypeError: A field has another type.
    """
    known = {each.name: entry[each.name] for each in fields(About) if each.name in entry}
    for name, value in known.items():
        if not _fits(value, _HINTS[name]):
            raise TypeError(f"{name} has another type")
    return About(**known)


def _fits(value: object, hint: object) -> bool:
    if hint == list[str]:
        return isinstance(value, list) and all(isinstance(each, str) for each in value)
    if hint == list[float]:
        return isinstance(value, list) and all(map(_is_number, value))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str)
    return _is_number(value) or (value is None and hint is not float)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _entries(content: bytes) -> list[tuple[str, dict[str, Any]]]:
    entries: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
    return entries


def _array(entry: Mapping[str, Any]) -> Floats:
    if entry["dtype"] not in ("F64", "F32"):
        raise ValueError(f"arrays of {entry['dtype']}; float64 or float32 is needed")
    dtype = np.dtype("<f8" if entry["dtype"] == "F64" else "<f4")
    return np.frombuffer(entry["data"], dtype).reshape(entry["shape"]).astype(np.float64)
