"""Part of the sync client: generated from _aio.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from trocar import _from_wire
from trocar._channel import (
    ConnectOptions,
    SyncChannel,
    TlsOptions,
    check_timeout,
    new_request_id,
    open_sync_channel,
)
from trocar._client_stream import ExtractStream
from trocar._replies import ReplyAssembler
from trocar._requests import extract_call, plan_request
from trocar._rpc_errors import error_from_rpc
from trocar._stream_messages import StreamOptions
from trocar_api.v1 import model_pb2, server_pb2
from trocar_api.v1.extraction_pb2_grpc import ExtractionServiceStub
from trocar_api.v1.model_pb2_grpc import ModelServiceStub
from trocar_api.v1.server_pb2_grpc import ServerServiceStub
from trocar_api.v1.tensor_pb2 import DTYPE_FLOAT32, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from types import TracebackType
    from typing import Self

    from trocar._channel import Reply, Request, SyncDownload, SyncMethod, SyncStream, SyncUpDownload
    from trocar._extraction_plan import ExtractionPlan
    from trocar._feature_maps import FeatureMaps
    from trocar._inputs import Inputs
    from trocar._modules import ModuleTree
    from trocar._requests import ExtractCall
    from trocar._taps import Tap
    from trocar._tensors import Array
    from trocar._types import Model, ServerInfo

_EXTRACT = "/trocar_api.v1.ExtractionService/Extract"
_EXTRACT_STREAM = "/trocar_api.v1.StreamService/ExtractStream"


def connect(
    target: str = "localhost:50051",
    *,
    timeout_s: float = 60.0,
    token: str | None = None,
    tls: TlsOptions | bool | None = None,
    retries: int = 4,
) -> Client:
    """Return a client; the connection is made with the first call.

        with trocar.connect("localhost:50051") as client:
            maps = client.extract("resnet50", images, taps=["layer4"])

    Args:
        target: `host:port`, or any gRPC target such as "unix:/run/trocar.sock".
        timeout_s: Deadline of every call that names none, in seconds.
        token: Sent as a bearer token; over plain text to this machine only.
        tls: True for TLS with the roots that gRPC brings along, or `TlsOptions`.
        retries: How often a call is tried again where the server cannot be reached, 0 to 4, with
            a backoff from 0.1 to 2 seconds. Inputs over 8 MiB are sent only once.

    Raises:
        ValueError: A value is out of range, or a token would cross a network in plain text.
        FileNotFoundError: A file of `tls` is not there.
    """
    return Client(ConnectOptions(target, timeout_s, token, tls, retries))


class Client:
    """A connection to a Trocar server; made by `connect`.

    Safe for concurrent calls. Every method that calls the server may raise, beside what it
    lists, `ServerUnavailableError`, `DeadlineExceededError`, `PermissionDeniedError`,
    `VersionSkewError` and `InternalServerError`; all are `TrocarError`.
    """

    def __init__(self, options: ConnectOptions) -> None:
        self._options = options
        self._channel: SyncChannel = open_sync_channel(options)
        self._models = ModelServiceStub(self._channel)
        self._plan = ExtractionServiceStub(self._channel).Plan
        self._server = ServerServiceStub(self._channel)
        # No serialisers: chunks are built and read by hand, without protobuf's copies. A request
        # of one message goes as a server-streaming call: the same bytes, 0.3 ms sooner.
        self._extract_one: SyncDownload = self._channel.unary_stream(_EXTRACT, None, None)
        self._extract_many: SyncUpDownload = self._channel.stream_stream(_EXTRACT, None, None)
        self._extract_stream: SyncUpDownload = self._channel.stream_stream(_EXTRACT_STREAM, None, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Client({self._options!r})"

    def close(self) -> None:
        """Close the connection; calls that still run are cancelled."""
        self._channel.close()

    def wait_ready(self, timeout_s: float = 30.0) -> ServerInfo:
        """Wait until the server answers.

        Args:
            timeout_s: The longest wait, in seconds.

        Returns:
            What `server_info` returns.

        Raises:
            DeadlineExceededError: It did not answer in time.
        """
        request = server_pb2.GetServerInfoRequest()
        reply = self._call(self._server.GetServerInfo, request, timeout_s, wait_for_ready=True)
        return _from_wire.server_info(reply)

    def server_info(self) -> ServerInfo:
        """Return the server's version, device and limits."""
        reply = self._call(self._server.GetServerInfo, server_pb2.GetServerInfoRequest())
        return _from_wire.server_info(reply)

    def models(self) -> list[Model]:
        """Return every model of the catalogue, loaded or not, by id; without categories."""
        reply = self._call(self._models.ListModels, model_pb2.ListModelsRequest())
        return [_from_wire.model(message) for message in reply.models]

    def model(self, model_id: str) -> Model:
        """Return one model, categories included.

        Args:
            model_id: The id of a catalogue entry, for example "resnet18".

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        reply = self._call(self._models.GetModel, model_pb2.GetModelRequest(model_id=model_id))
        return _from_wire.model(reply.model)

    def load(self, model_id: str, weights: str = "", *, timeout_s: float = 600.0) -> Model:
        """Load a model and return it when it can be used; a loaded model stays as it is.

        Args:
            model_id: The id of a catalogue entry, or a torchvision model name that is not in it yet.
            weights: For a name that is new: "DEFAULT" (also when empty), the name of a weights enum
                member, or "random:0" with any seed. Empty, or equal, for an existing entry.
            timeout_s: Deadline in seconds; a download can take minutes.

        Raises:
            UnknownModelError: Neither the catalogue nor torchvision has the name.
            UnknownWeightsError: The architecture has no weights of this name.
            ModelConflictError: The entry exists with other weights.
            WeightsUnavailableError: They could not be downloaded, or the file is not there.
            WeightsMismatchError: Keys are missing, unexpected or of another shape.
            WeightsCorruptError: The file cannot be read.
        """
        request = model_pb2.LoadModelRequest(model_id=model_id, weights=weights)
        reply = self._call(self._models.LoadModel, request, timeout_s)
        return _from_wire.model(reply.model)

    def unload(self, model_id: str) -> Model:
        """Drop a model's weights from the server's memory when the calls that use it have ended.

        Args:
            model_id: The id of a catalogue entry; the entry stays.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        request = model_pb2.UnloadModelRequest(model_id=model_id)
        reply = self._call(self._models.UnloadModel, request)
        return _from_wire.model(reply.model)

    def modules(self, model_id: str, inputs_shape: Sequence[int] | None = None) -> ModuleTree:
        """Return the modules of a model, with what each call of them returns.

        Args:
            model_id: The id of a loaded model.
            inputs_shape: The float32 input to assume, batch dimension included, for example
                (8, 3, 224, 224). One example input when None.

        Returns:
            The modules in execution order; prints as a tree.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
            ModelNotLoadedError: It is not in memory; see `load`.
            InputRejectedError: The model cannot take such an input.
        """
        request = model_pb2.ListModulesRequest(model_id=model_id)
        if inputs_shape is not None:
            request.inputs.append(TensorSpec(dtype=DTYPE_FLOAT32, shape=inputs_shape))
        return _from_wire.module_tree(self._call(self._models.ListModules, request))

    def extract(
        self,
        model_id: str,
        inputs: Inputs,
        taps: str | Tap | Sequence[str | Tap],
        *,
        out: Mapping[str, Array] | None = None,
        timeout_s: float | None = None,
        chunk_bytes: int | None = None,
    ) -> FeatureMaps:
        """Run one forward pass and return what the tapped modules computed.

            maps = client.extract("resnet50", images, taps=["layer4", "avgpool"])
            maps["layer4"]                   # numpy array (8, 2048, 7, 7)

        Args:
            model_id: The id of a loaded model, for example "resnet18".
            inputs: What the model's forward takes:
                an array or torch tensor, for example float32 (batch, channels, height, width), as
                it is; or images, which the server preprocesses as the model's weights say: a path,
                encoded bytes, a PIL image, a list of these, or uint8 pixels (height, width, 3) or
                (batch, height, width, 3). A list of equally shaped arrays is stacked to a batch. A
                tuple of arrays is positional arguments, a dict is keyword arguments.
            taps: Selectors such as "layer4" or "layer*.0.relu@1", or `tap(...)` for statistics and
                aliases. At least one.
            out: Arrays to fill instead of new ones, by feature map name; C-contiguous, writable, of
                exactly the shape and dtype of the reply.
            timeout_s: Overrides the client's timeout for this call, in seconds.
            chunk_bytes: The most payload bytes in one message of the reply; 1 MiB when None.

        Returns:
            The feature maps by name: by tap, and within a tap in execution order. A convolution's
            value has shape (batch, channels, height, width), a transformer block's (batch, tokens,
            width). bfloat16 values come as float32, exactly.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
            ModelNotLoadedError: It is not in memory; see `load`.
            UnknownModuleError: A selector matches nothing; see `modules`.
            ModuleNotCalledError: The pass never called one of the modules.
            SelectorError: A selector is wrong in another way; see its subclasses.
            InputRejectedError: The model cannot take the inputs.
            InputError: The inputs are wrong in another way; see its subclasses.
            RequestTooLargeError: The inputs exceed the server's limit.
            ReplyTooLargeError: The feature maps would; nothing was computed.
            ServerBusyError: No replica was free in time; the same call may succeed later.
            BadReplyError: The reply was cut short or breaks the contract.
            FileNotFoundError: A path of `inputs` leads nowhere.
            TypeError: `inputs` holds something that cannot be sent.
            ValueError: Arrays of one list differ in shape, or `out` does not fit the reply.
        """
        request = extract_call(model_id, inputs, taps, chunk_bytes)
        reply = ReplyAssembler(model_id, out)
        request_id = new_request_id()
        stream = self._open(request, request_id, timeout_s)
        try:
            for message in stream:
                reply.feed(message)
        except grpc.RpcError as error:
            raise self._converted(error, request_id) from error
        finally:
            stream.cancel()  # ends the call where the loop was left early, without effect otherwise
        return reply.finish()

    def plan(
        self,
        model_id: str,
        inputs: Inputs | tuple[int, ...] | None,
        taps: str | Tap | Sequence[str | Tap],
        *,
        timeout_s: float | None = None,
    ) -> ExtractionPlan:
        """Tell what `extract` would return and need; nothing is computed.

            plan = client.plan("resnet50", (8, 3, 224, 224), taps=["layer*"])
            plan.reply_bytes

        Args:
            model_id: The id of a loaded model.
            inputs: The shape of one float32 input, batch included, or what `extract` takes: only shapes and
                dtypes of arrays and the number of images count, and nothing is sent. One example
                input when None.
            taps: As in `extract`.
            timeout_s: Overrides the client's timeout for this call, in seconds.

        Returns:
            Names, shapes, dtypes and bytes of the feature maps, the memory that the pass needs, and where it
            would stop. Prints as a table.

        Raises:
            TrocarError: What `extract` raises about the model, the taps, the form of the inputs and limits.
        """
        request = plan_request(model_id, inputs, taps)
        return _from_wire.extraction_plan(model_id, self._call(self._plan, request, timeout_s))

    def extract_stream(
        self,
        model_id: str,
        batches: Iterable[Inputs],
        taps: str | Tap | Sequence[str | Tap],
        *,
        first_batch: int = 0,
        window: int = 4,
        timeout_s: float | None = None,
        chunk_bytes: int | None = None,
    ) -> ExtractStream:
        """Run one pass for each of many batches in one call, and return the results as they come, in order.

            with client.extract_stream("resnet50", batches, taps=["avgpool"]) as stream:
                for result in stream:
                    result.maps["avgpool"]   # numpy array (batch, 2048, 1, 1)

        The next batches are sent while the model works on this one. A batch that fails does so alone:
        `result.error` says why. A broken connection is made again, from the first batch without an answer.

        Args:
            model_id: The id of a loaded model.
            batches: Each item is what `extract` takes as `inputs`. Taken one by one, a few ahead of the
                results.
            taps: As in `extract`.
            first_batch: The index of the first batch, for a stream that goes on with earlier work.
            window: Batches that may be sent and not yet answered, at least 1; this bounds the memory.
            timeout_s: How long one batch may wait and compute, in seconds; the client's timeout when None.
            chunk_bytes: As in `extract`.

        Returns:
            An iterator of `BatchResult`. While it runs it may raise what `extract` raises about the model or
            the taps, and whatever `batches` raises.

        Raises:
            ValueError: `window`, `first_batch` or `timeout_s` is out of range.
        """
        request_id = new_request_id()
        options = StreamOptions(
            model_id, taps, first_batch, self._timeout(timeout_s), window, self._options.retries, chunk_bytes
        )

        def open_call(requests: Iterator[bytes]) -> SyncStream:
            return self._extract_stream(requests, metadata=self._options.metadata(request_id))

        def converted(error: grpc.RpcError) -> Exception:
            return self._converted(error, request_id)

        return ExtractStream(open_call, converted, options, batches)

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
