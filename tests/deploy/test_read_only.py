"""A server that can write to its data directory and its temporary folder only, as the deploy files run it."""

import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

import trocar
from tests.support.servers.sealed_off import can_seal, sealed_server

pytestmark = pytest.mark.skipif(not can_seal(), reason="needs unshare and mount namespaces")
START_S = 120


def address_of(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Wait until the server is ready; returns its address."""
    ready_file = folder / "tmp" / "ready"
    for _ in range(START_S * 10):
        if ready_file.exists() or process.poll() is not None:
            break
        time.sleep(0.1)
    assert ready_file.exists(), (folder / "log").read_text()
    return ready_file.read_text()


def test_it_serves_trains_with_a_spool_and_stops_by_sigterm(tmp_path: Path) -> None:
    words = ["resnet18=random:0", "--port", "0", "--device", "cpu"]
    words += ["--ready-file", str(tmp_path / "tmp" / "ready")]
    images = np.random.default_rng(0).random((2, 3, 64, 64), np.float32)
    with sealed_server(tmp_path, words) as process:
        with trocar.connect(address_of(process, tmp_path)) as client:
            assert client.is_serving()
            assert client.extract("resnet18", images, taps=["fc"])["fc"].shape == (2, 1000)
            trainer = client.train(
                "resnet18", saved_tensors=trocar.training.save_on_disk(budget_bytes=1 << 20)
            )
            assert trainer.step(images, np.array([1, 2])).written_bytes > 0
            trainer.save()
            client.upload_dataset((images, np.array([1, 2])))
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert "Read-only" not in (tmp_path / "log").read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"data", "tmp", "log"}
    assert (tmp_path / "data" / "trainers").is_dir()
    assert list((tmp_path / "data" / "scratch").iterdir()) == []
