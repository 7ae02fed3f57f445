"""Identity of a model: what must be equal so that values that were kept of it may be continued or reused.

    identity(spec, settings_of(config.engine, conversion), content_of(hosted)).digest

The only place that decides it: streams, exports, compiled variants on disk, replicas of a cluster and
`Model.digest` take it from here. A new field of `ModelSpec` is part of it unless `NOT_IDENTITY` says why not.

# Note: [Fields at their default]
A field or setting counts where it differs from its default, so a version that adds one changes no identity.
"""

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from torch import nn

from trocar_server.config import EngineConfig
from trocar_server.models.hosted import HostedModel
from trocar_server.models.spec import ModelSpec

_FORMAT = "2"
"""Changes where equal models get other digests than before."""

NOT_IDENTITY = {
    "model_id": "is a name: a model has the same values under any",
    "categories": "are names beside values",
    "merge": "says whose calls share a pass; each keeps the closeness that its numerics promise",
}
"""Fields of `ModelSpec` on which no value depends, each with its reason."""

BY_CONTENT = {
    "weights": "is a place or a seed: the tensors count, and the label that clients see",
    "source": "may be a folder: `architecture` is its public name, and its configuration counts",
    "factory": "is an object of this process: its code counts",
    "processor_folder": "is a place: the files in it count",
    "preprocessing": "is the library's where it is empty: all that decides pixels counts",
    "stages": "come beside those of the library: all stages of the model count",
    "numerics": "is the server's where it is empty: the one in force counts",
}
"""Fields of `ModelSpec` that count by what they stand for, each with its reason."""

NOT_SETTINGS = {
    "compile_after": "says when a pass is compiled, which also traffic decides; values keep their closeness",
    "max_compiled": "is a number of compiled passes",
    "min_gain": "is a speed",
    "kept_variants_bytes": "is a size on disk",
    "openvino": "chooses a backend; each keeps the closeness that the numerics promise",
    "cuda_graphs": "replays passes bit for bit",
    "pinned_bytes": "is a size of memory",
    "merge_max_rows": "as `merge` of a model",
    "merge_max_s": "as `merge` of a model",
}
"""Settings of `[engine]` on which no value depends. All of `[images]` count."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_PART_DIGITS = 8
_NOT_CODE = frozenset(("torch", *sys.stdlib_module_names))
_NOT_CONFIG = frozenset(("transformers_version",))
"""Of a configuration of transformers, beside names that begin with an underscore."""


@dataclass(frozen=True)
class Identity:
    """Identity of a model as it is configured and loaded."""

    parts: Mapping[str, str]
    """A sha256 in hex for each part that is not as usual: fields, settings, and what was loaded."""
    is_lasting: bool = True
    """Whether an equal model has an equal identity after the next load, too."""
    has_code: bool = True
    """Whether the code of all its classes of modules is part of it."""

    @property
    def digest(self) -> str:
        """One sha256 for all, in hex."""
        return digest_of([_FORMAT, dict(self.parts)])

    @property
    def short_parts(self) -> dict[str, str]:
        """The parts as clients see them: enough digits to name a difference, too few to guess a setting."""
        return {name: part[:_PART_DIGITS] for name, part in self.parts.items()}

    def with_tensors(self, digest: str, *, is_lasting: bool) -> "Identity":
        """Return it with the digest of the tensors."""
        parts = {**self.parts, "weights": digest_of(digest)}
        return replace(self, parts=parts, is_lasting=self.is_lasting and is_lasting)


@dataclass(frozen=True)
class Content:
    """What was loaded, beside the tensors."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    """By the name of their part."""
    is_lasting: bool = True
    """As in `Identity`."""
    has_code: bool = True
    """As in `Identity`."""

    def and_also(self, **facts: Any) -> "Content":
        """Return it with more facts."""
        return replace(self, facts={**self.facts, **facts})


def identity(spec: ModelSpec, settings: Mapping[str, Any], content: Content) -> Identity:
    """Return the identity of a model, without its tensors.

    Args:
        spec: The model as configured.
        settings: What `settings_of` returns.
        content: What was loaded.
    """
    others = {**settings, **content.facts, "numerics": spec.numerics or settings.get("numerics", "")}
    named = {
        each.name: getattr(spec, each.name)
        for each in fields(spec)
        if each.name not in NOT_IDENTITY.keys() | BY_CONTENT.keys()
        and getattr(spec, each.name) != _default(each)
    }
    parts = {name: digest_of(value) for name, value in {**others, **named}.items()}
    return Identity(dict(sorted(parts.items())), content.is_lasting, content.has_code)


def differing(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    """Return the names of the parts in which two identities differ, sorted."""
    return sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))


def settings_of(engine: EngineConfig, conversion: Any) -> dict[str, Any]:
    """Return the settings of a server that decide values: those that are not at their default.

    Args:
        engine: `[engine]` of the configuration.
        conversion: How images are converted to RGB: a dataclass, of which every field counts.
    """
    given = engine.model_dump(exclude=set(NOT_SETTINGS), exclude_defaults=True)
    images = {
        each.name: getattr(conversion, each.name)
        for each in fields(conversion)
        if getattr(conversion, each.name) != _default(each)
    }
    return {"numerics": engine.numerics, **given, **images}


def content_of(hosted: HostedModel, structure: str) -> Content:
    """Return what a model was loaded with, beside its tensors, stages and processor. Reads files.

    Args:
        hosted: The model.
        structure: What `structure_of` returns for its module.
    """
    code, has_code = _code(hosted)
    facts = {
        "weights_label": hosted.weights,
        "structure": structure,
        "code": code,
        "config": _config(getattr(hosted.module, "config", None)),
        "preprocessing": None if hosted.preprocessing is None else hosted.preprocessing.settings(),
    }
    return Content(facts, has_code=has_code)


def structure_of(module: nn.Module) -> str:
    """Return a module tree as text: the same after every load. Owner thread only."""
    try:
        return _ADDRESS.sub("", str(module))
    except Exception:  # noqa: BLE001 - of a module's own `extra_repr`
        return "\n".join(f"{path} {type(part).__name__}" for path, part in module.named_modules())


def digest_of(value: object) -> str:
    """Return the sha256 of a value, in hex: equal for equal values in every process.

    Tuples are as lists; dataclasses are as their fields, and functions as their names.
    """
    try:
        text = json.dumps(value, sort_keys=True, default=_as_json)
    except (TypeError, ValueError, RecursionError):  # keys of two types, or what contains itself
        text = _ADDRESS.sub("", repr(value))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _as_json(value: Any) -> Any:
    """Return what JSON does not have as what it has."""
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "is": type(value).__name__,
            **{each.name: getattr(value, each.name) for each in fields(value)},
        }
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value, key=repr)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}:{value.__qualname__}"
    return _ADDRESS.sub("", repr(value))


def _default(each: "Field[Any]") -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def _config(config: Any) -> Any:
    """Return the configuration of a model of transformers: not all of it is in the structure."""
    to_dict = getattr(config, "to_dict", None)
    with suppress(Exception):  # another library's, of the same name
        return _without_names(to_dict()) if callable(to_dict) else None
    return None


def _without_names(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    kept = {str(name): each for name, each in value.items() if name not in _NOT_CONFIG}
    return {name: _without_names(each) for name, each in kept.items() if not name.startswith("_")}


def _code(hosted: HostedModel) -> tuple[list[str], bool]:
    """Return the classes of a module tree and digests of their code, and whether all of it was read.

    The code is that of the files of all classes, and of the factory; functions of other files that they call
    are not covered. Of a class of a script, which may do more than define it, only its own lines count.
    """
    kinds = {base for part in hosted.module.modules() for base in type(part).__mro__}
    read, is_whole = set(), True
    for code_object in (*filter(_is_foreign, kinds), *_factory_modules(hosted.spec)):
        try:
            read.add(_code_of(code_object))
        except (TypeError, OSError):
            is_whole = False
    names = {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if _is_foreign(kind)}
    return [*sorted(names), *sorted(read)], is_whole


def _factory_modules(spec: ModelSpec) -> list[Any]:
    name = spec.architecture.partition(":")[0]
    is_own = spec.is_custom and not spec.source and spec.factory is None
    return [sys.modules[name]] if is_own and name in sys.modules else []


def _code_of(code_object: Any) -> str:
    if getattr(code_object, "__module__", "") == "__main__":
        return hashlib.sha256(inspect.getsource(code_object).encode()).hexdigest()
    return hashlib.sha256(Path(inspect.getfile(code_object)).read_bytes()).hexdigest()


def _is_foreign(kind: type) -> bool:
    return kind.__module__.partition(".")[0] not in _NOT_CODE or kind.__module__ == "__main__"
