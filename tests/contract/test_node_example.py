"""The Node examples of the guides: their requests are valid, and they read fields that exist."""

import json
import re
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict

from tests.support import ROOT
from trocar_api.v1 import extraction_pb2, generation_pb2, tensor_pb2
from trocar_server.config import Limits
from trocar_server.rpc.codec.extract_requests import to_plan
from trocar_server.rpc.codec.generation import sampling_from_wire

CHUNK = {"chunk": tensor_pb2.TensorChunk.DESCRIPTOR}
READ = {
    "generation.md": {
        "reply": generation_pb2.GenerateResponse.DESCRIPTOR,
        "reply.sequence": generation_pb2.SequenceFinished.DESCRIPTOR,
        "token": generation_pb2.GeneratedToken.DESCRIPTOR,
        "map": extraction_pb2.FeatureMap.DESCRIPTOR,
        **CHUNK,
    },
    "tasks/from-node.md": {
        "reply": extraction_pb2.ExtractResponse.DESCRIPTOR,
        "map": extraction_pb2.FeatureMap.DESCRIPTOR,
        "map.tensor": tensor_pb2.TensorSpec.DESCRIPTOR,
        **CHUNK,
    },
}
"""By page: the messages that its example reads."""
FILES: dict[str, Any] = {
    "generation.md": generation_pb2.DESCRIPTOR,
    "tasks/from-node.md": extraction_pb2.DESCRIPTOR,
}

pages = pytest.mark.parametrize("page", READ)


def example(page: str) -> str:
    [text] = re.findall(r"```js\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return str(text)


def literal(text: str, **names: str) -> str:
    """Return an object of JavaScript as JSON; names stand for other objects."""
    text = re.sub(r"(\w+):", r'"\1":', text)
    text = re.sub(r"\{ (\w+) \}", lambda match: f'{{"{match[1]}": {names[match[1]]}}}', text)
    text = re.sub(
        r"(, )(\w+)( \})", lambda match: f'{match[1]}"{match[2]}": {names[match[2]]}{match[3]}', text
    )
    text = re.sub(r"\[(\w+)\]", lambda match: f"[{names[match[1]]}]", text)
    return re.sub(r",(\s*[}\]])", r"\1", text)


def defined(page: str, name: str) -> str:
    written = re.search(rf"const {name} = ([\[{{].*?[\]}}]);", example(page))
    assert written is not None
    return literal(written[1].replace("picture.length", "1000"))


def first_message(page: str) -> str:
    written = re.search(r"call\.write\((.*?)\);", example(page), re.DOTALL)
    assert written is not None
    return written[1]


def test_the_request_of_a_run_is_one_that_the_server_takes() -> None:
    page = "generation.md"
    given = json.loads(literal(first_message(page), texts=defined(page, "texts"), tap=defined(page, "tap")))
    request = ParseDict(given, generation_pb2.GenerateRequest())
    plan, byte_counts = to_plan(request.extraction, Limits(), needs_taps=False)
    assert plan.model_id == "llama"
    assert not byte_counts
    assert sampling_from_wire(request.options).seed == 7


def test_the_request_for_features_is_one_that_the_server_takes() -> None:
    page = "tasks/from-node.md"
    given = json.loads(
        literal(first_message(page), images=defined(page, "images"), taps=defined(page, "taps"))
    )
    plan, byte_counts = to_plan(ParseDict(given, extraction_pb2.ExtractRequest()), Limits())
    assert (plan.model_id, [tap.selector.text for tap in plan.taps]) == ("resnet50", ["layer4", "avgpool"])
    assert list(byte_counts) == [1000]


@pages
def test_what_is_read_of_replies_exists(page: str) -> None:
    for name, kind in READ[page].items():
        fields = re.findall(rf"(?<![\w.]){re.escape(name)}\.(\w+)", example(page))
        assert fields, name
        assert set(fields) <= set(kind.fields_by_name)
    [method] = re.findall(r"service\.(\w+)\(", example(page))
    [service] = re.findall(r"api\.(\w+)\(", example(page))
    assert method in FILES[page].services_by_name[service].methods_by_name
    assert FILES[page].name in example(page)


def test_the_chunks_that_are_sent_have_fields_that_exist() -> None:
    sent = re.search(r"chunks: \[\{(.*?)\}\]", example("tasks/from-node.md"))
    assert sent is not None
    assert set(re.findall(r"(\w+):", sent[1])) == set(tensor_pb2.TensorChunk.DESCRIPTOR.fields_by_name)
