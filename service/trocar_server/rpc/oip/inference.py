"""One inference: a request in, the message of its reply out."""

import time
from dataclasses import dataclass, replace
from typing import Any

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import extraction_pb2
from trocar_server.engine.engine import Engine
from trocar_server.engine.plan import Payload, Payloads, Plan
from trocar_server.engine.work import Prepared
from trocar_server.errors import unknown
from trocar_server.models import Entry
from trocar_server.rpc.fields import MAX_TEXT_CHARACTERS, invalid
from trocar_server.rpc.oip.counters import VERSION, Counters, Spent
from trocar_server.rpc.oip.messages import ModelInferResponse
from trocar_server.rpc.oip.outputs import Taps, read_outputs, write_outputs
from trocar_server.rpc.oip.parameters import read_parameters
from trocar_server.rpc.oip.replies import infer_parts
from trocar_server.rpc.oip.tensors import read_inputs
from trocar_server.rpc.replies import Parts
from trocar_server.rpc.requests import base_plan


@dataclass(frozen=True)
class _Asked:
    """A request, read."""

    plan: Plan
    payloads: list[Payload]
    taps: Taps
    batch: int
    deadline: float | None


class Inference:
    """Answers requests for inference, the same way whether they come alone or in a stream.

    Args:
        engine: Runs them.
        counters: Counts them.
    """

    def __init__(self, engine: Engine, counters: Counters) -> None:
        self._engine = engine
        self._counters = counters

    async def infer(self, request: Any, deadline: float | None) -> Parts:
        """Run one pass and return the `ModelInferResponse`.

        Args:
            request: A `ModelInferRequest`.
            deadline: Of the call, a time of `time.monotonic()` in seconds; the request's may be earlier.

        Raises:
            ServiceError: Whatever is wrong with the request, and what stops a pass.
        """
        entry = entry_of(self._engine, "model_name", request.model_name, request.model_version)
        started = time.perf_counter()
        try:
            return await self._answer(entry, request, deadline, started)
        except BaseException:
            self._counters.of(entry).failed(time.perf_counter() - started)
            raise

    async def _answer(self, entry: Entry, request: Any, deadline: float | None, started: float) -> Parts:
        asked = self._read(request, deadline)
        await self._engine.check(asked.plan, asked.deadline)
        prepared = await self._engine.prepare(asked.plan, Payloads(asked.payloads))
        parts, spent = await self._run(request, asked, prepared, started)
        self._counters.of(entry).succeeded(asked.batch, spent)
        return parts

    async def _run(
        self, request: Any, asked: _Asked, prepared: Prepared, started: float
    ) -> tuple[Parts, Spent]:
        is_ready = time.perf_counter()
        extraction = await self._engine.extract(prepared, asked.deadline)
        has_run = time.perf_counter()
        response = ModelInferResponse(model_name=request.model_name, model_version=VERSION, id=request.id)
        payloads = write_outputs(response, asked.taps, extraction)
        for name in ("numerics", "engine"):
            response.parameters[name].string_param = str(getattr(extraction.report, name))
        parts = infer_parts(response, payloads)
        # What of the pass is neither waiting nor computing: making tensors of the inputs' bytes.
        preparing = max(0.0, has_run - is_ready - extraction.queue_s - extraction.compute_s)
        spent = Spent(
            extraction.queue_s,
            is_ready - started + preparing,
            extraction.compute_s,
            time.perf_counter() - has_run,
            extraction.report.is_cached,
        )
        return parts, spent

    def _read(self, request: Any, deadline: float | None) -> _Asked:
        if len(request.id) > MAX_TEXT_CHARACTERS:
            raise invalid("id", f"over {MAX_TEXT_CHARACTERS} characters")
        parameters = read_parameters(request.parameters)
        if parameters.timeout_s is not None:
            own = time.monotonic() + parameters.timeout_s
            deadline = own if deadline is None else min(own, deadline)
        limits = self._engine.limits
        hosted = self._engine.catalogue.loaded(request.model_name)
        taps = read_outputs(request, limits)
        # The request of our own service with the same meaning, so that both are checked alike.
        same = extraction_pb2.ExtractRequest(
            model_id=request.model_name,
            taps=[tapped.message for tapped in taps.tapped],
            execution=parameters.execution,
        )
        plan = base_plan(same, limits)
        pairs = zip(plan.taps, taps.tapped, strict=True)
        named = tuple(replace(tap, takes_wide_unsigned=True, suffix=tapped.suffix) for tap, tapped in pairs)
        inputs, payloads = read_inputs(request, hosted, limits)
        shape = request.inputs[0].shape
        batch = shape[0] if shape else 1
        return _Asked(replace(plan, taps=named, inputs=inputs), payloads, taps, batch, deadline)


def entry_of(engine: Engine, field: str, name: str, version: str) -> Entry:
    """Return the entry of a model that a request names.

    Raises:
        ServiceError: `UNKNOWN_MODEL`, there is none, or not of this version.
    """
    if not name:
        raise invalid(field, "is required")
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
