"""Calls of models and of the server: load, unload, drain, reload; and passes, which change nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.orders.case import IN_MEMORY, Case, Request, asked, same
from tests.support.models.tiny_models import Plain
from tests.support.models.trainable_nets import SteadyNet
from tests.support.servers.serving import custom
from tests.support.wire.wire import chunk, request, tensor
from trocar_api.v1 import generation_pb2, model_pb2, server_pb2, stream_pb2, tap_pb2, tensor_pb2
from trocar_server.config import ServerConfig
from trocar_server.rpc.oip.oip_messages import SERVICE, message_class

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from tests.orders.world import State
    from tests.support.orders.stepped_server import SteppedServer

SHAPE = (3, 8, 8)
MODELS = {"plain": custom(Plain, SHAPE), "other": custom(SteadyNet, SHAPE)}
SETTINGS = {"models": MODELS}
CAUSAL = {
    "causal": {
        "factory": "tests.support.models.causal_models:TinyGpt2",  # by name: it imports transformers
        "input_shape": (4,),
        "weights": "random:0",
    }
}
LOADED, UNLOADED = model_pb2.MODEL_STATE_LOADED, model_pb2.MODEL_STATE_UNLOADED
DRAIN = "ServerService/Drain"
OIP = f"/{SERVICE.full_name}/"


def is_now(model_id: str, state: int) -> Callable[[State], State]:
    return lambda before: before | {"models": before["models"] | {model_id: state}}


def drains(is_draining: bool) -> Callable[[State], State]:
    return lambda before: before | {"is_draining": is_draining, "is_serving": not is_draining}


async def unloading(_: SteppedServer) -> Request:
    return [model_pb2.UnloadModelRequest(model_id="other")]


async def loading(server: SteppedServer) -> Request:
    await asked(server, "ModelService/UnloadModel", *await unloading(server))
    return [model_pb2.LoadModelRequest(model_id="other")]


def repository(name: str) -> Any:
    method = SERVICE.methods_by_name[name]
    return message_class(method.input_type)(model_name="other")


async def unloading_by_repository(_: SteppedServer) -> Request:
    return [repository("RepositoryModelUnload")]


async def loading_by_repository(server: SteppedServer) -> Request:
    await loading(server)
    return [repository("RepositoryModelLoad")]


async def draining(_: SteppedServer) -> Request:
    return [server_pb2.DrainRequest(action=server_pb2.DRAIN_ACTION_START)]


async def accepting(server: SteppedServer) -> Request:
    await asked(server, DRAIN, *await draining(server))
    return [server_pb2.DrainRequest(action=server_pb2.DRAIN_ACTION_UNDO)]


def reread(folder: Any) -> ServerConfig:
    models: Any = {"plain": MODELS["plain"], "third": custom(SteadyNet, SHAPE)}
    return ServerConfig(port=0, grace_s=1.0, device="cpu", data_dir=folder, models=models)


async def reloading(_: SteppedServer) -> Request:
    return [server_pb2.ReloadConfigRequest()]


def reloaded(state: State) -> State:
    return state | {"models": {"plain": LOADED, "third": LOADED}}


# --- Passes -------------------------------------------------------------------------------------------


def values(seed: int = 0) -> bytes:
    return np.random.default_rng(seed).normal(size=(2, *SHAPE)).astype(np.float32).tobytes()


async def extracting(_: SteppedServer) -> Request:
    data = values()
    half = len(data) // 2
    head = request("plain", "conv", inputs=[tensor((2, *SHAPE))], chunks=[chunk(data[:half])])
    return [head, type(head)(chunks=[chunk(data[half:], offset=half)])]


async def streaming(_: SteppedServer) -> Request:
    start = stream_pb2.ExtractStreamStart(model_id="plain", taps=[tap_pb2.Tap(selector="conv")])
    batches = [
        stream_pb2.ExtractStreamRequest(
            batch=stream_pb2.StreamBatch(batch_index=index, inputs=[tensor((2, *SHAPE))]),
            chunks=[chunk(values(index))],
        )
        for index in range(3)
    ]
    return [stream_pb2.ExtractStreamRequest(start=start), *batches]


async def generating(_: SteppedServer) -> Request:
    prompt = np.arange(5, dtype=np.int64)[None]
    ids = tensor(prompt.shape, tensor_pb2.DTYPE_INT64, "input_ids")
    extraction = request("causal", "transformer.h.0", inputs=[ids], chunks=[])
    options = generation_pb2.GenerationOptions(max_new_tokens=4, temperature=1.0, seed=1)
    return [
        generation_pb2.GenerateRequest(extraction=extraction, options=options),
        generation_pb2.GenerateRequest(chunks=[chunk(prompt.tobytes())]),
    ]


async def generating_several(_: SteppedServer) -> Request:
    prompts = np.arange(6, dtype=np.int64).reshape(2, 3)
    ids = tensor(prompts.shape, tensor_pb2.DTYPE_INT64, "input_ids")
    taps = [tap_pb2.Tap(selector=f"transformer.h.{number}") for number in range(2)]
    extraction = request("causal", taps=taps, inputs=[ids], chunks=[])
    extraction.edits.add(selector="transformer.h.0").zero.SetInParent()
    options = generation_pb2.GenerationOptions(
        max_new_tokens=2, temperature=1.0, sample_index=1, stop=["end"], logprobs=2
    )
    return [
        generation_pb2.GenerateRequest(extraction=extraction, options=options),
        generation_pb2.GenerateRequest(chunks=[chunk(prompts.tobytes())]),
    ]


def inference() -> Any:
    kind = message_class(SERVICE.methods_by_name["ModelInfer"].input_type)
    message = kind(model_name="plain", raw_input_contents=[values()])
    message.inputs.add(name="x", datatype="FP32", shape=(2, *SHAPE))
    return message


async def inferring(_: SteppedServer) -> Request:
    return [inference()]


async def inferring_twice(_: SteppedServer) -> Request:
    return [inference(), inference()]


async def nothing(_: SteppedServer) -> Request:
    return [server_pb2.GetServerStatusRequest()]


CASES = [
    Case("ModelService/LoadModel", loading, is_now("other", LOADED), "", SETTINGS, repeats_after=IN_MEMORY),
    Case(
        "ModelService/UnloadModel",
        unloading,
        is_now("other", UNLOADED),
        "",
        SETTINGS,
        repeats_after=IN_MEMORY,
    ),
    Case(
        OIP + "RepositoryModelLoad",
        loading_by_repository,
        is_now("other", LOADED),
        "",
        SETTINGS,
        repeats_after=IN_MEMORY,
    ),
    Case(
        OIP + "RepositoryModelUnload",
        unloading_by_repository,
        is_now("other", UNLOADED),
        "",
        SETTINGS,
        repeats_after=IN_MEMORY,
    ),
    Case(DRAIN, draining, drains(True), "start", SETTINGS, repeats_after=IN_MEMORY),
    Case(DRAIN, accepting, drains(False), "undo", SETTINGS, repeats_after=IN_MEMORY),
    Case(
        "ServerService/ReloadConfig",
        reloading,
        reloaded,
        "",
        SETTINGS | {"reread": reread},
        repeats_after=IN_MEMORY,
    ),
    Case("ServerService/GetServerStatus", nothing, same, "", SETTINGS),
    Case("ExtractionService/Extract", extracting, same, "", SETTINGS),
    Case("StreamService/ExtractStream", streaming, same, "", SETTINGS),
    Case("GenerationService/Generate", generating, same, "", {"models": CAUSAL}),
    Case("GenerationService/Generate", generating_several, same, "several", {"models": CAUSAL}),
    Case(OIP + "ModelInfer", inferring, same, "", SETTINGS),
    Case(OIP + "ModelStreamInfer", inferring_twice, same, "", SETTINGS),
]
