"""What stands for gRPC in a process without sockets: the same handlers, called on the loop of a test.

with doorway() as door:
    app = await start(config)
    call = door.begin("TrainerService/CloseTrainer", request)
    assert (await call.ended()).code == "OK"
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from tests.support.orders.seeded_loop import Watch, watching
from trocar_api.repeats import REPEATED_KEY
from trocar_api.versions import VERSION_KEY
from trocar_server import __version__

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

    from google.protobuf.message import Message

PREFIX = "/trocar_api.v1."


class Gone(grpc.aio.BaseError):
    """The caller has gone: nothing can be sent."""


@dataclass
class Answer:
    """How a call ended: its code, "OK" among them, its reason, and the messages of its reply."""

    code: str
    reason: str = ""
    message: str = ""
    replies: list[bytes] = field(default_factory=list)
    trailing: tuple[tuple[str, str | bytes], ...] = ()

    @property
    def is_ok(self) -> bool:
        return self.code == "OK"


Metadata = tuple[tuple[str, str], ...]
OWN_METADATA: Metadata = ((VERSION_KEY, __version__),)


async def _one_by_one(messages: Iterable[bytes]) -> AsyncIterator[bytes]:
    for message in messages:
        await asyncio.sleep(0)
        yield message


class Context:
    """gRPC's context of a call, as far as the server uses it."""

    def __init__(self, call: Call, metadata: Metadata) -> None:
        self._call, self._metadata = call, metadata
        self._code: Any = None

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self._metadata

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> None:
        return None

    def code(self) -> Any:
        return self._code

    def auth_context(self) -> dict[str, Any]:
        return {}

    def set_trailing_metadata(self, metadata: Any) -> None:
        self._call.answer.trailing = tuple(metadata)

    def set_compression(self, _kind: Any) -> None:
        """Send as before."""

    async def write(self, message: bytes) -> None:
        await asyncio.sleep(0)
        if self._call.is_gone:
            raise Gone
        self._call.answer.replies.append(message)
        self._call.has_reply.set()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> None:
        await asyncio.sleep(0)
        if self._call.is_gone:
            raise Gone
        self._code = code
        answer = self._call.answer
        answer.code, answer.message, answer.trailing = code.name, details, tuple(trailing_metadata)
        raise grpc.aio.AbortError("Locally aborted.")


class Call:
    """A call under way."""

    def __init__(self, work: Any, messages: AsyncIterator[bytes], metadata: Metadata) -> None:
        self.answer = Answer("")
        self.has_reply = asyncio.Event()
        self.is_gone = False
        self._messages = messages
        self.context = Context(self, metadata)
        self.task: asyncio.Task[None] = asyncio.create_task(self._run(work))

    def cancel(self) -> None:
        """Cancel the handler, as gRPC does for a call that its caller has cancelled."""
        self.task.cancel()

    def disconnect(self) -> None:
        """Lose the caller: its messages end, nothing reaches it, and later the handler is cancelled."""
        self.is_gone = True
        self._cancelling = asyncio.create_task(self._cancel_later())

    async def _cancel_later(self) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
        self.task.cancel()

    async def ended(self) -> Answer:
        """Wait for the end of the handler."""
        await asyncio.wait([self.task])
        self.answer.code = self.answer.code or "CANCELLED"  # before the handler had begun
        return self.answer

    async def _run(self, work: Any) -> None:
        try:
            handler = await work()
            is_stream = handler.response_streaming
            behaviour = handler.stream_stream if is_stream else handler.stream_unary
            reply = await behaviour(self._arriving(), self.context)
            if not is_stream:
                await self.context.write(reply)
            self.answer.code = "OK" if not self.is_gone else "GONE"
        except asyncio.CancelledError:  # also raised by the interceptor after an `abort`
            self.answer.code = self.answer.code or "CANCELLED"
        except (grpc.aio.AbortError, Gone):
            self.answer.code = self.answer.code or "GONE"

    async def _arriving(self) -> AsyncIterator[bytes]:
        async for message in self._messages:
            if self.is_gone:  # gRPC ends the stream before it cancels the handler
                return
            yield message


@dataclass
class Details:
    """What gRPC tells an interceptor of a call."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...]


class Door:
    """Stands for a `grpc.aio.Server`."""

    def __init__(self, interceptors: Sequence[Any] = (), options: Any = ()) -> None:
        self._interceptor = interceptors[0] if interceptors else None
        self._handlers: list[Any] = []
        self.calls: set[Call] = set()

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """They are the same."""

    def add_insecure_port(self, address: str) -> int:
        return 1

    async def start(self) -> None:
        """Listen."""

    async def stop(self, grace: float | None) -> None:
        """Let calls end within the grace period, and cancel the others."""
        tasks = [call.task for call in self.calls if not call.task.done()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace or 0)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)

    def begin(
        self, method: str, *messages: Message | bytes, watch: Watch | None = None, is_repeated: bool = False
    ) -> Call:
        """Begin a call of a method, `TrainerService/Train` or a whole path, under a watch."""
        metadata = OWN_METADATA + ((REPEATED_KEY, "1"),) * is_repeated
        encoded = [one if isinstance(one, bytes) else one.SerializeToString() for one in messages]
        path = method if method.startswith("/") else PREFIX + method
        with watching(watch):
            return self.open(path, _one_by_one(encoded), metadata)

    def open(self, path: str, messages: AsyncIterator[bytes], metadata: Metadata) -> Call:
        """Begin a call whose messages are still to come."""
        details = Details(path, metadata)

        async def handler() -> Any:
            if self._interceptor is None:
                return await self._handler(details)
            return await self._interceptor.intercept_service(self._handler, details)

        call = Call(handler, messages, metadata)
        self.calls.add(call)
        call.task.add_done_callback(lambda _: self.calls.discard(call))
        return call

    async def ask(self, method: str, *messages: Message | bytes, is_repeated: bool = False) -> Answer:
        """Make a call, and wait for its end."""
        return await self.begin(method, *messages, is_repeated=is_repeated).ended()

    async def _handler(self, details: Details) -> Any:
        for one in self._handlers:
            with suppress(AttributeError):
                if (handler := one.service(details)) is not None:
                    return handler
        return None


@contextmanager
def doorway() -> Iterator[list[Door]]:
    """Let servers that start inside the context have a door in place of a gRPC server."""
    doors: list[Door] = []

    def server(**options: Any) -> Door:
        doors.append(Door(**options))
        return doors[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc.aio, "server", server)
        yield doors
