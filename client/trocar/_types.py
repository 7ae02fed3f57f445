"""What the server says about models and about itself, as plain data."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Preprocessing:
    """How the server turns an image into the model's input."""

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

    @property
    def is_loaded(self) -> bool:
        """Whether calls can use it."""
        return self.state == "loaded"


@dataclass(frozen=True)
class ServerLimits:
    """What the server refuses to exceed."""

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


@dataclass(frozen=True)
class ServerInfo:
    """Version, device and limits of the server."""

    version: str
    """The server's version."""
    torch_version: str
    """The version of torch that runs the models."""
    device: str
    """The torch device that runs the models."""
    limits: ServerLimits
    """What the server refuses to exceed."""
    server_id: str = ""
    """The server's own id: what it keeps (trainers, data sets, stored edits) is at this server only."""
    is_draining: bool = False
    """Whether it takes no new work; see `Client.drain`."""


@dataclass(frozen=True)
class DrainState:
    """How far a server has run empty."""

    is_draining: bool
    """Whether new work is refused."""
    running_call_count: int
    """Calls that still run, those that only look on not counted."""
    waiting_fit_count: int
    """Fits that wait, saved, until the server takes work again or is started anew."""


@dataclass(frozen=True)
class ServerTiming:
    """Where the server spent the time of one call."""

    queue_s: float
    """Seconds spent waiting for a replica."""
    compute_s: float
    """Seconds of preprocessing, forward pass and statistics."""
    total_s: float | None = field(default=None, compare=False)
    """Seconds of the whole call by the client's clock; None in a stream, where calls overlap."""

    @property
    def transfer_s(self) -> float | None:
        """Seconds of everything else: checks, both ways, and putting the reply together; None in a stream."""
        return None if self.total_s is None else max(0.0, self.total_s - self.queue_s - self.compute_s)

    def __str__(self) -> str:
        parts = {"queue": self.queue_s, "compute": self.compute_s, "transfer": self.transfer_s}
        return ", ".join(f"{name} {s * 1000:.1f} ms" for name, s in parts.items() if s is not None)
