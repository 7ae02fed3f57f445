"""Model spec: a model as configured, before anything is loaded: id, architecture, weights, inputs.

    ModelSpec("resnet50", "resnet50")                                # torchvision's DEFAULT weights
    ModelSpec("vit", "vit_b_16", weights="random:7")
    ModelSpec("lite", "efficientnet_lite_pytorch:EfficientNet.from_name", weights="lite0.safetensors",
              arguments=("efficientnet-lite0",), preprocessing=PreprocessingSpec(resize=(256,), crop=(224,)))

Everything here is checked when the object is made, with no torch: a bad configuration fails before the first
model is built. `architectures.check_spec` checks that names exist in torchvision.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique
from pathlib import Path
from typing import Any, ClassVar

from trocar_api.reasons import ErrorReason
from trocar_api.stored_names import is_stored_name
from trocar_api.value_words import not_one_of
from trocar_server.errors import ServiceError
from trocar_server.models.source import is_source, parse_source

DEFAULT_WEIGHTS = "DEFAULT"
"""torchvision's best weights for an architecture; for a factory, whatever the factory built."""

DTYPES = ("", "bf16", "fp16", "fp32")
"""Dtypes that weights can be converted to; empty for none."""

INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")
"""The names of torchvision's `InterpolationMode`."""

_ONLY_KNOWN = {"extra": "forbid"}
"""Of pydantic, which reads specs from records: a field that this version does not know is an error."""

_FACTORY = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_.]*")
_RANDOM = re.compile(r"random(?::([0-9]{1,18}))?")
_STAGE = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,62}")
_FILE_SUFFIX = ".safetensors"


@unique
class WeightsKind(StrEnum):
    """Source of a model's weights."""

    NAMED = "named"
    """`DEFAULT`, or the name of a member of torchvision's weights enum."""
    RANDOM = "random"
    """`random` or `random:<seed>`: the architecture's own initialisation."""
    FILE = "file"
    """The path of a `.safetensors` file."""


@unique
class Merge(StrEnum):
    """Whose calls may share a compiled pass of a model.

    The rows of a shared pass belong to several calls, and no trial proves that a model keeps them apart. So
    this is the operator's choice.
    """

    OFF = "off"
    """Every call runs alone."""
    CALLER = "caller"
    """Calls of one principal may; those without a token or certificate run alone."""
    EVERYBODY = "everybody"
    """All calls may."""


@dataclass(frozen=True, slots=True)
class PreprocessingSpec:
    """Preprocessing of a custom model's images, in torchvision's order: resize, crop, scale, normalise.

    Raises:
        ServiceError: `MODEL_INVALID`, a size, mean, std or interpolation does not work.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _ONLY_KNOWN
    resize: tuple[int, ...] = ()
    """Pixels of the shorter side, or (height, width). Empty: no resize."""
    crop: tuple[int, ...] = ()
    """Centre crop in pixels, one number for a square, or (height, width). Empty: no crop."""
    mean: tuple[float, ...] = ()
    """Subtracted per channel (red, green, blue), on values in [0, 1]. Empty: no normalisation."""
    std: tuple[float, ...] = ()
    """Divided by per channel, after the mean."""
    interpolation: str = "bilinear"
    """One of `INTERPOLATIONS`."""
    rules: str = "torchvision"
    """Whose rules of sizes and crops: `torchvision` or `transformers`; see `image_rules`."""
    longest: int = 0
    """Limit of the longer side after a resize of the shorter one, with transformers' rules; 0 for none."""
    scale: float | None = None
    """Factor of 8-bit values in place of 1/255, with transformers' rules."""
    pads: bool = False
    """Whether images of different sizes are padded to the largest, with `pixel_mask` as another argument."""
    patch: int = 0
    """Pixels of a patch's side, where images are cut into patches; 0 where they are not."""
    patches: int = 0
    """The most patches of an image, which is resized to have about as many, and filled up to so many."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if len(size) > 2 or any(side < 1 for side in size):
                raise _invalid(f"preprocessing.{name} takes one or two sizes of at least 1 pixel, not {size}")
        if (len(self.mean), len(self.std)) not in ((0, 0), (3, 3)) or 0 in self.std:
            raise _invalid("preprocessing.mean and .std take three numbers each, or none; no std may be 0")
        if self.interpolation not in INTERPOLATIONS:
            raise _invalid(f"preprocessing.interpolation {not_one_of(self.interpolation, INTERPOLATIONS)}")


@dataclass(frozen=True, slots=True)
class WarmVariant:
    """A compiled variant that is built, or restored, before its model counts as loaded."""

    __pydantic_config__: ClassVar[dict[str, str]] = _ONLY_KNOWN
    taps: tuple[str, ...]
    """Selectors of the values; checked once the model is there."""
    numerics: str
    """`fast` or `bf16`."""


@dataclass(frozen=True, slots=True)
class Rebuilding:
    """Recipe to rebuild the module of a published model's weights.

    The architecture is built as its base was, without that base's weights: nothing is downloaded.
    """

    built_as: str
    """The named weights that the base was built for, for example `IMAGENET1K_V1`, because they decide more
    than the numbers (`building`, Note: [torchvision's own builder]); empty where there were none."""
    sha256: str
    """Of the file with the weights, in hex; another file is refused."""
    prepare: Callable[[Any], None]
    """Changes the built module before it is filled: puts a new head in, for example."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One entry of the catalogue, as configured.

    Raises:
        ServiceError: `MODEL_INVALID`, the id, the factory's syntax, the input shape or a stage is wrong;
            `UNKNOWN_WEIGHTS`, the random seed is no number.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _ONLY_KNOWN
    model_id: str
    """The id that calls use: `^[a-z0-9][a-z0-9._-]{0,62}$`."""
    architecture: str
    """A torchvision model name, or a factory as `module:callable`; dots may follow the colon."""
    weights: str = DEFAULT_WEIGHTS
    """`DEFAULT`, a weights enum member, `random[:seed]`, or the path of a `.safetensors` file."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the builder or factory, for example `num_classes`."""
    arguments: tuple[Any, ...] = ()
    """Positional arguments of the factory; torchvision's builders take none."""
    categories: tuple[str, ...] | None = None
    """Class names by index. None: those of the named weights."""
    preprocessing: PreprocessingSpec | None = None
    """Image preprocessing. None: that of torchvision's weights, or nothing for a factory."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one example input without its batch dimension. None: chosen from the weights."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Selectors by stage name, for example `{"stem": "conv1"}`; they come before torchvision's own."""
    factory: Callable[[], Any] | None = None
    """Builds it, for models that exist in this process only. None: `architecture` builds it."""
    numerics: str = ""
    """Default numerics of callers: `exact`, `fast`, `bf16`; the server's default when empty."""
    rebuilding: Rebuilding | None = None
    """Recipe to build a published model; `weights` is then a file."""
    source: str = ""
    """`timm:NAME` or `hf:...`, see `source`; `architecture` is then the source without paths. Empty where
    torchvision or a factory builds it."""
    dtype: str = ""
    """The dtype of the weights: `bf16`, `fp16` or `fp32`; as they are when empty."""
    inputs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What is known of inputs by name, beside what the model itself says; see `inputs.overridden`."""
    processor_folder: Path | None = None
    """Folder with the files of its tokenizer or feature extractor. None: that of its source, if any."""
    warm_variants: tuple[WarmVariant, ...] = ()
    """Compiled variants that are ready before the first call, for inputs of the example's shape."""
    merge: Merge = Merge.CALLER
    """Whose calls may share a compiled pass."""

    def __post_init__(self) -> None:
        """Check what can be checked without torch."""
        check_model_id(self.model_id)
        if self.dtype not in DTYPES:
            raise _invalid(f"dtype {not_one_of(self.dtype, filter(None, DTYPES))}")
        if self.is_custom and not self.source and not _FACTORY.fullmatch(self.architecture):
            raise _invalid(f"'{self.architecture}' is not a factory; write it as module:callable")
        if self.arguments and not self.is_custom:
            raise _invalid(f"'{self.architecture}' takes no positional arguments; use options")
        if self.input_shape is not None and any(size < 1 for size in self.input_shape):
            raise _invalid(f"input_shape takes sizes of at least 1, not {self.input_shape}")
        for stage in self.stages:
            if not _STAGE.fullmatch(stage):
                raise _invalid(f"'{stage[:80]}' is not a stage name; use letters, digits, '_' and '-'")
        if self.weights.startswith("random") and self.weights_kind is WeightsKind.NAMED:
            raise ServiceError(
                ErrorReason.UNKNOWN_WEIGHTS,
                f"'{Path(self.weights).name}' is not a seed; write random or random:<whole number>",
            )

    @property
    def is_custom(self) -> bool:
        """Whether a factory of the operator or another library builds the model, not torchvision."""
        return ":" in self.architecture

    @property
    def named_architecture(self) -> str:
        """The architecture where neither the id nor a source says it; empty otherwise."""
        return "" if self.source or self.architecture == self.model_id else self.architecture

    @property
    def weights_kind(self) -> WeightsKind:
        """Where the weights come from."""
        if _RANDOM.fullmatch(self.weights):
            return WeightsKind.RANDOM
        return WeightsKind.FILE if self.weights.endswith(_FILE_SUFFIX) else WeightsKind.NAMED

    @property
    def seed(self) -> int:
        """The seed of random weights; 0 where none is given."""
        match = _RANDOM.fullmatch(self.weights)
        return int(match.group(1) or 0) if match else 0


def check_model_id(model_id: str) -> None:
    """Refuse an id that could be mistaken for a path, an option or another id.

    Raises:
        ServiceError: `MODEL_INVALID`.
    """
    if not is_stored_name(model_id):
        raise _invalid(
            f"{model_id[:80]!r} is not a model id; use 1 to 63 of a-z, 0-9, '.', '_', '-', "
            "and start with a letter or digit. A file of weights is written NAME=FILE.safetensors"
        )


def named_model(model_id: str, name: str, **settings: Any) -> ModelSpec:
    """Return the spec of a model by its source, torchvision name or factory.

    Args:
        model_id: Its id.
        name: A source such as `timm:NAME`, a torchvision name, or `module:callable` where `settings` have no
            source.
        settings: Other fields of `ModelSpec`.

    Raises:
        ServiceError: `MODEL_INVALID` or `UNKNOWN_WEIGHTS`, as `ModelSpec` and `parse_source` do.
    """
    if not is_source(name):
        return ModelSpec(model_id, name, **settings)
    source = parse_source(name)
    if source.library == "torchvision":
        return ModelSpec(model_id, source.name, **settings)
    if source.folder is not None:  # as of now: it is written to records of published models
        name = f"hf:{source.folder}" + (f"#{source.task}" if source.task else "")
    return ModelSpec(model_id, source.public_name, source=name, **settings)


def parse_model_argument(text: str) -> ModelSpec:
    """Read a model of the command line: `NAME`, `NAME=WEIGHTS`, `SOURCE[=WEIGHTS]` or `ID=SOURCE[=WEIGHTS]`.

    `vit_b_16=random:0` is a torchvision model, whose name becomes the id; `mini=hf:./folder` is a source with
    an id. A path is allowed as weights and in a source, because the operator types it; clients never name
    files. Relative ones are made absolute: the process may change its working directory.

    Raises:
        ServiceError: `MODEL_INVALID` or `UNKNOWN_WEIGHTS`, as `named_model` does.
    """
    if is_source(text):
        name, weights = _without_weights(text)
        return named_model(parse_source(name).model_id, name, weights=_absolute(weights))
    name, separator, weights = text.partition("=")
    if separator and not weights:
        raise _invalid(f"'{name}=' has no weights; write {name}, {name}=random:0 or {name}=FILE.safetensors")
    if is_source(weights):
        source, weights = _without_weights(weights)
        return named_model(name, source, weights=_absolute(weights))
    spec = ModelSpec(model_id=name, architecture=name, weights=_absolute(weights or DEFAULT_WEIGHTS))
    if ":" in weights and spec.weights_kind is WeightsKind.NAMED and "random" not in weights:
        parse_source(weights)  # no weights have such a name: a source, mistyped
    return spec


def parse_model_arguments(texts: Iterable[str]) -> dict[str, ModelSpec]:
    """Read the models of the command line, by id; the same one may be there twice.

    Raises:
        ServiceError: As `parse_model_argument`; `MODEL_INVALID`, two would have one id.
    """
    specs: dict[str, ModelSpec] = {}
    for spec in map(parse_model_argument, texts):
        if specs.setdefault(spec.model_id, spec) != spec:
            raise same_id(spec)
    return specs


def same_id(spec: ModelSpec) -> ServiceError:
    """Error for a model whose id another one has, with how to write it."""
    name = spec.source or f"torchvision:{spec.architecture}"
    weights = "" if spec.weights == DEFAULT_WEIGHTS else f"={spec.weights}"
    return _invalid(f"two models would be '{spec.model_id}'; write other={name}{weights} for the second")


def _without_weights(text: str) -> tuple[str, str]:
    """Split `SOURCE=WEIGHTS`; a folder may have an equals sign in its name."""
    source, separator, weights = text.rpartition("=")
    is_weights = weights.startswith("random") or weights.endswith(_FILE_SUFFIX)
    return (source, weights) if separator and is_weights else (text, DEFAULT_WEIGHTS)


def _absolute(weights: str) -> str:
    is_file = weights.endswith(_FILE_SUFFIX)
    return str(Path(weights).expanduser().absolute()) if is_file else weights


def _invalid(message: str) -> ServiceError:
    return ServiceError(ErrorReason.MODEL_INVALID, message)
