"""Fits to data sets on the server, which equal those to the same samples of a caller."""

# scikit-learn has no types.
# pyright: reportMissingTypeStubs=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import trocar
from tests.support.models.causal_models import save_causal
from tests.support.models.transformers_folders import save_family, save_image_processor
from tests.support.servers.running_server import running_server
from trocar.errors import DirectionRejectedError, InvalidArgumentError

DATA: Any = load_digits()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    folder = tmp_path_factory.mktemp("data-sets")
    save_family("vit", folder / "vit")
    save_image_processor("vit", folder / "vit")
    save_causal("llama", folder / "llama")
    models: Any = {name: {"source": f"hf:{folder / name}"} for name in ("vit", "llama")}
    with (
        running_server(models=models, device="cpu", data_dir=folder / "data") as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


def same(client: trocar.Client, model: str, one: Any, other: Any) -> None:
    assert [row.place for row in one] == [row.place for row in other]
    for row, expected in zip(one, other, strict=True):
        assert row.fold_scores == expected.fold_scores
        assert row.classes == expected.classes
        vectors = [client.direction(model, each.name, row.place).vectors for each in (one, other)]
        np.testing.assert_array_equal(vectors[0], vectors[1])


def test_a_folder_of_images(client: trocar.Client, tmp_path: Path) -> None:
    for digit in (0, 1):
        (tmp_path / f"digit-{digit}").mkdir()
        for index, image in enumerate(DATA.images[DATA.target == digit][:15]):
            pixels = Image.fromarray((image * 15).astype(np.uint8)).convert("RGB")
            pixels.save(tmp_path / f"digit-{digit}" / f"{index:02}.png")
    stored = client.upload_dataset(str(tmp_path), name="digits")
    fitted = client.fit_direction("vit", stored, name="stored", batch_size=7)
    same(client, "vit", fitted, client.fit_direction("vit", str(tmp_path), name="sent", batch_size=7))
    assert fitted.rows[0].classes == ("digit-0", "digit-1")
    assert fitted.rows[0].sample_count == 30


def test_arrays_with_several_targets(client: trocar.Client) -> None:
    rows = np.repeat(DATA.images[:60, None].astype(np.float32) / 16, 3, axis=1)
    ink = rows.mean((1, 2, 3)).astype(np.float32)
    large = (DATA.target[:60] > 4).astype(np.int64)
    stored = client.upload_dataset((rows, {"ink": ink, "large": large}), name="arrays")
    fitted = client.fit_direction("vit", stored, name="ink", kind="ridge", target="ink")
    same(client, "vit", fitted, client.fit_direction("vit", rows, ink, name="ink-2", kind="ridge"))
    fitted = client.fit_direction("vit", stored, name="large", target="large", class_weight="balanced")
    sent = client.fit_direction("vit", rows, large, name="large-2", class_weight="balanced")
    same(client, "vit", fitted, sent)
    same(
        client,
        "vit",
        client.fit_direction("vit", stored, name="axes", kind="pca", k=2),
        client.fit_direction("vit", rows, name="axes-2", kind="pca", k=2),
    )
    with pytest.raises(InvalidArgumentError, match="not one of the data set's: 'ink', 'large'"):
        client.fit_direction("vit", stored, target="small")
    with pytest.raises(DirectionRejectedError, match="target 'ink' has numbers that are no classes"):
        client.fit_direction("vit", stored, target="ink")
    with pytest.raises(ValueError, match="has its labels"):
        client.fit_direction("vit", stored, large)


def test_texts(client: trocar.Client, tmp_path: Path) -> None:
    texts = {"warm": ["a kind word", "thank you so much", "lovely"], "cold": ["go away", "a bad day", "no"]}
    for mood, lines in texts.items():
        (tmp_path / mood).mkdir()
        for index, line in enumerate(lines):
            (tmp_path / mood / f"{index}.txt").write_text(line)
    stored = client.upload_dataset(str(tmp_path), name="moods")
    options: Any = {"kind": "mean_difference", "folds": 0, "positions": trocar.positions(prompt=[-1])}
    fitted = client.fit_direction("llama", stored, name="stored-mood", **options)
    sent = [*texts["cold"], *texts["warm"]]
    labels = ["cold"] * 3 + ["warm"] * 3
    same(client, "llama", fitted, client.fit_direction("llama", sent, labels, name="sent-mood", **options))
