"""Connection to a server, or to several: calls, retries, and exceptions for failures."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, NoReturn, TypeVar
from weakref import WeakSet

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from trocar._async.members import AsyncMembers
from trocar._async.replicas import AsyncReplicas
from trocar._async.sharing import AsyncSharing
from trocar._base.call_options import check_timeout
from trocar._base.concurrency import async_pause
from trocar._transport.attempts import Attempts
from trocar._transport.call_sockets import AsyncCallSocket
from trocar._transport.channel import (
    UNIX,
    AsyncChannel,
    AsyncInterrupts,
    ConnectOptions,
    async_answer,
    async_begun,
    async_loop_check,
    new_request_id,
    open_async_channel,
    retire,
)
from trocar._transport.early_status import async_status_kept
from trocar._transport.exchange import AsyncExchange
from trocar._transport.local import async_stop, stop_with
from trocar._transport.rpc_errors import ClientClosedError, error_from_rpc
from trocar._wire.digests import SentDigests
from trocar_api.gateways import GATEWAY_KEY, LISTS_REPLICAS, REPLICA_SERVICE
from trocar_api.repeats import REPEATED_KEY
from trocar_api.v1.dataset_pb2_grpc import DatasetServiceStub
from trocar_api.v1.direction_pb2_grpc import DirectionServiceStub
from trocar_api.v1.edit_store_pb2_grpc import EditStoreServiceStub
from trocar_api.v1.extraction_pb2_grpc import ExtractionServiceStub
from trocar_api.v1.fit_pb2_grpc import FitServiceStub
from trocar_api.v1.model_pb2_grpc import ModelServiceStub
from trocar_api.v1.prepared_pb2_grpc import PreparedCallServiceStub
from trocar_api.v1.server_pb2 import GetServerInfoRequest
from trocar_api.v1.server_pb2_grpc import ServerServiceStub
from trocar_api.v1.shared_memory_pb2_grpc import SharedMemoryServiceStub
from trocar_api.v1.trainer_pb2_grpc import TrainerServiceStub

Result = TypeVar("Result")

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from typing import Literal

    from trocar._transport.channel import (
        AsyncMethod,
        AsyncStream,
        AsyncStreamStream,
        AsyncUnaryStream,
        Reply,
        Request,
        Trailing,
    )
    from trocar._transport.local import LocalServer
    from trocar._wire.requests import ExtractCall
    from trocar_api.v1.prepared_pb2 import PrepareCallsRequest

_EXTRACT = "/trocar_api.v1.ExtractionService/Extract"
_EXTRACT_STREAM = "/trocar_api.v1.StreamService/ExtractStream"
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = 1
_GATEWAY_RETURNS_WITHIN_S = 120.0
"""How long calls wait for a gateway that has gone: a new one took 5 s, on a new node up to 50 (measured)."""
_GENERATE = "/trocar_api.v1.GenerationService/Generate"
_TRAIN = "/trocar_api.v1.TrainerService/Train"


class AsyncConnection:
    """A channel to a server and the calls on it, shared by the parts of a client.

        connection = AsyncConnection(options)
        reply = await connection.call(connection.model_service.ListModels, request)

    Of several servers it is one channel to all of them, and has a connection to each beside it.

    Attributes:
        options: Options of the connection.
        sharing: Memory shared with the server.
        sent_digests: Digests of what was sent before.
        extract: Extraction, with one message and with several; see `open`.
        generate: Generation of text, likewise.
        train: A batch of a trainer, likewise.
        is_gateway: Whether the server is a gateway of a cluster; None before the first call.
        replicas: Replicas behind the server; None if it is no gateway of a cluster, or they are not wanted.
    """

    def __init__(self, options: ConnectOptions, local: LocalServer | None = None) -> None:
        self.options = options
        self._local = local
        self._is_closed = False
        self._longest_s = options.timeout_s
        if local is not None:
            stop_with(self, local)
        self.sent_digests = SentDigests()
        self._open_channel()
        self._call_sockets: WeakSet[AsyncCallSocket] = WeakSet()
        self._members = AsyncMembers(options, AsyncConnection) if options.addresses else None
        calls_direct = options.direct and local is None and not options.target.startswith(UNIX)
        self.replicas = AsyncReplicas(self, AsyncConnection) if calls_direct else None
        self.is_gateway: bool | None = None

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, and so all parts of a client: it has a socket, maybe a token."""
        raise TypeError(
            "a client is a connection, which can be neither pickled nor copied: call trocar.connect in each "
            "process that needs one, and send it addresses and names"
        )

    def _open_channel(self) -> None:
        """Open the channel; make the stubs on it, and what is shared over it."""
        self._channel: AsyncChannel = open_async_channel(self.options)
        self._is_in_other_loop = async_loop_check(self._channel)
        self.model_service = ModelServiceStub(self._channel)
        self.direction_service = DirectionServiceStub(self._channel)
        self.edit_service = EditStoreServiceStub(self._channel)
        self.dataset_service = DatasetServiceStub(self._channel)
        self.extraction_service = ExtractionServiceStub(self._channel)
        self.server_service = ServerServiceStub(self._channel)
        self.trainer_service = TrainerServiceStub(self._channel)
        self.fit_service = FitServiceStub(self._channel)
        # No serialisers: chunks are built and read by hand, without protobuf's copies. A request
        # of one message goes as a server-streaming call: the same bytes, 0.3 ms sooner.
        extract_one: AsyncUnaryStream = self._channel.unary_stream(_EXTRACT, None, None)
        extract_many: AsyncStreamStream = self._channel.stream_stream(_EXTRACT, None, None)
        train_one: AsyncUnaryStream = self._channel.unary_stream(_TRAIN, None, None)
        train_many: AsyncStreamStream = self._channel.stream_stream(_TRAIN, None, None)
        generate_one: AsyncUnaryStream = self._channel.unary_stream(_GENERATE, None, None)
        generate_many: AsyncStreamStream = self._channel.stream_stream(_GENERATE, None, None)
        self.extract = extract_one, extract_many
        self.generate = generate_one, generate_many
        self.train = train_one, train_many
        self._extract_stream: AsyncStreamStream = self._channel.stream_stream(_EXTRACT_STREAM, None, None)
        share = SharedMemoryServiceStub(self._channel).ShareMemory
        opened = partial(AsyncExchange, share, self.options.metadata(new_request_id()))
        self.sharing = AsyncSharing(opened if self.options.shares_memory else None)
        self._prepare = PreparedCallServiceStub(self._channel).PrepareCalls

    def reopen(self, longest_s: float = 0.0) -> None:
        """Go on with another channel after an interrupted call, see Note: [Interrupted call].

        Args:
            longest_s: The longest timeout of a call that may run on it for another connection, in seconds.
        """
        if not self._is_closed:
            channel, sharing, longest_s = self._channel, self.sharing, max(longest_s, self._longest_s)
            self._open_channel()
            sharing.reset()
            retire(channel, longest_s)
            if self.replicas is not None:
                self.replicas.reopen(longest_s)

    @property
    def transport(self) -> Literal["shared_memory", "chunks"]:
        """Transport of large inputs and feature maps: memory shared with the server, or its socket."""
        return "shared_memory" if self.sharing.is_used else "chunks"

    async def close(self) -> None:
        """Close the connection; running calls are cancelled. A local server is stopped."""
        self._is_closed = True
        self.sharing.reset()
        for calls in tuple(self._call_sockets):
            calls.close()
        if self._members is not None:
            await self._members.close()
        if self.replicas is not None:
            await self.replicas.close()
        await self._channel.close()
        if self._local is not None:
            await async_stop(self._local)

    async def prepare_calls(self, request: PrepareCallsRequest) -> AsyncCallSocket:
        """Have a request prepared by a server on this host.

        Raises:
            NotPreparedError: It is not.
        """
        try:
            calls = await AsyncCallSocket.open(
                self._prepare, request, self.options.metadata(new_request_id())
            )
        except AsyncInterrupts:
            self.reopen()
            raise
        self._call_sockets.add(calls)
        return calls

    async def home(self) -> AsyncConnection:
        """Return the connection to the server that stores new objects."""
        return self if (members := await self._several()) is None else await members.home()

    async def find(self, ask: Callable[[AsyncConnection], Awaitable[Result]]) -> Result:
        """Call the server that has the named object; of several servers, one after the other."""
        return await (ask(self) if (members := await self._several()) is None else members.find(ask))

    async def everywhere(self, ask: Callable[[AsyncConnection], Awaitable[Result]]) -> list[Result]:
        """Call every server."""
        members = await self._several()
        return [await ask(self)] if members is None else await members.everywhere(ask)

    async def delete_everywhere(
        self, delete: Callable[[AsyncConnection], Awaitable[object]], absent: type[Exception]
    ) -> None:
        """Delete a named object on every server; at least one has to have it.

        Args:
            delete: Deletes it on one server.
            absent: What that raises where the server has no such object; raised if none has.
        """

        async def ask(one: AsyncConnection) -> Exception | None:
            try:
                await delete(one)
            except absent as error:  # another server may have it
                return error
            return None

        missing = await self.everywhere(ask)
        if missing[0] is not None and None not in missing:
            raise missing[0]

    async def _several(self) -> AsyncMembers | None:
        """Return the servers if there are several; the gateways of a cluster are one."""
        members = self._members
        return None if members is None or await members.are_one() else members

    def check_one(self, call: str) -> None:
        """Check that this is the connection to one server.

        Raises:
            ValueError: It is to several.
        """
        if self._members is not None:
            raise ValueError(f"{call} is for one server; connect to that one alone")

    async def is_serving(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Whether the server reports SERVING; needs no token and runs no model.

        False while models are loaded after the start, and while the server stops.

        Args:
            service: One service by its full name, for example "trocar_api.v1.ModelService"; all when empty.
            timeout_s: Overrides the client's timeout for this call, in seconds.

        Raises:
            ServerUnavailableError: No server answers.
            NotFoundError: The server has no such service.
        """
        # On the wire these are the two messages of grpc.health.v1, whose stubs would be one more dependency.
        check: AsyncMethod[StringValue, Int32Value] = self._channel.unary_unary(
            _HEALTH, StringValue.SerializeToString, Int32Value.FromString
        )
        # Not `call`, which would wait for a gateway that has gone.
        request, request_id = StringValue(value=service), new_request_id()
        metadata = self.options.metadata(request_id)
        try:
            reply: Int32Value = await self.begin(
                check, request, timeout=self.timeout(timeout_s), metadata=metadata
            )
        except grpc.RpcError as error:
            raise self.converted(error, request_id) from None
        except AsyncInterrupts:
            self.reopen()
            raise
        return reply.value == _SERVING

    async def server_id(self) -> str:
        """Return the id of the server: of its data directory, which the members of a cluster share."""
        return (await self.call(self.server_service.GetServerInfo, GetServerInfoRequest())).server_id

    async def is_replica(self, replica_id: str, timeout_s: float) -> bool:
        """Whether the server is this replica of a cluster and serves; the token is not sent."""
        check: AsyncMethod[StringValue, Int32Value] = self._channel.unary_unary(
            _HEALTH, StringValue.SerializeToString, Int32Value.FromString
        )
        request = StringValue(value=REPLICA_SERVICE + replica_id)
        try:
            reply: Int32Value = await self.begin(check, request, timeout=timeout_s)
        except (grpc.RpcError, ClientClosedError):
            return False
        return reply.value == _SERVING

    async def learn(self, stream: AsyncStream) -> None:
        """Learn from a call that has ended well whether its server is a gateway; once is enough."""
        self._learn(await stream.trailing_metadata() or ())

    def _learn(self, trailing: Trailing) -> None:
        said = [value for key, value in trailing if key == GATEWAY_KEY]
        self.is_gateway = bool(said)
        if self.replicas is not None and LISTS_REPLICAS in said:
            self.replicas.are_listed = True
        else:
            self.replicas = None

    def attempts(
        self,
        timeout_s: float = math.inf,
        *,
        resumes: bool = False,
        began_at: float | None = None,
        grpc_retries: bool = False,
    ) -> Attempts:
        """Return the attempts at a call. They wait for a gateway that has gone: it is replaced.

        Args:
            timeout_s: As in `Attempts`.
            resumes: As in `Attempts`.
            began_at: As in `Attempts`.
            grpc_retries: Whether gRPC makes the retries of each attempt.
        """
        retries = self.options.retries
        waits = self.is_gateway and retries > 0 and not self.options.is_member
        return Attempts(
            0 if grpc_retries else retries,
            timeout_s,
            returns_within_s=_GATEWAY_RETURNS_WITHIN_S if waits else 0.0,
            resumes=resumes,
            began_at=began_at,
        )

    async def nearest(
        self,
        model_id: str,
        attempt: Callable[[AsyncConnection, float], Awaitable[Result]],
        timeout_s: float,
    ) -> Result:
        """Make one attempt at a call: at a replica if one is reached, and if that fails at the server.

        Args:
            model_id: The id of a model or a trainer.
            attempt: Makes an attempt over a connection, from the seconds that are left. It may be made twice.
            timeout_s: For all of it, in seconds.
        """
        replicas, deadline = self.replicas, time.monotonic() + timeout_s
        route = None if replicas is None else await replicas.route(model_id, timeout_s)
        if route is None:
            return await attempt(self, max(0.001, deadline - time.monotonic()))
        try:
            return await attempt(route.connection, max(0.001, deadline - time.monotonic()))
        except grpc.RpcError as error:
            if self._is_closed:
                raise self._closed() from None
            if not route.falls_back(error, self.converted(error, "")):
                raise
        finally:
            route.end()
        return await attempt(self, max(0.001, deadline - time.monotonic()))

    def extract_stream(self, requests: AsyncIterator[bytes], request_id: str) -> AsyncStream:
        """Open one attempt at a stream of batches."""
        metadata = self.options.metadata(request_id)
        return async_status_kept(self.begin(self._extract_stream, requests, metadata=metadata))

    def open(
        self,
        methods: tuple[AsyncUnaryStream, AsyncStreamStream],
        request: ExtractCall,
        request_id: str,
        timeout_s: float,
    ) -> AsyncStream:
        """Open one attempt at a call.

        Args:
            methods: The method for one message, and for several.
            request: The request.
            request_id: Its id.
            timeout_s: Of the attempt, in seconds.
        """
        one, many = methods
        metadata = (*self.options.metadata(request_id), *request.headers)
        if request.fits_one_message:
            return self.begin(one, request.message(), timeout=timeout_s, metadata=metadata)
        return async_status_kept(self.begin(many, request.messages(), timeout=timeout_s, metadata=metadata))

    def begin(self, method: Callable[..., Result], request: object, **options: object) -> Result:
        """Begin a call on the channel, which another thread may close at any moment.

        Raises:
            ClientClosedError: The connection was closed.
        """
        if not self._is_closed and not self._is_in_other_loop():
            try:
                return method(request, **options)
            except ValueError:  # gRPC's own for a closed channel
                if not self._is_closed:
                    raise
        raise self._closed() from None

    async def call(
        self,
        method: AsyncMethod[Request, Reply],
        request: Request,
        timeout_s: float | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> Reply:
        """Make a call of one message each way; gRPC retries it."""
        again: tuple[tuple[str, str], ...] = ()

        async def attempt(request_id: str, left_s: float) -> Reply:
            nonlocal again
            metadata, again = (*self.options.metadata(request_id), *again), ((REPEATED_KEY, "1"),)
            call = self.begin(
                partial(async_begun, method),
                request,
                timeout=left_s,
                metadata=metadata,
                wait_for_ready=wait_for_ready,
            )
            reply: Reply
            reply, trailing = await async_answer(call)
            if self.is_gateway is None:
                self._learn(trailing)
            return reply

        return await self.repeated(attempt, timeout_s, grpc_retries=True)

    async def repeated(
        self,
        attempt: Callable[[str, float], Awaitable[Result]],
        timeout_s: float | None,
        *,
        resumes: bool = False,
        grpc_retries: bool = False,
    ) -> Result:
        """Make a call that the server applies once, with retries after a failure that may pass.

        Args:
            attempt: Makes one attempt, from the request's id and the seconds that are left.
            timeout_s: For all attempts together, in seconds; the client's timeout when None.
            resumes: As in `Attempts`.
            grpc_retries: As in `attempts`.
        """
        began_at, attempts = time.monotonic(), None
        left_s = limit_s = self.timeout(timeout_s)
        while True:
            request_id = new_request_id()
            try:
                return await attempt(request_id, left_s)
            except grpc.RpcError as error:
                problem = self.converted(error, request_id)
                if attempts is None:
                    attempts = self.attempts(
                        limit_s, resumes=resumes, began_at=began_at, grpc_retries=grpc_retries
                    )
                pause_s = attempts.pause_after(problem, error)
                if pause_s is None:
                    raise problem from None
            except AsyncInterrupts:
                self.reopen()
                raise
            await async_pause(pause_s)
            left_s = attempts.remaining_s

    def _closed(self) -> ClientClosedError:
        target = self.options.target
        if not self._is_closed and self._is_in_other_loop():
            return ClientClosedError(
                f"the client of {target} was connected in another event loop, or outside of any; each "
                "`asyncio.run` has its own: connect inside of it, "
                f"`async with trocar.aio.connect({target!r}) as client`"
            )
        return ClientClosedError(
            f"the client of {target} was closed; connect again, `client = trocar.connect({target!r})`, "
            "and make the calls inside of its `with`"
        )

    def converted(self, error: grpc.RpcError, request_id: str) -> Exception:
        """Return the exception of a failed call."""
        options = self.options
        return error_from_rpc(error, target=options.target, request_id=request_id, is_tls=bool(options.tls))

    def timeout(self, timeout_s: float | None) -> float:
        """Return the timeout of a call, in seconds; that of the connection when None."""
        if timeout_s is None:
            return self.options.timeout_s
        self._longest_s = max(self._longest_s, check_timeout(timeout_s))
        return timeout_s
