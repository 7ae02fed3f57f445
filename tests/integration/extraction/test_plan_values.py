"""A dry run gets the values by which a model decides, where made-up ones do not work."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
import transformers as T

import trocar
from tests.support.servers.running_server import RunningServer, running_server
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import tensor_pb2
from trocar_api.v1.extraction_pb2_grpc import ExtractionServiceStub

BLOCKS = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
IMAGE_TOKEN = 59
IDS = np.array([[1, 5, 6, 7, 8, 2], [1, 5, 2, 0, 0, 0]])
PADDED = {"input_ids": IDS, "attention_mask": np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])}
PICTURES = {
    "input_ids": np.array([[1, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, IMAGE_TOKEN, 2]] * 2),
    "attention_mask": np.ones((2, 6), np.int64),
    "pixel_values": np.zeros((2, 3, 8, 8), np.float32),
}


def llava() -> Any:
    vision = T.CLIPVisionConfig(**BLOCKS, image_size=8, patch_size=4)
    text = T.LlamaConfig(**BLOCKS, vocab_size=60, num_key_value_heads=2, max_position_embeddings=64)
    config = T.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    return T.LlavaForConditionalGeneration(config)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("folders")
    torch.manual_seed(0)
    made = {"bert": T.BertModel(T.BertConfig(**BLOCKS, vocab_size=30)), "llava": llava()}
    for name, model in made.items():
        model.save_pretrained(root / name)
    tables = {name: {"source": f"hf:{root / name}"} for name in made}
    with running_server(models=tables, device="cpu", data_dir=Path(root / "data")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


@pytest.mark.parametrize(
    ("model", "inputs", "taps"),
    [
        ("bert", PADDED, ["encoder.layer.0/in(attention_mask)", "encoder.layer.1"]),
        ("llava", PICTURES, ["model.language_model.layers.0", "model.multi_modal_projector"]),
    ],
)
def test_a_plan_is_that_of_the_reply(
    client: trocar.Client, model: str, inputs: dict[str, Any], taps: list[str]
) -> None:
    plan = client.plan(model, inputs, taps)
    maps = client.extract(model, inputs, taps)
    assert plan.feature_maps == maps.info
    assert not plan.is_symbolic


def test_other_values_have_another_plan(client: trocar.Client) -> None:
    whole = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}
    with pytest.raises(trocar.errors.NotATensorError, match="NoneType"):
        client.plan("bert", whole, ["encoder.layer.0/in(attention_mask)"])
    wrong = {**PICTURES, "input_ids": np.ones((2, 6), np.int64)}
    with pytest.raises(trocar.errors.InputRejectedError, match="image tokens"):
        client.plan("llava", wrong, ["model.language_model.layers.0"])


def request(*chunks: tensor_pb2.TensorChunk, count: int = 6) -> pb.PlanRequest:
    ids = tensor_pb2.TensorSpec(dtype=tensor_pb2.DTYPE_INT64, shape=[1, count])
    wanted = pb.ExtractRequest(
        model_id="bert", inputs=[pb.Input(name="input_ids", tensor=ids)], chunks=chunks
    )
    wanted.taps.add(selector="encoder.layer.0", values=True)
    return pb.PlanRequest(extraction=wanted)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (request(tensor_pb2.TensorChunk(data=b"\0" * 47)), "in one chunk"),
        (request(tensor_pb2.TensorChunk(data=b"\0" * 48, offset_bytes=8)), "in one chunk"),
        (request(tensor_pb2.TensorChunk(data=b"\0" * 48, payload_index=1)), "named tensors"),
        (request(tensor_pb2.TensorChunk(data=b"\0" * 48, payload_index=-1)), "named tensors"),
        (request(tensor_pb2.TensorChunk(data=b"\0" * 80_000), count=10_000), "at most 65,536 bytes"),
    ],
)
def test_values_that_are_not_whole_are_refused(
    server: RunningServer, wrong: pb.PlanRequest, words: str
) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        ExtractionServiceStub(channel).Plan(wrong)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(caught.value.details())
