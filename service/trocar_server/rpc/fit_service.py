"""`FitService`: fits of the caller's trainers, begun, watched and controlled."""

from typing import Any

from google.protobuf.struct_pb2 import Struct

from trocar_api.v1 import fit_pb2 as pb
from trocar_api.v1 import fit_pb2_grpc
from trocar_server.rpc.fields import invalid
from trocar_server.rpc.principal import principal_of
from trocar_server.rpc.trainer_specs import fit_spec
from trocar_server.training.event_log import LoggedEvent
from trocar_server.training.fitting import Command, Fits

_COMMANDS = {
    pb.FIT_COMMAND_PAUSE: Command.PAUSE,
    pb.FIT_COMMAND_RESUME: Command.RESUME,
    pb.FIT_COMMAND_CANCEL: Command.CANCEL,
}


class FitService(fit_pb2_grpc.FitServiceServicer):
    """Answers for fits."""

    def __init__(self, fits: Fits) -> None:
        self._fits = fits

    async def StartFit(self, request: pb.StartFitRequest, context: Any) -> pb.StartFitResponse:
        """Begin a fit."""
        spec = fit_spec(request.spec)
        number = await self._fits.start(
            principal_of(context), request.trainer_id, spec, request.request_id[:64]
        )
        return pb.StartFitResponse(first_event_number=number)

    async def WatchFit(  # type: ignore[override]  # writes to the context
        self, request: pb.WatchFitRequest, context: Any
    ) -> None:
        """Stream events until the fit has ended."""
        number = request.event_number if request.HasField("event_number") else None
        async for event in self._fits.watch(principal_of(context), request.trainer_id, number):
            await context.write(pb.WatchFitResponse(event=_message(event)))

    async def ControlFit(self, request: pb.ControlFitRequest, context: Any) -> pb.ControlFitResponse:
        """Pause a fit, let it go on, or end it."""
        command = _COMMANDS.get(request.command)
        if command is None:
            raise invalid("command", "not set, or not known")
        state = await self._fits.control(principal_of(context), request.trainer_id, command)
        return pb.ControlFitResponse(state=state)


def _message(event: LoggedEvent) -> pb.FitEvent:
    facts = Struct()
    facts.update(event.facts)
    return pb.FitEvent(number=event.number, kind=event.kind, time_s=event.time_s, facts=facts)
