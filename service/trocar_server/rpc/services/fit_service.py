"""`FitService`: fits of the caller's trainers: start, events, control."""

from google.protobuf.struct_pb2 import Struct

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import fit_pb2 as pb
from trocar_api.v1 import fit_pb2_grpc
from trocar_server.errors import ServiceError
from trocar_server.rpc.call.principal import principal_of
from trocar_server.rpc.call.repeated import is_repeated
from trocar_server.rpc.codec.fields import check_request_id, invalid
from trocar_server.rpc.codec.trainer_specs import fit_spec
from trocar_server.rpc.transfer.messages import CallContext, send
from trocar_server.training.files.event_log import LoggedEvent
from trocar_server.training.fit.fitting import Command, Fits

_COMMANDS = {
    pb.FIT_COMMAND_PAUSE: Command.PAUSE,
    pb.FIT_COMMAND_RESUME: Command.RESUME,
    pb.FIT_COMMAND_CANCEL: Command.CANCEL,
}


class FitService(fit_pb2_grpc.FitServiceServicer):
    """Servicer of fits."""

    def __init__(self, fits: Fits, stall_timeout_s: float) -> None:
        self._fits = fits
        self._stall_timeout_s = stall_timeout_s

    async def StartFit(self, request: pb.StartFitRequest, context: CallContext) -> pb.StartFitResponse:
        """Start a fit."""
        check_request_id(request.request_id)
        spec = fit_spec(request.spec)
        number = await self._fits.start(principal_of(context), request.trainer_id, spec, request.request_id)
        return pb.StartFitResponse(first_event_number=number)

    async def WatchFit(  # type: ignore[override]  # writes to the context
        self, request: pb.WatchFitRequest, context: CallContext
    ) -> None:
        """Stream events until the fit has ended."""
        number = request.event_number if request.HasField("event_number") else None
        if number is not None and number < 0:
            raise invalid("event_number", f"{number}; events are numbered from 0")
        async for event in self._fits.watch(principal_of(context), request.trainer_id, number):
            await send(context, [pb.WatchFitResponse(event=_message(event))], self._stall_timeout_s)

    async def ControlFit(self, request: pb.ControlFitRequest, context: CallContext) -> pb.ControlFitResponse:
        """Pause, resume or end a fit."""
        command = _COMMANDS.get(request.command)
        if command is None:
            raise invalid("command", "not set, or not known")
        try:
            state = await self._fits.control(principal_of(context), request.trainer_id, command)
        except ServiceError as error:
            has_ended = error.reason is ErrorReason.UNKNOWN_FIT and command is Command.CANCEL
            if not (has_ended and is_repeated(context.invocation_metadata() or ())):
                raise
            state = "ended"  # by an earlier attempt at this call
        return pb.ControlFitResponse(state=state)


def _message(event: LoggedEvent) -> pb.FitEvent:
    facts = Struct()
    facts.update(event.facts)
    return pb.FitEvent(number=event.number, kind=event.kind, time_s=event.time_s, facts=facts)
