"""What the benchmark of GPUs says where there is none; on a CPU its ways are tried."""

import pytest

import trocar
from benchmarks.measuring import Effort, images
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
        rows = gpu.inside_rows(client, "resnet18", images(2, 32), 1)
    assert isinstance(found, trocar.FeatureMaps)
    assert [figure.value is not None for row in rows for figure in row.figures.values()] == [True] * 4


def test_the_row_of_the_spool_is_measured() -> None:
    (figure,) = gpu.spool_row("resnet18", 1, "cpu", 1).figures.values()
    assert figure.value is not None
