"""Gateway: one address for the clients of a cluster; forwards the messages of every call as bytes.

Of a call only the id of its model or trainer is read. Metadata, deadline, cancellation, messages of both
directions, trailing metadata and status pass through; tokens are checked by the replica, as by any server.

# Note: [Calls that are sent again]
A call may be sent to another replica if no byte of a reply has gone to its caller, every message of the
caller is still kept, and the method changes nothing, or the replica refused the call because it drains, or
there was no connection to send it on: of a node that is lost the reports stay for some seconds.
Everything else fails with `UNAVAILABLE`, as with a server that dies; the client repeats its steps itself,
with their numbers.
"""

import asyncio
import time
import zlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc

from trocar_api.gateways import GATEWAY_KEY, LISTS_REPLICAS
from trocar_api.reasons import ErrorReason
from trocar_api.repeats import REPEATED_KEY
from trocar_api.v1 import model_pb2 as pb
from trocar_api.v1.trainer_pb2 import GetTrainerRequest, ListTrainersResponse
from trocar_server.cluster.caller_messages import CallerMessages
from trocar_server.cluster.routes import Subject, route_of
from trocar_server.cluster.routing import Replica, ReplicaTable
from trocar_server.errors import TRAINER_MOVED, ServiceError, busy, nearest
from trocar_server.rpc.call.drain import is_pending_work
from trocar_server.rpc.call.forwarded import caller_metadata, without_claims
from trocar_server.rpc.call.repeated import is_repeated
from trocar_server.rpc.call.status import DETAILS_KEY, STATUS_CODES, status_details, status_message
from trocar_server.rpc.transfer.messages import CallContext, compress_if_asked

_LIST_REPLICAS = "/trocar_api.v1.ModelService/ListReplicas"
_LIST_MODELS = "/trocar_api.v1.ModelService/ListModels"
_LIST_TRAINERS = "/trocar_api.v1.TrainerService/ListTrainers"
_CREATE_TRAINER = "/trocar_api.v1.TrainerService/CreateTrainer"
_GET_TRAINER = "/trocar_api.v1.TrainerService/GetTrainer"
_GET_MODEL = "/trocar_api.v1.ModelService/GetModel"
_PROBE_S = 10.0
_MAX_HOMES = 100_000
_FIRST_PAUSE_S, _LOOK_AGAIN_S = 0.25, 1.0
"""Pauses between two looks for a trainer on its way to another replica: each asks every replica."""
_TAKEN_WITHIN_S = 10.0
"""Seconds in which another replica hosts the published models of one that has ended; each looks every 2 s."""
_LIST_VALID_S = 5.0
"""How long a client may call the replicas of a list without asking again, in seconds."""

Metadata = tuple[tuple[str, str | bytes], ...]
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_metadata_size", 64 << 10),
    ("grpc.absolute_max_metadata_size", 64 << 10),
    # A node that loses its power closes no connection. Servers allow pings every 10 s.
    ("grpc.keepalive_time_ms", 11_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
)


class Channels:
    """Connections to replicas, by address; on the wire all four kinds of method are streams.

    # Note: [Who closes a connection]
    Nobody: each attempt holds its channel, and gRPC closes one that nothing holds any more. `Channel.close`
    would cancel calls under way, after its grace or (before grpcio 1.83) as soon as they had sent their
    message; a forwarded call that is cancelled here ends without a status, and its caller waits until the
    deadline. A connection whose replica has died ends by itself, and its calls with it.
    """

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    def at(self, address: str) -> grpc.aio.Channel:
        """Return the connection to a replica, for as long as the caller holds it."""
        channel = self._channels.get(address)
        if channel is None:
            channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
            self._channels[address] = channel
        return channel

    def keep_only(self, addresses: set[str]) -> None:
        """Let go of the connections to other addresses; see Note: [Who closes a connection]."""
        for address in self._channels.keys() - addresses:
            del self._channels[address]


@dataclass
class Gateway:
    """Forwards calls. Belongs to one event loop.

    Args:
        table: The replicas.
        hold_s: The longest time that a call waits for a replica, in seconds.
        message_timeout_s: The longest wait for the first message of a call, in seconds.
        lists_replicas: Whether clients learn the addresses of replicas, to call them directly.
        key: The cluster's key, which proves to replicas that a caller is what the gateway says.
    """

    table: ReplicaTable
    hold_s: float = 60.0
    message_timeout_s: float = 600.0
    lists_replicas: bool = True
    key: str = ""
    channels: Channels = field(default_factory=Channels)
    work_count: int = 0
    """Running calls that a gateway waits for before it stops, as a replica that drains does."""
    _homes: "OrderedDict[tuple[Subject, str], str]" = field(default_factory=OrderedDict)
    """Ids of the replicas where trainers and published models were found."""

    def update(self, reports: Iterable[Mapping[str, Any]], wanted: Mapping[str, int]) -> None:
        """Take the latest reports, as `ReplicaTable.update`; calls under way end where they began."""
        self.table.update(reports, wanted)
        self.channels.keep_only(self.table.addresses())

    def handler(self) -> grpc.GenericRpcHandler:
        """Handler of every method."""
        return _Handler(self)

    async def forward(self, method: str, requests: AsyncIterator[bytes], context: CallContext) -> None:
        """Forward one call."""
        messages = CallerMessages(requests)
        is_work = is_pending_work(method)
        self.work_count += is_work
        try:
            await _ForwardedCall(self, method, context, messages).run()
        except ServiceError as error:
            details = ((DETAILS_KEY, status_details(error, "")),)
            await context.abort(STATUS_CODES[error.reason], status_message(error), trailing_metadata=details)
        finally:
            self.work_count -= is_work
            messages.close()

    def home(self, subject: Subject, name: str) -> str | None:
        """Return the id of the replica where a trainer or a published model was found before."""
        return self._homes.get((subject, name))

    def forget(self, subject: Subject, name: str) -> None:
        """Forget where a trainer or a published model was: it is no longer there."""
        self._homes.pop((subject, name), None)

    def remember(self, subject: Subject, name: str, replica_id: str) -> None:
        """Remember where a trainer or a published model is."""
        self._homes[subject, name] = replica_id
        if len(self._homes) > _MAX_HOMES:
            self._homes.popitem(last=False)


class _Handler(grpc.GenericRpcHandler):
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = str(handler_call_details.method)
        return grpc.stream_stream_rpc_method_handler(partial(self._gateway.forward, method))


@dataclass
class _ForwardedCall:
    """One call, from its first message to its status."""

    gateway: Gateway
    method: str
    context: CallContext
    messages: CallerMessages
    has_replied: bool = False
    tried: list[Replica] = field(default_factory=list)
    is_from_memory: bool = False
    """Whether the replica was found for an earlier call: its model may be elsewhere by now."""
    has_looked_again: bool = False
    home_left_at: float | None = None
    """When the replica that had the model was first missing."""

    def __post_init__(self) -> None:
        self.route = route_of(self.method)
        self.metadata = _passed_on(self.gateway.key, self.context)
        remaining_s: float | None = self.context.time_remaining()
        now, hold_s = time.monotonic(), self.gateway.hold_s
        self.deadline = None if remaining_s is None else now + remaining_s
        self.give_up = now + (hold_s if remaining_s is None else min(hold_s, remaining_s))

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the caller's deadline."""
        return None if self.deadline is None else max(0.001, self.deadline - time.monotonic())

    async def run(self) -> None:
        """Forward the call, and again if that is allowed."""
        route = self.route
        if route.refusal:
            raise ServiceError(
                ErrorReason.UNIMPLEMENTED,
                f"a cluster has no {self.method.rpartition('/')[2]}: {route.refusal}",
            )
        compress_if_asked(self.context)
        self.context.set_trailing_metadata(self._hint())
        message = await self._first_message()
        if self.method in _MERGED:
            await self.context.write(await self._merged(message))
            return
        name = route.read(message)
        if self.method == _LIST_REPLICAS:
            await self.context.write(await self._listed(name, message))
            return
        while True:
            replica = await self._replica(name, message)
            problem = await self._attempt(replica)
            if problem is None:
                return
            if _has_moved(problem) or _is_unknown_model(problem):
                self.gateway.forget(route.subject_of(name), name)
            if not self._may_repeat(problem):
                await self._fail(problem)

    async def _first_message(self) -> bytes:
        try:
            async with asyncio.timeout(self.gateway.message_timeout_s):
                return await self.messages.first() or b""
        except TimeoutError:
            raise ServiceError(
                ErrorReason.DEADLINE_EXCEEDED, "the message of the call did not come in time"
            ) from None

    async def _attempt(self, replica: Replica) -> grpc.aio.AioRpcError | None:
        """Forward the call to a replica; returns its failure, None if it succeeded."""
        self.tried.append(replica)
        replica.sent_count += 1
        if len(self.tried) > 1 and not is_repeated(self.metadata):
            self.metadata = (*self.metadata, (REPEATED_KEY, "1"))
        replica.open_count += 1
        try:
            return await self._exchange(self.gateway.channels.at(replica.address))
        finally:  # also where the caller leaves before the call has begun
            replica.open_count -= 1

    async def _exchange(self, channel: grpc.aio.Channel) -> grpc.aio.AioRpcError | None:
        """Send the caller's messages and pass on the replies; returns the failure, if any."""
        call, sending = await self._begin(channel)
        try:
            await self._pass_on(call)
            self.context.set_trailing_metadata((*(await call.trailing_metadata() or ()), *self._hint()))
        except grpc.aio.AioRpcError as error:
            return error
        finally:
            call.cancel()
            if sending is not None:
                sending.cancel()
        return None

    async def _pass_on(self, call: Any) -> None:
        """Send the replies to the caller; the last one together with a status that follows at once.

        So a call with one reply can be sent again as long as its replica has not said that it succeeded.
        """
        held: bytes | None = None
        while (reply := await call.read()) is not grpc.aio.EOF:
            if held is not None:
                await self._write(held)
            held = reply
            if not self.route.ends_with_reply:
                await self._write(reply)
                held = None
        if held is not None:
            await self._write(held)

    async def _write(self, reply: bytes) -> None:
        self.has_replied = True
        await self.context.write(reply)

    async def _begin(self, channel: grpc.aio.Channel) -> "tuple[Any, asyncio.Future[None] | None]":
        """Begin the call to a replica; returns it, and the task that sends its messages, if several."""
        if await self.messages.is_single():
            message = await self.messages.first() or b""
            return _call_once(channel, self.method, self.metadata, self.remaining_s, message), None
        call: Any = channel.stream_stream(self.method)(metadata=self.metadata, timeout=self.remaining_s)
        return call, asyncio.ensure_future(self.messages.send_to(call))

    def _may_repeat(self, problem: grpc.aio.AioRpcError) -> bool:
        """Whether to send the call to another replica; see Note: [Calls that are sent again]."""
        replica = self.tried[-1]
        if is_refused := _is_draining(problem) or _has_moved(problem):
            replica.is_draining = replica.is_draining or _is_draining(problem)
        elif _is_broken(problem):
            replica.suspect()
        elif _is_unknown_model(problem) and self.is_from_memory and not self.has_looked_again:
            is_refused = self.has_looked_again = True
        else:
            return False
        is_allowed = is_refused or self.route.is_repeatable or _is_unsent(problem)
        can_repeat = self.messages.can_repeat and not self.has_replied
        return is_allowed and can_repeat

    async def _fail(self, problem: grpc.aio.AioRpcError) -> None:
        if _has_moved(problem):  # with more bytes than are kept: the client sends them again
            await self.context.abort(grpc.StatusCode.UNAVAILABLE, "the trainer has moved to another replica")
        trailing = tuple(problem.trailing_metadata() or ())
        await self.context.abort(problem.code(), problem.details() or "", trailing_metadata=trailing)

    async def _replica(self, name: str, message: bytes) -> Replica:
        """Return the replica for the next attempt; waits for one.

        Raises:
            ServiceError: `SERVER_BUSY`, none was ready in time.
        """
        pause_s = _FIRST_PAUSE_S
        while True:
            result = await self._find(name, message)
            if result is not None:
                return result
            left_s = self.give_up - time.monotonic()
            if left_s <= 0:
                what = f"model '{name}'" if self.route.subject is Subject.MODEL else "this call"
                raise busy(f"no replica for {what} is ready; try again later", None)
            await self.gateway.table.changed(min(left_s, pause_s))
            pause_s = min(2 * pause_s, _LOOK_AGAIN_S)

    async def _find(self, name: str, message: bytes) -> Replica | None:
        """Return a replica that may answer, or None."""
        table, subject = self.gateway.table, self.route.subject
        if self.method == _CREATE_TRAINER and name in table.model_ids:
            return self._maker(table.serving(name), message)
        if subject is Subject.ANY or not name or name in table.model_ids:
            broken = [replica for replica in self.tried if replica.is_suspect]
            return table.least_waiting(name if subject is Subject.MODEL else "", broken)
        return await self._owner(self.route.subject_of(name), name)

    def _maker(self, serving: list[Replica], message: bytes) -> Replica | None:
        """Return the replica that makes a trainer: the same one if it is asked for twice.

        One that says that another replica has made the trainer is followed by the others in turn.
        """
        left = [replica for replica in serving if replica not in self.tried and not replica.is_suspect]
        if not left:
            self.tried.clear()
            return None
        return max(left, key=lambda replica: zlib.crc32(replica.replica_id.encode() + message))

    async def _owner(self, subject: Subject, name: str) -> Replica | None:
        """Return the replica that has a trainer or a published model; any if none has it."""
        table, home = self.gateway.table, self.gateway.home(subject, name)
        if home is not None:
            result = table.at(home)
            if result is not None:  # one that drains still answers calls that only look
                self.is_from_memory = True
                is_no_use = result in self.tried and (result.is_draining or result.is_suspect)
                return None if is_no_use else result
        self.is_from_memory = False
        if subject is Subject.TRAINER:
            method, message = _GET_TRAINER, GetTrainerRequest(trainer_id=name).SerializeToString()
        else:
            method, message = _GET_MODEL, pb.GetModelRequest(model_id=name).SerializeToString()
        replicas, is_complete = table.all(), table.is_complete
        answers = await asyncio.gather(*(self._ask(replica, method, message) for replica in replicas))
        for replica, answer in zip(replicas, answers, strict=True):
            if isinstance(answer, bytes) or _is_damaged(answer):
                self.gateway.remember(subject, name, replica.replica_id)
                return replica
        failures = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        is_lost = any(self._has_no_answer(failure) or _has_moved(failure) for failure in failures)
        if is_lost or not is_complete or (home is not None and self._is_being_taken(subject)):
            return None
        self.gateway.forget(subject, name)
        near = nearest(name, table.model_ids, 1)  # its replica names it in the error
        return table.least_waiting("".join(near)) or table.least_waiting()

    def _is_being_taken(self, subject: Subject) -> bool:
        """Whether another replica may yet take a published model from the one that had it and has ended."""
        if self.home_left_at is None:
            self.home_left_at = time.monotonic()
        return subject is Subject.MODEL and time.monotonic() - self.home_left_at < _TAKEN_WITHIN_S

    def _has_no_answer(self, problem: grpc.aio.AioRpcError) -> bool:
        """Whether a replica that was asked is gone or silent, before the deadline of the caller itself."""
        is_over = problem.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not _details(problem)
        has_time = self.deadline is None or time.monotonic() < self.deadline
        return problem.code() is grpc.StatusCode.UNAVAILABLE or (is_over and has_time)

    async def _ask(self, replica: Replica, method: str, message: bytes) -> bytes | grpc.aio.AioRpcError:
        """Ask one replica on behalf of the caller; returns its reply, or its failure."""
        timeout_s = min(_PROBE_S, self.remaining_s or _PROBE_S)
        channel = self.gateway.channels.at(replica.address)
        call = _call_once(channel, method, self.metadata, timeout_s, message)
        try:
            reply = await call.read()
            return reply if isinstance(reply, bytes) else b""
        except grpc.aio.AioRpcError as error:
            return error
        finally:
            call.cancel()

    def _hint(self) -> Metadata:
        """Metadata by which a client learns that this is a gateway, and whether it may ask for replicas."""
        return ((GATEWAY_KEY, LISTS_REPLICAS if self.gateway.lists_replicas else "0"),)

    async def _listed(self, name: str, message: bytes) -> bytes:
        """Return the replicas that may be called directly, if one of them says that the caller may know."""
        asked = await self._find(name, message)
        if asked is None:
            raise busy("no replica is ready; try again later", None)
        answer = await self._ask(asked, self.method, message)
        if isinstance(answer, grpc.aio.AioRpcError):
            await self._fail(answer)
            return b""
        if not self.gateway.lists_replicas:
            return answer
        table = self.gateway.table
        replicas = table.serving(name) if name in table.model_ids else [asked]
        listed = [
            pb.Replica(
                address=replica.client_address, waiting_s=replica.waiting_s, replica_id=replica.replica_id
            )
            for replica in replicas
            if not replica.is_draining
        ]
        return pb.ListReplicasResponse(replicas=listed, valid_s=_LIST_VALID_S).SerializeToString()

    async def _merged(self, message: bytes) -> bytes:
        """Return one list of what all replicas have."""
        answers = await asyncio.gather(
            *(self._ask(replica, self.method, message) for replica in self.gateway.table.serving())
        )
        replies = [answer for answer in answers if isinstance(answer, bytes)]
        failures = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        for failure in failures:
            if not self._has_no_answer(failure):
                await self._fail(failure)
        if not replies:
            raise busy("no replica answers; try again later", None)
        return _MERGED[self.method](replies)


def _call_once(
    channel: grpc.aio.Channel, method: str, metadata: Metadata, timeout_s: float | None, message: bytes
) -> Any:
    """Begin a call with one message: sent with everything else in one step, where a stream takes four."""
    begin: Any = channel.unary_stream(method)
    return begin(message, metadata=metadata, timeout=timeout_s)


def _passed_on(key: str, context: CallContext) -> Metadata:
    """Metadata of a caller without that of its connection, and who it is."""
    metadata = context.invocation_metadata() or ()
    own = [
        (name, value)
        for name, value in without_claims(metadata)
        if name not in ("user-agent", REPEATED_KEY) and not name.startswith("grpc-")
    ]
    repeated = ((REPEATED_KEY, "1"),) if is_repeated(metadata) else ()
    return (*own, *repeated, *caller_metadata(key, context))


def _is_draining(problem: grpc.aio.AioRpcError) -> bool:
    """Whether a replica refused a call because it drains."""
    details = _details(problem)
    return problem.code() is grpc.StatusCode.UNAVAILABLE and ErrorReason.SERVER_DRAINING.encode() in details


def _has_moved(problem: grpc.aio.AioRpcError) -> bool:
    """Whether a trainer is at another replica, or on its way there."""
    return _is_not_found(problem, TRAINER_MOVED)


def _is_damaged(problem: grpc.aio.AioRpcError) -> bool:
    """Whether a replica has the trainer, and cannot restore it."""
    return problem.code() is grpc.StatusCode.DATA_LOSS


def _is_unknown_model(problem: grpc.aio.AioRpcError) -> bool:
    """Whether a replica has no such model, or no longer."""
    return _is_not_found(problem, ErrorReason.UNKNOWN_MODEL)


def _is_not_found(problem: grpc.aio.AioRpcError, reason: str) -> bool:
    return problem.code() is grpc.StatusCode.NOT_FOUND and reason.encode() in _details(problem)


def _is_broken(problem: grpc.aio.AioRpcError) -> bool:
    """Whether the connection broke: no decision of the replica, whose statuses carry details."""
    if _details(problem):
        return False
    # gRPC (1.81) reports for a stream that it can no longer write to: INTERNAL, "from Core".
    is_from_core = problem.code() is grpc.StatusCode.INTERNAL and "from Core" in (problem.details() or "")
    return is_from_core or problem.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def _is_unsent(problem: grpc.aio.AioRpcError) -> bool:
    """Whether there was no connection to a replica, so that it has nothing of the call."""
    return _is_broken(problem) and (problem.details() or "").startswith("failed to connect to all addresses")


def _details(problem: grpc.aio.AioRpcError) -> bytes:
    details = dict(problem.trailing_metadata() or ()).get(DETAILS_KEY, b"")
    return details if isinstance(details, bytes) else b""


def _merged_models(replies: Sequence[bytes]) -> bytes:
    models = {
        model.model_id: model for reply in replies for model in pb.ListModelsResponse.FromString(reply).models
    }
    merged = pb.ListModelsResponse(models=[models[model_id] for model_id in sorted(models)])
    return merged.SerializeToString()


def _merged_trainers(replies: Sequence[bytes]) -> bytes:
    trainers = [trainer for reply in replies for trainer in ListTrainersResponse.FromString(reply).trainers]
    trainers.sort(key=lambda trainer: trainer.created_at_s)
    return ListTrainersResponse(trainers=trainers).SerializeToString()


_MERGED: dict[str, Callable[[Sequence[bytes]], bytes]] = {
    _LIST_MODELS: _merged_models,
    _LIST_TRAINERS: _merged_trainers,
}
"""Methods that every replica is asked, and how one reply is made of theirs."""
