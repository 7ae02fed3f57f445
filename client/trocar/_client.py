"""Part of the sync client: generated from _aio.py by tools/generate_sync.py, do not edit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from trocar import _from_wire
from trocar._channel import (
    LOCAL,
    ConnectOptions,
    TlsOptions,
)
from trocar._client_trainers import Trainers
from trocar._local import start_local
from trocar_api.v1 import model_pb2, server_pb2
from trocar_api.v1.tensor_pb2 import DTYPE_FLOAT32, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any, Literal

    from trocar._local import LocalModels
    from trocar._modules import ModuleTree
    from trocar._types import DrainState, Model, ServerInfo


def connect(  # noqa: PLR0913 - options of one connection, by keyword
    target: str = "localhost:50051",
    *,
    timeout_s: float = 60.0,
    token: str | None = None,
    tls: TlsOptions | bool | None = None,
    retries: int = 4,
    shared_memory: bool | None = None,
    compression: Literal["gzip"] | None = None,
    cache: bool | None = None,
    models: LocalModels | None = None,
    options: Mapping[str, Any] | None = None,
) -> Client:
    """Return a client; the connection is made with the first call.

        with trocar.connect("localhost:50051") as client:
            maps = client.extract("resnet50", images, taps=["layer4"])

    With "local" there is no separate server: it runs in this process, for this client, until the client
    is closed or dropped or the interpreter exits. `connect` then returns when its models are loaded.

        client = trocar.connect("local", models={"resnet50": "DEFAULT", "mine": my_module})

    Args:
        target: `host:port`, or any gRPC target such as "unix:/run/trocar.sock"; several servers as
            "gpu1:50051,gpu2:50051", which are asked in turn; or "local".
        timeout_s: Deadline of every call that names none, in seconds.
        token: Sent as a bearer token; over plain text to this machine only.
        tls: True for TLS with the roots that gRPC brings along, or `TlsOptions`.
        retries: How often a call is tried again where the server cannot be reached, 0 to 4, with
            a backoff from 0.1 to 2 seconds, within the deadline.
        shared_memory: Whether inputs from 512 KiB and feature maps from 1 MiB on go through memory that
            is shared with the server. None: where the target is a Unix socket and the server lends some;
            see `transport`.
            False: never. True: as None, and `ValueError` where the target is no Unix socket.
        compression: "gzip" compresses every message, lossless, in both directions: for networks slower than
            about 20 MB/s, and values that repeat. It takes the place of shared memory.
        cache: Whether replies may come from the server's feature cache, where it has one. True also asks by
            digest alone for what was sent before, which pays where the same inputs come again; False asks
            for a pass each time; None leaves it to the server.
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
    chosen = ConnectOptions(target, timeout_s, token, tls, retries, shared_memory, compression, cache)
    if target != LOCAL:
        if models is not None or options is not None:
            raise ValueError(f"models and options go with the target {LOCAL!r} only, not with {target!r}")
        return Client(chosen)
    local = start_local(models or (), options)
    return Client(replace(chosen, target=local.target), local)


class Client(Trainers):
    """A connection to a Trocar server; made by `connect`.

    Safe for concurrent calls. Every method that calls the server may raise, beside what it
    lists, `ServerUnavailableError`, `DeadlineExceededError`, `PermissionDeniedError`,
    `VersionSkewError` and `InternalServerError`; all are `TrocarError`.
    """

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

        def ask(one: Client) -> Model:
            return _from_wire.model((one._call(one._models.LoadModel, request, timeout_s)).model)

        return (self._everywhere(ask))[0]

    def unload(self, model_id: str) -> Model:
        """Drop a model's weights from the server's memory when the calls that use it have ended.

        Args:
            model_id: The id of a catalogue entry; the entry stays.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        request = model_pb2.UnloadModelRequest(model_id=model_id)

        def ask(one: Client) -> Model:
            return _from_wire.model((one._call(one._models.UnloadModel, request)).model)

        return (self._everywhere(ask))[0]

    def drain(self, *, undo: bool = False) -> DrainState:
        """Let the server run empty, or take work again; its operator's call.

        Health says NOT_SERVING and new work is refused with `ServerDrainingError`. Calls that run go on to
        their end; fits are saved and wait. Ask again to see how far it is.

        Args:
            undo: Whether to take work again; the fits go on.

        Raises:
            ScopeMissingError: Your token does not have the scope admin.
        """
        self._check_one("drain")
        action = server_pb2.DRAIN_ACTION_UNDO if undo else server_pb2.DRAIN_ACTION_START
        reply = self._call(self._server.Drain, server_pb2.DrainRequest(action=action))
        return _from_wire.drain_state(reply)

    def reload_config(self, *, timeout_s: float = 600.0) -> list[str]:
        """Let the server read its configuration again; its operator's call.

        Models, data sets, limits and whether tokens are asked for may change; calls that run finish on what
        they began with. What is wrong leaves everything as it was.

        Args:
            timeout_s: Deadline in seconds; new models are loaded before the answer comes.

        Returns:
            What has changed, a line each.

        Raises:
            InvalidArgumentError: The configuration is wrong, or changes what only a restart can.
            ModelError: A new model cannot be loaded; see `load`.
            ScopeMissingError: Your token does not have the scope admin.
        """
        self._check_one("reload_config")
        reply = self._call(self._server.ReloadConfig, server_pb2.ReloadConfigRequest(), timeout_s)
        return list(reply.changes)

    def _check_one(self, call: str) -> None:
        if self._members is not None:
            raise ValueError(f"{call} is for one server; connect to that one alone")

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
