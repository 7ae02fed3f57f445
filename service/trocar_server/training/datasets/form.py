"""What a data set is, as data: its shards, and what their samples look like."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

MAX_LABELS = 65_536
"""How many different values of a target are listed."""


@dataclass(frozen=True)
class Shard:
    """One file of samples, as the manifest names it."""

    sha256: str
    """Of the whole file, in hexadecimal digits."""
    byte_count: int
    """Of the whole file."""
    sample_count: int
    """Samples in it."""


@dataclass(frozen=True)
class Manifest:
    """What an upload is made of; equal manifests of one principal are one data set."""

    name: str
    """For people."""
    sample_count: int
    """In all shards."""
    categories: tuple[str, ...]
    """Names of the classes by label; empty when unknown."""
    shards: tuple[Shard, ...]
    """In the order of their samples."""

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each content."""
        return {shard.sha256: shard.byte_count for shard in self.shards}


@dataclass(frozen=True)
class ArrayForm:
    """What one sample of a tensor looks like."""

    dtype: str
    """The name of torch's and NumPy's dtype, for example `float32` or `bfloat16`."""
    shape: tuple[int, ...]
    """Without the dimension of the samples."""


@dataclass(frozen=True)
class TargetForm:
    """What one target looks like, and which values it has."""

    dtype: str
    """As in `ArrayForm`."""
    shape: tuple[int, ...]
    """Without the dimension of the samples; empty for one label a sample."""
    low: int | None = None
    """The smallest value; of integers only."""
    high: int | None = None
    """The largest value; of integers only."""
    labels: tuple[int, ...] | None = None
    """The different values, ascending; of integers only, None for over `MAX_LABELS` of them."""


@dataclass(frozen=True)
class SampleForm:
    """What the samples of a data set, or of one shard, look like."""

    inputs: ArrayForm | None
    """One input; None for encoded images."""
    targets: Mapping[str, TargetForm]
    """By name; a single one without a name has the name ""."""


@dataclass(frozen=True)
class DatasetInfo:
    """A data set as it is listed."""

    dataset_id: str
    """128 random bits as hexadecimal digits; the name of one that the operator listed."""
    name: str
    """For people."""
    sample_count: int
    """How many samples."""
    byte_count: int
    """Of its shards, each content once."""
    categories: tuple[str, ...]
    """Names of the classes by label; empty when unknown."""
    form: SampleForm | None
    """What its samples look like; None while it is being uploaded."""
    stored_at_s: float
    """When it was committed or begun, in seconds since 1970."""
    is_listed: bool = False
    """Whether it is the operator's."""

    @property
    def is_complete(self) -> bool:
        """Whether it can be trained on."""
        return self.form is not None

    def class_count(self, target: str = "") -> int | None:
        """Return how many classes an integer target has: the categories, or the largest label and one.

        None for a target that is not there, has no whole numbers or negative ones.
        """
        found = self.form.targets.get(target) if self.form else None
        if found is None or found.high is None or found.low is None or found.low < 0:
            return None
        return max(len(self.categories), found.high + 1)


def form_to_json(form: SampleForm) -> dict[str, Any]:
    """Return a form as JSON has it."""
    return asdict(form)


def form_from_json(value: Mapping[str, Any]) -> SampleForm:
    """Read what `form_to_json` made.

    Raises:
        KeyError, TypeError, ValueError: It did not make this.
    """
    inputs = value["inputs"]
    return SampleForm(
        inputs=None if inputs is None else ArrayForm(str(inputs["dtype"]), tuple(inputs["shape"])),
        targets={name: _target_from_json(target) for name, target in value["targets"].items()},
    )


def manifest_to_json(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as JSON has it."""
    return asdict(manifest)


def manifest_from_json(value: Mapping[str, Any]) -> Manifest:
    """Read what `manifest_to_json` made.

    Raises:
        KeyError, TypeError, ValueError: It did not make this.
    """
    return Manifest(
        name=str(value["name"]),
        sample_count=int(value["sample_count"]),
        categories=tuple(value["categories"]),
        shards=tuple(Shard(**shard) for shard in value["shards"]),
    )


def _target_from_json(value: Mapping[str, Any]) -> TargetForm:
    labels = value["labels"]
    return TargetForm(
        dtype=str(value["dtype"]),
        shape=tuple(value["shape"]),
        low=value["low"],
        high=value["high"],
        labels=None if labels is None else tuple(labels),
    )
