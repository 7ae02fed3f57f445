"""The asyncio client, and the source from which `tools/generate_sync.py` makes the sync one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from trocar import _aio_analysis, _from_wire
from trocar._aio_stream import AsyncExtractStream
from trocar._channel import (
    LOCAL,
    AsyncChannel,
    ConnectOptions,
    TlsOptions,
    check_timeout,
    new_request_id,
    open_async_channel,
)
from trocar._local import async_stop, start_local, stop_with
from trocar._replies import ReplyAssembler
from trocar._requests import Start, extract_call, plan_request
from trocar._rpc_errors import error_from_rpc
from trocar._stream_messages import StreamOptions
from trocar_api.v1 import model_pb2, server_pb2
from trocar_api.v1.extraction_pb2_grpc import ExtractionServiceStub
from trocar_api.v1.model_pb2_grpc import ModelServiceStub
from trocar_api.v1.server_pb2_grpc import ServerServiceStub
from trocar_api.v1.tensor_pb2 import DTYPE_FLOAT32, TensorSpec

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import Any, Self

    from trocar._analysis.cka import Cka
    from trocar._analysis.dead_channels import DeadChannels
    from trocar._analysis.diff import Diff
    from trocar._analysis.fid import Fid
    from trocar._analysis.inputs import AsyncInputSet
    from trocar._analysis.pca import Pca
    from trocar._channel import AsyncDownload, AsyncMethod, AsyncStream, AsyncUpDownload, Reply, Request
    from trocar._extraction_plan import ExtractionPlan
    from trocar._feature_maps import FeatureMaps
    from trocar._inputs import Inputs
    from trocar._local import LocalModels, LocalServer
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
    models: LocalModels | None = None,
    options: Mapping[str, Any] | None = None,
) -> AsyncClient:
    """Return a client; the connection is made with the first call.

        async with trocar.aio.connect("localhost:50051") as client:
            maps = await client.extract("resnet50", images, taps=["layer4"])

    With "local" there is no separate server: it runs in this process, for this client, until the client
    is closed or dropped or the interpreter exits. `connect` then returns when its models are loaded.

        client = trocar.aio.connect("local", models={"resnet50": "DEFAULT", "mine": my_module})

    Args:
        target: `host:port`, or any gRPC target such as "unix:/run/trocar.sock"; or "local".
        timeout_s: Deadline of every call that names none, in seconds.
        token: Sent as a bearer token; over plain text to this machine only.
        tls: True for TLS with the roots that gRPC brings along, or `TlsOptions`.
        retries: How often a call is tried again where the server cannot be reached, 0 to 4, with
            a backoff from 0.1 to 2 seconds. Inputs over 8 MiB are sent only once.
        models: With "local", what to host: names such as ["resnet50", "vit_b_16=random:0"]; or a dict from
            model id to the name of weights, to a table with the keys of `[models.ID]` in the configuration
            file, to an `nn.Module`, or to {"module": ..., "input_shape": (3, 32, 32)}. A module shares its
            weights with what is hosted and is not changed itself.
        options: With "local", settings as in the configuration file: "device", "threads", "data_dir"
            and "limits".

    Raises:
        ValueError: A value is out of range, a token would cross a network in plain text, or `models`,
            `options` and `tls` do not go with the target.
        FileNotFoundError: A file of `tls` is not there.
        ServerUnavailableError: The target is "local" and the server is not installed.
        ModelError: The target is "local" and a model cannot be loaded; see its subclasses.
        NotFoundError: The target is "local" and a model or its weights have no such name.
        InvalidArgumentError: The target is "local" and an option is wrong.
    """
    chosen = ConnectOptions(target, timeout_s, token, tls, retries)
    if target != LOCAL:
        if models is not None or options is not None:
            raise ValueError(f"models and options go with the target {LOCAL!r} only, not with {target!r}")
        return AsyncClient(chosen)
    local = start_local(models or (), options)
    return AsyncClient(replace(chosen, target=local.target), local)


class AsyncClient:
    """A connection to a Trocar server; made by `connect`.

    Safe for concurrent calls. Every method that calls the server may raise, beside what it
    lists, `ServerUnavailableError`, `DeadlineExceededError`, `PermissionDeniedError`,
    `VersionSkewError` and `InternalServerError`; all are `TrocarError`.
    """

    def __init__(self, options: ConnectOptions, local: LocalServer | None = None) -> None:
        self._options = options
        self._local = local
        if local is not None:
            stop_with(self, local)
        self._channel: AsyncChannel = open_async_channel(options)
        self._models = ModelServiceStub(self._channel)
        self._plan = ExtractionServiceStub(self._channel).Plan
        self._server = ServerServiceStub(self._channel)
        # No serialisers: chunks are built and read by hand, without protobuf's copies. A request
        # of one message goes as a server-streaming call: the same bytes, 0.3 ms sooner.
        self._extract_one: AsyncDownload = self._channel.unary_stream(_EXTRACT, None, None)
        self._extract_many: AsyncUpDownload = self._channel.stream_stream(_EXTRACT, None, None)
        self._extract_stream: AsyncUpDownload = self._channel.stream_stream(_EXTRACT_STREAM, None, None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._options!r})"

    async def close(self) -> None:
        """Close the connection; calls that still run are cancelled. A local server is stopped."""
        await self._channel.close()
        if self._local is not None:
            await async_stop(self._local)

    async def wait_ready(self, timeout_s: float = 30.0) -> ServerInfo:
        """Wait until the server answers.

        Args:
            timeout_s: The longest wait, in seconds.

        Returns:
            What `server_info` returns.

        Raises:
            DeadlineExceededError: It did not answer in time.
        """
        request = server_pb2.GetServerInfoRequest()
        reply = await self._call(self._server.GetServerInfo, request, timeout_s, wait_for_ready=True)
        return _from_wire.server_info(reply)

    async def server_info(self) -> ServerInfo:
        """Return the server's version, device and limits."""
        reply = await self._call(self._server.GetServerInfo, server_pb2.GetServerInfoRequest())
        return _from_wire.server_info(reply)

    async def models(self) -> list[Model]:
        """Return every model of the catalogue, loaded or not, by id; without categories."""
        reply = await self._call(self._models.ListModels, model_pb2.ListModelsRequest())
        return [_from_wire.model(message) for message in reply.models]

    async def model(self, model_id: str) -> Model:
        """Return one model, categories included.

        Args:
            model_id: The id of a catalogue entry, for example "resnet18".

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        reply = await self._call(self._models.GetModel, model_pb2.GetModelRequest(model_id=model_id))
        return _from_wire.model(reply.model)

    async def load(self, model_id: str, weights: str = "", *, timeout_s: float = 600.0) -> Model:
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
        reply = await self._call(self._models.LoadModel, request, timeout_s)
        return _from_wire.model(reply.model)

    async def unload(self, model_id: str) -> Model:
        """Drop a model's weights from the server's memory when the calls that use it have ended.

        Args:
            model_id: The id of a catalogue entry; the entry stays.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        request = model_pb2.UnloadModelRequest(model_id=model_id)
        reply = await self._call(self._models.UnloadModel, request)
        return _from_wire.model(reply.model)

    async def modules(self, model_id: str, inputs_shape: Sequence[int] | None = None) -> ModuleTree:
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
        return _from_wire.module_tree(await self._call(self._models.ListModules, request))

    async def extract(
        self,
        model_id: str,
        inputs: Inputs | None,
        taps: str | Tap | Sequence[str | Tap],
        *,
        start_at: str | None = None,
        start_shape: tuple[int, ...] | None = None,
        out: Mapping[str, Array] | None = None,
        timeout_s: float | None = None,
        chunk_bytes: int | None = None,
    ) -> FeatureMaps:
        """Run one forward pass and return what the tapped modules computed.

            maps = await client.extract("resnet50", images, taps=["layer4", "avgpool"])
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
            start_at: Where the pass starts instead of at the model's input, for example "layer3" or
                "layer4/in"; `inputs` is then the value there, one array, as an earlier `extract` gave
                it. Bit-equal to the full pass.
            start_shape: With `start_at`: the shape of the model's own input from which that value came; the
                model's example input with the value's batch size when None.
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
            StartNotPossibleError: What follows `start_at` needs more than that value.
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
        request = extract_call(model_id, inputs, taps, chunk_bytes, Start(start_at, start_shape))
        reply = ReplyAssembler(model_id, out)
        request_id = new_request_id()
        stream = self._open(request, request_id, timeout_s)
        try:
            async for message in stream:
                reply.feed(message)
        except grpc.RpcError as error:
            raise self._converted(error, request_id) from error
        finally:
            stream.cancel()  # ends the call where the loop was left early, without effect otherwise
        return reply.finish()

    async def plan(
        self,
        model_id: str,
        inputs: Inputs | tuple[int, ...] | None,
        taps: str | Tap | Sequence[str | Tap],
        *,
        start_at: str | None = None,
        start_shape: tuple[int, ...] | None = None,
        timeout_s: float | None = None,
    ) -> ExtractionPlan:
        """Tell what `extract` would return and need; nothing is computed.

            plan = await client.plan("resnet50", (8, 3, 224, 224), taps=["layer*"])
            plan.reply_bytes

        Args:
            model_id: The id of a loaded model.
            inputs: The shape of one float32 input, batch included, or what `extract` takes: only shapes and
                dtypes of arrays and the number of images count, and nothing is sent. One example
                input when None.
            taps: As in `extract`.
            start_at: As in `extract`.
            start_shape: As in `extract`.
            timeout_s: Overrides the client's timeout for this call, in seconds.

        Returns:
            Names, shapes, dtypes and bytes of the feature maps, the memory that the pass needs, and where it
            would stop. Prints as a table.

        Raises:
            TrocarError: What `extract` raises about the model, the taps, the form of the inputs and limits.
        """
        request = plan_request(model_id, inputs, taps, Start(start_at, start_shape))
        return _from_wire.extraction_plan(model_id, await self._call(self._plan, request, timeout_s))

    def extract_stream(  # noqa: PLR0913 - options of one call, by keyword
        self,
        model_id: str,
        batches: AsyncIterable[Inputs] | Iterable[Inputs],
        taps: str | Tap | Sequence[str | Tap],
        *,
        start_at: str | None = None,
        start_shape: tuple[int, ...] | None = None,
        running_statistics: bool = False,
        checkpoint: bytes | None = None,
        checkpoint_interval: int = 16,
        first_batch: int = 0,
        window: int = 4,
        timeout_s: float | None = None,
        chunk_bytes: int | None = None,
    ) -> AsyncExtractStream:
        """Run one pass for each of many batches in one call, and return the results as they come, in order.

            async with client.extract_stream("resnet50", batches, taps=["avgpool"]) as stream:
                async for result in stream:
                    result.maps["avgpool"]   # numpy array (batch, 2048, 1, 1)

        The next batches are sent while the model works on this one. A batch that fails does so alone:
        `result.error` says why. A broken connection is made again, from the first batch without an answer.

        Args:
            model_id: The id of a loaded model.
            batches: Each item is what `extract` takes as `inputs`. Taken one by one, a few ahead of the
                results.
            taps: As in `extract`.
            start_at: As in `extract`.
            start_shape: As in `extract`.
            running_statistics: Whether statistics over "all" and over "channel" are taken over the whole
                stream, and are in `stream.statistics` after the last result, instead of each batch's own.
            checkpoint: Of an earlier stream with the same taps (`result.checkpoint`): its statistics go
                on from there. Send the batches behind that result.
            checkpoint_interval: With running statistics: how many batches lie between two checkpoints, 1
                to 1024. As many are kept, to be sent again after a broken connection.
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
            model_id,
            taps,
            first_batch,
            self._timeout(timeout_s),
            window,
            self._options.retries,
            chunk_bytes,
            Start(start_at, start_shape),
            running_statistics,
            checkpoint,
            checkpoint_interval,
        )

        def open_call(requests: AsyncIterator[bytes]) -> AsyncStream:
            return self._extract_stream(requests, metadata=self._options.metadata(request_id))

        def converted(error: grpc.RpcError) -> Exception:
            return self._converted(error, request_id)

        return AsyncExtractStream(open_call, converted, options, batches)

    async def fid(
        self,
        model_id: str,
        images_a: AsyncInputSet,
        images_b: AsyncInputSet,
        at: str | Tap = "avgpool",
        *,
        batch_size: int = 32,
    ) -> Fid:
        """Return the Frechet distance (FID) between two sets of images, in the features of a model.

            result = await client.fid("resnet50", "real/", "generated/", at="avgpool")
            result.distance

        |mean_a - mean_b|^2 + tr(cov_a + cov_b - 2 (cov_a cov_b)^(1/2)) with sample covariances (divided by
        n - 1), of Heusel et al. 2017, in float64. Mean and covariance are taken on the server. The
        published numbers are for the Inception weights of 2015 and their own resizing; numbers of other
        models and sizes of sets compare only among themselves.

        Args:
            model_id: The id of a loaded model.
            images_a: A folder, a list of images or an array of them, or an iterable of batches; at
                least 2 images. More than there are channels, or the distance is biased.
            images_b: The other set.
            at: Where the features are, one value of shape (batch, channels), or with positions, which are
                averaged; for another pooling pass `tap(..., reduce=[trocar.pool("cls")])`.
            batch_size: The most images in one pass, where they do not come in batches.

        Returns:
            The distance and its parts; prints as a table.

        Raises:
            ValueError: A set is too small, the features are not finite, or `at` stands for several values.
            FileNotFoundError: There is no such file or folder.
            TrocarError: What `extract` raises; a note says in which batch.
        """
        return await _aio_analysis.fid(self, model_id, (images_a, images_b), at, batch_size)

    async def cka(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        taps: str | Tap | Sequence[str | Tap],
        *,
        other: str | None = None,
        other_taps: str | Tap | Sequence[str | Tap] | None = None,
        batch_size: int = 32,
        debiased: bool = False,
    ) -> Cka:
        """Return the linear CKA between modules of one model or of two, over the same inputs.

            cka = await client.cka("resnet50", "photos/", taps=["layer1", "layer2", "layer3", "layer4"])
            cka["layer1", "layer4"]

        <K, L> / (|K| |L|) of the centred Gram matrices of all samples, of Kornblith et al. 2019, in float64;
        exact, not an average over batches. Memory grows with taps times samples squared; the features go
        through temporary files. Pool large feature maps with `tap(..., reduce=...)`.

        Args:
            model_id: The id of a loaded model.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            taps: What makes the rows. Every feature map needs one row for each sample.
            other: Another model for the columns; the same one when None.
            other_taps: What makes the columns; as `taps` when None.
            batch_size: The most samples in one pass, where they do not come in batches.
            debiased: Estimate without the bias that few samples give: CKA from the unbiased HSIC of Song
                et al. 2012, as Nguyen et al. 2021 do, on all samples at once. Needs 4 samples.

        Returns:
            The matrix with the names of its rows and columns; prints as a table and plots as a heat map.

        Raises:
            ValueError: There are too few samples, or the feature maps have no row for each sample.
            FileNotFoundError: There is no such file or folder.
            TrocarError: What `extract` raises; a note says in which batch.
        """
        models, both_taps = (model_id, other or model_id), (taps, other_taps)
        return await _aio_analysis.cka(self, models, inputs, both_taps, batch_size, debiased)

    async def dead_channels(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        taps: str | Tap | Sequence[str | Tap] = "**",
        *,
        threshold: float = 0.0,
        batch_size: int = 32,
    ) -> DeadChannels:
        """Report channels whose absolute maximum over all inputs is not above a threshold.

            report = await client.dead_channels("resnet50", "photos/", taps="**:ReLU")
            report.dead_count

        The maxima are taken on the server; no values are sent. Channels with a NaN are reported apart.

        Args:
            model_id: The id of a loaded model.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            taps: Where to look; everywhere by default. Channels are as for statistics with over="channel".
            threshold: The largest absolute value of a dead channel.
            batch_size: The most samples in one pass, where they do not come in batches.

        Returns:
            A row for each feature map; prints those with dead or NaN channels as a table.

        Raises:
            ValueError: `threshold` is negative or not finite, or there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: What `extract` raises; a note says in which batch.
        """
        return await _aio_analysis.dead_channels(self, model_id, inputs, taps, threshold, batch_size)

    async def diff(
        self,
        model_a: str,
        model_b: str,
        inputs: AsyncInputSet,
        taps: str | Tap | Sequence[str | Tap] = "**",
        *,
        taps_b: str | Tap | Sequence[str | Tap] | Mapping[str, str | Tap] | None = None,
        tolerance: float = 1e-5,
        batch_size: int = 32,
    ) -> Diff:
        """Compare two models on the same inputs, feature map by feature map.

            diff = await client.diff("resnet18", "resnet18-tuned", "photos/", taps="**")
            diff.first_diverging

        Cosine similarity, relative error |a - b| / |a| and largest absolute difference over all elements of
        all samples, in float64. Equal NaN and infinities at the same place count as equal.

        Args:
            model_a: The id of a loaded model.
            model_b: The other model; may be the same id.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            taps: What to compare, by name; what only one model has is listed.
            taps_b: What to ask of the second model where names differ: a list in the order of `taps`, or a
                mapping from what is in `taps` to its counterpart.
            tolerance: The largest relative error of what counts as equal.
            batch_size: The most samples in one pass, where they do not come in batches.

        Returns:
            A row for each feature map, in execution order; prints as a table and plots.

        Raises:
            ValueError: `tolerance` is negative, taps do not pair up, or there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: What `extract` raises; a note says in which batch of which model.
        """
        models = (model_a, model_b)
        return await _aio_analysis.diff(self, models, inputs, (taps, taps_b), tolerance, batch_size)

    async def fit_pca(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        at: str | Tap,
        k: int,
        *,
        batch_size: int = 32,
    ) -> Pca:
        """Fit the k principal components of a feature map's channels, over all samples and positions.

            pca = await client.fit_pca("resnet50", "photos/", at="layer3", k=16)
            pca.components.shape             # (16, 1024)

        From mean and covariance, which are taken on the server, by eigendecomposition in float64. Variances
        are divided by n - 1, and signs are as scikit-learn's.

        Args:
            model_id: The id of a loaded model.
            inputs: A folder, a list of images, an array, or an iterable of batches; see the analysis page.
            at: One feature map.
            k: How many components, at most the smaller of the numbers of channels and vectors.
            batch_size: The most samples in one pass, where they do not come in batches.

        Returns:
            Components, mean and explained variance; can be saved and loaded.

        Raises:
            ValueError: `k` is out of range, the features are not finite, or `at` stands for several values.
            FileNotFoundError: There is no such file or folder.
            TrocarError: What `extract` raises; a note says in which batch.
        """
        return await _aio_analysis.fit_pca(self, model_id, inputs, at, k, batch_size)

    def _open(self, request: ExtractCall, request_id: str, timeout_s: float | None) -> AsyncStream:
        metadata, timeout = self._options.metadata(request_id), self._timeout(timeout_s)
        if request.fits_one_message:
            return self._extract_one(request.message(), timeout=timeout, metadata=metadata)
        return self._extract_many(request.messages(), timeout=timeout, metadata=metadata)

    async def _call(
        self,
        method: AsyncMethod[Request, Reply],
        request: Request,
        timeout_s: float | None = None,
        *,
        wait_for_ready: bool = False,
    ) -> Reply:
        request_id = new_request_id()
        try:
            return await method(
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
