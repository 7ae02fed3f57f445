"""Data set schema: shards, sample signatures and manifests as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_LABELS = 65_536
"""The most distinct values of a target that are listed."""


@dataclass(frozen=True)
class Shard:
    """One file of samples, as described in the manifest."""

    sha256: str
    """Of the whole file, in hex."""
    byte_count: int
    """Of the whole file."""
    sample_count: int
    """Samples in it."""


@dataclass(frozen=True)
class Manifest:
    """Manifest of an upload; equal manifests of one principal are one data set."""

    name: str
    """For people."""
    sample_count: int
    """In all shards."""
    categories: tuple[str, ...]
    """Names of the classes by label; empty when unknown."""
    shards: tuple[Shard, ...]
    """In the order of their samples."""

    def sizes(self) -> dict[str, int]:
        """Return byte counts by content hash."""
        return {shard.sha256: shard.byte_count for shard in self.shards}


@dataclass(frozen=True)
class ArraySignature:
    """Dtype and shape of one sample of an array."""

    dtype: str
    """The name of torch's and NumPy's dtype, for example `float32` or `bfloat16`."""
    shape: tuple[int, ...]
    """Without the dimension of the samples."""


@dataclass(frozen=True)
class TargetSignature:
    """Dtype, shape and value range of one target."""

    dtype: str
    """As in `ArraySignature`."""
    shape: tuple[int, ...]
    """Without the dimension of the samples; empty for one label a sample."""
    low: int | None = None
    """The smallest value; of integers only."""
    high: int | None = None
    """The largest value; of integers only."""
    labels: tuple[int, ...] | None = None
    """The distinct values, ascending; of integers only, None for over `MAX_LABELS` of them."""


@dataclass(frozen=True)
class SampleSignature:
    """Signature of the samples of a data set, or of one shard."""

    inputs: ArraySignature | None
    """One input; None for encoded images, texts and sound."""
    targets: Mapping[str, TargetSignature]
    """By name; a single unnamed target has the name ""."""
    is_text: bool = False
    """Whether samples are texts."""
    is_sound: bool = False
    """Whether samples are clips of sound."""

    @property
    def has_images(self) -> bool:
        """Whether samples are encoded images."""
        return self.inputs is None and not (self.is_text or self.is_sound)


@dataclass(frozen=True)
class DatasetInfo:
    """A data set as it is listed."""

    dataset_id: str
    """128 random bits in hex; for one listed by the operator, its name."""
    name: str
    """For people."""
    sample_count: int
    """Number of samples."""
    byte_count: int
    """Of its shards, each content once."""
    categories: tuple[str, ...]
    """Names of the classes by label; empty when unknown."""
    signature: SampleSignature | None
    """Signature of its samples; None while it is being uploaded."""
    stored_at_s: float
    """When it was committed or begun, in seconds since 1970."""
    is_listed: bool = False
    """Whether it was listed by the operator."""
    problem: str = ""
    """Why it cannot be read; all but the id is unknown then."""

    @property
    def is_complete(self) -> bool:
        """Whether it can be trained on."""
        return self.signature is not None

    def class_count(self, target: str = "") -> int | None:
        """Return the number of classes of an integer target: the categories, or the largest label plus one.

        None for a target that is absent, not of integers, or has negative values.
        """
        result = self.signature.targets.get(target) if self.signature else None
        if result is None or result.high is None or result.low is None or result.low < 0:
            return None
        return max(len(self.categories), result.high + 1)


def signature_to_json(signature: SampleSignature) -> dict[str, Any]:
    """Return a sample signature as JSON values."""
    return asdict(signature)


def signature_from_json(value: Mapping[str, Any]) -> SampleSignature:
    """Parse the result of `signature_to_json`.

    Raises:
        KeyError, TypeError, ValueError: It is malformed.
    """
    inputs = value["inputs"]
    return SampleSignature(
        inputs=None if inputs is None else ArraySignature(str(inputs["dtype"]), tuple(inputs["shape"])),
        targets={name: _target_from_json(target) for name, target in value["targets"].items()},
        is_text=bool(value.get("is_text", False)),  # records of servers that stored no texts
        is_sound=bool(value.get("is_sound", False)),
    )


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as JSON values."""
    return asdict(manifest)


def manifest_from_json(value: Mapping[str, Any]) -> Manifest:
    """Parse the result of `manifest_to_json`.

    Raises:
        KeyError, TypeError, ValueError: It is malformed.
    """
    return Manifest(
        name=str(value["name"]),
        sample_count=int(value["sample_count"]),
        categories=tuple(value["categories"]),
        shards=tuple(Shard(**shard) for shard in value["shards"]),
    )


def _target_from_json(value: Mapping[str, Any]) -> TargetSignature:
    labels = value["labels"]
    return TargetSignature(
        dtype=str(value["dtype"]),
        shape=tuple(value["shape"]),
        low=value["low"],
        high=value["high"],
        labels=None if labels is None else tuple(labels),
    )
