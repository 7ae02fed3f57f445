"""Calls of the Open Inference Protocol are watched as our own are."""

from typing import Any

import grpc
import numpy as np
import pytest

from tests.support.models.odd_models import Identity
from tests.support.servers.running_server import RunningServer
from tests.support.servers.scraping import scrape
from tests.support.servers.serving import Serve, custom
from trocar_server.rpc.oip import oip_messages as oip

INFER = "/inference.GRPCInferenceService/ModelInfer"


@pytest.fixture
def watched(serve: Serve) -> RunningServer:
    return serve(models={"identity": custom(Identity)}, metrics_port=0)


def infer(channel: grpc.Channel, model_name: str, rows: int) -> Any:
    request = oip.ModelInferRequest(model_name=model_name)
    request.inputs.add(name="x", datatype="FP32", shape=[rows, 3])
    request.raw_input_contents.append(np.zeros((rows, 3), np.float32).tobytes())
    request.outputs.add(name="identity")
    method: Any = channel.unary_unary(INFER, None, None)
    return method(request.SerializeToString(), timeout=60)


def test_an_inference_is_a_call_with_a_pass(watched: RunningServer) -> None:
    with grpc.insecure_channel(watched.address) as channel:
        for rows in (1, 4):
            infer(channel, "identity", rows)
        with pytest.raises(grpc.RpcError):
            infer(channel, "absent", 1)
    found = scrape(watched)
    labels = {"grpc_service": "inference.GRPCInferenceService", "grpc_method": "ModelInfer"}
    assert found.value("grpc_server_handled_total", grpc_code="OK", **labels) == 2
    assert found.value("grpc_server_handled_total", **labels) == 3
    assert found.value("trocar_passes_total", model="identity") == 2
    assert found.value("trocar_rows_total", model="identity") == 5
    assert found.value("trocar_requests_total", model="identity", grpc_code="OK") == 2
