"""`DirectionService`: stored directions of callers."""

import asyncio
from collections.abc import Sequence

from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import direction_pb2 as pb
from trocar_api.v1 import direction_pb2_grpc
from trocar_server.directions import Direction, DirectionStore, StoredDirections, decoded
from trocar_server.directions.direction import encoded_alone
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.plan import Plan, TapRequest
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.call.repeated import is_repeated
from trocar_server.rpc.codec.extract_requests import DEFAULT_CHUNK_BYTES
from trocar_server.rpc.codec.fields import invalid, named
from trocar_server.rpc.codec.selector_parts import selector_from_text
from trocar_server.rpc.codec.stored.directions import directions_to_wire
from trocar_server.rpc.codec.stored.named_directions import NamedDirections, at_place
from trocar_server.rpc.transfer.messages import CallContext
from trocar_server.storage.durable import DamagedError
from trocar_server.surgery import Selector
from trocar_server.tensors.reductions import Readout

MAX_FILE_BYTES = 4 << 20
_SHOWN_PLACES = 6


class DirectionService(direction_pb2_grpc.DirectionServiceServicer):
    """Servicer of stored directions."""

    def __init__(self, engine: Engine, store: DirectionStore, directions: NamedDirections) -> None:
        self._engine = engine
        self._store = store
        self._directions = directions

    async def ListDirections(
        self, request: pb.ListDirectionsRequest, context: CallContext
    ) -> pb.ListDirectionsResponse:
        """List the caller's directions."""
        entries = await asyncio.to_thread(self._store.entries, principal_of(context), request.model_id)
        listed = [each for entry in entries for each in directions_to_wire(entry)]
        return pb.ListDirectionsResponse(directions=listed)

    async def GetDirection(
        self, request: pb.GetDirectionRequest, context: CallContext
    ) -> pb.GetDirectionResponse:
        """Return one direction as a file."""
        key = principal_of(context), request.model_id, request.name
        stored = await asyncio.to_thread(self._store.get, *key)
        return pb.GetDirectionResponse(file=encoded_alone(self._chosen(stored.directions, request)))

    def _chosen(self, directions: Sequence[Direction], request: pb.GetDirectionRequest) -> Direction:
        by_place = {each.about.place: each for each in directions}
        if request.place in by_place:
            return by_place[request.place]
        if request.place:
            with named("place"):
                place = self._directions.place_of(
                    request.model_id, selector_from_text("place", request.place)
                )
            return at_place(directions, request.name, place)
        if len(directions) > 1:
            places = ", ".join(list(by_place)[:_SHOWN_PLACES])
            raise invalid("place", f"'{request.name}' has {len(directions)} places; name one: {places}")
        return directions[0]

    async def StoreDirection(
        self, request: pb.StoreDirectionRequest, context: CallContext
    ) -> pb.StoreDirectionResponse:
        """Check a direction against the model, and store it."""
        principal = principal_of(context)
        direction = await asyncio.to_thread(_received, request)
        digest = await self._directions.digest_of(request.model_id)
        if direction.about.model_digest not in ("", digest):
            raise ServiceError(
                ErrorReason.DIRECTION_MISMATCH,
                f"the direction was fitted on another model than '{request.model_id}' is now; fit it again",
            )
        with named("place"):
            selector = selector_from_text("place", request.place)
            place = self._directions.place_of(request.model_id, selector)
            await self._engine.checks.preview(_reading_plan(request.model_id, selector, direction))
        stored = await self._stored(principal, request, direction.of_model(place, digest), context)
        only = [entry for entry in directions_to_wire(stored) if entry.place == place]
        return pb.StoreDirectionResponse(direction=only[0])

    async def _stored(
        self, principal: str, request: pb.StoreDirectionRequest, made: Direction, context: CallContext
    ) -> StoredDirections:
        """Store a direction; a repeated call whose first attempt stored it succeeds."""
        key = principal, request.model_id, request.name
        try:
            return await asyncio.to_thread(
                self._store.put, *key, [made], is_replacing=request.is_replacing, is_adding=True
            )
        except ServiceError as error:
            metadata = context.invocation_metadata() or ()
            if error.reason is not ErrorReason.DIRECTION_EXISTS or not is_repeated(metadata):
                raise
            stored = await asyncio.to_thread(self._store.get, *key)
            if made.digest not in [each.digest for each in stored.directions]:
                raise
            return stored

    async def DeleteDirections(
        self, request: pb.DeleteDirectionsRequest, context: CallContext
    ) -> pb.DeleteDirectionsResponse:
        """Delete the directions of one name."""
        key = principal_of(context), request.model_id, request.name
        await asyncio.to_thread(self._store.delete, *key)
        return pb.DeleteDirectionsResponse()


def _reading_plan(model_id: str, selector: Selector, direction: Direction) -> Plan:
    """Return the plan of a readout, which a direction with other channels than its place does not pass."""
    tap = TapRequest(selector, reductions=(Readout(*direction.vectors.shape),))
    return Plan(model_id, (tap,), (), DEFAULT_CHUNK_BYTES)


def _received(request: pb.StoreDirectionRequest) -> Direction:
    """Read the file of a request.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    if len(request.file) > MAX_FILE_BYTES:
        raise invalid("file", f"{len(request.file):,} bytes; at most {MAX_FILE_BYTES:,} are allowed")
    try:
        directions = decoded(request.file)
    except DamagedError as error:
        raise invalid("file", f"is no direction: {error}") from None
    if len(directions) != 1:
        raise invalid("file", f"has {len(directions)} directions; send one")
    try:  # what its JSON says must be sendable, or its owner could list nothing any more
        directions_to_wire(StoredDirections("", "", 0.0, tuple(directions)))
    except (ValueError, TypeError, DecodeError) as error:
        raise invalid("file", f"says something impossible of its direction: {str(error)[:200]}") from None
    return directions[0]
