"""Specs of trainers and fits: from messages to what `training` checks, and back.

Fields have the same names on both sides, so there is no code for each of them.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict, SerializeToJsonError
from google.protobuf.message import Message

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import fit_pb2, trainer_pb2
from trocar_server.errors import ServiceError
from trocar_server.training.checking import parse_spec
from trocar_server.training.fit_forms import parse_fit_spec
from trocar_server.training.fit_spec import FitSpec
from trocar_server.training.spec import TrainerSpec

_MOST_EXACT = 1 << 53


def trainer_spec(message: trainer_pb2.TrainerSpec) -> TrainerSpec:
    """Read a trainer's spec.

    Raises:
        ServiceError: `TRAINER_INVALID` with every problem of its form.
    """
    return parse_spec(_fields(message, ErrorReason.TRAINER_INVALID))


def fit_spec(message: fit_pb2.FitSpec) -> FitSpec:
    """Read a fit's spec.

    Raises:
        ServiceError: `FIT_INVALID` with every problem of its form.
    """
    return parse_fit_spec(_fields(message, ErrorReason.FIT_INVALID))


def spec_message(spec: TrainerSpec) -> trainer_pb2.TrainerSpec:
    """Say what a trainer was made of; what was not said is filled in."""
    return ParseDict(spec.model_dump(mode="json", exclude_none=True), trainer_pb2.TrainerSpec())


def _fields(message: Message, reason: ErrorReason) -> dict[str, Any]:
    try:
        fields = MessageToDict(message, preserving_proto_field_name=True)
    except SerializeToJsonError as error:  # options are JSON, which has no NaN and no infinity
        raise ServiceError(reason, f"options must be finite numbers: {error}") from None
    return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Turn whole numbers back into ints: JSON's numbers, of which options are made, are all floats.

    A float of 2^53 or more is whole by its size alone, and torch takes no int of 1e30.
    """
    if isinstance(value, Mapping):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    is_whole = isinstance(value, float) and abs(value) <= _MOST_EXACT and value.is_integer()
    return int(value) if is_whole else value
