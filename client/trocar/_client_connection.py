"""Part of the sync client: generated from _aio_connection.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from trocar import _from_wire
from trocar._channel import (
    ConnectOptions,
    SyncChannel,
    check_timeout,
    new_request_id,
    open_sync_channel,
)
from trocar._client_members import Members
from trocar._client_sharing import Sharing
from trocar._exchange import SyncExchange
from trocar._local import stop_with, sync_stop
from trocar._rpc_errors import error_from_rpc
from trocar_api.v1 import model_pb2
from trocar_api.v1.dataset_pb2_grpc import DatasetServiceStub
from trocar_api.v1.edit_store_pb2_grpc import EditStoreServiceStub
from trocar_api.v1.extraction_pb2_grpc import ExtractionServiceStub
from trocar_api.v1.fit_pb2_grpc import FitServiceStub
from trocar_api.v1.model_pb2_grpc import ModelServiceStub
from trocar_api.v1.server_pb2_grpc import ServerServiceStub
from trocar_api.v1.shared_memory_pb2_grpc import SharedMemoryServiceStub
from trocar_api.v1.trainer_pb2_grpc import TrainerServiceStub

Found = TypeVar("Found")

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Self

    from trocar._channel import Reply, Request, SyncDownload, SyncMethod, SyncStream, SyncUpDownload
    from trocar._local import LocalServer
    from trocar._requests import ExtractCall
    from trocar._types import Model

_EXTRACT = "/trocar_api.v1.ExtractionService/Extract"
_EXTRACT_STREAM = "/trocar_api.v1.StreamService/ExtractStream"
_HEALTH = "/grpc.health.v1.Health/Check"
_SERVING = 1
_TRAIN = "/trocar_api.v1.TrainerService/Train"


class Connection:
    """A channel to a server and the calls on it; `Client` is the one that users see."""

    def __init__(self, options: ConnectOptions, local: LocalServer | None = None) -> None:
        self._options = options
        self._local = local
        if local is not None:
            stop_with(self, local)
        self._channel: SyncChannel = open_sync_channel(options)
        self._models = ModelServiceStub(self._channel)
        self._edits = EditStoreServiceStub(self._channel)
        self._datasets = DatasetServiceStub(self._channel)
        self._plan = ExtractionServiceStub(self._channel).Plan
        self._server = ServerServiceStub(self._channel)
        # No serialisers: chunks are built and read by hand, without protobuf's copies. A request
        # of one message goes as a server-streaming call: the same bytes, 0.3 ms sooner.
        self._extract_one: SyncDownload = self._channel.unary_stream(_EXTRACT, None, None)
        self._extract_many: SyncUpDownload = self._channel.stream_stream(_EXTRACT, None, None)
        self._extract_stream: SyncUpDownload = self._channel.stream_stream(_EXTRACT_STREAM, None, None)
        self._trainers = TrainerServiceStub(self._channel)
        self._fits = FitServiceStub(self._channel)
        self._train_one: SyncDownload = self._channel.unary_stream(_TRAIN, None, None)
        self._train_many: SyncUpDownload = self._channel.stream_stream(_TRAIN, None, None)
        share = SharedMemoryServiceStub(self._channel).ShareMemory
        metadata = options.metadata(new_request_id())
        opened = partial(SyncExchange, share, metadata) if options.shares_memory else None
        self._sharing = Sharing(opened)
        self._members: Members | None = Members(options, type(self)) if options.addresses else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._options!r})"

    @property
    def transport(self) -> Literal["shared_memory", "chunks"]:
        """How large inputs and feature maps travel now: memory shared with the server, or its socket."""
        return "shared_memory" if self._sharing.is_used else "chunks"

    def close(self) -> None:
        """Close the connection; calls that still run are cancelled. A local server is stopped."""
        self._sharing.reset()
        if self._members is not None:
            self._members.close()
        self._channel.close()
        if self._local is not None:
            sync_stop(self._local)

    def _home(self) -> Self:
        """Return the client of the server that keeps what is made now."""
        home: Self = self if self._members is None else self._members.home()
        return home

    def _found(self, ask: Callable[[Self], Found]) -> Found:
        """Ask the server that has what is meant; where there are several, one after the other."""
        return ask(self) if self._members is None else self._members.found(ask)

    def _everywhere(self, ask: Callable[[Self], Found]) -> list[Found]:
        """Ask every server."""
        return [ask(self)] if self._members is None else self._members.everywhere(ask)

    def is_serving(self, service: str = "", *, timeout_s: float | None = None) -> bool:
        """Tell whether the server reports that it serves; it asks for no token and runs no model.

        False while models are loaded after the start, and while the server stops.

        Args:
            service: One service by its full name, for example "trocar_api.v1.ModelService"; all when empty.
            timeout_s: Overrides the client's timeout for this call, in seconds.

        Raises:
            ServerUnavailableError: Nobody answers.
            NotFoundError: The server has no such service.
        """
        # On the wire these are the two messages of grpc.health.v1, whose stubs would be one more dependency.
        check: SyncMethod[StringValue, Int32Value] = self._channel.unary_unary(
            _HEALTH, StringValue.SerializeToString, Int32Value.FromString
        )
        reply = self._call(check, StringValue(value=service), timeout_s)
        return reply.value == _SERVING

    def model(self, model_id: str) -> Model:
        """Return one model, categories included.

        Args:
            model_id: The id of a catalogue entry, for example "resnet18".

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        reply = self._call(self._models.GetModel, model_pb2.GetModelRequest(model_id=model_id))
        return _from_wire.model(reply.model)

    def _open(self, request: ExtractCall, request_id: str, timeout_s: float | None) -> SyncStream:
        metadata, timeout = self._options.metadata(request_id), self._timeout(timeout_s)
        if request.fits_one_message:
            return self._extract_one(request.message(), timeout=timeout, metadata=metadata)
        return self._extract_many(request.messages(), timeout=timeout, metadata=metadata)

    def _call(
        self,
        method: SyncMethod[Request, Reply],
        request: Request,
        timeout_s: float | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> Reply:
        request_id = new_request_id()
        try:
            return method(
                request,
                timeout=self._timeout(timeout_s),
                metadata=self._options.metadata(request_id),
                wait_for_ready=wait_for_ready,
            )
        except grpc.RpcError as error:
            raise self._converted(error, request_id) from error

    def _converted(self, error: grpc.RpcError, request_id: str) -> Exception:
        return error_from_rpc(error, target=self._options.target, request_id=request_id)

    def _timeout(self, timeout_s: float | None) -> float:
        return self._options.timeout_s if timeout_s is None else check_timeout(timeout_s)
