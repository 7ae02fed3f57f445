"""Codec of named directions: what readouts and edits of a request stand for.

    directions = NamedDirections(engine, store)
    await directions.find(principal, model_id, edits, taps)      # {"edits[0]": ..., "taps[1]": ...}

A direction is resolved here, on the server, for the place of its tap or edit. It is refused where that is
another place than the one where it was fitted, or where the model has changed since.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from trocar_api.reasons import ErrorReason
from trocar_api.v1.edit_pb2 import DIRECTION_UNITS_NORM, DirectionEdit, DirectionUnits, Edit
from trocar_api.v1.position_pb2 import Gate as GateMessage
from trocar_api.v1.tap_pb2 import Tap
from trocar_server.directions import Direction, DirectionStore
from trocar_server.directions.direction import Floats
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.plan import EditRequest, Payload
from trocar_server.errors import ServiceError, nearest
from trocar_server.rpc.codec.edits import StoredList, gate_field
from trocar_server.rpc.codec.fields import invalid, named
from trocar_server.rpc.codec.selector_parts import selector_from_text, selector_of
from trocar_server.surgery import Recording, Selector, parse_selector, resolve
from trocar_server.tensors.edits import Cap, Operation, Project, Steer
from trocar_server.tensors.edits import Edit as EditOfValue
from trocar_server.tensors.reductions import OperandSpec, Readout

_SHOWN_PLACES = 6
Gates = Mapping[str, GateMessage]
"""Gates by field."""
NO_GATES: Gates = {}


class NamedDirections:
    """The directions that taps and edits of requests name.

    Args:
        engine: Provides the models.
        store: The direction store.
    """

    def __init__(self, engine: Engine, store: DirectionStore) -> None:
        self._engine = engine
        self._store = store
        self._digests: dict[str, tuple[str, str]] = {}
        """By model: the version of its deployment, and the model's digest, where its weights never change."""

    async def find(
        self,
        principal: str,
        model_id: str,
        edits: Sequence[Edit],
        taps: Sequence[Tap],
        gates: Gates = NO_GATES,
    ) -> dict[str, StoredList]:
        """Return what each direction of a request stands for, by its field.

        Args:
            principal: The caller.
            model_id: The model.
            edits: Of the request.
            taps: Of the request.
            gates: Others than those of edits, by field.

        Raises:
            ServiceError: `UNKNOWN_DIRECTION`, `DIRECTION_MISMATCH`, `DIRECTION_CORRUPT` or
                `DIRECTIONS_UNAVAILABLE`, with the field named; `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        result: dict[str, StoredList] = {}
        for i, edit in enumerate(edits):
            if edit.WhichOneof("operation") == "direction":
                with named(f"edits[{i}].direction"):
                    result[f"edits[{i}]"] = await self._of_edit(principal, model_id, edit)
        for i, tap in enumerate(taps):
            if is_readout(tap):
                with named(f"taps[{i}]"):
                    result[f"taps[{i}]"] = await self._of_tap(principal, model_id, tap)
        for field, gate in {**_gates_of(edits), **gates}.items():
            with named(field):
                result[field] = await self._of_gate(principal, model_id, gate)
        return result

    async def _of_edit(self, principal: str, model_id: str, edit: Edit) -> StoredList:
        asked = edit.direction
        known = await self.of_model(principal, model_id, asked.name)
        place = self.place_of(model_id, selector_of("selector", edit))
        direction = at_place(known, asked.name, place)
        operation, operand = _operation(asked, direction)
        request = EditRequest(parse_selector("/out"), EditOfValue(operation))
        return StoredList((request,), (_payload(operand),), _digest([direction]))

    async def _of_gate(self, principal: str, model_id: str, gate: GateMessage) -> StoredList:
        directions = await self.of_model(principal, model_id, gate.direction)
        if gate.place:
            name = self.place_of(model_id, selector_from_text("place", gate.place))
            directions = [at_place(directions, gate.direction, name)]
        if len(directions) > 1:
            raise invalid("place", f"'{gate.direction}' has {len(directions)} places; name one")
        (direction,) = directions
        if len(direction.vectors) > 1:
            raise ServiceError(
                ErrorReason.DIRECTION_MISMATCH,
                f"direction '{gate.direction}' has {len(direction.vectors)} vectors, and a gate needs one",
            )
        readout = Readout(*direction.vectors.shape)
        operands = tuple(map(_payload, (direction.vectors, direction.bias)))
        place = parse_selector(direction.about.place)
        return StoredList((), operands, _digest([direction]), ((place, readout),))

    async def _of_tap(self, principal: str, model_id: str, tap: Tap) -> StoredList:
        name = tap.reductions[0].readout.name
        directions = await self.of_model(principal, model_id, name)
        selector: Selector | None = None
        if tap.selector or tap.HasField("parts"):
            selector = selector_of("selector", tap)
            directions = [at_place(directions, name, self.place_of(model_id, selector))]
        operands = [_payload(array) for each in directions for array in (each.vectors, each.bias)]
        readouts = tuple(
            (selector or parse_selector(each.about.place), Readout(*each.vectors.shape))
            for each in directions
        )
        return StoredList((), tuple(operands), _digest(directions), readouts)

    async def of_model(self, principal: str, model_id: str, name: str) -> list[Direction]:
        """Return the directions of one name for a model as it is now.

        Raises:
            ServiceError: See `find`.
        """
        self._engine.deployment(model_id)
        stored = await asyncio.to_thread(self._store.get, principal, model_id, name)
        digest = await self.digest_of(model_id)
        changed = [each for each in stored.directions if each.about.model_digest not in ("", digest)]
        if changed:
            raise ServiceError(
                ErrorReason.DIRECTION_MISMATCH,
                f"direction '{name}' was fitted on '{model_id}' as it was: its weights, code or settings "
                "have changed since; fit it again",
            )
        return list(stored.directions)

    async def digest_of(self, model_id: str) -> str:
        """Return the digest of a model as it is now.

        It is worked out on the thread that computes, behind other passes; so it is kept for each load.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        deployment = self._engine.deployment(model_id)
        version, digest = self._digests.get(model_id, ("", ""))
        if version == deployment.version and not deployment.may_change:
            return digest
        digest = (await self._engine.identity(deployment)).digest
        if not deployment.may_change:
            self._digests[model_id] = deployment.version, digest
        return digest

    def place_of(self, model_id: str, selector: Selector) -> str:
        """Return the name of the value that a selector stands for.

        Raises:
            ServiceError: `INVALID_ARGUMENT`, it stands for several; the errors of selectors.
        """
        names = names_of(selector, self._engine.deployment(model_id).example)
        if len(names) != 1:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"'{selector.text}' stands for {len(names)} values, and a direction is for one; name the "
                "place",
            )
        return names[0]


def names_of(selector: Selector, recording: Recording) -> list[str]:
    """Return the names of the values that a selector stands for.

    Raises:
        ServiceError: The errors of selectors.
    """
    return [target.name for target, _ in resolve([selector], recording)[0]]


def is_readout(tap: Tap) -> bool:
    """Whether a tap reads a direction.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, beside other reductions.
    """
    kinds = [reduction.WhichOneof("kind") for reduction in tap.reductions]
    if "readout" not in kinds:
        return False
    if len(kinds) > 1:
        raise invalid("reductions", "a readout is the only reduction of its tap")
    return True


def _gates_of(edits: Sequence[Edit]) -> Gates:
    return {
        gate_field(f"edits[{i}]"): edit.positions.when
        for i, edit in enumerate(edits)
        if edit.positions.HasField("when")
    }


def has_directions(edits: Sequence[Edit], taps: Sequence[Tap]) -> bool:
    """Whether a request names directions."""
    of_edits = (edit.HasField("direction") or edit.positions.HasField("when") for edit in edits)
    return any(of_edits) or any(reduction.HasField("readout") for tap in taps for reduction in tap.reductions)


def at_place(directions: Sequence[Direction], name: str, place: str) -> Direction:
    """Return the direction of one place.

    Raises:
        ServiceError: `DIRECTION_MISMATCH`, there is none.
    """
    by_place = {each.about.place: each for each in directions}
    if place in by_place:
        return by_place[place]
    places = nearest(place, by_place) or list(by_place)[:_SHOWN_PLACES]
    more = ", ..." if len(by_place) > len(places) else ""
    raise ServiceError(
        ErrorReason.DIRECTION_MISMATCH,
        f"direction '{name}' was not fitted at '{place}', but at {', '.join(places)}{more}; use it there, "
        f"or fit one for '{place}'",
        place=place,
    )


def _operation(asked: DirectionEdit, direction: Direction) -> tuple[Operation, Floats]:
    """Return the operation that an edit with a direction stands for, and its tensor.

    Raises:
        ServiceError: `INVALID_ARGUMENT` or `DIRECTION_MISMATCH`.
    """
    kind = asked.WhichOneof("kind")
    if kind is None:
        raise invalid("kind", "is not set")
    if kind == "project_out":
        return Project(OperandSpec(torch.float64, direction.vectors.shape)), direction.vectors
    if len(direction.vectors) > 1:
        raise ServiceError(
            ErrorReason.DIRECTION_MISMATCH,
            f"direction '{asked.name}' has {len(direction.vectors)} vectors, and {kind} needs one; fit two "
            "classes, or one component",
        )
    length = _unit_length(asked, direction)
    spec = OperandSpec(torch.float64, direction.vectors.shape[1:])
    if kind == "steer":
        alpha = asked.steer.alpha if asked.steer.HasField("alpha") else 1.0
        if asked.steer.is_relative and length is not None:
            raise invalid("steer.is_relative", "is for raw units: the norm is that of each vector")
        vector = direction.vectors[0] if length is None else direction.unit * length
        return Steer(spec, alpha, asked.steer.keeps_norm, asked.steer.is_relative), vector
    low, high = (
        getattr(asked.cap, limit) * (length or 1.0) if asked.cap.HasField(limit) else None
        for limit in ("low", "high")
    )
    return Cap(spec, low, high), direction.vectors[0]


def _unit_length(asked: DirectionEdit, direction: Direction) -> float | None:
    """Return the length that 1 stands for; None for the vector as it is."""
    if asked.units not in DirectionUnits.values():
        raise invalid("units", f"unknown units {asked.units}")
    if asked.units != DIRECTION_UNITS_NORM:
        return None
    if not direction.about.mean_norm > 0:
        raise invalid("units", "the mean norm of the value is not known for this direction; use raw units")
    return direction.about.mean_norm


def _payload(array: Floats) -> Payload:
    return np.ascontiguousarray(array, np.float64).reshape(-1).view(np.uint8).copy()


def _digest(directions: Sequence[Direction]) -> bytes:
    return hashlib.sha256("".join(each.digest for each in directions).encode()).digest()
