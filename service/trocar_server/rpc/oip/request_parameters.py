"""Request parameters: the known ones, and those that must not be ignored.

Like in Triton, unknown parameters are ignored, except those that would change the results.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import execution_pb2 as pb
from trocar_api.value_words import not_one_of
from trocar_server.engine.request.plan import FlagInput
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, invalid

_NUMERICS = {"exact": pb.NUMERICS_EXACT, "fast": pb.NUMERICS_FAST, "bf16": pb.NUMERICS_BF16}
_PRIORITIES = {"low": pb.PRIORITY_LOW, "normal": pb.PRIORITY_NORMAL, "high": pb.PRIORITY_HIGH}
_NUMBERED = {0: pb.PRIORITY_UNSPECIFIED, 1: pb.PRIORITY_HIGH, 2: pb.PRIORITY_NORMAL}
_SEQUENCES = ("sequence_id", "sequence_start", "sequence_end")
_OF_OUR_OWN = ("edits", "objective", "of", "at", "sources", "start_at", "start_inputs", "reductions", "cast")
_TAKEN = frozenset(
    ("numerics", "priority", "merge", "cache", "timeout", "classification", *_SEQUENCES, *_OF_OUR_OWN)
)
_MAX_TIMEOUT_US = 10**15


@dataclass(frozen=True)
class RequestParameters:
    """The parsed parameters of a request.

    Attributes:
        execution: The execution options of its pass.
        timeout_s: Its timeout in seconds; None for the call's own.
        flags: Flags of the model's forward.
    """

    execution: pb.Execution
    timeout_s: float | None = None
    flags: tuple[FlagInput, ...] = ()


def read_parameters(parameters: Mapping[str, Any], flag_names: Collection[str] = ()) -> RequestParameters:
    """Read the parameters of a request.

    Args:
        parameters: Those of the request, by name.
        flag_names: The model's flags. One that is called as a parameter of the protocol cannot be given.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    values = {name: _value(parameter) for name, parameter in parameters.items()}
    for name in _SEQUENCES:
        if values.get(name):
            raise invalid(_field(name), "models keep no state between requests; leave it out")
    for name in _OF_OUR_OWN:
        if name in values:
            raise invalid(_field(name), "is not part of this protocol; use Trocar's own client for it")
    execution = pb.Execution()
    if "numerics" in values:
        execution.numerics = _named("numerics", values["numerics"], _NUMERICS)
    if "priority" in values:
        execution.priority = _priority(values["priority"])
    for name in ("merge", "cache"):
        if name in values:
            setattr(execution, name, _flag(name, values[name]))
    flags = (_flag_input(name, values[name]) for name in flag_names if name in values and name not in _TAKEN)
    return RequestParameters(execution, _timeout_s(values.get("timeout")), tuple(flags))


def check_input_parameters(field: str, parameters: Mapping[str, Any]) -> None:
    """Refuse an input with its elements in shared memory.

    Raises:
        ServiceError: `UNIMPLEMENTED`.
    """
    for name in parameters:
        if name.startswith("shared_memory_"):
            raise _unimplemented(
                field,
                "shared memory is not offered in this protocol; send the bytes, or use Trocar's own client",
            )


def check_output_parameters(field: str, parameters: Mapping[str, Any]) -> None:
    """Refuse an output that should be another or go elsewhere.

    Raises:
        ServiceError: `UNIMPLEMENTED`.
    """
    check_input_parameters(field, parameters)
    if "classification" in parameters and _value(parameters["classification"]):
        raise _unimplemented(field, "classification is not offered; take the values and sort them")


def _flag_input(name: str, value: Any) -> FlagInput:
    is_too_long = isinstance(value, str) and len(value) > MAX_TEXT_CHARACTERS
    if not isinstance(value, bool | int | str) or is_too_long or (isinstance(value, int) and value >= 2**63):
        raise invalid(
            _field(name),
            f"must be true or false, a whole number or up to {MAX_TEXT_CHARACTERS} characters",
        )
    return FlagInput(name, value)


def _unimplemented(field: str, problem: str) -> ServiceError:
    return invalid(field, problem, ErrorReason.UNIMPLEMENTED)


def _value(parameter: Any) -> Any:
    choice = parameter.WhichOneof("parameter_choice")
    return None if choice is None else getattr(parameter, choice)


def _field(name: str) -> str:
    return f"parameters['{name}']"


def _named(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if not isinstance(value, str) or value not in known:
        raise invalid(_field(name), not_one_of(value, known))
    return known[value]


def _priority(value: Any) -> pb.Priority.ValueType:
    """Read a priority: a word, or Triton's numbers, where 1 is the highest and 0 is unset."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return _NUMBERED.get(value, pb.PRIORITY_LOW)
    result: pb.Priority.ValueType = _named("priority", value, _PRIORITIES)
    return result


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise invalid(_field(name), "must be true or false")
    return value


def _timeout_s(value: Any) -> float | None:
    """Read a timeout in microseconds; 0 is unset."""
    if value is None or value == 0:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not 0 < value <= _MAX_TIMEOUT_US:
        raise invalid(_field("timeout"), "must be a number of microseconds above 0")
    return float(value) / 1e6
