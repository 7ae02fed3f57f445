"""Models with asyncio: the catalogue, loading and unloading, module trees."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._base.tables import Listing
from trocar._base.types import MODEL_COLUMNS
from trocar._wire import from_wire
from trocar_api.v1 import model_pb2
from trocar_api.v1.tensor_pb2 import DTYPE_FLOAT32, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._base.types import Model
    from trocar._result.modules import ModuleTree

_DIGEST_TIMEOUT_S = 600.0
"""Of a call for which the server hashes weights, about a second per GB."""


class AsyncModels:
    """The models of a server's catalogue."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def models(self) -> list[Model]:
        """Return every model of the catalogue, loaded or not, by id; without categories."""
        reply = await self._connection.call(
            self._connection.model_service.ListModels, model_pb2.ListModelsRequest()
        )
        return Listing(map(from_wire.model, reply.models), MODEL_COLUMNS)

    async def model(self, model_id: str, *, has_digest: bool = False) -> Model:
        """Return one model, including its categories.

        Args:
            model_id: The id of a catalogue entry, for example "resnet18".
            has_digest: Whether `Model.digest` is wanted. The server takes about a second per GB of weights
                for it, once for each load.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        request = model_pb2.GetModelRequest(model_id=model_id, has_digest=has_digest)
        timeout_s = max(_DIGEST_TIMEOUT_S, self._connection.options.timeout_s) if has_digest else None
        reply = await self._connection.call(self._connection.model_service.GetModel, request, timeout_s)
        return from_wire.model(reply.model)

    async def load(self, model_id: str, weights: str = "", *, timeout_s: float = 600.0) -> Model:
        """Load a model and return it when it can be used; a loaded model does not change.

        Args:
            model_id: The id of a catalogue entry, or a torchvision model name that is not in it yet.
            weights: For a new name: "DEFAULT" (also when empty), the name of a weights enum member, or
                "random:0" with any seed. Empty, or equal, for an existing entry.
            timeout_s: Deadline in seconds; a download can take minutes.

        Raises:
            UnknownModelError: Neither the catalogue nor torchvision has the name.
            UnknownWeightsError: The architecture has no weights of this name.
            ModelConflictError: The entry exists with other weights.
            WeightsUnavailableError: They could not be downloaded, or the file is missing.
            WeightsMismatchError: Keys are missing, unexpected or of another shape.
            WeightsCorruptError: The file cannot be read.
        """
        request = model_pb2.LoadModelRequest(model_id=model_id, weights=weights)

        async def ask(one: AsyncConnection) -> Model:
            return from_wire.model((await one.call(one.model_service.LoadModel, request, timeout_s)).model)

        return (await self._connection.everywhere(ask))[0]

    async def unload(self, model_id: str) -> Model:
        """Remove a model's weights from the server's memory when the calls that use it have ended.

        Args:
            model_id: The id of a catalogue entry; the entry stays.

        Raises:
            UnknownModelError: The catalogue has no model of this id.
        """
        request = model_pb2.UnloadModelRequest(model_id=model_id)

        async def ask(one: AsyncConnection) -> Model:
            return from_wire.model((await one.call(one.model_service.UnloadModel, request)).model)

        return (await self._connection.everywhere(ask))[0]

    async def modules(self, model_id: str, inputs_shape: Sequence[int] | None = None) -> ModuleTree:
        """Return the modules of a model, with the output of each of their calls.

        Args:
            model_id: The id of a loaded model.
            inputs_shape: The assumed shape of a float32 input, including the batch, for example (8, 3, 224,
                224). One example input when None.

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
        return from_wire.module_tree(
            await self._connection.call(self._connection.model_service.ListModules, request)
        )
