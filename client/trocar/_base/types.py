"""Model and server metadata as plain data."""

from dataclasses import dataclass, field

from trocar._base.names import few
from trocar._base.tables import Columns, html_facts, html_fold, html_table, size_text

_LISTED_NAMES = 5
"""How many names of classes the facts of a model list."""


@dataclass(frozen=True)
class Preprocessing:
    """Conversion of an image to the model's input on the server."""

    description: str
    """The transform, in torchvision's own words."""
    resize: tuple[int, ...]
    """Size of the resized shorter side, or (height, width), in pixels; empty for no resize."""
    crop: tuple[int, ...]
    """Size of the centre crop, (height, width), in pixels; empty for no crop."""
    mean: tuple[float, ...]
    """Subtracted per channel, on values scaled to [0, 1]."""
    std: tuple[float, ...]
    """Divided by per channel, after the mean."""
    interpolation: str
    """A name of torchvision's `InterpolationMode`, for example "bilinear"."""
    longest: int = 0
    """Limit of the longer side after a resize of the shorter one; 0 for none."""
    scale: float = 1 / 255
    """What 8-bit values are multiplied by."""


@dataclass(frozen=True)
class ModelInput:
    """One argument of a model's forward; prints as `input_ids: int64 (batch, tokens)`."""

    name: str
    """The keyword; empty where no name is known."""
    dtype: str
    """A torch dtype such as "int64"; or "bool", "int", "str" where `is_flag`."""
    shape: tuple[int | str, ...]
    """Sizes and names of dimensions, the batch included; empty where any shape is taken."""
    is_optional: bool = False
    """Whether a call may leave it out."""
    below: int | None = None
    """Values are from 0 to below this; None for any."""
    largest: dict[str, int] = field(default_factory=dict)
    """The most that named dimensions may have."""
    is_flag: bool = False
    """Whether it is no tensor."""

    def __str__(self) -> str:
        """As `input_ids: int64 (batch, tokens)`."""
        shape = f" ({', '.join(map(str, self.shape))})" if self.shape else ""
        return f"{self.name or 'input'}: {self.dtype}{shape}{', optional' if self.is_optional else ''}"


@dataclass(frozen=True)
class Model:
    """One entry of the server's catalogue."""

    model_id: str
    """The id that calls use, for example "resnet18"."""
    state: str
    """"loaded", "unloaded", "loading" or "failed"."""
    family: str
    """"classification", "segmentation", "detection", "video", "optical_flow" or "custom"."""
    architecture: str
    """A torchvision model name, or the operator's factory as "module:callable"."""
    weights: str
    """Where the weights come from: an enum name, "random:0" or "file"."""
    parameter_count: int
    """Number of parameter elements; 0 while not loaded."""
    byte_count: int
    """Bytes of parameters and buffers in memory; 0 while not loaded."""
    device: str
    """The torch device, for example "cuda:0"; empty while not loaded."""
    dtype: str | None
    """The dtype of the parameters, for example "float32"; None while not loaded."""
    preprocessing: Preprocessing | None
    """What the server does to images; None for a model that takes arrays only."""
    categories: tuple[str, ...] = field(repr=False)
    """Class names by index. Empty when unknown, and always in `Client.models`."""
    input_shape: tuple[int, ...]
    """Shape of one example input without its batch dimension."""
    error_message: str = ""
    """Why the last attempt to load it failed."""
    inputs: tuple[ModelInput, ...] = ()
    """The arguments of its forward; empty while not loaded."""
    stages: dict[str, str] = field(default_factory=dict, repr=False)
    """Selectors by the names that stand for them, for example "layer[3]"; empty while not loaded."""
    digest: str = field(default="", repr=False)
    """SHA-256, in hex, of which model this is: weights, code, and the configuration and settings that decide
    values, not its id and class names. Empty while not loaded, and if not asked for in `Client.model`."""
    digest_parts: dict[str, str] = field(default_factory=dict, repr=False)
    """What `digest` is made of, by name, for example "stages": digits that say which parts of two models
    differ. Empty where `digest` is."""
    generates: bool = False
    """Whether `Client.generate` continues texts with it; False while not loaded."""

    @property
    def is_loaded(self) -> bool:
        """Whether calls can use it."""
        return self.state == "loaded"

    def __repr__(self) -> str:
        count = f", {self.parameter_count:,} parameters on {self.device}" if self.is_loaded else ""
        return f"<Model {self.model_id}: {self.state}{count}>"

    def __str__(self) -> str:
        return "\n".join(f"{name}  {text}" for name, text in model_facts(self).items())

    def _repr_html_(self) -> str:
        """Show the facts in a notebook."""
        return html_facts(model_facts(self))


MODEL_COLUMNS: Columns[Model] = {
    "model": lambda model: model.model_id,
    "state": lambda model: model.state,
    "family": lambda model: model.family,
    "weights": lambda model: model.weights,
    "parameters": lambda model: f"{model.parameter_count:,}" if model.is_loaded else "",
    "memory": lambda model: size_text(model.byte_count) if model.is_loaded else "",
    "device": lambda model: model.device,
    "error": lambda model: model.error_message,
}
"""The columns of a list of models."""


def model_facts(model: Model) -> dict[str, str]:
    """Return what there is to tell of a model, by name."""
    preprocessing = model.preprocessing
    has_names = any(entry.name for entry in model.inputs)
    without_images = "" if has_names else "none: the model takes arrays only"
    facts = {
        "model": model.model_id,
        "state": model.state,
        "error": model.error_message,
        "family": model.family,
        "architecture": model.architecture,
        "weights": model.weights,
        "parameters": f"{model.parameter_count:,}" if model.is_loaded else "",
        "memory": size_text(model.byte_count) if model.is_loaded else "",
        "device": model.device,
        "dtype": model.dtype or "",
        "input": "" if has_names else f"(batch, {', '.join(map(str, model.input_shape))})",
        "inputs": "\n".join(map(str, model.inputs)) if has_names else "",
        "stages": ", ".join(model.stages),
        "images": preprocessing.description if preprocessing else without_images,
        "categories": few(model.categories, _LISTED_NAMES),
    }
    return {name: text for name, text in facts.items() if text}


@dataclass(frozen=True)
class ServerLimits:
    """Limits of the server."""

    max_request_bytes: int
    """The most bytes of inputs in one call."""
    max_reply_bytes: int
    """The most bytes of feature maps in one reply."""
    max_chunk_bytes: int
    """The most payload bytes in one message."""
    max_batch: int
    """The most samples in one batch."""
    max_taps: int
    """The most taps in one call."""
    max_image_pixels: int
    """The most pixels of one encoded image."""
    max_queue: int
    """The most calls that wait for one model."""
    max_pass_bytes: int
    """The most bytes of device memory that one pass may need at once, by estimate."""
    max_edits: int
    """The most edits in one call, those behind stored names included."""
    max_dataset_bytes: int
    """The most bytes of all data sets that you have uploaded; equal shards count once."""
    max_trainers: int
    """Trainers of one caller."""
    trainer_ttl_s: float
    """Seconds after its last use at which a trainer is closed."""
    max_checkpoints: int
    """Checkpoints of one trainer that were asked for; the oldest goes."""
    max_pending_bytes: int = 0
    """Bytes of inputs that came and of replies that are not yet sent, of all callers together."""
    max_principal_bytes: int = 0
    """The same of you alone."""
    max_pending_s: float = 0.0
    """Seconds of computing, by estimate, that calls of all callers which were let in may still need."""
    max_principal_s: float = 0.0
    """The same of you alone."""
    stall_timeout_s: float = 0.0
    """Seconds for which you may leave a message of a reply unread before the call is ended."""
    max_shared_memory_bytes: int = 0
    """The most bytes of shared memory that you may have at once; 0 where none is offered."""
    feature_cache_bytes: int = 0
    """Bytes of replies that the server keeps; 0 where it keeps none."""


@dataclass(frozen=True)
class Feature:
    """Optional feature of a server."""

    name: str
    """Its name, for example "fast", "reply_cache" or "tls"."""
    is_on: bool
    """Whether the server offers it."""
    reason: str
    """Why it is off and what turns it on; where it is on, what to know of it."""

    def __str__(self) -> str:
        return f"{self.name}: {'on' if self.is_on else 'off'}" + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class ServerInfo:
    """Version, device, limits and features of the server; prints as a few lines."""

    version: str
    """The server's version."""
    torch_version: str
    """The version of torch that runs the models."""
    device: str
    """The torch device that runs the models."""
    limits: ServerLimits
    """Limits of the server."""
    server_id: str = ""
    """The server's own id: what it keeps (trainers, data sets, stored edits) is at this server only."""
    is_draining: bool = False
    """Whether it takes no new work; see `Client.drain`."""
    features: tuple[Feature, ...] = ()
    """What it may offer, and why it does not."""

    def __str__(self) -> str:
        return "\n".join((self._title(), *(f"  {feature}" for feature in self.features)))

    def __repr__(self) -> str:
        on = sum(feature.is_on for feature in self.features)
        return f"<{self._title()}: {on} of {len(self.features)} features on>"

    def _repr_html_(self) -> str:
        """Show features, and the limits folded, in a notebook."""
        rows = [(one.name, "on" if one.is_on else "off", one.reason) for one in self.features]
        limits = {name: f"{value:,}" for name, value in vars(self.limits).items()}
        features = html_table(("feature", "", ""), rows, self._title())
        return features + html_fold("limits", html_facts(limits))

    def _title(self) -> str:
        state = ", draining" if self.is_draining else ""
        return f"trocar {self.version}, torch {self.torch_version}, {self.device}{state}"


@dataclass(frozen=True)
class DrainState:
    """Progress of a drain."""

    is_draining: bool
    """Whether new work is refused."""
    running_call_count: int
    """Calls that still run, those that only look on not counted."""
    waiting_fit_count: int
    """Fits that wait, saved, until the server takes work again or is started anew."""


@dataclass(frozen=True)
class ServerTiming:
    """Time breakdown of one call on the server."""

    queue_s: float
    """Seconds spent waiting for a replica."""
    compute_s: float
    """Seconds of preprocessing, forward pass and statistics."""
    total_s: float | None = field(default=None, compare=False)
    """Seconds of the whole call by the client's clock; None in a stream, where calls overlap."""

    @property
    def transfer_s(self) -> float | None:
        """Seconds of everything else: checks, both transfers, and assembly of the reply; None in a stream."""
        return None if self.total_s is None else max(0.0, self.total_s - self.queue_s - self.compute_s)

    def __str__(self) -> str:
        parts = {"queue": self.queue_s, "compute": self.compute_s, "transfer": self.transfer_s}
        return ", ".join(f"{name} {s * 1000:.1f} ms" for name, s in parts.items() if s is not None)
