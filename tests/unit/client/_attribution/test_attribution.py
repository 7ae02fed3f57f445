"""Heat maps, texts and pictures of an attribution."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr._utils.visualization import _normalize_attr
from PIL import Image
from torchvision.transforms import functional

import trocar
from trocar import Preprocessing
from trocar._attribution.image_pixels import crop_box, image_pixels, input_pixels
from trocar._attribution.scaling import resized
from trocar._base.tensors import Array

PREPROCESSING = Preprocessing(
    "", (256,), (224, 224), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bilinear"
)


def attribution(values: Array, **given: Any) -> trocar.Attribution:
    inputs = np.random.default_rng(0).standard_normal((len(values), 3, 12, 10)).astype(np.float32)
    return trocar.Attribution(
        **{"values": values, "method": "saliency", "at": "/in", "model_id": "m", "inputs": inputs, **given}
    )


def noise(*shape: int) -> Array:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def test_heat_maps_of_the_input_are_captums_pictures() -> None:
    values = noise(2, 3, 12, 10)
    expected = [_normalize_attr(one.sum(axis=0), "absolute_value", 2) for one in values.astype(np.float64)]
    np.testing.assert_allclose(attribution(values).heatmap, expected, atol=1e-6)


def test_heat_maps_of_modules_are_resized() -> None:
    values = noise(2, 8, 3, 4)
    small = [_normalize_attr(one.sum(axis=0), "absolute_value", 2) for one in values.astype(np.float64)]
    found = attribution(values, at="layer4")
    np.testing.assert_allclose(found.heatmap, resized(np.array(small), 12, 10), atol=1e-6)
    last = attribution(np.moveaxis(values, 1, -1), at="layer4", channel_dim=-1)
    np.testing.assert_array_equal(last.heatmap, found.heatmap)
    tokens = attribution(np.moveaxis(values, 1, -1).reshape(2, 12, 8), at="layer4", grid=(3, 4))
    np.testing.assert_array_equal(tokens.heatmap, found.heatmap)


@pytest.mark.parametrize(
    ("values", "given", "message"),
    [
        (noise(2, 5), {}, "no spatial positions"),
        (noise(2, 8, 5), {}, "is not known; pass channel_dim="),
        (noise(2, 3, 4, 5, 6), {}, "height and width"),
        (noise(2, 4, 5, 6), {"is_map": True}, "height and width"),
        (noise(2, 7), {"inputs": noise(2, 7)}, "needs inputs"),
        (noise(2, 0, 3, 4)[:, 0:0].sum(axis=1)[:, :0], {"is_map": True}, "height and width"),
    ],
)
def test_values_without_height_and_width_have_no_heat_map(
    values: Array, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        _ = attribution(values, **given).heatmap


def test_texts_name_classes_and_scores() -> None:
    found = attribution(
        noise(2, 3, 12, 10), classes=(1, 4), class_names=("bee", ""), scores=np.array([0.5, 12.3456789])
    )
    assert repr(found) == "Attribution(saliency, m: (2, 3, 12, 10) of bee (1): 0.5; class 4: 12.35)"
    assert repr(attribution(noise(1, 3, 12, 10))) == "Attribution(saliency, m: (1, 3, 12, 10))"
    many = attribution(noise(9, 3, 12, 10), at="conv", classes=(0,) * 9)
    assert repr(many).startswith("Attribution(saliency at conv, m: (9, 3, 12, 10) of class 0; ")
    assert repr(many).endswith("; ...)")


def test_pictures_have_a_colour_bar_the_class_and_the_score(tmp_path: Path) -> None:
    found = attribution(noise(2, 3, 12, 10), classes=(1, 4), class_names=("$bee$", "eel"), scores=noise(2))
    figure = found.plot(tmp_path / "cam.png", sample=1)
    panel, bar = figure.axes
    assert panel.get_title().startswith("eel (4): ")
    assert bar.get_ylabel() == "attribution, 0 to 1"
    assert (tmp_path / "cam.png").stat().st_size > 1000
    assert len(found.plot(sample=None).axes) == 2 + 1
    found.plot(tmp_path / "odd.png")  # a name that is no mathematics
    assert found.plot().axes[0].images[1].get_alpha() == 0.5


def test_the_heat_map_lies_where_the_server_cropped(tmp_path: Path) -> None:
    found = attribution(noise(1, 3, 12, 10), preprocessing=PREPROCESSING)
    Image.new("RGB", (400, 300), "red").save(tmp_path / "red.png")
    for image in (tmp_path / "red.png", Image.new("RGB", (400, 300)), np.zeros((300, 400, 3), np.uint8)):
        shown = found.plot(image=image).axes[0].images
        drawn: Any = shown[0].get_array()
        assert drawn.shape[:2] == (300, 400)
        left, right, bottom, top = shown[1].get_extent()
        assert right - left == pytest.approx(bottom - top) == pytest.approx(224 * 300 / 256)
        assert left + right == pytest.approx(399)


@pytest.mark.parametrize("size", [(300, 400), (512, 300), (256, 256)])
@pytest.mark.parametrize("resize", [(256,), (240, 320), ()])
def test_the_crop_is_torchvisions(size: tuple[int, int], resize: tuple[int, ...]) -> None:
    """Pixels that hold their own position come out where the box says."""
    height, width = size
    rows, columns = np.mgrid[0:height, 0:width].astype(np.float32)
    picture = functional.to_tensor(np.stack([rows, columns], axis=-1))
    if resize:
        picture = functional.resize(picture, list(resize), antialias=True)
    seen = functional.center_crop(picture, [224, 224])
    box = crop_box(height, width, Preprocessing("", resize, (224, 224), (), (), "bilinear"))
    assert box is not None
    left, right, bottom, top = box
    middle = seen[:, 111:113, 111:113].mean(dim=(1, 2))
    assert float(middle[1]) == pytest.approx((left + right) / 2, abs=1.0)
    assert float(middle[0]) == pytest.approx((top + bottom) / 2, abs=1.0)
    share = 100 / 224
    assert float(seen[1, 112, 162] - seen[1, 112, 62]) == pytest.approx(share * (right - left), abs=1.0)
    assert float(seen[0, 162, 112] - seen[0, 62, 112]) == pytest.approx(share * (bottom - top), abs=1.0)


def test_without_a_crop_the_heat_map_covers_the_image() -> None:
    assert crop_box(300, 400, Preprocessing("", (520,), (), (), (), "bilinear")) is None
    assert crop_box(300, 400, None) is None


def test_normalisation_is_undone_for_the_picture() -> None:
    pixels = np.random.default_rng(0).random((12, 10, 3))
    normalised = (pixels - PREPROCESSING.mean) / PREPROCESSING.std
    np.testing.assert_allclose(
        input_pixels(np.moveaxis(normalised, -1, 0), PREPROCESSING), pixels, atol=1e-12
    )
    stretched = input_pixels(noise(3, 12, 10), None)
    assert (stretched.min(), stretched.max()) == (0, 1)
    for channels in (1, 2, 5):
        assert input_pixels(noise(channels, 12, 10), PREPROCESSING).shape == (12, 10)
    assert np.isfinite(input_pixels(np.full((3, 2, 2), np.nan, np.float32), None)).all()


@pytest.mark.parametrize(
    ("mean", "std", "scale"),
    [
        ((0.5,) * 3, (0.25,) * 3, 1 / 255),
        ((0.0,) * 3, (1.0,) * 3, 1 / 127.5),
        ((127.5,) * 3, (64.0,) * 3, 1.0),
    ],
)
def test_any_scale_of_the_pixels_is_undone(
    mean: tuple[float, ...], std: tuple[float, ...], scale: float
) -> None:
    """The inverse of what transformers' image processors do: (pixels x scale - mean) / std."""
    pixels = np.random.default_rng(0).integers(0, 256, (12, 10, 3), np.uint8)
    inputs = np.moveaxis((pixels * scale - mean) / std, -1, 0)
    described = Preprocessing("", (), (), mean, std, "bilinear", 0, scale)
    np.testing.assert_allclose(input_pixels(inputs, described), pixels / 255, atol=1e-12)


def test_a_bfloat16_image_has_its_own_brightness() -> None:
    grey = torch.full((2, 2), 0.5)
    np.testing.assert_array_equal(image_pixels(grey.bfloat16()), grey.numpy())


@pytest.mark.parametrize("image", [np.zeros((3, 4, 4, 4)), np.zeros((4, 4, 2)), np.zeros((0, 4, 3))])
def test_what_is_no_image_is_refused(image: Array) -> None:
    with pytest.raises(ValueError, match="an image has shape"):
        image_pixels(image)


def test_samples_that_there_are_not_are_refused() -> None:
    found = attribution(noise(2, 3, 12, 10))
    with pytest.raises(IndexError, match="sample=2 is out of range"):
        found.plot(sample=2)
    with pytest.raises(ValueError, match="several samples"):
        found.plot(sample=None, image="cat.jpg")
    with pytest.raises(FileNotFoundError):
        found.plot(image="no-such-file.png")


def test_pictures_without_matplotlib_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "trocar._attribution.heat_map_pictures", raising=False)
    monkeypatch.delitem(sys.modules, "trocar._base.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install \"trocar\[plot\]\""):
        attribution(noise(1, 3, 12, 10)).plot()
