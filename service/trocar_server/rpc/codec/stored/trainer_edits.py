"""Codec of a trainer's edits: from `Edit` messages with directions to what a trainer keeps of them.

    edits = await trainer_edits(directions, principal, spec.model_id, spec.edits, limits.max_edits)

A trainer outlives its directions, which may be deleted or replaced: it gets their numbers.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import fields

from trocar_api.v1.edit_pb2 import EDIT_ORDER_AFTER_TAPS, Edit
from trocar_server.engine.request.plan import EditRequest, Payload
from trocar_server.rpc.codec.edits import edits_from_wire
from trocar_server.rpc.codec.fields import check_count, invalid
from trocar_server.rpc.codec.stored.named_directions import NamedDirections
from trocar_server.surgery import parse_selector
from trocar_server.tensors.reductions import OperandSpec
from trocar_server.training.spec.trainer_spec import ValueEditSpec


async def trainer_edits(
    directions: NamedDirections, principal: str, model_id: str, messages: Sequence[Edit], max_count: int
) -> tuple[ValueEditSpec, ...]:
    """Return the edits of a trainer, with the directions as they are now.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, an edit is none that a trainer takes; as `NamedDirections.find` and
            `edits_from_wire`.
    """
    if not messages:
        return ()
    check_count("edits", len(messages), max_count)
    for i, message in enumerate(messages):
        _check(f"edits[{i}]", message)
    stored = await directions.find(principal, model_id, messages, ())
    requests = edits_from_wire("edits", messages, max_count, stored=stored)
    edits = []
    for i, (message, request) in enumerate(zip(messages, requests, strict=True)):
        place = directions.place_of(model_id, request.selector)
        if parse_selector(place).kind != "module":
            raise invalid(
                f"edits[{i}].selector", f"'{place}' is no value of a module, which a trainer edits alone"
            )
        edits.append(_spec(message, request, place, stored[f"edits[{i}]"].operands[0]))
    return tuple(edits)


def _check(field: str, message: Edit) -> None:
    """Refuse an edit that a trainer does not make.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if message.WhichOneof("operation") != "direction":
        raise invalid(
            field, "a trainer takes `steer`, `project_out` and `cap` with stored directions alone; name one"
        )
    for part, what in (("positions", "positions or a gate"), ("region", "a part of the value")):
        if message.HasField(part):  # type: ignore[arg-type]  # one of these two
            raise invalid(f"{field}.{part}", f"a trainer edits whole values; leave {what} out")
    if message.order == EDIT_ORDER_AFTER_TAPS:
        raise invalid(f"{field}.order", "losses at an edited value see the edit; leave the order out")


def _spec(message: Edit, request: EditRequest, place: str, vectors: Payload) -> ValueEditSpec:
    operation = request.edit.operation
    (operand,) = operation.operands()
    values = {field.name: getattr(operation, field.name) for field in fields(operation)}
    return ValueEditSpec.model_validate(
        {
            "selector": place,
            "name": operation.name,
            "options": {name: one for name, one in values.items() if not isinstance(one, OperandSpec)},
            "channel_dim": request.edit.channel_dim,
            "shape": operand.shape,
            "vectors": b64encode(bytes(vectors)).decode(),
            "sent": b64encode(message.SerializeToString()).decode(),
        }
    )
