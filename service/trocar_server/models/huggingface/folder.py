"""Model folder: what is in it, checked before transformers is imported.

    folder = open_folder(Path("minilm"))
    folder.weights                      # the safetensors files; empty for a folder with a configuration only

# Note: [No remote code]
`auto_map` in any configuration of a folder names Python files to import, also of its tokenizer, of nested
text and vision parts, and where `trust_remote_code=False` a library has read it all the same. An attention or
expert implementation with a slash in its name is code of the Hub too, and an adapter's base can be any
repository. So a folder that has one of these is refused as a whole, and nothing of it reaches transformers.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trocar_server.models.source import invalid

_NOT_CONFIGURATION = ("tokenizer.json", "vocab.json", "added_tokens.json", "merges.json")
"""Lists of tokens, of which one may be called anything."""
_MAX_CONFIG_BYTES = 16 << 20
_MAX_DEPTH = 32
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"-\d+-of-\d+\.")
_TRAINING_STATE = ("optimizer", "scheduler", "scaler", "rng_state", "training_args")
"""Pickles that transformers' `Trainer` writes beside the weights."""


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A checked folder.

    Attributes:
        root: Where it is.
        path: The transformer's own folder: the root, or below it in some sentence-transformers folders.
        config: Its `config.json`.
        weights: Its safetensors files at the top level.
        modules: Entries of a sentence-transformers folder's `modules.json`; empty for others.
    """

    root: Path
    path: Path
    config: dict[str, Any]
    weights: tuple[Path, ...]
    modules: tuple[dict[str, Any], ...]


def open_folder(path: Path) -> ModelFolder:
    """Read a folder's configurations and refuse what would run code.

    Raises:
        ServiceError: `MODEL_INVALID`, there is no model, or it brings code, an adapter or quantized weights.
    """
    if not path.is_dir():
        raise invalid(f"there is no folder '{path.name}'; check the path of the source")
    for file in sorted(path.rglob("*.json")):
        if file.name not in _NOT_CONFIGURATION and not file.name.endswith(".index.json"):
            read_configuration(file)
    if (path / "adapter_config.json").exists():
        raise invalid(
            f"'{path.name}' is an adapter; merge it into its base with peft's `merge_and_unload` first"
        )
    modules = read_configuration(path / "modules.json") if (path / "modules.json").exists() else []
    root = _transformer_folder(path, modules)
    if not (root / "config.json").is_file():
        raise invalid(f"'{path.name}' has no config.json; give the folder that `save_pretrained` wrote")
    config = read_configuration(root / "config.json")
    if not isinstance(config, dict):
        raise invalid(f"'{path.name}': config.json is not a JSON object")
    if config.get("quantization_config"):
        raise invalid(f"'{path.name}' holds quantized weights, which are not hosted; use the original's")
    return ModelFolder(path, root, config, tuple(sorted(root.glob("*.safetensors"))), tuple(modules))


def read_configuration(file: Path) -> Any:
    """Read a JSON file of a model or of its processor; see Note: [No remote code].

    Raises:
        ServiceError: `MODEL_INVALID`, it is no JSON, too large or nested too deep, or names code to import.
    """
    value = _read(file)
    check_configuration(file.name, value)
    return value


def check_weights(folder: ModelFolder) -> None:
    """Refuse a folder without safetensors.

    Raises:
        ServiceError: `MODEL_INVALID`, with the cure.
    """
    if folder.weights:
        return
    pickles = sorted(
        (file.name for file in folder.path.iterdir() if file.suffix in _PICKLES and not _is_state(file)),
        key=lambda name: (not name.startswith("pytorch_model"), name),
    )
    name = folder.path.name
    if pickles and _SHARD.search(pickles[0]):
        raise invalid(
            f"'{name}' has its weights as several pickles, {pickles[0]} and so on, and the server reads "
            f"safetensors only: save it again with the model's class of transformers, for example "
            f"`AutoModel.from_pretrained({name!r}).save_pretrained(FOLDER)`"
        )
    if pickles:
        raise invalid(
            f"'{name}' has its weights as {', '.join(pickles)} only, and the server reads safetensors only: "
            f"run `trocar admin convert {pickles[0]} model.safetensors` in the folder first"
        )
    raise invalid(f"'{name}' has no weights; add model.safetensors, or ask for `random:0`")


def _is_state(file: Path) -> bool:
    """Whether a pickle is what a trainer keeps beside the weights."""
    return file.name.startswith(_TRAINING_STATE)


def _transformer_folder(path: Path, modules: Any) -> Path:
    """Return the folder of the transformer: a sentence-transformers folder may have it one level down."""
    if not modules:
        return path
    if not isinstance(modules, list) or not all(isinstance(entry, dict) for entry in modules):
        raise invalid(f"'{path.name}': modules.json is not a list of modules")
    below = (path / str(modules[0].get("path", ""))).resolve()
    if not below.is_relative_to(path.resolve()):
        raise invalid(f"'{path.name}': modules.json names a path outside of the folder")
    return below


def _read(file: Path) -> Any:
    try:
        if file.stat().st_size > _MAX_CONFIG_BYTES:
            raise invalid(f"'{file.name}' is larger than {_MAX_CONFIG_BYTES:,} bytes")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise invalid(f"cannot read '{file.name}': {error.strerror}") from None
    except (ValueError, RecursionError):
        raise invalid(f"'{file.name}' is not JSON") from None


def check_configuration(name: str, value: Any) -> None:
    """Refuse what would import code; see Note: [No remote code].

    Args:
        name: Of the configuration, for messages.
        value: Its content.

    Raises:
        ServiceError: `MODEL_INVALID`.
    """
    for key, item in _entries(value, 0):
        if key == "auto_map" and item:
            raise invalid(
                f"'{name}' has an auto_map: the model needs code of its own, and remote code is never "
                "run; use a version of it that transformers itself has, or host it with a factory"
            )
        if key.endswith(("_implementation", "_implementation_internal")):
            names = item.values() if isinstance(item, dict) else [item]
            if any("/" in str(each) for each in names):
                raise invalid(f"'{name}' has {key} {item!r}: kernels of the Hub are never loaded")


def _entries(value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _MAX_DEPTH:
        raise invalid(f"a configuration is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict):
        for key, item in value.items():
            yield str(key), item
            yield from _entries(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _entries(item, depth + 1)
