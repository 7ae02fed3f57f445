"""After a change of a model's description, nothing that was kept of before is continued.

Every field of `[models.ID]`, and every setting of `[images]` and `[engine]`, has a change that makes another
model of it, or a reason why it is the same one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel
from torch import nn

import trocar
from tests.support.servers.running_server import RunningServer
from trocar_server.config import (
    EngineConfig,
    ImagesConfig,
    InputConfig,
    ModelConfig,
    PreprocessingConfig,
    ServerConfig,
    WarmVariantConfig,
)
from trocar_server.models.identity import NOT_IDENTITY, NOT_SETTINGS

BASE: dict[str, Any] = {
    "factory": "tests.relations.identities:Changeable",
    "weights": "random:1",
    "input_shape": (3, 8, 8),
    "stages": {"early": "first"},
    "preprocessing": {"resize": [8, 8]},
    "options": {"power": 1},
}
CHANGES: dict[str, Any] = {
    "factory": "tests.relations.identities:Other",
    "weights": "random:2",
    "stages": {"early": "second"},
    "preprocessing": {"resize": [8, 8], "mean": [0.1, 0.2, 0.3]},
    "options": {"power": 2},
    "arguments": (3.0,),
    "dtype": "bf16",
}
"""A change of each field that changes the answer which is asked for here."""
PREPROCESSING: dict[str, Any] = {
    "resize": [9, 9],
    "crop": [6, 6],
    "mean": [0.1, 0.2, 0.3],
    "std": [0.5, 0.6, 0.7],
    "interpolation": "bicubic",
}
"""A change of each field of `preprocessing`, of which each changes the answer, too."""
PARTS: dict[str, tuple[type[BaseModel], Any, dict[str, Any]]] = {
    "inputs": (
        InputConfig,
        lambda part: {"x": {"dtype": "float32", "shape": ["batch", 3, 8, 8], **part}},
        {
            "dtype": "float64",
            "shape": ["batch", 3, "height", 8],
            "optional": True,
            "below": 5,
            "sizes": {"height": 8},
        },
    ),
    "warm_variants": (
        WarmVariantConfig,
        lambda part: [{"taps": ["first"], "numerics": "bf16", **part}],
        {"taps": ["second"], "numerics": "fast"},
    ),
}
"""Of fields that are tables: what they consist of, how they are made, and a change of each field in them."""
OTHER_CALLS: dict[str, Any] = {
    "input_shape": (3, 16, 16),
    "inputs": {"x": {"dtype": "float32", "shape": ["batch", 3, 8, 8]}},
    "numerics": "bf16",
    "warm_variants": [{"taps": ["first"], "numerics": "bf16"}],
    "processor": "tokenizer",
}
"""A change of each field that changes answers, but not the one here: of masks, compiled passes, texts."""
NEUTRAL: dict[str, tuple[Any, str]] = {
    "categories": (["a", "b", "c", "d"], NOT_IDENTITY["categories"]),
    "merge": ("everybody", NOT_IDENTITY["merge"]),
    "replicas": (2, "are copies with equal weights, and no field of `ModelSpec`"),
}
"""Changes after which it is the same model, and reasons."""
ELSEWHERE = {
    "architecture": "says what `factory` says here",
    "source": "says what `factory` says here; see `test_deployment_identity.py`",
}

SETTINGS: dict[str, dict[str, Any]] = {
    "images.orient": {"images": {"orient": False}},
    "images.scale_16_bit": {"images": {"scale_16_bit": False}},
    "engine.numerics": {"engine": {"numerics": "bf16"}},
}
"""A change of each setting of the server that decides values."""
NOT_OF_A_MODEL = {
    **{f"engine.{name}": reason for name, reason in NOT_SETTINGS.items()},
    "device": "says where: exports note it beside the model",
    "threads": "changes last digits, as another machine does",
    "limits": "refuse calls, and change no value",
    "models": "are described by their own fields",
    "datasets": "are other inputs",
    "cluster": "says where replicas run",
    "page": "is the web page",
    **dict.fromkeys(("host", "port", "health_port", "metrics_host", "metrics_port"), "is an address"),
    **dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca", "tokens", "insecure"), "says who may call"),
    **dict.fromkeys(("data_dir", "cache_dir"), "is a place"),
    **dict.fromkeys(("strict", "reflection", "otel_endpoint", "log_format", "grace_s"), "runs the server"),
    "max_message_bytes": "says how values are sent",
}
"""Settings of the server on which no value of a model depends, with their reasons."""


class Changeable(nn.Module):
    """Two layers, and numbers that no weight tells of."""

    def __init__(self, gain: float = 1.0, *, power: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.gain, self.power = gain, power

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x.pow(self.power) * self.gain))


class Other(Changeable):
    """The same weights, and another function of them."""

    def forward(self, x: torch.Tensor) -> Any:
        return -super().forward(x.pow(2))


def unnamed_fields() -> set[str]:
    """Return the fields of a model's configuration, and of the tables in it, that are in no table."""
    parts = {
        f"preprocessing.{name}" for name in PreprocessingConfig.model_fields.keys() - PREPROCESSING.keys()
    }
    for field, (kind, _, changes) in PARTS.items():
        parts |= {f"{field}.{name}" for name in set(kind.model_fields) - changes.keys()}
    return parts | (
        set(ModelConfig.model_fields)
        - CHANGES.keys()
        - OTHER_CALLS.keys()
        - NEUTRAL.keys()
        - ELSEWHERE.keys()
    )


def unnamed_settings() -> set[str]:
    """Return the settings of a server that are in neither table."""
    tables: dict[str, type[BaseModel]] = {"engine": EngineConfig, "images": ImagesConfig}
    single = {f"{table}.{name}" for table, kind in tables.items() for name in kind.model_fields}
    return (single | set(ServerConfig.model_fields)) - tables.keys() - SETTINGS.keys() - NOT_OF_A_MODEL.keys()


def write_pictures(folder: Path) -> None:
    """Write four pictures that are to be turned, the last of them grey with 16 bits."""
    folder.mkdir()
    values = np.random.default_rng(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in "abc":
        picture = Image.fromarray(values.integers(0, 256, (12, 8, 3), np.uint8))
        picture.save(folder / f"{name}.png", exif=exif)
    Image.fromarray(values.integers(0, 2048, (12, 8), np.uint16)).save(folder / "d.png")


def answer(client: trocar.Client, pictures: Path) -> Any:
    """Return the values of a stage, of all pictures."""
    rows = [client.extract("m", path, ["early"]) for path in sorted(pictures.iterdir())]
    return np.concatenate([next(iter(row.values())) for row in rows])


@dataclass(frozen=True)
class Running:
    """A server with a model `m`, and a client of it."""

    server: RunningServer
    client: trocar.Client


@dataclass(frozen=True)
class Kept:
    """Something that a server or a client keeps of a model, and continues.

    Attributes:
        begin: Makes it from pictures in a folder, with the first model.
        is_continued: Continues it with the changed model; whether it is taken.
    """

    begin: Callable[[Running, Path, Path], Any]
    is_continued: Callable[[Running, Path, Any], bool]


_TAPS = [trocar.tap("early", stats=["mean"], values=False, alias="kept")]
_EXPORTED = [trocar.tap("early", alias="kept")]


class _StopError(Exception):
    """An export was stopped."""


def _begin_stream(running: Running, pictures: Path, _: Path) -> Any:
    options: Any = {"running_statistics": True, "checkpoint_interval": 1}
    with running.client.extract_stream("m", [pictures / "a.png"], _TAPS, **options) as stream:
        return list(stream)[-1].checkpoint


def _continue_stream(running: Running, pictures: Path, checkpoint: Any) -> bool:
    options: Any = {"running_statistics": True, "checkpoint": checkpoint, "first_batch": 1}
    try:
        with running.client.extract_stream("m", [pictures / "a.png"], _TAPS, **options) as stream:
            return [result.unwrap() for result in stream] != []
    except trocar.TrocarError:
        return False


def _begin_export(running: Running, pictures: Path, work: Path) -> Path:
    def stop(progress: Any) -> None:
        if progress.sample_count == 2:
            raise _StopError

    try:
        _export(running.client, pictures, work / "features", stop)
    except _StopError:
        return work / "features"
    raise AssertionError("it was not stopped")


def _continue_export(running: Running, pictures: Path, out: Path) -> bool:
    try:
        return bool(_export(running.client, pictures, out, None).resumed_at == 2)
    except trocar.errors.OutputError as error:
        return "model: other" not in str(error)  # it must say that the model is another one


def _export(client: trocar.Client, pictures: Path, out: Path, progress: Any) -> Any:
    options: Any = {"batch": 1, "shard_size": 1, "progress": progress}
    return trocar.extract_dataset(client, "m", str(pictures), _EXPORTED, str(out), **options)


def _digest(running: Running, *_: Any) -> str:
    return running.client.model("m", has_digest=True).digest


def _has_digest(running: Running, _: Path, digest: str) -> bool:
    return _digest(running) == digest


COMPILING: dict[str, Any] = {"compile_after": 2, "min_gain": 0.0}
"""Settings of `[engine]`: passes are compiled soon, and those of an earlier server are used at once."""


def _fast_engine(running: Running) -> str:
    """Return what computes a fast pass, once variants of an earlier server are restored or dropped."""
    running.server.run(running.server.engine.compiled.settled)
    maps = running.client.extract("m", ARRAY, ["early"], options=trocar.options(numerics="fast", cache=False))
    return str(maps.execution.engine)


def _begin_variant(running: Running, *_: Any) -> None:
    engines = [_fast_engine(running) for _ in range(6)]
    assert engines[-1] != "eager", engines


def _continue_variant(running: Running, *_: Any) -> bool:
    return _fast_engine(running) != "eager"


KEPT = {
    "stream": Kept(_begin_stream, _continue_stream),
    "export": Kept(_begin_export, _continue_export),
    "digest": Kept(_digest, _has_digest),
    "variant": Kept(_begin_variant, _continue_variant),
}
"""What is kept after a server has ended, by name."""
ARRAY = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def kept_in_memory(running: Running, pictures: Path) -> Callable[[], dict[str, Any]]:
    """Let a server and a client keep what they keep while they run.

    Returns:
        What answers by all of it: values by name, the reply cache's only if it has one.
    """
    picture = pictures / "a.png"
    client = running.client
    client.extract("m", picture, ["early"], options=trocar.options(cache=True))
    assert client.extract("m", picture, ["early"], options=trocar.options(cache=True)).is_cached
    call = client.prepare("m", ARRAY, ["early"])
    call(ARRAY)

    def answers() -> dict[str, Any]:
        kept = client.extract("m", picture, ["early"], options=trocar.options(cache=True))
        given = {"reply": _value(kept)} if kept.is_cached else {}
        try:
            return {**given, "prepared": _value(call(ARRAY))}
        except trocar.TrocarError:
            return given

    return answers


def fresh(running: Running, pictures: Path) -> dict[str, Any]:
    """Return the same values, of passes that use nothing that was kept."""
    client = running.client
    given: dict[str, Any] = {"reply": pictures / "a.png", "prepared": ARRAY}
    return {
        name: _value(client.extract("m", inputs, ["early"], options=trocar.options(cache=False)))
        for name, inputs in given.items()
    }


def _value(maps: trocar.FeatureMaps) -> Any:
    return next(iter(maps.values()))
