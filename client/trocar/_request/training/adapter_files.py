"""Adapter folders of PEFT: read into a description, sent in pieces."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from trocar._base.delegation import explained
from trocar._request.training.trainer_parts import Lora
from trocar_api.v1 import trainer_pb2 as pb

ADAPTER_WEIGHTS, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names of the files."""
_DEFAULTS: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "layers_to_transform": (None,),
}
"""The values of PEFT's settings that trainers know."""
_PIECE_BYTES = 1 << 20
_INSIDE = re.compile(r"\.base_layer(?=\.|$)")
"""Where PEFT puts what it adapts, in a name of a file."""
_RANK_ENDS = re.compile(r"base_model\.model\.(.+)\.lora_A\.weight")


@explained
def lora_from(folder: str | os.PathLike[str], *, name: str = "") -> Lora:
    """Return a LoRA adapter that PEFT saved, for `Client.train`, with its weights.

        trainer = client.train("gpt2", lora=trocar.training.lora_from("my-adapter"), losses="causal_lm")

    Args:
        folder: The folder with `adapter_config.json` and `adapter_model.safetensors`.
        name: Its name in your calls; see `lora`.

    Raises:
        OSError: A file cannot be read.
        ValueError: It is another kind of adapter, or has a setting that trainers do not know.
    """
    home = Path(folder)
    config: dict[str, Any] = json.loads((home / ADAPTER_CONFIG).read_text("utf-8"))
    for setting, known in _DEFAULTS.items():
        if config.get(setting, known[0]) not in known:
            raise ValueError(
                f"{home / ADAPTER_CONFIG}: {setting} is {config[setting]!r}; trainers know {known[0]!r}"
            )
    ranks = _ranks(home / ADAPTER_WEIGHTS, config)
    alphas = {
        selector: _by_pattern(
            config.get("alpha_pattern") or {}, selector.removeprefix("^"), config["lora_alpha"]
        )
        for selector in ranks
    }
    return Lora(
        tuple(ranks.items()),
        alphas,
        config.get("lora_dropout", 0.0),
        config.get("use_rslora", False),
        home,
        name,
    )


def made_folder(folder: str | os.PathLike[str]) -> Path:
    """Return a folder, which is made if it is missing."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    return path


def adapter_requests(trainer_id: str, data: bytes, request_id: str) -> Iterator[pb.LoadAdapterRequest]:
    """Yield the messages that carry an adapter's file."""
    for start in range(0, max(len(data), 1), _PIECE_BYTES):
        piece = data[start : start + _PIECE_BYTES]
        yield pb.LoadAdapterRequest(trainer_id=trainer_id, data=piece, request_id=request_id)


def _ranks(path: Path, config: dict[str, Any]) -> dict[str, int]:
    """Return the rank by selector: of layers from the file, of stacked experts from the settings.

    There the file has the rows of all experts, under the names of layers around their module.
    """
    parameters: list[str] = config.get("target_parameters") or []
    owners = tuple(f".{parameter.rpartition('.')[0]}" for parameter in parameters)
    with safe_open(path, "numpy") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - no mapping
    matched = {_RANK_ENDS.fullmatch(name): shape[0] for name, shape in shapes.items()}
    layers = {_INSIDE.sub("", result[1]): rank for result, rank in matched.items() if result is not None}
    return {
        **{f"^{layer}": rank for layer, rank in layers.items() if not f".{layer}".endswith(owners)},
        **{name: _by_pattern(config.get("rank_pattern") or {}, name, config["r"]) for name in parameters},
    }


def _by_pattern(patterns: dict[str, Any], path: str, otherwise: Any) -> Any:
    """Return the value of the first pattern that matches a path, as PEFT's `get_pattern_key` does."""
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", path):
            return value
    return otherwise
