"""What the benchmark of GPUs says where there is none; on a CPU its ways are tried."""

import pytest

import trocar
from benchmarks.measuring import Effort
from benchmarks.sections import gpu
from tests.support.servers.running_server import running_server


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_gpu", lambda: False)
    (table,) = gpu.run(Effort(is_quick=True))
    assert gpu.NO_GPU in table.markdown()


def test_its_ways_call_a_server() -> None:
    models = {"resnet18": {"weights": "random:0"}}
    with running_server(models=models, device="cpu") as server, trocar.connect(server.address) as client:
        found = gpu._WAYS["resnet18, `layer4`, batch 1"](client)()
    assert isinstance(found, trocar.FeatureMaps)
