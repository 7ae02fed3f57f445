"""Analyses against a real server; the oracle is the model in this process, NumPy and SciPy."""

from collections.abc import AsyncIterator, Iterator

import numpy as np
import pytest
import scipy.linalg
from PIL import Image

import trocar
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from trocar_server.config import ModelConfig

RESNETS = {
    "resnet18": ModelConfig(weights="random:0"),
    "other": ModelConfig(architecture="resnet18", weights="random:1"),
}
TAPS = ["conv1", "layer1", "layer3", "fc"]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models=RESNETS) as running:
        yield running


def images(count: int = 24, seed: int = 0) -> Array:
    return noise(count, 3, 64, 64, seed=seed)


def in_batches(x: Array, size: int) -> Iterator[Array]:
    return (x[start : start + size] for start in range(0, len(x), size))


def features(client: trocar.Client, x: Array, at: str, size: int, model_id: str = "resnet18") -> Array:
    """The features batch by batch, as the analyses run them."""
    parts = [client.extract(model_id, batch, at)[at] for batch in in_batches(x, size)]
    return np.concatenate(parts).astype(np.float64)


def scipy_fid(a: Array, b: Array) -> float:
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    difference = a.mean(axis=0) - b.mean(axis=0)
    root = np.real(scipy.linalg.sqrtm(cov_a @ cov_b))
    return float(difference @ difference + np.trace(cov_a + cov_b - 2 * root))


@pytest.mark.parametrize("at", ["conv1", "layer1"])
def test_fid_is_scipys_on_averaged_features(client: trocar.Client, at: str) -> None:
    a, b = images(150, seed=1), images(130, seed=2) * 1.5 + 0.2
    left, right = (features(client, x, at, 32).mean(axis=(2, 3)) for x in (a, b))
    found = client.fid("resnet18", a, b, at)
    assert found.distance == pytest.approx(scipy_fid(left, right), rel=1e-6)
    assert (found.count_a, found.count_b) == (150, 130)


def test_fid_of_fewer_images_than_channels_is_that_of_the_features(client: trocar.Client) -> None:
    a, b = images(20, seed=1), images(30, seed=2) + 0.5
    left, right = (features(client, x, "avgpool", 8)[:, :, 0, 0] for x in (a, b))
    centred = [(x - x.mean(axis=0)) / np.sqrt(len(x) - 1) for x in (left, right)]
    cross = np.linalg.norm(centred[0] @ centred[1].T, "nuc")
    spread = sum(float(np.sum(x**2)) for x in centred) - 2 * cross
    means = float(np.sum((left.mean(axis=0) - right.mean(axis=0)) ** 2))
    found = client.fid("resnet18", a, b, batch_size=8)
    assert found.distance == pytest.approx(means + spread, rel=1e-9)
    assert found.is_singular


def test_fid_without_positions_needs_no_pooling(client: trocar.Client) -> None:
    a = images(40)
    assert client.fid("resnet18", a, a[::-1], "fc").distance == pytest.approx(0, abs=1e-9)


def test_cka_is_the_direct_formula(client: trocar.Client) -> None:
    x = images()
    found = client.cka("resnet18", x, TAPS, other="other", batch_size=7)
    for row, name in enumerate(TAPS):
        for column, name_b in enumerate(TAPS):
            a = features(client, x, name, 7).reshape(len(x), -1)
            b = features(client, x, name_b, 7, "other").reshape(len(x), -1)
            a, b = a - a.mean(axis=0), b - b.mean(axis=0)
            k, m = a @ a.T, b @ b.T
            expected = np.sum(k * m) / np.linalg.norm(k) / np.linalg.norm(m)
            assert found.matrix[row, column] == pytest.approx(expected, rel=1e-10)


def test_dead_channels_are_numpys(client: trocar.Client) -> None:
    x = images(12)
    report = client.dead_channels("resnet18", in_batches(x, 5), "**:ReLU", threshold=0.05)
    assert len(report.rows) == 17
    for row in report.rows:
        values = features(client, x, row.name, 5)
        assert row.dead == tuple(np.flatnonzero(np.abs(values).max(axis=(0, 2, 3)) <= 0.05))
    assert report.dead_count > 0


def test_dead_channels_looks_everywhere_by_default(client: trocar.Client) -> None:
    names = client.extract("resnet18", images(1), trocar.tap("**", stats=["min"], values=False)).info
    assert [row.name for row in client.dead_channels("resnet18", images(3)).rows] == list(names)


def test_diff_of_a_model_with_itself_is_zero(client: trocar.Client) -> None:
    diff = client.diff("resnet18", "resnet18", images(10), batch_size=4, tolerance=0)
    assert diff.first_diverging is None
    assert {row.relative_error for row in diff.rows} == {0.0}


def test_diff_of_two_models_is_numpys_in_execution_order(client: trocar.Client) -> None:
    x = images(10)
    diff = client.diff(
        "resnet18", "other", x, ["fc", "layer1.0.conv1", "/in", "layer1", "conv1"], batch_size=4
    )
    assert [row.name for row in diff.rows] == ["/in", "conv1", "layer1.0.conv1", "layer1", "fc"]
    for row in diff.rows[1:]:
        a, b = (features(client, x, row.name, 4, model).ravel() for model in ("resnet18", "other"))
        assert row.relative_error == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-12)
        assert row.cosine == pytest.approx(a @ b / np.linalg.norm(a) / np.linalg.norm(b), rel=1e-9)
        assert row.max_difference == np.abs(a - b).max()
    assert diff.first_diverging is diff["conv1"]


def test_pca_is_the_singular_value_decomposition(client: trocar.Client) -> None:
    x = images()
    pca = client.fit_pca("resnet18", x, "layer1", 5, batch_size=7)
    data = np.moveaxis(features(client, x, "layer1", 7), 1, -1).reshape(-1, 64)
    _, singular, components = np.linalg.svd(data - data.mean(axis=0), full_matrices=False)
    signs = np.sign(components[np.arange(64), np.abs(components).argmax(axis=1)])
    np.testing.assert_allclose(pca.components, (components * signs[:, None])[:5], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(pca.explained_variance, singular[:5] ** 2 / (len(data) - 1), rtol=1e-9)
    assert pca.count == len(data)


def test_a_fitted_pca_reduces_on_the_server(client: trocar.Client) -> None:
    x = images()
    pca = client.fit_pca("resnet18", x, "layer1", 3)
    tap = trocar.tap("layer1", reduce=[trocar.pca(pca.components, mean=pca.mean)])
    maps = client.extract("resnet18", x, ["layer1", trocar.tap("layer1", alias="scores", reduce=tap.reduce)])
    expected = pca.transform(maps["layer1"])
    np.testing.assert_allclose(maps["scores"], expected, rtol=1e-4, atol=1e-4)


async def test_the_asyncio_client_gives_the_same(server: RunningServer, client: trocar.Client) -> None:
    x, y = images(9), images(9, seed=3)

    async def later() -> AsyncIterator[Array]:
        for batch in in_batches(x, 4):
            yield batch

    async with trocar.aio.connect(server.address) as aio:
        assert await aio.diff("resnet18", "other", later(), TAPS) == client.diff(
            "resnet18", "other", in_batches(x, 4), TAPS
        )
        assert (await aio.fid("resnet18", later(), y)).distance == client.fid(
            "resnet18", in_batches(x, 4), y
        ).distance
        cka = await aio.cka("resnet18", later(), TAPS)
        np.testing.assert_array_equal(cka.matrix, client.cka("resnet18", in_batches(x, 4), TAPS).matrix)
        assert await aio.dead_channels("resnet18", later()) == client.dead_channels(
            "resnet18", in_batches(x, 4)
        )
        pca = await aio.fit_pca("resnet18", later(), "layer1", 2)
        np.testing.assert_array_equal(
            pca.components, client.fit_pca("resnet18", in_batches(x, 4), "layer1", 2).components
        )


def test_a_damaged_image_is_named(client: trocar.Client, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("photos")
    for index in range(5):
        Image.new("RGB", (40, 40), (index, 0, 0)).save(folder / f"{index}.png")
    assert client.fid("resnet18", folder, folder, batch_size=2).distance == pytest.approx(0, abs=1e-9)
    (folder / "3.png").write_bytes(b"no image")
    with pytest.raises(trocar.errors.InvalidImageError) as caught:
        client.cka("resnet18", folder, TAPS, other="other", batch_size=2)
    assert caught.value.__notes__ == [
        f"in samples 2 to 3 ({folder / '2.png'} to {folder / '3.png'}), resnet18; "
        f"image 1 is {folder / '3.png'}"
    ]
