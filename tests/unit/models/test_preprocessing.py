import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model_weights
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.functional import InterpolationMode

from tests.unit.models.conftest import load, reason_of
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.preprocessing import PreprocessingInfo, Preprocessor, SpecTransform
from trocar_server.models.spec import PreprocessingSpec


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


def test_no_image_is_an_empty_batch() -> None:
    with pytest.raises(ServiceError) as error:
        Preprocessor(SpecTransform(PreprocessingSpec()))([])
    assert reason_of(error) is ErrorReason.EMPTY_BATCH


def test_an_image_one_pixel_high_is_prepared_or_refused() -> None:
    transform = get_model_weights("resnet18")["DEFAULT"].transforms()
    batch = Preprocessor(transform)(pictures((1, 1), (1, 300)))
    assert isinstance(batch, torch.Tensor)
    assert batch.shape == (2, 3, 224, 224)


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
