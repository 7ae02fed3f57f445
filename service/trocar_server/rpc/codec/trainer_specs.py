"""Codec of trainer and fit specs: from messages to the specs of `training`, and back.

Fields have the same names on both sides, so there is no code for each of them.
"""

import math
from base64 import b64decode
from collections.abc import MutableSequence, Sequence
from typing import Any

from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import fit_pb2, trainer_pb2
from trocar_api.v1.edit_pb2 import Edit
from trocar_server.training.checks.spec_checks import parse_spec
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.spec.fit_validation import parse_fit_spec
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import TrainerSpec, ValueEditSpec

_MAX_ENTRIES = 1024
"""Limit of one list: more parts of a model are not named one by one."""
_MAX_OPTION_ENTRIES = 1 << 16
"""Limit of the lists within options, which may have a weight for each class."""
_MAX_ALL_ENTRIES = 1 << 18
"""Limit of all lists and options together: each may be short, and they nest."""
_EXACT = 1 << 53
"""Up to here a float represents every integer exactly."""


def trainer_spec(message: trainer_pb2.TrainerSpec, edits: Sequence[ValueEditSpec] = ()) -> TrainerSpec:
    """Read a trainer's spec.

    Args:
        message: The spec.
        edits: What its edits stand for; see `trainer_edits`.

    Raises:
        ServiceError: `TRAINER_INVALID` with every structural problem.
    """
    described = _without_edits(message) if message.edits else message
    return parse_spec({**_checked(described, ErrorReason.TRAINER_INVALID), "edits": tuple(edits)})


def fit_spec(message: fit_pb2.FitSpec) -> FitSpec:
    """Read a fit's spec.

    Raises:
        ServiceError: `FIT_INVALID` with every structural problem.
    """
    return parse_fit_spec(_checked(message, ErrorReason.FIT_INVALID))


def spec_message(spec: TrainerSpec) -> trainer_pb2.TrainerSpec:
    """Spec of a trainer as a message, with defaults filled in."""
    fields = spec.model_dump(mode="json", exclude_none=True, exclude={"edits"})
    message: trainer_pb2.TrainerSpec = ParseDict(fields, trainer_pb2.TrainerSpec())
    message.edits.extend(Edit.FromString(b64decode(edit.sent)) for edit in spec.edits)
    return message


def _without_edits(message: trainer_pb2.TrainerSpec) -> trainer_pb2.TrainerSpec:
    result = trainer_pb2.TrainerSpec()
    result.CopyFrom(message)
    result.ClearField("edits")
    return result


class _Reading:
    """The problems of a spec that is being read, and how many more entries are read of it."""

    def __init__(self) -> None:
        self.problems = Problems()
        self._left = _MAX_ALL_ENTRIES

    def takes(self, count: int, path: str, most: int = _MAX_ENTRIES) -> bool:
        """Whether a list is read, by its length; a problem is added where it is not."""
        if count > most:
            self.problems.add(path, f"has {count:,} entries; {most:,} at most")
            return False
        if count > self._left:
            self._left = 0
            self.problems.add("", f"all lists together have over {_MAX_ALL_ENTRIES:,} entries")
            return False
        self._left -= count
        return True


def _checked(message: Message, reason: ErrorReason) -> dict[str, Any]:
    reading = _Reading()
    fields = _fields(message, "", reading)
    reading.problems.raise_any(reason, "the description of the trainer cannot be parsed")
    return fields


def _fields(message: Message, path: str, reading: _Reading) -> dict[str, Any]:
    """Return the fields that are set, as plain dicts and lists."""
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        where = f"{path}.{field.name}".removeprefix(".")
        if not isinstance(value, MutableSequence):
            fields[field.name] = _entry(value, where, reading)
        elif reading.takes(len(value), where):
            fields[field.name] = [_entry(one, f"{where}[{i}]", reading) for i, one in enumerate(value)]
    return fields


def _entry(value: Any, path: str, reading: _Reading) -> Any:
    if isinstance(value, Struct):
        if not reading.takes(len(value.fields), path):
            return {}
        return {name: _option(one, f"{path}.{name[:80]}", reading) for name, one in value.fields.items()}
    return _fields(value, path, reading) if isinstance(value, Message) else value


def _option(value: Value, path: str, reading: _Reading) -> Any:
    """Value of an option. Integers become ints again: JSON's numbers are all floats."""
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        if not math.isfinite(number):
            reading.problems.add(path, "is not a finite number; leave the option out where there is no limit")
        return int(number) if number.is_integer() and abs(number) <= _EXACT else number
    if kind == "struct_value":
        return _entry(value.struct_value, path, reading)
    if kind == "list_value":
        entries = value.list_value.values
        if not reading.takes(len(entries), path, _MAX_OPTION_ENTRIES):
            return []
        return [_option(one, f"{path}[{i}]", reading) for i, one in enumerate(entries)]
    return (
        value.string_value if kind == "string_value" else value.bool_value if kind == "bool_value" else None
    )
