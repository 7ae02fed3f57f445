"""What a call's end is called."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc  # type: ignore[attr-defined]  # has no stub

from trocar_server.rpc.call.interceptor import CallInterceptor
from trocar_server.telemetry import CallRecord, PassFacts

METHOD = "/a.Service/Method"


@dataclass
class Witness:
    wants_phases = False
    ends: list[CallRecord] = field(default_factory=list)

    def started(self, call: CallRecord) -> None: ...

    def passed(self, call: CallRecord, facts: PassFacts) -> None: ...

    def finished(self, call: CallRecord) -> None:
        self.ends.append(call)


@dataclass
class Context:
    remaining_s: float | None = None
    set_code: grpc.StatusCode | None = None

    def time_remaining(self) -> float | None:
        return self.remaining_s

    def code(self) -> grpc.StatusCode | None:
        return self.set_code

    def invocation_metadata(self) -> None: ...

    def peer(self) -> str:
        return "ipv4:127.0.0.1:5"


async def end_of(behaviour: Any, context: Context, metadata: Any = ()) -> CallRecord:
    """Make one call of a handler behind the interceptor and return its record."""
    witness = Witness()
    details: Any = SimpleNamespace(method=METHOD, invocation_metadata=metadata)

    async def continuation(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(behaviour)

    interceptor = CallInterceptor(log=SimpleNamespace(info=lambda *_, **__: None), observer=witness)

    async def messages() -> AsyncIterator[bytes]:
        yield b"12345"

    handler = await interceptor.intercept_service(continuation, details)
    with suppress(asyncio.CancelledError):
        await handler.stream_unary(messages(), context)
    (record,) = witness.ends
    return record


async def cancelled(request: bytes, context: Any) -> bytes:
    raise asyncio.CancelledError


async def answered(request: bytes, context: Any) -> bytes:
    return b"123"


@pytest.mark.parametrize(
    ("remaining_s", "code"),
    [
        (None, "CANCELLED"),
        (30.0, "CANCELLED"),
        (0.0, "DEADLINE_EXCEEDED"),
        (0.001, "DEADLINE_EXCEEDED"),
    ],
)
async def test_a_call_that_the_deadline_ends_is_not_called_cancelled(
    remaining_s: float | None, code: str
) -> None:
    assert (await end_of(cancelled, Context(remaining_s))).code == code


@pytest.mark.parametrize(
    "error",
    [cygrpc.ExecuteBatchError, grpc.aio.InternalError, grpc.aio.UsageError, cygrpc._ServerStoppedError],
)
async def test_a_caller_that_leaves_while_its_reply_is_written_is_no_defect(error: type[Exception]) -> None:
    async def leaves(request: bytes, context: Any) -> bytes:
        raise error("the call has ended")

    record = await end_of(leaves, Context())
    assert (record.code, record.reason) == ("CANCELLED", "")


@pytest.mark.parametrize("set_code", [grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OK, None])
async def test_a_code_that_the_handler_sets_counts(set_code: grpc.StatusCode | None) -> None:
    record = await end_of(answered, Context(set_code=set_code))
    assert record.code == (set_code or grpc.StatusCode.OK).name
    assert (record.bytes_in, record.bytes_out, record.messages_in, record.messages_out) == (5, 3, 1, 1)


@pytest.mark.parametrize(
    ("sent", "is_kept"),
    [("mine-1", True), ("", False), ("two\nlines", False), ("x" * 1000, True), (b"bytes", False)],
)
async def test_a_request_id_is_the_callers_where_it_is_one(sent: Any, is_kept: bool) -> None:
    record = await end_of(answered, Context(), (("x-request-id", sent),))
    assert (record.request_id == sent[:64]) == is_kept
    assert 0 < len(record.request_id) <= 64
    assert record.request_id.isprintable()


async def test_of_several_trace_contexts_the_last_counts() -> None:
    first, last = (f"00-{digit * 32}-{digit * 16}-01" for digit in "12")
    record = await end_of(answered, Context(), (("traceparent", first), ("traceparent", last)))
    assert record.traceparent == last
    assert record.trace_id == "2" * 32
