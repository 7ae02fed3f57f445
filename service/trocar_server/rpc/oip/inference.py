"""Inference: from a request to the message of its reply."""

import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf.message import DecodeError

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2
from trocar_api.wire import WireError, split_field
from trocar_server.config import Limits
from trocar_server.engine.engine import Engine
from trocar_server.engine.reply_cache import KeptReply
from trocar_server.engine.request.plan import Payload, Plan
from trocar_server.engine.run.call import Call
from trocar_server.engine.schedule.admission import MethodClass, Reservation
from trocar_server.errors import ServiceError, unknown
from trocar_server.models import CatalogueEntry, HostedModel, current_flow
from trocar_server.rpc.codec.extract_requests import base_plan
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, invalid
from trocar_server.rpc.codec.replies import Parts
from trocar_server.rpc.oip.counters import VERSION, Counters, Spent
from trocar_server.rpc.oip.inference_outputs import Taps, read_outputs, write_outputs
from trocar_server.rpc.oip.inference_replies import infer_parts
from trocar_server.rpc.oip.inference_tensors import read_inputs
from trocar_server.rpc.oip.oip_messages import ModelInferRequest, ModelInferResponse
from trocar_server.rpc.oip.request_parameters import read_parameters
from trocar_server.telemetry import note_model, note_pass, pass_facts, phase

_RAW_INPUTS = 7
_MAX_HEAD_BYTES = 8 << 20
_LARGE_BYTES = 1 << 20


@dataclass(frozen=True)
class Message:
    """A `ModelInferRequest` as received.

    Attributes:
        request: Without its `raw_input_contents`.
        raw: These, as views.
        is_large: Whether parsing it would block other calls for too long.
    """

    request: Any
    raw: list[memoryview]
    is_large: bool = False


@dataclass(frozen=True)
class _Inference:
    """A parsed request."""

    plan: Plan
    payloads: list[Payload]
    taps: Taps
    batch: int
    deadline: float | None


class Inference:
    """Answers requests for inference, alone or in a stream.

    Args:
        engine: Runs them.
        counters: Counts them.
    """

    def __init__(self, engine: Engine, counters: Counters) -> None:
        self._engine = engine
        self._counters = counters

    async def infer(self, message: Message, deadline: float | None) -> Parts:
        """Run one pass and return the `ModelInferResponse`.

        Args:
            message: A `ModelInferRequest`.
            deadline: Of the call, a time of `time.monotonic()` in seconds; the request's may be earlier.

        Raises:
            ServiceError: The request is invalid, or the pass was stopped.
        """
        request = message.request
        note_model(request.model_name)
        entry = entry_of(self._engine, "model_name", request.model_name, request.model_version)
        started = time.perf_counter()
        try:
            return await self._answer(entry, message, deadline, started)
        except BaseException:
            self._counters.of(entry).failed(time.perf_counter() - started)
            raise

    async def _answer(
        self, entry: CatalogueEntry, message: Message, deadline: float | None, started: float
    ) -> Parts:
        hosted, engine = self._engine.catalogue.loaded(entry.spec.model_id), self._engine
        if message.is_large:  # health is answered meanwhile
            asked = await asyncio.to_thread(_read, message, hosted, engine.limits, deadline)
        else:
            asked = _read(message, hosted, engine.limits, deadline)
        with engine.admission.admit(MethodClass.EXTRACT, current_flow()) as reservation:
            parts, spent = await self._run(message.request, asked, reservation, started)
        self._counters.of(entry).succeeded(asked.batch, spent)
        return parts

    async def _run(
        self, request: Any, asked: _Inference, reservation: Reservation, started: float
    ) -> tuple[Parts, Spent]:
        byte_count = sum(payload.nbytes for payload in asked.payloads)

        async def receive(reservation: Reservation) -> list[Payload]:
            reservation.grow(byte_count)
            return asked.payloads

        call = Call(asked.plan, byte_count, receive, phase, asked.deadline)
        extraction = await self._engine.serve(call, reservation)
        assert not isinstance(extraction, KeptReply)  # only calls with a question are looked up
        note_pass(pass_facts(asked.plan, extraction))
        has_run = time.perf_counter()
        response = ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
        payloads = write_outputs(response, asked.taps, extraction)
        for name in ("numerics", "engine"):
            response.parameters[name].string_param = str(getattr(extraction.report, name))
        parts = infer_parts(response, payloads)
        # The part that is neither waiting nor computing: tensors are made from the inputs' bytes.
        preparing = max(0.0, has_run - started - extraction.queue_s - extraction.compute_s)
        spent = Spent(
            extraction.queue_s,
            preparing,
            extraction.compute_s,
            time.perf_counter() - has_run,
            extraction.report.is_cached,
        )
        return parts, spent


def read_infer_request(data: bytes) -> Message:
    """Split and parse a `ModelInferRequest`.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, the bytes are not such a message; `REQUEST_TOO_LARGE`, the part
            besides raw contents is too large.
    """
    try:
        head, raw = split_field(data, _RAW_INPUTS)
        if len(head) > _MAX_HEAD_BYTES:
            raise ServiceError(
                ErrorReason.REQUEST_TOO_LARGE,
                f"the request has {len(head):,} bytes beside raw_input_contents, the limit is "
                f"{_MAX_HEAD_BYTES:,}; send tensors there",
            )
        return Message(ModelInferRequest.FromString(head), raw, len(data) > _LARGE_BYTES)
    except (WireError, DecodeError) as error:
        problem = f"the message is not a ModelInferRequest: {error}"
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, problem) from None


def _read(message: Message, hosted: HostedModel, limits: Limits, deadline: float | None) -> _Inference:
    request = message.request
    if len(request.id) > MAX_TEXT_CHARACTERS:
        raise invalid("id", f"over {MAX_TEXT_CHARACTERS} characters")
    flag_names = [spec.name for spec in hosted.signature.inputs if spec.is_flag]
    parameters = read_parameters(request.parameters, flag_names)
    if parameters.timeout_s is not None:
        own = time.monotonic() + parameters.timeout_s
        deadline = own if deadline is None else min(own, deadline)
    taps = read_outputs(request, limits)
    # The equivalent request of our own service, so that both get the same checks.
    same = extraction_pb2.ExtractRequest(
        model_id=request.model_name,
        taps=[tapped.message for tapped in taps.tapped],
        execution=parameters.execution,
    )
    plan = base_plan(same, limits)
    pairs = zip(plan.taps, taps.tapped, strict=True)
    named = tuple(replace(tap, takes_wide_unsigned=True, suffix=tapped.suffix) for tap, tapped in pairs)
    read = read_inputs(request, message.raw, hosted, limits)
    shape = request.inputs[0].shape
    batch = shape[0] if shape else 1
    plan = replace(plan, taps=named, inputs=(*read.inputs, *parameters.flags), unprocessed=read.texts)
    return _Inference(plan, read.payloads, taps, batch, deadline)


def entry_of(engine: Engine, field: str, name: str, version: str) -> CatalogueEntry:
    """Return the entry of a model that a request names.

    Raises:
        ServiceError: `UNKNOWN_MODEL`, there is none, or not of this version.
    """
    if not name:
        raise invalid(field, "is required")
    note_model(name)
    entry = engine.catalogue.get(name)
    if version not in ("", VERSION):
        raise unknown(
            ErrorReason.UNKNOWN_MODEL,
            "version",
            version[:80],
            (),
            f"model '{name}' has version {VERSION} only",
        )
    return entry
