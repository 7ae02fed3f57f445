"""The asyncio client, made of parts; `tools/generate_sync.py` generates the sync one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trocar._async.analysis.analyses import AsyncAnalyses
from trocar._async.analysis.attributions import AsyncAttributions
from trocar._async.analysis.retrieval import AsyncRetrieval
from trocar._async.classification import AsyncClassification
from trocar._async.connection import AsyncConnection
from trocar._async.datasets import AsyncDatasets
from trocar._async.directions import AsyncDirections
from trocar._async.edit_store import AsyncEditStore
from trocar._async.extraction import AsyncExtraction
from trocar._async.generations import AsyncGenerations
from trocar._async.gradients import AsyncGradients
from trocar._async.models import AsyncModels
from trocar._async.prepared import AsyncPreparing
from trocar._async.server import AsyncServer
from trocar._async.trainers import AsyncTrainers
from trocar._base.call_options import AS_CONNECTED
from trocar._base.delegation import delegate, explained
from trocar._transport.channel import LOCAL, ConnectOptions, TlsOptions
from trocar._transport.local import start_local
from trocar._transport.settings import connect_settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import Any, Literal, Self

    from trocar._base.call_options import CallOptions
    from trocar._transport.local import LocalModels, LocalServer


@explained
def connect(  # noqa: PLR0913 - options of one connection, by keyword
    target: str | None = None,
    *,
    timeout_s: float = 60.0,
    token: str | None = None,
    tls: TlsOptions | bool | None = None,
    retries: int = 4,
    shared_memory: bool | None = None,
    compression: Literal["gzip"] | None = None,
    direct: bool = True,
    models: LocalModels | None = None,
    settings: Mapping[str, Any] | None = None,
    profile: str | None = None,
    options: CallOptions = AS_CONNECTED,
) -> AsyncClient:
    """Return a client; the connection is made with the first call.

        async with trocar.aio.connect("localhost:50051") as client:
            maps = await client.extract("resnet50", images, taps=["layer4"])

    With "local" there is no separate server: it runs in this process, for this client, until the client is
    closed or garbage-collected or the interpreter exits. `connect` then returns when its models are loaded.

        client = trocar.aio.connect("local", models={"resnet50": "DEFAULT", "mine": my_module})

    Args:
        target: `host:port`, or any gRPC target such as "unix:/run/trocar.sock"; several servers as
            "gpu1:50051,gpu2:50051", which are called in turn; or "local". The default port is 50051; https://
            means TLS. When None: `TROCAR_SERVER`, the profile's, or "localhost:50051".
        timeout_s: Default deadline of a call, in seconds.
        token: Sent as a bearer token; in plain text only to this machine. When None: `TROCAR_TOKEN`, or the
            profile's token for the profile's server.
        tls: True for TLS with the root certificates of gRPC, or `TlsOptions`. What it leaves out:
            `TROCAR_CA`, or the profile's. False always means plain text.
        retries: How often a call is retried if the server cannot be reached, 0 to 4, with a backoff from 0.1
            to 2 seconds, within the deadline. Unless it is 0, a gateway of a cluster that has gone is retried
            for two minutes.
        shared_memory: Whether inputs from 512 KiB and feature maps from 1 MiB on go through memory that is
            shared with the server. None: if the target is a Unix socket and the server offers shared memory;
            see `transport`. False: never. True: as None, and `ValueError` if the target is not a Unix socket.
        compression: "gzip" compresses every message, lossless, in both directions: for networks slower than
            about 20 MB/s, and values that repeat. It replaces shared memory.
        direct: Whether calls with tensors go directly to a replica if the server is the gateway of a cluster,
            allows it, and the replica is reached. False: every call goes through the gateway.
        models: With "local", the models to host: names such as ["resnet50", "vit_b_16=random:0"]; an
            `nn.Module` or several, whose ids are the names of their classes in lower case; or a dict from
            model id to the name of weights, to a table with the keys of `[models.ID]` in the configuration
            file, to an `nn.Module`, or to {"module": ..., "input_shape": (3, 32, 32)}. A module shares its
            weights with the hosted model and is not changed.
        settings: With "local", settings as in the configuration file: "device", "threads", "data_dir",
            "cache_dir" and "limits". Without "data_dir", trainers, data sets and stored edits are in a
            private folder that is deleted when the client is closed or the program ends.
        profile: A profile of `~/.config/trocar/config.toml`, which `trocar login` creates. When None:
            `TROCAR_PROFILE`, or the current one.
        options: `trocar.options(...)`, the default of calls with tensors.

    Raises:
        ValueError: A value or an address is wrong, there is no such profile, a token would be sent over a
            network in plain text, or `models`, `settings` or `tls` cannot be used with the target.
        FileNotFoundError: A file of `tls` does not exist.
        MissingExtraError: The target is "local" and the server is not installed; also an `ImportError`.
        ModelError: The target is "local" and a model cannot be loaded; see its subclasses.
        NotFoundError: The target is "local" and a model or its weights have no such name.
        InvalidArgumentError: The target is "local" and a setting is wrong.
    """
    result = connect_settings(target, token, tls, profile)
    chosen = ConnectOptions(
        result.target,
        timeout_s,
        result.token,
        result.tls,
        retries,
        shared_memory,
        compression,
        options,
        direct,
    )
    if target != LOCAL:
        if models is not None or settings is not None:
            raise ValueError(f"models= and settings= need the target {LOCAL!r} only, not with {target!r}")
        return AsyncClient(chosen)
    local = start_local(() if models is None else models, settings)
    return AsyncClient(replace(chosen, target=local.target), local)


class AsyncClient:
    """A connection to a Trocar server; made by `connect`.

    Safe for concurrent calls. Every method that calls the server may raise, in addition to the errors that it
    lists, `ServerUnavailableError`, `DeadlineExceededError`, `PermissionDeniedError`, `VersionSkewError` and
    `InternalServerError`; all are `TrocarError`.
    """

    def __init__(self, options: ConnectOptions, local: LocalServer | None = None) -> None:
        self._connection = connection = AsyncConnection(options, local)
        self._models = AsyncModels(connection)
        self._server = AsyncServer(connection, self._models)
        self._extraction = AsyncExtraction(connection)
        self._preparing = AsyncPreparing(connection, self._extraction)
        self._generations = AsyncGenerations(connection)
        self._gradients = AsyncGradients(connection, self._extraction)
        self._directions = AsyncDirections(connection)
        self._edit_store = AsyncEditStore(connection)
        self._analyses = AsyncAnalyses(self._extraction, self._gradients)
        self._retrieval = AsyncRetrieval(self._extraction, self._models)
        self._classification = AsyncClassification(self._extraction, self._models)
        self._attributions = AsyncAttributions(self._extraction, self._models)
        self._datasets = AsyncDatasets(connection)
        self._trainers = AsyncTrainers(connection)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncClient({self._connection.options!r})"

    @property
    def transport(self) -> Literal["shared_memory", "chunks"]:
        """Transport of large inputs and feature maps: memory shared with the server, or its socket."""
        return self._connection.transport

    close = delegate("_connection", AsyncConnection.close)
    is_serving = delegate("_connection", AsyncConnection.is_serving)

    wait_ready = delegate("_server", AsyncServer.wait_ready)
    server_info = delegate("_server", AsyncServer.server_info)
    status = delegate("_server", AsyncServer.status)
    drain = delegate("_server", AsyncServer.drain)
    reload_config = delegate("_server", AsyncServer.reload_config)
    page = delegate("_server", AsyncServer.page)

    models = delegate("_models", AsyncModels.models)
    model = delegate("_models", AsyncModels.model)
    modules = delegate("_models", AsyncModels.modules)
    load = delegate("_models", AsyncModels.load)
    unload = delegate("_models", AsyncModels.unload)

    extract = delegate("_extraction", AsyncExtraction.extract)
    extract_stream = delegate("_extraction", AsyncExtraction.extract_stream)
    plan = delegate("_extraction", AsyncExtraction.plan)
    shared_array = delegate("_extraction", AsyncExtraction.shared_array)

    prepare = delegate("_preparing", AsyncPreparing.prepare)

    generate = delegate("_generations", AsyncGenerations.generate)

    gradients = delegate("_gradients", AsyncGradients.gradients)

    store_edits = delegate("_edit_store", AsyncEditStore.store_edits)
    stored_edits = delegate("_edit_store", AsyncEditStore.stored_edits)
    delete_edits = delegate("_edit_store", AsyncEditStore.delete_edits)

    fit_direction = delegate("_directions", AsyncDirections.fit_direction)
    directions = delegate("_directions", AsyncDirections.directions)
    direction = delegate("_directions", AsyncDirections.direction)
    store_direction = delegate("_directions", AsyncDirections.store_direction)
    delete_directions = delegate("_directions", AsyncDirections.delete_directions)

    fid = delegate("_analyses", AsyncAnalyses.fid)
    cka = delegate("_analyses", AsyncAnalyses.cka)
    rsa = delegate("_analyses", AsyncAnalyses.rsa)
    dead_channels = delegate("_analyses", AsyncAnalyses.dead_channels)
    diff = delegate("_analyses", AsyncAnalyses.diff)
    fit_pca = delegate("_analyses", AsyncAnalyses.fit_pca)
    health = delegate("_analyses", AsyncAnalyses.health)

    nearest = delegate("_retrieval", AsyncRetrieval.nearest)
    top_inputs = delegate("_retrieval", AsyncRetrieval.top_inputs)

    predict = delegate("_classification", AsyncClassification.predict)
    compare = delegate("_classification", AsyncClassification.compare)

    attribute = delegate("_attributions", AsyncAttributions.attribute)
    grad_cam = delegate("_attributions", AsyncAttributions.grad_cam)

    upload_dataset = delegate("_datasets", AsyncDatasets.upload_dataset)
    datasets = delegate("_datasets", AsyncDatasets.datasets)
    dataset = delegate("_datasets", AsyncDatasets.dataset)
    delete_dataset = delegate("_datasets", AsyncDatasets.delete_dataset)

    train = delegate("_trainers", AsyncTrainers.train)
    trainer = delegate("_trainers", AsyncTrainers.trainer)
    trainers = delegate("_trainers", AsyncTrainers.trainers)
    unpublish = delegate("_trainers", AsyncTrainers.unpublish)
