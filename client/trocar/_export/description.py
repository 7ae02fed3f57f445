"""Output description: the settings that determine its bytes, as JSON; a run resumes only if they match."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trocar._export.edit_descriptions import describe_edits
from trocar._export.options import Options
from trocar._sources.sample import Source

if TYPE_CHECKING:
    from trocar._base.types import Model, ServerInfo
    from trocar._request.stored.stored_edits import StoredEdits
    from trocar._request.taps import Tap


def describe(
    model: "Model",
    server: "ServerInfo",
    taps: "Sequence[str | Tap]",
    source: Source,
    options: Options,
    stored: "Sequence[StoredEdits]" = (),
) -> dict[str, Any]:
    """Describe a job: which model it is, where it runs, taps, edits, source and options.

    The handling of failed samples is no part of it: a run that stopped at one may resume with "skip",
    and its output equals that of a run that had skipped from the beginning.
    """
    result: dict[str, Any] = {
        "model": described_model(model),
        # Other versions of torch and other devices give other last digits.
        "server": {"torch_version": server.torch_version, "device": server.device.partition(":")[0]},
        "taps": [plain(tap) for tap in taps],
        "source": source.description,
        "format": options.format,
        "batch": options.batch,
        "shard_size": options.shard_size,
        "decode": options.decode,
        "limit": options.limit,
    }
    if options.edits:  # folders begun before edits existed still resume
        result["edits"] = describe_edits(options.edits, stored)
    if options.numerics != "exact":
        result["numerics"] = options.numerics
    if options.adapter:
        result["adapter"] = options.adapter
    if options.flags:
        result["flags"] = dict(options.flags)
    if options.max_tokens is not None or options.truncate:
        result["texts"] = {"max_tokens": options.max_tokens, "truncate": options.truncate}
    normal: dict[str, Any] = json.loads(json.dumps(result))
    return normal


def described_model(model: "Model") -> dict[str, Any]:
    """Describe a model: its digest decides; the others are for people."""
    return {
        "id": model.model_id,
        "architecture": model.architecture,
        "weights": model.weights,
        "parameter_count": model.parameter_count,
        "dtype": model.dtype,
        "digest": model.digest,
        "parts": model.digest_parts,
    }


def plain(value: Any) -> Any:
    """Convert a tap to JSON: fields that differ from their default; arrays and bytes by their hash."""
    if is_dataclass(value) and not isinstance(value, type):
        given = {
            field.name: getattr(value, field.name)
            for field in fields(value)
            if field.default is MISSING or not _is_same(getattr(value, field.name), field.default)
        }
        return given["selector"] if given.keys() == {"selector"} else plain(given)
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        digest = hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()
        return {"shape": list(value.shape), "dtype": str(value.dtype), "sha256": digest}
    if isinstance(value, (bytes, memoryview)):
        return {"sha256": hashlib.sha256(value).hexdigest()}
    return value if isinstance(value, (str, int, float, bool, type(None))) else repr(value)


def _is_same(value: Any, default: Any) -> bool:
    return value is default or (
        type(value) is type(default) and not isinstance(value, np.ndarray) and value == default
    )
