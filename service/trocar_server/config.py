"""Server configuration: a TOML file, environment variables `TROCAR_...` and the command line.

[server]                    # optional, like every value
port = 50051

[limits]
max_reply_bytes = "1GiB"   # or a number of bytes

[models.resnet50]
weights = "DEFAULT"

[models.cats]
factory = "my_package.models:build"
weights = "cats.safetensors"

[datasets.flowers]
path = "flowers"            # a folder with one folder of images for each class
"""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from trocar_api.byte_sizes import byte_count
from trocar_api.reasons import ErrorReason
from trocar_api.value_words import refusals
from trocar_server.errors import ServiceError, nearest


def _read_size(value: object) -> object:
    """Read a text as a size; other values stay for pydantic."""
    if not isinstance(value, str):
        return value
    try:
        return byte_count(value)
    except ValueError:
        raise ValueError(f"must be a number of bytes or a size such as 256MiB, not {value[:40]!r}") from None


ByteCount = Annotated[int, BeforeValidator(_read_size)]
"""A number of bytes, also as a text such as "256MiB"."""


def default_state_dir() -> Path:
    """Return where a server keeps its state: `$XDG_STATE_HOME/trocar`, `~/.local/state/trocar`."""
    return _xdg("XDG_STATE_HOME", "~/.local/state") / "trocar"


def default_cache_dir() -> Path:
    """Return where downloads are kept: `$XDG_CACHE_HOME/trocar`, `~/.cache/trocar`."""
    return _xdg("XDG_CACHE_HOME", "~/.cache") / "trocar"


def _xdg(variable: str, otherwise: str) -> Path:
    """Return a base folder; a relative one does not count, as the XDG specification says."""
    given = Path(os.environ.get(variable, ""))
    return given if given.is_absolute() else Path(otherwise).expanduser()


class Table(BaseModel):
    """A table of the configuration. It is not changed once it is read, and has no other keys than these."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Table):
    """Limits of a call. All are finite."""

    max_request_bytes: ByteCount = Field(default=1 << 30, ge=1 << 10)
    """Bytes of inputs in one call."""
    max_reply_bytes: ByteCount = Field(default=1 << 30, ge=1 << 10)
    """Bytes of feature maps in one reply."""
    max_pass_bytes: ByteCount = Field(default=0, ge=0)
    """Bytes of memory that one pass may need at once, by estimate; 0 for three quarters of the device's."""
    max_pass_s: float = Field(default=600.0, gt=0)
    """Seconds that one pass may take, by an estimate that is rather too low; it also shows as held too long
    if it takes longer. A pass inside one operator cannot be stopped."""
    max_chunk_bytes: ByteCount = Field(default=2 << 20, ge=4096, le=8 << 20)
    """Payload bytes in one message; 0.5 to 2 MiB is fastest."""
    max_batch: int = Field(default=4096, ge=1)
    """Samples in one batch."""
    max_taps: int = Field(default=256, ge=1)
    """Taps in one call."""
    max_edits: int = Field(default=256, ge=1, le=4096)
    """Edits in one call, those behind stored names included."""
    max_image_pixels: int = Field(default=50_000_000, ge=1)
    """Pixels of one encoded image, checked before decoding."""
    max_text_characters: int = Field(default=1_000_000, ge=1)
    """Characters of all texts of one call."""
    max_tokens: int = Field(default=262_144, ge=1)
    """Tokens of one batch of texts, padding included."""
    max_audio_s: float = Field(default=1800.0, gt=0)
    """Seconds of all sound of one call."""
    max_processing_s: float = Field(default=30.0, gt=0)
    """Seconds for which a model's own tokenizer or feature extractor may work on one batch."""
    max_dataset_bytes: ByteCount = Field(default=16 << 30, ge=1 << 10)
    """Bytes of all data sets that one caller has uploaded; equal shards count once."""
    max_direction_fit_bytes: ByteCount = Field(default=8 << 30, ge=1 << 10)
    """Bytes on disk of the pooled values to which directions are fitted, of all running fits."""
    max_shared_memory_bytes: ByteCount = Field(default=1 << 30, ge=0)
    """Bytes of shared memory that one caller on a Unix socket may have at once; 0 to lend none."""
    max_queue: int = Field(default=64, ge=1)
    """Calls that wait for one model."""
    max_pending_bytes: ByteCount = Field(default=0, ge=0)
    """Bytes of received inputs and unsent replies, of all calls; 0 for half of the host's memory."""
    max_principal_bytes: ByteCount = Field(default=0, ge=0)
    """The same for one caller; 0 for half of the total."""
    max_pending_s: float = Field(default=1800.0, gt=0)
    """Estimated seconds of computation that admitted calls may still need."""
    max_principal_s: float = Field(default=600.0, gt=0)
    """The same for one caller."""
    stall_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for which a caller may leave a message of a reply unread, a stream without its next batch, or
    the one message of a call unsent before the call is ended."""
    receive_timeout_s: float = Field(default=60.0, gt=0)
    """Seconds within which each further part of announced inputs has to come: `min_receive_rate` times as
    many bytes, or a whole chunk; and the end of a call's requests after its one message."""
    min_receive_rate: int = Field(default=16 << 10, ge=0)
    """Bytes in a second, on average over `receive_timeout_s`, below which a caller counts as stalled."""
    max_trainers: int = Field(default=16, ge=1)
    """Trainers of one principal."""
    trainer_ttl_s: float = Field(default=604_800, gt=0)
    """Seconds after its last use at which a trainer is closed; a week."""
    max_checkpoints: int = Field(default=8, ge=1)
    """Checkpoints of one trainer; the oldest is removed."""
    feature_cache_bytes: ByteCount = Field(default=0, ge=0)
    """Memory of the reply cache in bytes; 0 disables it."""

    @property
    def most_made_bytes(self) -> int:
        """Return the most bytes that the inputs of one call may become when they are processed."""
        budgets = (self.max_request_bytes, self.max_principal_bytes, self.max_pending_bytes)
        return min(each for each in budgets if each)


class PreprocessingConfig(Table):
    """What to do to images of a custom model; the order is resize, crop, scale to [0, 1], normalise."""

    resize: tuple[int, ...] = ()
    """Size of the shorter side, or (height, width), in pixels. Empty: no resize."""
    crop: tuple[int, ...] = ()
    """Size of the centre crop in pixels, one number or (height, width). Empty: no crop."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Subtracted per channel."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)
    """Divided by per channel."""
    interpolation: str = "bilinear"
    """`nearest`, `bilinear` or `bicubic`."""


class InputConfig(Table):
    """One named input of a model."""

    dtype: str = "float32"
    """A torch dtype such as `int64`; or `int` or `str` for what is no tensor."""
    shape: tuple[int | str, ...] | None = None
    """Dimensions, the batch included: numbers, and names for what a call may choose. Unset: any."""
    optional: bool = False
    """Whether a call may leave it out."""
    below: int = Field(default=0, ge=0)
    """Values are from 0 to below this, for example the size of a vocabulary; 0 for any."""
    sizes: dict[str, int] = {}
    """Sizes of named dimensions in the example input; 8 where not given."""


class WarmVariantConfig(Table):
    """One compiled variant that is built, or restored, before its model counts as loaded."""

    taps: tuple[str, ...] = Field(min_length=1)
    """Selectors of the values, as calls write them, without reductions and statistics."""
    numerics: Literal["fast", "bf16"]
    """The numerics that calls ask for."""


class ModelConfig(Table):
    """One model of the catalogue."""

    architecture: str = ""
    """A torchvision model name. The model's id when neither this nor `factory` is given."""
    source: str = ""
    """`timm:NAME`, `hf:./FOLDER`, `hf:org/name@COMMIT` or `torchvision:NAME`, in place of `architecture`. A
    relative folder is looked up beside the config file."""
    factory: str = ""
    """`module:callable` that builds a custom `nn.Module`; it runs with the server's rights."""
    arguments: tuple[Any, ...] = ()
    """Positional arguments of the factory."""
    options: dict[str, Any] = {}
    """Keyword arguments of the builder or factory, for example `num_classes`."""
    weights: str = "DEFAULT"
    """`DEFAULT`, a weights enum name, `random[:seed]`, or a `.safetensors` file. A relative file is
    looked up beside the config file."""
    categories: tuple[str, ...] | str | None = None
    """Class names by index, or a text file with one name a line, or `torchvision:NAME` for those of an
    architecture's default weights, for example `torchvision:resnet50`."""
    preprocessing: PreprocessingConfig | None = None
    """What to do to images; torchvision models know theirs."""
    input_shape: tuple[int, ...] | None = None
    """Shape of one example input without the batch dimension."""
    inputs: dict[str, InputConfig] = {}
    """Named inputs, where the model's own description is missing or wrong."""
    dtype: Literal["", "bf16", "fp16", "fp32"] = ""
    """The dtype of the weights; as they are when empty."""
    processor: Path | None = None
    """Folder with the files of a Hugging Face tokenizer or feature extractor, for texts and sound. A relative
    one is looked up beside the config file."""
    stages: dict[str, str] = {}
    """Selectors by stage name, for example `{ stem = "conv1", head = "fc" }`; clients use the names."""
    replicas: int = Field(default=1, ge=1, le=16)
    """Copies of the module tree, sharing weights."""
    numerics: Literal["", "exact", "fast", "bf16"] = ""
    """Default numerics of callers; that of `[engine]` when empty."""
    warm_variants: tuple[WarmVariantConfig, ...] = ()
    """Compiled variants for inputs of the example's shape that are ready before the first call, for example
    `[{ taps = ["layer4"], numerics = "bf16" }]`."""
    merge: Literal["off", "caller", "everybody"] = "caller"
    """Whose calls may share a compiled pass whose rows are proved to be independent: `off` none, `caller`
    those of one caller with a token or certificate, `everybody` all."""


PINNED_BYTES = 512 << 20
"""Of page-locked host memory, where the configuration does not say otherwise."""


class EngineConfig(Table):
    """Execution of passes that change nothing; see `Numerics`."""

    numerics: Literal["exact", "fast", "bf16"] = "exact"
    """Default numerics of callers: `exact`, `fast` or `bf16`. A model's own setting wins."""
    compile_after: int = Field(default=3, ge=0)
    """Calls with the same values and row shape after which a compiled variant is built; 0 builds none."""
    max_compiled: int = Field(default=16, ge=1, le=256)
    """Compiled variants at once, over all models; the least recently used one is evicted."""
    min_gain: float = Field(default=1.05, ge=0)
    """Minimum speedup of a compiled variant over eager."""
    kept_variants_bytes: ByteCount = Field(default=2 << 30, ge=0)
    """Bytes of compiled variants on disk, for models on a CPU; the least recently used ones are removed. 0
    keeps none."""
    openvino: bool = True
    """Whether OpenVINO is used where it is installed and the models run on a CPU."""
    cuda_graphs: bool = False
    """Whether frequent passes on a GPU are replayed as CUDA graphs. A recording keeps the GPU memory of a
    pass."""
    pinned_bytes: ByteCount = Field(default=PINNED_BYTES, ge=0)
    """Page-locked host memory for copies from and to a GPU; without any every copy is waited for."""
    merge_max_rows: int = Field(default=32, ge=1, le=4096)
    """Samples of different calls that run together, where rows are independent and `merge` allows it; 1 runs
    every call alone."""
    merge_max_s: float = Field(default=0.1, gt=0)
    """The longest time that a group of calls may be expected to take, in seconds."""


class ImagesConfig(Table):
    """Conversion of encoded images to RGB with 8 bits per value."""

    orient: bool = True
    """Whether images are turned and mirrored as their EXIF data says."""
    scale_16_bit: bool = True
    """Whether 16 bits of grey become 8 by value / 257, rounded; without, all values over 255 become 255."""


class DatasetConfig(Table):
    """A data set of the operator, which every caller can train on."""

    path: Path
    """A folder with one folder for each class, of JPEG, PNG or WebP files, of WAV or FLAC files, or of texts
    (`.txt`). A relative one is looked up beside the config file."""


class PlacementConfig(Table):
    """Replicas of one model on a Ray cluster: how many, and what each takes of its node."""

    min_replicas: int = Field(default=1, ge=1)
    """Replicas without any load."""
    max_replicas: int | None = Field(default=None, ge=1)
    """The most replicas; `min_replicas` when unset, and then their number is fixed."""
    max_per_node: int | None = Field(default=None, ge=1, le=100)
    """The most replicas on one node; any number when unset."""
    cpus: float = Field(default=1.0, ge=0)
    """CPUs that Ray sets aside for each replica, and for each worker of its fits; also the threads of a pass,
    where `threads` is unset."""
    gpus: float = Field(default=0.0, ge=0)
    """GPUs of each replica."""
    resources: dict[str, float] = {}
    """Other resources of Ray that a node must have, for example `{ fast_disk = 1 }`."""
    waiting_s: float = Field(default=1.0, gt=0)
    """Seconds of admitted work for each replica above which another one is started."""

    @property
    def most(self) -> int:
        """Return the most replicas."""
        return max(self.min_replicas, self.max_replicas or 0)


class ClusterConfig(Table):
    """Settings of `trocar serve --ray`."""

    models: dict[str, PlacementConfig] = {}
    """Placement by model id; a model that is not listed has one replica with one CPU."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds within which every model and gateway has to be ready, and workers of fits need room."""
    drain_s: float = Field(default=300.0, ge=0)
    """The longest time that a replica waits for its calls before it stops, in seconds."""
    hold_s: float = Field(default=60.0, gt=0)
    """The longest time that a call waits at a gateway for a replica, in seconds."""
    direct: bool = True
    """Whether callers learn the addresses of replicas, so that clients that reach them call them directly."""
    trainers_dir: Path | None = None
    """Folder of the trainers, which replicas take over from each other: on storage that all nodes share;
    `replicas` in the data directory when unset."""
    durable_steps: bool = True
    """Whether every acknowledged step of a trainer survives the loss of its replica, not only checkpoints."""
    upscale_delay_s: float = Field(default=10.0, ge=0)
    """Seconds for which too much work has to wait before a replica is added."""
    downscale_delay_s: float = Field(default=300.0, ge=0)
    """Seconds for which too little work has to wait before a replica is removed."""


class PageConfig(Table):
    """The web page of the server, in a process and on a port of its own."""

    enabled: bool = False
    """Whether the page is served."""
    host: str = "127.0.0.1"
    """Name or address of this machine where it listens and is opened; others than loopback need TLS."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Its TCP port; 0 takes a free one."""
    tls_cert: Path | None = None
    """Its certificate chain as a PEM file; with it and `tls_key` the page is HTTPS. Both are looked up beside
    the config file when they are relative."""
    tls_key: Path | None = None
    """The private key of `tls_cert`, without a password."""
    insecure: bool = False
    """Whether addresses other than loopback are allowed without TLS."""


class ServerConfig(BaseSettings):
    """Settings of `trocar serve`. Unset ones come from environment variables."""

    model_config = SettingsConfigDict(env_prefix="TROCAR_", env_nested_delimiter="__", extra="forbid")

    host: str = "127.0.0.1"
    """Address to listen on, loopback by default; or `unix:/path` for a Unix socket of this user alone."""
    insecure: bool = False
    """Whether addresses other than loopback are allowed without authentication."""
    tokens: bool = False
    """Whether every call needs a token of `trocar admin token create`, with the scope of its method."""
    tls_cert: Path | None = None
    """The server's certificate chain as a PEM file; with it and `tls_key` the server speaks TLS only. It and
    the next two are looked up beside the config file when they are relative."""
    tls_key: Path | None = None
    """The private key of `tls_cert`."""
    tls_client_ca: Path | None = None
    """The CA of client certificates, as a PEM file; if set, every client must have one (mTLS)."""
    port: int = Field(default=50051, ge=0, le=65535)
    """TCP port; 0 takes a free one. Without meaning for a Unix socket."""
    health_port: int | None = Field(default=None, ge=0, le=65535)
    """TCP port that answers health checks and nothing else, in plain text, for probes that speak no TLS; 0
    takes a free one. None for none."""
    device: str = "auto"
    """`auto` (CUDA when there is one), `cpu` or `cuda:0`."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of one CPU pass; torch's own choice when unset."""
    max_message_bytes: ByteCount = Field(default=64 << 20, ge=1 << 20, le=(1 << 31) - 1)
    """Bytes of one message that comes in. Our own client sends large inputs in many small messages;
    clients of the Open Inference Protocol send all in one."""
    data_dir: Path = Field(default_factory=default_state_dir)
    """Folder of the server's state: trainers, published models, fits, data sets, stored edits, tokens,
    its id. `$XDG_STATE_HOME/trocar` or `~/.local/state/trocar` when unset."""
    cache_dir: Path | None = None
    """Where downloaded weights are kept, as safetensors: what is lost there can be downloaded again. When
    unset, `data_dir` where that is set, otherwise `$XDG_CACHE_HOME/trocar` or `~/.cache/trocar`."""
    strict: bool = False
    """Whether a model that cannot be loaded ends the start, though others can. Without, the others are
    served, and the one that failed is listed with the reason."""
    reflection: bool = False
    """Whether to offer gRPC server reflection."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """TCP port of Prometheus metrics over HTTP; 0 takes a free one. No metrics when unset."""
    metrics_host: str = "127.0.0.1"
    """Address of the metrics. Whoever reaches it can read them: they name models, and no callers."""
    otel_endpoint: str | None = None
    """Where OpenTelemetry traces go, for example `http://localhost:4317`; needs `trocar[otel]`. When unset,
    the environment variables `OTEL_EXPORTER_OTLP_ENDPOINT` and `OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` decide;
    an empty text says no traces."""
    log_format: Literal["text", "json"] = "text"
    """How log lines are written: `text` is logfmt, or coloured on a terminal; `json` one object a line."""
    grace_s: float = Field(default=10.0, ge=0)
    """How long a stopping server lets calls finish, in seconds."""
    limits: Limits = Limits()
    """What a call may not exceed."""
    engine: EngineConfig = EngineConfig()
    """Execution of passes that change nothing."""
    images: ImagesConfig = ImagesConfig()
    """Conversion of encoded images to RGB."""
    page: PageConfig = PageConfig()
    """The web page."""
    models: dict[str, ModelConfig] = {}
    """The catalogue by model id, loaded at start."""
    datasets: dict[str, DatasetConfig] = {}
    """Folders to train on, by the id that callers use."""
    cluster: ClusterConfig = ClusterConfig()
    """Replicas on a Ray cluster, for `trocar serve --ray`."""

    @property
    def has_own_data_dir(self) -> bool:
        """Whether `data_dir` was chosen, and is not the default."""
        return "data_dir" in self.model_fields_set

    @property
    def cluster_folders(self) -> tuple[Path, Path]:
        """The folders that only one cluster may use: its state, and the trainers of all models."""
        data_dir = self.data_dir.expanduser().absolute()
        trainers_dir = self.cluster.trainers_dir
        return (
            data_dir,
            data_dir / "replicas" if trainers_dir is None else trainers_dir.expanduser().absolute(),
        )

    @property
    def weights_dir(self) -> Path:
        """Return the folder of downloaded weights; see `cache_dir`."""
        if self.cache_dir is not None:
            return self.cache_dir.expanduser()
        return self.data_dir.expanduser() if self.has_own_data_dir else default_cache_dir()


def read_config(path: Path | None = None, **overrides: Any) -> ServerConfig:
    """Read the file, if any; the environment wins over it, `overrides` (the command line) over both.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with every wrong key and why.
    """
    in_file = _read_toml(path) if path else {}
    try:
        environment = EnvSettingsSource(ServerConfig)()
        return ServerConfig(**_merged(_merged(in_file, environment), overrides))
    except ValidationError as error:
        raise _wrong(f"the configuration is invalid: {_problems(error)}") from None
    except SettingsError as error:  # an environment variable that should hold JSON
        raise _wrong(f"the environment is invalid: {error}") from None


def _problems(error: ValidationError) -> str:
    """Return every refused setting, with its path and why."""
    lines = []
    for place, words in refusals(error.errors()):
        name = ".".join(map(str, place))
        is_unknown = any(tuple(e["loc"]) == place and e["type"] == "extra_forbidden" for e in error.errors())
        lines.append(f"{name}: {_unknown_setting(place)}" if is_unknown else f"{name} {words}")
    return "; ".join(lines)


def _unknown_setting(place: tuple[int | str, ...]) -> str:
    """Say what an unknown setting is: one of another table, else the nearest ones of its own."""
    name, tables = str(place[-1]), dict(_tables(ServerConfig, ()))
    own = tuple(part for part in place[:-1] if isinstance(part, str))  # lists of tables have numbers
    known = next((names for table, names in tables.items() if _is_table(own, table)), [])
    elsewhere = sorted(_heading(table) for table, names in tables.items() if name in names)
    if elsewhere:
        return f"no such setting here; it is one of {' and '.join(elsewhere)}"
    near = nearest(name, known)
    hint = f"nearest: {', '.join(near)}; " if near else ""
    return f"no such setting; {hint}docs/serving.md lists all"


_ANY = "*"
"""A part of a table's name that the operator chooses: the id of a model, say."""


def _tables(kind: type[BaseModel], at: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Yield each table by its place, with its settings."""
    yield at, list(kind.model_fields)
    for name, field in kind.model_fields.items():
        for part in (field.annotation, *_parts(field.annotation)):
            if isinstance(part, type) and issubclass(part, Table):
                is_named = part not in (field.annotation, *get_args(field.annotation)[:1])
                yield from _tables(part, (*at, name, _ANY) if is_named else (*at, name))


def _parts(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation is made of, at any depth."""
    for part in get_args(annotation):
        yield part
        yield from _parts(part)


def _is_table(place: tuple[str, ...], table: tuple[str, ...]) -> bool:
    return len(place) == len(table) and all(
        part in (own, _ANY) for own, part in zip(place, table, strict=True)
    )


def _heading(table: tuple[str, ...]) -> str:
    """Return how a table is written in the file: `[models.ID]`."""
    words = {"models": "ID", "datasets": "ID", "inputs": "NAME"}
    befores = ("", *table)
    parts = [
        words.get(before, "") if part == _ANY else part for before, part in zip(befores, table, strict=False)
    ]
    return f"[{'.'.join(parts) or 'server'}]"


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both merged, table by table; on conflicts `above` wins."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both_tables = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = _merged(old or {}, value) if both_tables else value
    return merged


def _read_toml(path: Path) -> dict[str, Any]:
    """Settings of a file, with the keys of `[server]` at the top level and its paths resolved."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(f"cannot read the config file '{path.name}': {error.strerror}") from None
    except UnicodeDecodeError:
        raise _wrong(f"'{path.name}' is not valid TOML: it is not a text in UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise _wrong(f"'{path.name}' is not valid TOML: {error}") from None
    server = values.pop("server", {})
    if not isinstance(server, dict):
        raise _wrong(f"'{path.name}': `server` is not a table; write [server]")
    values = {**server, **values}
    resolve_files(values, path.absolute().parent)  # a cluster reads them in other folders
    return values


def resolve_files(values: dict[str, Any], folder: Path) -> None:
    """Resolve relative files of certificates, models and data sets against a folder, in place.

    Args:
        values: Settings by name, as of a configuration file. They need not be valid.
        folder: That of the configuration file, or where the command runs.
    """
    for table in (values, values.get("page")):
        if isinstance(table, dict):
            _resolve_certificates(table, folder)
    models = values.get("models")
    for model in models.values() if isinstance(models, dict) else ():
        if isinstance(model, dict):
            _resolve_files(model, folder)
    datasets = values.get("datasets")
    for dataset in datasets.values() if isinstance(datasets, dict) else ():
        if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
            dataset["path"] = str(folder / _at_home(Path(dataset["path"])))


def _resolve_certificates(table: dict[str, Any], folder: Path) -> None:
    """Resolve relative files of TLS against the config file's folder, and `~` to the home folder."""
    for key in ("tls_cert", "tls_key", "tls_client_ca"):
        if isinstance(table.get(key), str):
            table[key] = str(folder / _at_home(Path(table[key])))


def _resolve_files(model: dict[str, Any], folder: Path) -> None:
    """Resolve a model's relative files against the config file's folder, and `~` to the home folder."""
    for key, suffix in (("weights", ".safetensors"), ("categories", ".txt")):
        value = model.get(key)
        if isinstance(value, str) and value.endswith(suffix):
            model[key] = str(folder / _at_home(Path(value)))
    source = model.get("source")
    if isinstance(source, str) and source.startswith(("hf:.", "hf:~")):
        model["source"] = f"hf:{(folder / _at_home(Path(source.removeprefix('hf:')))).absolute()}"
    if isinstance(model.get("processor"), str):
        model["processor"] = str(folder / _at_home(Path(model["processor"])))


def _at_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:  # no such user: the file's own name begins with `~`
        return path


def _wrong(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.INVALID_ARGUMENT, problem)
