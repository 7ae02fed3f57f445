"""Codec of edit operations: from the operation of an `Edit` message to the engine's."""

from typing import Any, cast

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2 as pb
from trocar_server.rpc.codec.declarations import declared, operand_from_wire
from trocar_server.rpc.codec.fields import invalid, named
from trocar_server.rpc.codec.selector_parts import selector_from_text
from trocar_server.tensors.edits import OPERATIONS, Operation, Swap


def operation_from_wire(field: str, message: pb.Edit) -> Operation:
    """Convert and check the operation of an inline edit; `field` is the edit's name in errors.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, `INVALID_TENSOR`, `NON_FINITE_VALUE`, `INVALID_SELECTOR` or
            `EDIT_NOT_POSSIBLE`, with the field named.
    """
    kind = message.WhichOneof("operation")
    if kind is None:
        raise invalid(field, "has no operation; set one, for example `zero`")
    name = f"{field}.{kind}"
    options = getattr(message, kind)
    with named(name):
        if isinstance(options, pb.Operand):
            make: Any = OPERATIONS[kind]  # the operand is its only field
            return cast(Operation, make(operand_from_wire(name, options)))
        operation = declared(OPERATIONS[kind], name, options)
        if isinstance(operation, Swap) and operation.selector:
            _check_selector(f"{name}.selector", operation.selector)
        return operation


def _check_selector(field: str, text: str) -> None:
    """Refuse selectors that do not stand for a value of the forward pass."""
    with named(field):
        selector = selector_from_text(field, text)
    if selector.is_gradient or selector.parameter is not None:
        raise invalid(
            field,
            f"'{text}' is not a value of the forward pass; swap takes an output or input",
            ErrorReason.EDIT_NOT_POSSIBLE,
        )
