"""Inputs as users have them: each error says what came, what was expected, and a line that works."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import trocar
from tests.support.models import tiny_models
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom

RANDOM = np.random.default_rng(0)
PREPROCESSING = {"resize": (8,), "crop": (8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    plain = {**custom(tiny_models.Plain, (3, 8, 8)), "preprocessing": PREPROCESSING}
    with running_server(models={"plain": plain}, device="cpu") as running:
        yield running


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8), "teal").save(folder / name)
    return folder


MISTAKES: dict[str, Any] = {
    "channels last": RANDOM.normal(size=(2, 8, 8, 3)).astype("float32"),
    "channels last without a batch": RANDOM.normal(size=(8, 8, 3)).astype("float32"),
    "channels last in int64": RANDOM.integers(0, 255, (2, 8, 8, 3)),
    "uint8 with channels first": RANDOM.integers(0, 255, (2, 3, 8, 8)).astype("uint8"),
    "uint8 with channels first without a batch": RANDOM.integers(0, 255, (3, 8, 8)).astype("uint8"),
    "grey": RANDOM.integers(0, 255, (8, 8)).astype("uint8"),
    "grey with a channel": RANDOM.integers(0, 255, (8, 8, 1)).astype("uint8"),
    "grey with a channel first": RANDOM.integers(0, 255, (1, 8, 8)).astype("uint8"),
    "a batch of grey ones with a channel first": RANDOM.integers(0, 255, (2, 1, 8, 8)).astype("uint8"),
    "a batch of grey ones": RANDOM.integers(0, 255, (2, 8, 8)).astype("uint8"),
    "a batch of grey ones with a channel": RANDOM.integers(0, 255, (2, 8, 8, 1)).astype("uint8"),
    "with alpha": RANDOM.integers(0, 255, (8, 8, 4)).astype("uint8"),
    "a batch with alpha": RANDOM.integers(0, 255, (2, 8, 8, 4)).astype("uint8"),
    "int64": RANDOM.integers(0, 255, (2, 3, 8, 8)),
    "float64": RANDOM.normal(size=(2, 3, 8, 8)),
    "no batch": RANDOM.normal(size=(3, 8, 8)).astype("float32"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_line_of_an_error_mends_the_array(client: trocar.Client, name: str) -> None:
    array = MISTAKES[name]
    with pytest.raises(trocar.errors.InputRejectedError) as caught:
        client.extract("plain", array, "fc")
    message = str(caught.value)
    assert str(array.dtype) in message
    assert "float32" in message or "3, 8, 8" in message
    line = re.search(r"`([^`]*array[^`]+)`", message)
    assert line is not None, message
    assert client.extract("plain", eval(line[1], {"array": array, "np": np}), "fc")["fc"].shape[1] == 5


@pytest.mark.parametrize("shape", [(8, 8), (2, 8, 8, 3)])
def test_the_line_mends_arrays_in_a_list(client: trocar.Client, shape: tuple[int, ...]) -> None:
    array = RANDOM.integers(0, 255, shape).astype("uint8")
    with pytest.raises(trocar.errors.InputRejectedError) as caught:
        client.extract("plain", [array], "fc")
    line = re.search(r"`([^`]*array[^`]+)`", str(caught.value))
    assert line is not None, str(caught.value)
    mended = eval(line[1], {"array": [array] if array.ndim == 4 else array, "np": np})
    assert client.extract("plain", mended, "fc")["fc"].shape == (len(array) if array.ndim == 4 else 1, 5)


def test_a_folder_a_pattern_and_a_url_are_no_picture(client: trocar.Client, photos: Path) -> None:
    with pytest.raises(IsADirectoryError, match=r"A folder where a file is expected: write `sorted\("):
        client.extract("plain", photos, "fc")
    with pytest.raises(FileNotFoundError, match=r"A pattern .*sorted\(glob\.glob\("):
        client.extract("plain", f"{photos}/*.png", "fc")
    for url in ("https://example.org/cat.jpg", ["https://example.org/cat.jpg"]):
        with pytest.raises(
            ValueError, match=r"https://example.org/cat.jpg is a URL.*urlopen\(url\)\.read\(\)"
        ):
            client.extract("plain", url, "fc")
        with pytest.raises(ValueError, match="is a URL"):
            client.predict("plain", url)


def test_folders_and_patterns_work_where_many_are_allowed(client: trocar.Client, photos: Path) -> None:
    expected = client.predict("plain", [photos / "a.png", photos / "b.png"])
    for inputs in (
        photos,
        str(photos),
        f"{photos}/*.png",
        f"{photos.parent}/**/*.png",
        f"{photos.parent}/ph*",
    ):
        assert client.predict("plain", inputs) == expected
    assert client.predict("plain", [photos]) == expected
    mixed: list[Any] = [f"{photos}/a*", photos / "b.png", photos]
    assert len(client.predict("plain", mixed)) == 4
    with pytest.raises(FileNotFoundError, match="no file or folder matches the pattern"):
        client.predict("plain", f"{photos}/*.jpg")


def test_a_module_that_is_not_called_names_modules_that_run(client: trocar.Client) -> None:
    with pytest.raises(
        trocar.errors.ModuleNotCalledError, match=r"never calls it; those that run: .*conv"
    ) as caught:
        client.extract("plain", MISTAKES["no batch"][np.newaxis], "unused")
    names = str(caught.value).rpartition(": ")[2].split(", ")
    assert set(client.extract("plain", MISTAKES["no batch"][np.newaxis], names[0]))


def test_a_closed_client_says_how_to_connect_again(server: RunningServer) -> None:
    client = trocar.connect(server.address)
    client.close()
    with pytest.raises(ValueError, match=rf"`client = trocar\.connect\('{server.address}'\)`"):
        client.models()
