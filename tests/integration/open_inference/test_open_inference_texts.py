"""Models of texts and of images through the Open Inference Protocol: texts as BYTES, several named inputs."""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.support.models.text_models import save_tokenizer
from tests.support.models.transformers_folders import save_family, save_image_processor
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.wire.open_inference import arrays_of, ask, infer, info_of, request_of
from tests.support.wire.pictures import encoded, photo
from tests.support.wire.wire import raw_channel

TEXTS = ["a cat", "the dog sat on the mat"]
LAYER = "encoder.layer.1"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    root = tmp_path_factory.mktemp("folders")
    found = {name: (root / name, save_family(name, root / name)) for name in ("bert", "clip", "gpt2")}
    save_tokenizer(root / "bert")
    save_tokenizer(root / "clip", model_input_names=["input_ids", "attention_mask"])
    save_image_processor("clip", root / "clip")
    return {name: (folder, model.requires_grad_(False)) for name, (folder, model) in found.items()}


@pytest.fixture(scope="module")
def server(folders: dict[str, tuple[Path, Any]]) -> Iterator[RunningServer]:
    tables: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, (folder, _) in folders.items()}
    with running_server(models=tables, device="cpu") as running:
        yield running


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    with raw_channel(server.address) as opened:
        yield opened


def _with_bytes(request: Any, name: str, shape: list[int], strings: list[bytes]) -> Any:
    """Add an input of strings in raw contents, as tritonclient serialises them."""
    request.inputs.add(name=name, datatype="BYTES", shape=shape)
    request.raw_input_contents.append(b"".join(len(each).to_bytes(4, "little") + each for each in strings))
    return request


def _encoded(texts: list[str]) -> list[bytes]:
    return [text.encode() for text in texts]


def _tokens(folder: Path, *texts: list[str]) -> dict[str, torch.Tensor]:
    return dict(AutoTokenizer.from_pretrained(folder)(*texts, padding=True, return_tensors="pt"))


def _hooked(model: Any, path: str, inputs: dict[str, Any]) -> Any:
    seen: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        model(**inputs)
    handle.remove()
    return (seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]).numpy()


@pytest.mark.parametrize("name", ["text", "input_ids"])
@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_texts_are_tokenized_as_transformers_does(
    channel: grpc.Channel, folders: dict[str, tuple[Path, Any]], name: str, shape: list[int]
) -> None:
    folder, model = folders["bert"]
    request = _with_bytes(request_of("bert", {}, [LAYER]), name, shape, _encoded(TEXTS))
    found = arrays_of(infer(channel, request))[LAYER]
    np.testing.assert_array_equal(found, _hooked(model, LAYER, _tokens(folder, TEXTS)))


def test_typed_contents_and_pairs_of_texts(
    channel: grpc.Channel, folders: dict[str, tuple[Path, Any]]
) -> None:
    folder, model = folders["bert"]
    request = request_of("bert", {}, [LAYER])
    pairs = [["a cat", "the mat"], ["hello", "dog sat"]]
    contents = {"bytes_contents": _encoded([text for pair in pairs for text in pair])}
    request.inputs.add(name="text", datatype="BYTES", shape=[2, 2], contents=contents)
    tokens = _tokens(folder, *map(list, zip(*pairs, strict=True)))
    np.testing.assert_array_equal(arrays_of(infer(channel, request))[LAYER], _hooked(model, LAYER, tokens))


@pytest.mark.parametrize(("name", "tap"), [("bert", LAYER), ("gpt2", "transformer.h.1")])
@pytest.mark.parametrize("is_turned", [False, True])
def test_two_named_inputs(
    channel: grpc.Channel, folders: dict[str, tuple[Path, Any]], name: str, tap: str, *, is_turned: bool
) -> None:
    arrays = {
        "input_ids": np.array([[3, 1, 4, 1], [5, 9, 0, 0]]),
        "attention_mask": np.array([[1, 1, 1, 1], [1, 1, 0, 0]]),
    }
    sent = dict(reversed(arrays.items())) if is_turned else arrays
    wanted = _hooked(folders[name][1], tap, {key: torch.from_numpy(value) for key, value in arrays.items()})
    np.testing.assert_array_equal(arrays_of(infer(channel, request_of(name, sent, [tap])))[tap], wanted)


def test_texts_and_images_in_one_request(channel: grpc.Channel, folders: dict[str, tuple[Path, Any]]) -> None:
    folder, model = folders["clip"]
    from transformers import AutoImageProcessor

    images = AutoImageProcessor.from_pretrained(folder, backend="pil")(photo(), return_tensors="pt")
    with torch.inference_mode():
        wanted = model(**_tokens(folder, TEXTS), **images).logits_per_image.numpy()
    tap = '/out["logits_per_image"]'
    request = _with_bytes(request_of("clip", {}, [tap]), "text", [2], _encoded(TEXTS))
    request = _with_bytes(request, "images", [1], [encoded(photo(), "PNG")])
    np.testing.assert_array_equal(arrays_of(infer(channel, request))[tap], wanted)


def test_the_metadata_name_the_inputs(channel: grpc.Channel) -> None:
    found = ask(channel, "ModelMetadata", {"name": "clip"}).inputs
    assert [(entry.name, entry.datatype) for entry in found] == [
        ("input_ids", "INT64"),
        ("pixel_values", "FP32"),
    ]


@pytest.mark.parametrize(
    ("model", "shape", "strings", "message"),
    [
        ("bert", [1], [b""], "text 0 is empty"),
        ("bert", [1], [b"\xff"], "text 0 is not UTF-8"),
        ("bert", [2], [b"a cat"], "2 texts expected, 1 received"),
        ("bert", [1, 3], [b"a", b"b", b"c"], r"shape \[count\]"),
        ("bert", [1], [b"cat " * 40], "has 42 tokens, the model takes 16"),
        ("gpt2", [1], [b"a cat"], "model 'gpt2' has no tokenizer"),
    ],
)
def test_texts_that_cannot_be_taken_are_refused(
    channel: grpc.Channel, model: str, shape: list[int], strings: list[bytes], message: str
) -> None:
    request = _with_bytes(request_of(model, {}, []), "text", shape, strings)
    with pytest.raises(grpc.RpcError, match=message) as caught:
        infer(channel, request)
    assert info_of(caught.value).reason in (
        "INPUT_REJECTED",
        "INVALID_TENSOR",
        "NO_PREPROCESSING",
    )


def test_texts_beside_their_ids_are_refused(channel: grpc.Channel) -> None:
    request = request_of("bert", {"input_ids": np.ones((1, 3), np.int64)}, [LAYER])
    with pytest.raises(grpc.RpcError, match="one or the other"):
        infer(channel, _with_bytes(request, "text", [1], [b"a cat"]))
