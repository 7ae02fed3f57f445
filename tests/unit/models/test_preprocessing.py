from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model_weights, list_models
from torchvision.transforms import functional
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.functional import InterpolationMode

from tests.unit.models.conftest import load, reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.families import Family, family_of
from trocar_server.models.preprocessing import PreprocessingInfo, Preprocessor, SpecTransform
from trocar_server.models.spec import INTERPOLATIONS, PreprocessingSpec


def pictures(*sizes: tuple[int, int]) -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)) for height, width in sizes]


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0", "lraspp_mobilenet_v3_large"])
def test_a_batch_is_bit_equal_to_torchvisions_transforms(name: str) -> None:
    transform = get_model_weights(name)["DEFAULT"].transforms()
    images = pictures((300, 400), (300, 400))
    batch = Preprocessor(transform)(images)
    assert isinstance(batch, torch.Tensor)
    assert torch.equal(batch, torch.stack([transform(image) for image in images]))


def test_detection_gets_a_list_of_images_of_their_own_sizes() -> None:
    transform = get_model_weights("ssdlite320_mobilenet_v3_large")["DEFAULT"].transforms()
    images = pictures((30, 40), (50, 60))
    batch = Preprocessor(transform, as_list=True)(images)
    assert isinstance(batch, list)
    assert all(torch.equal(ours, transform(image)) for ours, image in zip(batch, images, strict=True))


def test_a_spec_is_bit_equal_to_torchvisions_preset_of_the_same_numbers() -> None:
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    preset = ImageClassification(
        crop_size=64, resize_size=80, mean=mean, std=std, interpolation=InterpolationMode.BICUBIC
    )
    spec = PreprocessingSpec(resize=(80,), crop=(64,), mean=mean, std=std, interpolation="bicubic")
    images = pictures((300, 400))
    batch = Preprocessor(SpecTransform(spec))(images)
    assert isinstance(batch, torch.Tensor)
    assert torch.equal(batch[0], preset(images[0]))


def test_an_empty_spec_only_scales() -> None:
    images = pictures((3, 4))
    batch = Preprocessor(SpecTransform(PreprocessingSpec()))(images)
    assert isinstance(batch, torch.Tensor)
    assert torch.equal(batch[0], torch.from_numpy(np.array(images[0])).permute(2, 0, 1) / 255)


def test_images_that_end_in_different_sizes_do_not_make_a_batch() -> None:
    transform = get_model_weights("lraspp_mobilenet_v3_large")["DEFAULT"].transforms()
    with pytest.raises(ServiceError, match="2 sizes") as error:
        Preprocessor(transform)(pictures((300, 400), (400, 300)))
    assert reason_of(error) is ErrorReason.INPUT_REJECTED


def test_images_of_a_padding_processor_get_a_mask_and_are_counted_padded() -> None:
    padding = Preprocessor(SpecTransform(PreprocessingSpec(mean=(0.5,) * 3, std=(0.5,) * 3, pads=True)))
    images = [Image.new("RGB", (width, height), "white") for height, width in ((2, 5), (4, 3))]
    prepared = padding.with_made(images)
    assert prepared.values.shape == (2, 3, 4, 5)
    mask = prepared.made["pixel_mask"]
    assert mask.shape == (2, 4, 5)
    assert mask.dtype == torch.int64
    assert mask[0].nonzero().tolist() == [[row, column] for row in range(2) for column in range(5)]
    assert torch.equal((prepared.values[:, 0] != 0).long(), mask)
    assert padding.common_size([(2, 5), (4, 3)]) == (4, 5)
    assert padding.common_size([(2, 5), None]) is None
    assert padding.prepared_size([(2, 5), (4, 3)]).batch_bytes == prepared.values.nbytes + mask.nbytes
    tall_and_wide = padding.prepared_size([(1, 8_000), (8_000, 1)])
    assert tall_and_wide.padded == (8_000, 8_000)
    assert tall_and_wide.batch_bytes == 2 * 8_000 * 8_000 * 20


def test_no_image_is_an_empty_batch() -> None:
    with pytest.raises(ServiceError) as error:
        Preprocessor(SpecTransform(PreprocessingSpec()))([])
    assert reason_of(error) is ErrorReason.EMPTY_BATCH


def test_an_image_one_pixel_high_is_prepared_or_refused() -> None:
    transform = get_model_weights("resnet18")["DEFAULT"].transforms()
    batch = Preprocessor(transform)(pictures((1, 1), (1, 300)))
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (2, 3, 224, 224)


def all_transforms() -> dict[str, Any]:
    """Return one transform of each kind that torchvision's weights have, for models that take images."""
    found: dict[str, Any] = {}
    for name in list_models():
        if name.startswith("raft") or family_of(name) is Family.VIDEO:
            continue
        for weights in get_model_weights(name):
            transform = weights.transforms()
            found.setdefault(repr(transform), transform)
    return found


TRANSFORMS = all_transforms()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_every_transform_is_bit_equal_for_images_of_many_sizes(name: str) -> None:
    transform, random = TRANSFORMS[name], np.random.default_rng(len(name))
    sizes = [(224, 224), (1, 1), (500, 375), (37, 300), (300, 61), *random.integers(20, 500, (3, 2)).tolist()]
    for image in pictures(*sizes):
        (ours,) = Preprocessor(transform, as_list=True)([image])
        assert torch.equal(ours, transform(image))


@pytest.mark.parametrize("interpolation", INTERPOLATIONS)
def test_a_spec_is_bit_equal_in_every_interpolation(interpolation: str) -> None:
    spec = PreprocessingSpec(resize=(60,), crop=(48, 56), interpolation=interpolation)
    mode = InterpolationMode(interpolation)
    for image in pictures((100, 80), (33, 199), (400, 17), (60, 60), (9, 9)):
        value: Any = image
        value = functional.center_crop(functional.resize(value, [60], mode), [48, 56])
        (ours,) = Preprocessor(SpecTransform(spec), as_list=True)([image])
        assert torch.equal(ours, functional.pil_to_tensor(value) / 255)


@pytest.mark.parametrize("crop", [(224, 224), (300, 200), (150, 400)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "hamming", "lanczos"])
def test_what_the_crop_keeps_is_what_the_whole_resize_gives(
    interpolation: str, crop: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would become too large; Pillow's box is of single precision, so a few values differ by 1."""
    spec = SpecTransform(PreprocessingSpec(resize=(256,), crop=crop, interpolation=interpolation))
    monkeypatch.setattr(Preprocessor, "_whole_pixels", lambda self: 0)
    for image in pictures((300, 500), (640, 200), (7, 1000), (300, 7), (700, 31), (50, 1), (256, 256)):
        (ours,) = Preprocessor(spec, as_list=True)([image])
        difference = ((ours - spec(image)) * 255).abs()
        assert difference.max() < 1.01
        assert (difference > 0.5).float().mean() < 0.005


EXTREMES = [(1, 8000), (8000, 1), (1, 50_000), (3, 20_000), (65_000, 2), (1, 22_000_000)]


@pytest.mark.parametrize("size", EXTREMES)
def test_extreme_proportions_are_cropped_before_they_are_enlarged(size: tuple[int, int]) -> None:
    transform = TRANSFORMS[repr(get_model_weights("resnet18")["DEFAULT"].transforms())]
    image = Image.new("RGB", (size[1], size[0]), (200, 100, 50))
    made: list[tuple[int, ...]] = []
    whole = Image.Image.resize
    Image.Image.resize = measured_resize(made)  # type: ignore[method-assign]
    try:
        batch = Preprocessor(transform)([image])
    finally:
        Image.Image.resize = whole  # type: ignore[method-assign]
    assert made == [(224, 224)]
    assert isinstance(batch, torch.Tensor)
    assert torch.equal(batch[0], transform(Image.new("RGB", (224, 224), (200, 100, 50))))


def measured_resize(made: list[tuple[int, ...]]) -> Any:
    whole = Image.Image.resize

    def resize(self: Image.Image, size: tuple[int, int], *rest: Any, **options: Any) -> Image.Image:
        made.append(tuple(size))
        return whole(self, size, *rest, **options)

    return resize


@pytest.mark.parametrize("size", EXTREMES)
@pytest.mark.parametrize("name", ["fcn_resnet50", "deeplabv3_mobilenet_v3_large"])
def test_extreme_proportions_are_refused_where_nothing_is_cropped(name: str, size: tuple[int, int]) -> None:
    preprocessor = Preprocessor(get_model_weights(name)["DEFAULT"].transforms())
    with pytest.raises(ServiceError, match=f"{size[0]} x {size[1]} pixels would become") as told:
        preprocessor.prepared_size([(300, 400), size])
    assert reason_of(told) is ErrorReason.IMAGE_TOO_LARGE
    with pytest.raises(ServiceError) as made:
        preprocessor([Image.new("RGB", (size[1], size[0]))])
    assert reason_of(made) is ErrorReason.IMAGE_TOO_LARGE


@pytest.mark.parametrize("name", TRANSFORMS)
def test_the_bytes_of_a_batch_are_told_before_it_is_made(name: str) -> None:
    preprocessor = Preprocessor(TRANSFORMS[name], as_list=True)
    for size in [(300, 400), (90, 20), (1, 1)]:
        (image,) = preprocessor(pictures(size))
        assert preprocessor.prepared_size([size]).batch_bytes == image.nbytes


def test_more_bytes_than_are_allowed_are_not_made() -> None:
    preprocessor = Preprocessor(get_model_weights("resnet18")["DEFAULT"].transforms())
    with pytest.raises(ServiceError, match="the first 3 images") as error:
        preprocessor(pictures(*[(10, 10)] * 4), max_bytes=2 * 602_112)
    assert reason_of(error) is ErrorReason.IMAGE_TOO_LARGE


def test_the_description_has_torchvisions_numbers() -> None:
    preprocessor = load("resnet18=random:0").preprocessing
    assert preprocessor is not None
    info = preprocessor.describe()
    assert (info.resize, info.crop, info.interpolation) == ((256,), (224, 224), "bilinear")
    assert (info.mean, info.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert "resize_size=[256]" in info.description


def test_detection_is_described_as_rescaling_only() -> None:
    preprocessor = load("ssdlite320_mobilenet_v3_large=random:0").preprocessing
    assert preprocessor is not None
    info = preprocessor.describe()
    assert info == PreprocessingInfo(info.description, (), (), (), (), "")


def test_a_spec_is_described() -> None:
    spec = PreprocessingSpec(resize=(80, 90), crop=(64,), interpolation="bicubic")
    info = Preprocessor(SpecTransform(spec)).describe()
    assert (info.resize, info.crop, info.mean, info.interpolation) == ((80, 90), (64, 64), (), "bicubic")
    assert "resized" in info.description
    assert "normalized" not in info.description
