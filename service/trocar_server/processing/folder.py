"""Processor folder: the files of a tokenizer or feature extractor, their digest, and no code among them."""

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.folder import read_configuration

_TOKENIZERS = ("tokenizer*.json", "vocab*", "merges.txt", "*.model")
_FEATURE_EXTRACTORS = ("preprocessor_config.json", "processor_config.json")
_PATTERNS = (
    *_TOKENIZERS,
    *_FEATURE_EXTRACTORS,
    *("special_tokens_map.json", "added_tokens.json", "config.json", "sentence_*_config.json"),
    *("chat_template*", "additional_chat_templates/*.jinja"),
)
_MAX_FILE_BYTES = 256 << 20
_FOLDERS_KEPT = 256


def sound_settings(folder: Path) -> dict[str, Any]:
    """Return the attributes of a folder's feature extractor, as its file has them; none where it has no file.

    The files were checked before, see `processor_digest`.
    """
    for name in reversed(_FEATURE_EXTRACTORS):
        if (folder / name).is_file():
            configuration = read_configuration(folder / name)
            own = (
                configuration.get("feature_extractor", configuration)
                if isinstance(configuration, dict)
                else None
            )
            if isinstance(own, dict) and "sampling_rate" in own:
                return own
    return {}


@lru_cache(maxsize=_FOLDERS_KEPT)
def has_tokenizer(folder: Path, _version: str) -> bool:
    """Whether a folder has the files of a tokenizer, in a version that is unique for each load of a model.

    Looked at once: it is asked for every generated token.
    """
    return any(any(folder.glob(pattern)) for pattern in _TOKENIZERS)


@lru_cache(maxsize=_FOLDERS_KEPT)
def has_feature_extractor(folder: Path, _version: str) -> bool:
    """Whether a folder has the files of a feature extractor; as `has_tokenizer`."""
    return any((folder / name).is_file() for name in _FEATURE_EXTRACTORS)


def processor_digest(folder: Path) -> bytes:
    """Return the SHA-256 over the names and bytes of a processor's files.

    Raises:
        ServiceError: `MODEL_INVALID`, there are none, one is too large or cannot be read, or one refers to
            code of its own, which is never run.
    """
    digest = hashlib.sha256()
    files = sorted({path for pattern in _PATTERNS for path in folder.glob(pattern) if path.is_file()})
    if not files:
        raise _invalid("its processor folder has no file of a tokenizer or feature extractor")
    for path in files:
        name = path.relative_to(folder).as_posix()
        try:
            if path.stat().st_size > _MAX_FILE_BYTES:
                raise _invalid(f"'{name}' of its processor is over {_MAX_FILE_BYTES:,} bytes")
            data = path.read_bytes()
        except OSError as error:
            raise _invalid(f"'{name}' of its processor cannot be read: {error.strerror}") from None
        if path.name.endswith("config.json"):
            read_configuration(path)
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.digest()


def _invalid(problem: str) -> ServiceError:
    return ServiceError(ErrorReason.MODEL_INVALID, f"the model takes no texts and no sound: {problem}")
