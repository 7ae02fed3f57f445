"""Images through a real server against torchvision's own transforms."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import ResNet18_Weights, get_model_weights
from torchvision.transforms import functional

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.oracle import same_bits
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom
from tests.support.wire.pictures import encoded, photo

MODELS = ("resnet18", "lraspp_mobilenet_v3_large", "ssdlite320_mobilenet_v3_large")
TRANSFORM = ResNet18_Weights.DEFAULT.transforms()
PHOTO = photo()


@pytest.fixture(scope="module")
def images_client() -> Iterator[trocar.Client]:
    """A client of a server with models that prepare images, one of them custom."""
    models: dict[str, Any] = {name: {"weights": "random:0"} for name in MODELS}
    preprocessing = {"resize": (20,), "crop": (16,), "mean": (0.5, 0.4, 0.3), "std": (0.1, 0.2, 0.3)}
    models["own"] = custom(Plain, (3, 16, 16), preprocessing=preprocessing)
    models["free"] = custom(Plain, (3, 16, 16), preprocessing={**preprocessing, "crop": ()})
    models["plain"] = custom(Plain, (3, 16, 16))
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as connected:
        yield connected


def prepared(client: trocar.Client, images: Any, model_id: str = "resnet18") -> Any:
    """Return what the server made of images."""
    return client.extract(model_id, images, taps="/in")["/in"]


def stacked(*images: Image.Image) -> torch.Tensor:
    return torch.stack([TRANSFORM(image) for image in images])


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_encoded_images_are_prepared_as_the_weights_say(images_client: trocar.Client, kind: str) -> None:
    data = encoded(PHOTO, kind)
    expected = stacked(Image.open(io.BytesIO(data)).convert("RGB"))
    assert same_bits(prepared(images_client, data), expected)


FORMS: dict[str, Callable[[Image.Image, Path], Any]] = {
    "PIL image": lambda image, _: image,
    "uint8 pixels": lambda image, _: np.asarray(image),
    "uint8 batch": lambda image, _: np.asarray(image)[None],
    "uint8 tensor": lambda image, _: torch.from_numpy(np.asarray(image).copy()),
    "list of one": lambda image, _: [image],
    "path": lambda _, path: path,
    "path as text": lambda _, path: str(path),
    "bytes": lambda _, path: path.read_bytes(),
    "strided pixels": lambda image, _: np.asarray(image)[:, :, ::-1][:, :, ::-1],
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_the_same_in_every_form(images_client: trocar.Client, tmp_path: Path, form: str) -> None:
    path = tmp_path / "photo.png"
    PHOTO.save(path)
    assert same_bits(prepared(images_client, FORMS[form](PHOTO, path)), stacked(PHOTO))


def test_a_batch_of_different_sizes_and_forms_keeps_its_order(images_client: trocar.Client) -> None:
    images = [photo(seed=seed, height=200 + 40 * seed) for seed in range(4)]
    mixed = [images[0], encoded(images[1], "PNG"), np.asarray(images[2]), encoded(images[3], "PNG")]
    assert same_bits(prepared(images_client, mixed), stacked(*images))


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "LA"])
def test_every_colour_mode_is_brought_to_rgb(images_client: trocar.Client, mode: str) -> None:
    data = encoded(PHOTO.convert(mode), "JPEG" if mode == "CMYK" else "PNG")
    assert same_bits(prepared(images_client, data), stacked(Image.open(io.BytesIO(data)).convert("RGB")))


@pytest.mark.parametrize("name", MODELS)
def test_the_model_gets_what_its_weights_ask_for(images_client: trocar.Client, name: str) -> None:
    weights: Any = get_model_weights(name)
    transform = weights.DEFAULT.transforms()
    found = images_client.extract(name, PHOTO, taps="/in")
    (values,) = found.values()
    expected = transform(PHOTO)
    assert same_bits(values.reshape(expected.shape), expected)


def test_images_and_arrays_give_the_same_features(images_client: trocar.Client) -> None:
    batch = stacked(PHOTO, photo(seed=3)).numpy()
    of_arrays = images_client.extract("resnet18", batch, taps="layer3")["layer3"]
    of_images = images_client.extract("resnet18", [PHOTO, photo(seed=3)], taps="layer3")["layer3"]
    assert np.array_equal(of_arrays, of_images)


PAIR = [PHOTO, photo(seed=3)]
PAIRS: dict[str, Callable[[Image.Image], Any]] = {
    "PIL images": lambda image: image,
    "encoded": lambda image: encoded(image, "PNG"),
    "pixels": np.asarray,
}


@pytest.mark.parametrize("kind", PAIRS)
def test_a_tap_takes_parts_that_the_example_input_lacks(images_client: trocar.Client, kind: str) -> None:
    """The second image, and a column behind those of the example: 20 x 24 pixels, not 16 x 16."""
    images = [PAIRS[kind](image) for image in PAIR]
    whole = images_client.extract("free", images, taps="conv2")["conv2"]
    part = trocar.tap("conv2", samples=[1], index=np.s_[:, :, :, 20:])
    found = images_client.extract("free", images, taps=part)["conv2"]
    assert np.array_equal(found, whole[[1]][:, :, :, 20:])
    assert found.shape == (1, 4, 20, 4)


EDITS = {
    "samples": trocar.edit("conv2", "zero", samples=[1]),
    "index": trocar.edit("conv2", "zero", index=np.s_[1]),
    "mask": trocar.edit("conv2", "zero", mask=np.array([False, True]).reshape(2, 1, 1, 1)),
    "factors": trocar.edit("conv2", "scale", np.array([1, 0], np.float32).reshape(2, 1, 1, 1)),
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_changes_an_image_that_the_example_input_lacks(
    images_client: trocar.Client, kind: str
) -> None:
    whole = images_client.extract("free", PAIR, taps="conv2")["conv2"]
    found = images_client.extract("free", PAIR, taps="conv2", edits=EDITS[kind])["conv2"]
    assert np.array_equal(found[0], whole[0])
    assert not found[1].any()


def test_a_stream_of_images_takes_parts_that_the_example_input_lacks(images_client: trocar.Client) -> None:
    whole = images_client.extract("free", PAIR, taps="conv2")["conv2"]
    part = trocar.tap("conv2", samples=[1])
    with images_client.extract_stream("free", [PAIR, PAIR[:1]], taps=part) as stream:
        both, single = stream
    assert np.array_equal(both.unwrap()["conv2"], whole[[1]])
    with pytest.raises(trocar.errors.ReductionRejectedError, match="position 1"):
        single.unwrap()


def test_a_part_that_the_images_lack_is_refused(images_client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.ReductionRejectedError, match="position 2"):
        images_client.extract("free", PAIR, taps=trocar.tap("conv2", samples=[2]))
    with pytest.raises(trocar.errors.EditShapeMismatchError, match="position 2"):
        images_client.extract("free", PAIR, taps="fc", edits=trocar.edit("conv2", "zero", samples=[2]))


def test_a_module_that_the_model_lacks_is_refused_before_images_are_decoded(
    images_client: trocar.Client,
) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError, match="conv9"):
        images_client.extract("free", b"no image", taps="conv9")


def test_detection_takes_images_of_different_sizes(images_client: trocar.Client) -> None:
    images = [photo(100, 120), photo(80, 60)]
    found = images_client.extract("ssdlite320_mobilenet_v3_large", images, taps="/in")
    assert [value.shape for value in found.values()] == [(3, 100, 120), (3, 80, 60)]


def test_a_custom_models_images_are_prepared_as_its_operator_says(images_client: trocar.Client) -> None:
    image: Any = PHOTO  # torchvision's annotations know tensors only
    small = functional.center_crop(functional.resize(image, [20], antialias=True), [16])
    tensor = functional.convert_image_dtype(functional.pil_to_tensor(small), torch.float)
    expected = functional.normalize(tensor, [0.5, 0.4, 0.3], [0.1, 0.2, 0.3])
    assert same_bits(prepared(images_client, PHOTO, "own")[0], expected)


def test_a_model_without_preprocessing_takes_no_images(images_client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.NoPreprocessingError, match="batch, 3, 16, 16"):
        images_client.extract("plain", PHOTO, taps="fc")


@pytest.mark.parametrize("size", [(1, 1), (1, 400), (400, 1), (2000, 10)])
def test_extreme_shapes_are_prepared_or_refused(images_client: trocar.Client, size: tuple[int, int]) -> None:
    image = photo(*size)
    try:
        expected = stacked(image)
    except ValueError:
        with pytest.raises(trocar.errors.InvalidImageError):
            prepared(images_client, image)
    else:
        assert same_bits(prepared(images_client, image), expected)


def test_the_preprocessing_is_described(images_client: trocar.Client) -> None:
    described = images_client.model("resnet18").preprocessing
    assert described is not None
    assert (described.resize, described.crop, described.interpolation) == ((256,), (224, 224), "bilinear")
    assert described.mean == (0.485, 0.456, 0.406)
