"""The messages live beside those of other servers' clients in one process."""

import subprocess
import sys

import pytest

from trocar_server.rpc.oip.oip_messages import FILE, SERVICE, ModelInferRequest, ModelInferResponse

_ANOTHERS = """
from google.protobuf import descriptor_pb2, descriptor_pool
file = descriptor_pb2.FileDescriptorProto(name="grpc_service.proto", package="inference", syntax="proto3")
file.message_type.add(name="ModelInferRequest").field.add(name="mine", number=1, type=9, label=1)
descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
"""
_OURS = "from trocar_server.rpc.oip import oip_messages as messages"
_BOTH = """
pool = descriptor_pool.Default()
assert [field.name for field in pool.FindMessageTypeByName("inference.ModelInferRequest").fields] == ["mine"]
assert messages.ModelInferRequest(model_name="resnet50", id="7").SerializeToString()
"""


@pytest.mark.parametrize(
    "order", [(_ANOTHERS, _OURS), (_OURS, _ANOTHERS)], ids=["theirs first", "ours first"]
)
def test_the_default_pool_is_left_to_others(order: tuple[str, str]) -> None:
    """tritonclient and kserve register other files of the package `inference` there."""
    subprocess.run([sys.executable, "-c", "\n".join([*order, _BOTH])], check=True, timeout=120)


def test_the_file_has_the_one_service() -> None:
    assert SERVICE.full_name == "inference.GRPCInferenceService"
    assert SERVICE.file.serialized_pb == FILE


def test_bytes_are_those_of_the_specification() -> None:
    """Written by hand from the public specification: number and type of what every client uses."""
    request = ModelInferRequest(model_name="m", id="7", raw_input_contents=[b"\1\2"])
    request.inputs.add(name="x", datatype="FP32", shape=[1, 2])
    request.outputs.add(name="y")
    assert request.SerializeToString() == bytes.fromhex(
        "0a016d"  # model_name = 1
        "1a0137"  # id = 3
        "2a0d"
        "0a0178"
        "1204"
        "46503332"
        "1a020102"  # inputs = 5: name = 1, datatype = 2, shape = 3, packed
        "3203"
        "0a0179"  # outputs = 6: name = 1
        "3a020102"  # raw_input_contents = 7
    )
    response = ModelInferResponse(model_name="m", id="7", raw_output_contents=[b"\3"])
    response.outputs.add(name="y", datatype="INT8", shape=[1])
    assert response.SerializeToString() == bytes.fromhex(
        "0a016d"  # model_name = 1
        "1a0137"  # id = 3
        "2a0c"
        "0a0179"
        "1204"
        "494e5438"
        "1a0101"  # outputs = 5
        "320103"  # raw_output_contents = 6
    )
