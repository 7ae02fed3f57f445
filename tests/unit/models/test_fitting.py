"""Images prepared without torch: the very bits of the preprocessing."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model_weights, list_models
from torchvision.transforms._presets import ImageClassification

from trocar_server.decoding.pixels import fitted
from trocar_server.models.preprocessing import WHOLE_PIXELS, Preprocessor, SpecTransform
from trocar_server.models.spec import INTERPOLATIONS, PreprocessingSpec

SIZES = ((300, 400), (401, 299), (64, 64), (256, 256), (37, 300))


def picture(height: int, width: int) -> Image.Image:
    random = np.random.default_rng(height)
    return Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))


def fit(preprocessor: Preprocessor, image: Image.Image) -> torch.Tensor | None:
    """Prepare one image as a decoding process and the server's threads do; None where it is left to torch."""
    assert preprocessor.fitting is not None
    steps = preprocessor.fitting.steps((image.height, image.width))
    if steps is None:
        return None
    row = np.empty((3, *preprocessor.fitting.size), np.float32)
    preprocessor.fitting.fill(fitted(image, [steps]).tobytes(), row)
    return torch.from_numpy(row)


def classification_presets() -> dict[str, Any]:
    """Return the presets of torchvision's classifiers, one of each kind."""
    found = {}
    for name in list_models():
        transform = get_model_weights(name)["DEFAULT"].transforms()
        if isinstance(transform, ImageClassification):
            found[repr(transform)] = transform
    return found


def test_every_preset_of_a_classifier_has_its_bits() -> None:
    presets = classification_presets()
    assert len(presets) > 10
    for transform in presets.values():
        preprocessor = Preprocessor(transform)
        for size in SIZES:
            image = picture(*size)
            ours = fit(preprocessor, image)
            assert ours is not None
            assert torch.equal(ours, transform(image)), (transform, size)


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
@pytest.mark.parametrize(
    "spec",
    [
        {"resize": (80,), "crop": (64, 48), "mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6)},
        {"resize": (50, 70)},
        {"resize": (90,), "crop": (61,), "rules": "transformers", "longest": 200},
        {
            "resize": (64, 64),
            "rules": "transformers",
            "scale": 1 / 127.5,
            "mean": (1.0,) * 3,
            "std": (0.5,) * 3,
        },
    ],
)
def test_every_spec_has_the_bits_of_the_preprocessing(spec: dict[str, Any], interpolation: str) -> None:
    preprocessor = Preprocessor(SpecTransform(PreprocessingSpec(**spec, interpolation=interpolation)))
    checked = 0
    for size in SIZES:
        image = picture(*size)
        ours = fit(preprocessor, image)
        if ours is not None:
            checked += 1
            assert torch.equal(ours, preprocessor([image])[0]), size
    assert checked >= 4  # 37 x 300 within 200 pixels is smaller than the crop


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1)])
def test_an_image_that_is_resized_in_parts_is_left_to_the_preprocessing(size: tuple[int, int]) -> None:
    preprocessor = Preprocessor(get_model_weights("resnet18")["DEFAULT"].transforms())
    assert preprocessor.fitting is not None
    assert WHOLE_PIXELS < 256 * 256 * 60_000
    assert preprocessor.fitting.steps(size) is None


def test_a_crop_larger_than_the_image_is_left_to_the_preprocessing() -> None:
    preprocessor = Preprocessor(SpecTransform(PreprocessingSpec(crop=(64,))))
    assert fit(preprocessor, picture(63, 64)) is None
    ours = fit(preprocessor, picture(64, 64))
    assert ours is not None
    assert torch.equal(ours, preprocessor([picture(64, 64)])[0])


@pytest.mark.parametrize(
    ("spec", "as_list"), [({"resize": (80,)}, False), ({"pads": True}, False), ({"resize": (80, 80)}, True)]
)
def test_images_that_may_end_in_different_sizes_have_no_fitting(spec: dict[str, Any], as_list: bool) -> None:
    assert Preprocessor(SpecTransform(PreprocessingSpec(**spec)), as_list=as_list).fitting is None
