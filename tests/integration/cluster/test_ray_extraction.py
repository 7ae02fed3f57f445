"""Bulk extraction with Ray: the files of one machine, byte for byte, and the transform of Ray Data."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trocar
from tests.support.files.scale import SEED, count
from tests.support.killing.ray_extraction import CHOICES, TAPS, Writer, readers_of
from tests.support.servers.ray_cluster import ray_cluster
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import tiny_models_config
from trocar.errors import SourceError

pytest.importorskip("ray", reason="needs Ray: pip install 'trocar[ray]'")
pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")]
KILLS = count(3, "TROCAR_EXTRACTION_KILLS")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models={"plain": tiny_models_config()["plain"]}, device="cpu") as running:
        yield running


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Any]:
    with ray_cluster(2) as found:
        yield found


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    path = tmp_path / "arrays.npy"
    np.save(path, np.random.default_rng(0).normal(size=(70, 3, 8, 8)).astype(np.float32))
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def both(client: trocar.Client, source: object, tmp_path: Path, **changes: Any) -> dict[str, bytes]:
    """Extract on one machine and with Ray; returns the files, which are the same."""
    import trocar.ray

    options = {**CHOICES, **changes}
    trocar.extract_dataset(client, "plain", source, TAPS, tmp_path / "alone", **options)
    trocar.ray.extract_dataset(client, "plain", source, TAPS, tmp_path / "ray", workers=2, **options)
    expected = files(tmp_path / "alone")
    assert files(tmp_path / "ray") == expected
    return expected


@pytest.mark.parametrize("limit", [None, 1, 33, 64])
def test_the_files_are_those_of_one_machine(
    client: trocar.Client, arrays: Path, tmp_path: Path, limit: int | None
) -> None:
    assert both(client, arrays, tmp_path, limit=limit)


def test_a_change_of_kind_ends_a_batch_as_on_one_machine(
    client: trocar.Client, arrays: Path, tmp_path: Path
) -> None:
    """Arrays, then images: chunks of 16 samples no longer begin with a batch."""
    folder, first = tmp_path / "images", tmp_path / "first.npy"
    folder.mkdir()
    np.save(first, np.load(arrays)[:27])
    pixels = np.random.default_rng(1).integers(0, 255, size=(30, 8, 8, 3), dtype=np.uint8)
    for index, values in enumerate(pixels):
        Image.fromarray(values).save(folder / f"{index:02}.png")
    assert both(client, [first, folder, first], tmp_path, on_error="skip")


def test_unreadable_samples_are_left_out_as_on_one_machine(client: trocar.Client, tmp_path: Path) -> None:
    folder = tmp_path / "images"
    folder.mkdir()
    for index in range(20):
        Image.new("RGB", (8, 8), (index, 0, 0)).save(folder / f"{index:02}.png")
    (folder / "07.png").write_bytes(b"no image")
    both(client, folder, tmp_path, on_error="skip")


def test_a_run_that_was_stopped_goes_on_with_ray(client: trocar.Client, arrays: Path, tmp_path: Path) -> None:
    import trocar.ray

    class StopError(Exception):
        pass

    def stop(progress: trocar.Progress) -> None:
        if progress.sample_count >= 30:
            raise StopError

    with pytest.raises(StopError):
        trocar.extract_dataset(client, "plain", arrays, TAPS, tmp_path / "ray", progress=stop, **CHOICES)
    assert both(client, arrays, tmp_path)


def test_a_failure_keeps_what_was_done(client: trocar.Client, arrays: Path, tmp_path: Path) -> None:
    import trocar.ray

    wrong = tmp_path / "wrong.npy"
    np.save(wrong, np.zeros((4, 5, 8, 8), np.float32))
    with pytest.raises(trocar.TrocarError) as failed:
        trocar.ray.extract_dataset(client, "plain", [arrays, wrong], TAPS, tmp_path / "out", **CHOICES)
    assert any("samples are done; run the same command again" in note for note in failed.value.__notes__)
    with pytest.raises(SourceError):
        trocar.ray.extract_dataset(client, "plain", tmp_path / "none.npy", TAPS, tmp_path / "out2")


@pytest.mark.timeout(600 + 60 * KILLS)
def test_a_run_whose_workers_and_writer_are_killed_at_random_moments_writes_the_same_files(
    cluster: Any, client: trocar.Client, server: RunningServer, tmp_path: Path
) -> None:
    source, out, chance = tmp_path / "arrays.npy", tmp_path / "ray", random.Random(SEED)
    sample_count = 120 * max(4, KILLS)  # so that there is work left after the last kill
    np.save(source, np.random.default_rng(1).normal(size=(sample_count, 3, 8, 8)).astype(np.float32))
    trocar.extract_dataset(client, "plain", source, TAPS, tmp_path / "alone", **CHOICES)
    raylets = [dict(node.live_processes())["raylet"].pid for node in cluster.list_all_nodes()]

    kills, writer = dict.fromkeys(("writer", "worker"), 0), None
    for number in range(KILLS):
        writer = writer or Writer(cluster.address, server.address, source, out)
        assert writer.wait_for_batches(chance.randint(1, 20)), writer.end()
        victim = "worker" if number % 2 else "writer"
        if victim == "writer":
            os.kill(writer.process_id, signal.SIGKILL)
            assert writer.end() == -signal.SIGKILL
            writer = None
        else:
            os.kill(chance.choice(readers_of(raylets)), signal.SIGKILL)
        kills[victim] += 1
    writer = writer or Writer(cluster.address, server.address, source, out)
    assert writer.end() == 0
    assert kills["writer"] >= kills["worker"] > 0
    assert files(out) == files(tmp_path / "alone")


def test_a_transform_of_ray_data(client: trocar.Client, server: RunningServer, arrays: Path) -> None:
    import ray

    import trocar.ray

    rows = np.load(arrays)[:8]
    data = ray.data.from_items([{"image": row, "id": index} for index, row in enumerate(rows)])
    found = data.map_batches(
        trocar.ray.Extract,
        fn_constructor_kwargs={"target": server.address, "model_id": "plain", "taps": ["fc"]},
        batch_size=8,
        concurrency=1,
    ).take_all()
    assert set(found[0]) == {"id", "fc"}
    expected = client.extract("plain", rows, ["fc"])["fc"]
    order = [row["id"] for row in found]
    np.testing.assert_allclose(np.stack([row["fc"] for row in found]), expected[order], rtol=1e-5)
