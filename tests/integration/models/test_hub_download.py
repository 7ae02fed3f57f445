"""Models of the Hub: downloaded by the real client from a stand-in, verified, and served without network."""

# transformers is half typed.
# pyright: reportArgumentType=false, reportCallIssue=false

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, BertModel

import trocar
from tests.support.models import text_models
from tests.support.models.hub_stand_in import HubStandIn, hub_stand_in
from tests.support.servers.server_processes import ServerProcesses

NAME = "org/tiny"
LAYER = "encoder.layer.1"
UNWANTED = ("pytorch_model.bin", "modeling_own.py")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    text_models.save_text_model(folder)
    for name in UNWANTED:
        (folder / name).write_bytes(b"no file to download")
    return folder


@pytest.fixture
def hub(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    with hub_stand_in(NAME, repository) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HTTP_PROXY", "http_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield found


def values(address: str) -> np.ndarray:
    with trocar.connect(address) as client:
        return client.extract("tiny", "the cat sat", [LAYER])[LAYER]


def test_a_repository_is_downloaded_verified_and_served_without_the_hub(
    repository: Path, hub: HubStandIn, tmp_path: Path
) -> None:
    commit = hub.commit
    models: dict[str, Any] = {"tiny": {"source": f"hf:{NAME}@{commit}"}}
    processes = ServerProcesses()
    try:
        server = processes.start(tmp_path, models=models)
        first = values(server.address)
        assert server.terminate() == 0
        asked = list(hub.requests)
        hub.folder = tmp_path / "gone"  # the Hub has nothing any more
        server = processes.start(tmp_path, models=models)
        second = values(server.address)
        assert server.terminate() == 0
        assert hub.requests == asked
        (cache,) = tmp_path.rglob(f"*@{commit}")
        _check_files(repository, cache, asked)
        (cache / "config.json").write_text((cache / "config.json").read_text() + " ")
        refused = processes.ask({"data_dir": str(tmp_path), "device": "cpu", "port": 0, "models": models})
        assert "port" not in refused
        log = tmp_path.with_suffix(".log").read_text()
        assert "reason=WEIGHTS_CORRUPT" in log
        assert f"files of 'org--tiny@{commit}' are not those that were downloaded: config.json" in log
    finally:
        processes.close()
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(first, _expected(repository))


def _check_files(repository: Path, cache: Path, asked: list[str]) -> None:
    """Compare what was downloaded and recorded with the repository; code and pickles were never asked for."""
    lines = [line.split("  ", 1) for line in (cache / ".trocar-sha256").read_text().splitlines()]
    recorded = {name: digest for digest, name in lines}
    wanted = {path.name for path in repository.iterdir()} - set(UNWANTED)
    assert recorded == {name: hashlib.sha256((repository / name).read_bytes()).hexdigest() for name in wanted}
    assert not [path for path in asked if path.endswith(UNWANTED)]
    assert {path.name for path in cache.iterdir()} == {*wanted, ".trocar-sha256"}


def _expected(repository: Path) -> np.ndarray:
    model: Any = AutoModel.from_pretrained(str(repository)).eval()
    assert isinstance(model, BertModel)
    from transformers import AutoTokenizer

    load: Any = AutoTokenizer.from_pretrained
    with torch.inference_mode():
        output = model(**load(str(repository))("the cat sat", return_tensors="pt"), output_hidden_states=True)
    values: np.ndarray = output.hidden_states[2].numpy()
    return values
