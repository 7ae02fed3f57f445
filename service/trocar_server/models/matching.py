"""State dict matching: loads a state dict into a module, with every mismatched key in one error."""

from collections import OrderedDict
from collections.abc import Iterable

from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.weights.weights_file import StateDict

_LISTED_COUNT = 20


def load_matching(module: nn.Module, state: StateDict, file_name: str) -> None:
    """Copy `state` into `module`'s parameters and buffers; values are cast to the module's dtypes.

    Raises:
        ServiceError: `WEIGHTS_MISMATCH`, listing missing, unexpected and wrongly shaped keys, up to
            20 of each in the message and all of them in the details. The module is then half
            loaded: drop it.
    """
    wrong_shapes = _wrong_shapes(module, state)
    fitting = OrderedDict((key, value) for key, value in state.items() if key not in wrong_shapes)
    fitting._metadata = _versions(module, state)  # type: ignore[attr-defined]  # where torch looks for it
    result = module.load_state_dict(fitting, strict=False)
    missing = [key for key in _unfilled(module, fitting, result.missing_keys) if key not in wrong_shapes]
    problems = {
        "missing": missing,
        "unexpected": result.unexpected_keys,
        "wrong_shape": wrong_shapes.values(),
    }
    if any(problems.values()):
        raise _mismatch(problems, file_name)


def _unfilled(module: nn.Module, state: StateDict, missing: list[str]) -> list[str]:
    """Missing keys whose tensors got no value: of a tied pair `save_pretrained` writes one name only."""
    own = module.state_dict(keep_vars=True)
    filled = {id(own[key]) for key in state if isinstance(own.get(key), Tensor)}
    return [key for key in missing if id(own.get(key)) not in filled]


def _wrong_shapes(module: nn.Module, state: StateDict) -> dict[str, str]:
    own = module.state_dict()
    return {
        key: f"{key} {tuple(value.shape)}, the model has {tuple(own[key].shape)}"
        for key, value in state.items()
        if key in own and hasattr(own[key], "shape") and own[key].shape != value.shape
    }


def _versions(module: nn.Module, state: StateDict) -> dict[str, dict[str, int]]:
    """Return the file's module versions; without any, the root's present one.

    MNASNet refuses to load without. The parts keep none, so that torch fills in what old versions
    lacked, such as batch norm's `num_batches_tracked`.
    """
    versions: dict[str, dict[str, int]] | None = getattr(state, "_metadata", None)
    return versions or {"": {"version": module._version}}


def _mismatch(problems: dict[str, Iterable[str]], file_name: str) -> ServiceError:
    lists = {kind: sorted(keys) for kind, keys in problems.items() if keys}
    parts = [f"{len(keys)} {kind.replace('_', ' ')}: {_shorten(keys)}" for kind, keys in lists.items()]
    details = {kind: "\n".join(keys) for kind, keys in lists.items()}
    return ServiceError(
        ErrorReason.WEIGHTS_MISMATCH,
        f"'{file_name}' does not fit the model; {'; '.join(parts)}. Set options such as num_classes, "
        "or use the file of this architecture",
        **details,
    )


def _shorten(keys: list[str]) -> str:
    rest = f" and {len(keys) - _LISTED_COUNT} more" if len(keys) > _LISTED_COUNT else ""
    return f"{', '.join(keys[:_LISTED_COUNT])}{rest}"
