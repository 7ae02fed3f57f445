"""From bytes to arguments of the forward, and what is known of them before the bytes are there."""

import io
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import ResNet18_Weights

from tests.support.models.odd_models import Identity
from tests.support.models.tiny_models import Half
from tests.unit.engine.deployments import hosted, hosted_by_name
from trocar_api.reasons import ErrorReason
from trocar_server.config import Limits
from trocar_server.decoding.pixels import decode_image
from trocar_server.engine.execute.arguments import (
    build_arguments,
    check_images,
    decode_images,
    predicted_signature,
    signature_of,
)
from trocar_server.engine.execute.image_decoder import ImageDecoder
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.request.plan import ArgumentInput, ImageInput, ImageSpec, Payload, TensorInput
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.models.preprocessing import Preprocessor, SpecTransform
from trocar_server.models.spec import PreprocessingSpec

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def payload(tensor: torch.Tensor) -> Payload:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().copy()


def png(image: Image.Image) -> Payload:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return np.frombuffer(buffer.getvalue(), np.uint8).copy()


def photo(height: int = 40, width: int = 60) -> Image.Image:
    values = np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 3), (2, 0, 3), (1,) * 8], ids=str)
def test_bytes_become_the_tensor_that_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    expected = torch.arange(6).remainder(2)[: int(np.prod(shape))].to(dtype).reshape(shape)
    model = hosted(Identity)
    (argument,) = build_arguments(model, [TensorInput("", dtype, shape)], [payload(expected)], [[]])
    assert isinstance(argument, torch.Tensor)
    assert argument.dtype == dtype
    assert torch.equal(argument, expected)


def test_detection_takes_a_list_of_samples() -> None:
    model = hosted_by_name("ssdlite320_mobilenet_v3_large")
    batch = torch.rand(2, 3, 8, 9)
    entry = TensorInput("", torch.float32, (2, 3, 8, 9))
    (argument,) = build_arguments(model, [entry], [payload(batch)], [[]])
    assert isinstance(argument, list)
    assert [torch.equal(sample, row) for sample, row in zip(argument, batch, strict=True)] == [True, True]
    assert predicted_signature(model, [entry]) == signature_of([""], [argument])


def test_the_predicted_form_is_that_of_the_arguments() -> None:
    model = hosted(Identity)
    entries = [TensorInput("", torch.float32, (2, 3)), TensorInput("bias", torch.int64, ())]
    tensors = [torch.zeros(2, 3), torch.zeros((), dtype=torch.int64)]
    arguments = build_arguments(model, entries, [payload(tensor) for tensor in tensors], [[], []])
    assert predicted_signature(model, entries) == signature_of(["", "bias"], arguments)


def test_the_form_of_images_is_not_predicted() -> None:
    assert predicted_signature(hosted(Identity), [ImageInput("", (ImageSpec(10),))]) is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_float_of_another_width_is_refused_with_the_way_out(dtype: torch.dtype) -> None:
    with pytest.raises(ServiceError, match=r'array\.astype\("float32"\)') as caught:
        predicted_signature(hosted(Half, (7,)), [TensorInput("", dtype, (1, 7))])
    assert caught.value.reason is ErrorReason.INPUT_REJECTED


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_what_is_no_float_is_the_models_to_judge(dtype: torch.dtype) -> None:
    assert predicted_signature(hosted(Half, (7,)), [TensorInput("", dtype, (1, 7))]) is not None


def test_images_are_prepared_as_torchvisions_weights_say() -> None:
    model, images = hosted_by_name("resnet18"), [photo(), photo(300, 200)]
    entry = ImageInput("", tuple(ImageSpec(1) for _ in images))
    (batch,) = build_arguments(model, [entry], [np.empty(1, np.uint8)] * 2, [images])
    transform = ResNet18_Weights.DEFAULT.transforms()
    assert isinstance(batch, torch.Tensor)
    assert torch.equal(batch, torch.stack([transform(image) for image in images]))


def test_payloads_go_to_their_arguments_in_order() -> None:
    model = hosted_by_name("resnet18")
    entries: list[ArgumentInput] = [
        ImageInput("", (ImageSpec(1), ImageSpec(1))),
        TensorInput("a", torch.float32, (2,)),
        TensorInput("b", torch.float32, (1,)),
    ]
    payloads = [np.empty(1, np.uint8)] * 2 + [payload(torch.ones(2)), payload(torch.zeros(1))]
    images, first, second = build_arguments(model, entries, payloads, [[photo(), photo()], [], []])
    assert isinstance(images, torch.Tensor)
    assert images.shape == (2, 3, 224, 224)
    assert isinstance(first, torch.Tensor)
    assert torch.equal(first, torch.ones(2))
    assert isinstance(second, torch.Tensor)
    assert torch.equal(second, torch.zeros(1))


@pytest.fixture
def decoder() -> Iterator[ImageDecoder]:
    found = ImageDecoder()
    yield found
    found.stop()


async def decoded(
    decoder: ImageDecoder, image_specs: list[ImageSpec], payloads: list[Payload], **limits: int
) -> tuple[DecodedImages, list[int]]:
    """Return the images or their batch, and the bytes that were reserved for them."""
    reserved: list[int] = []
    entry = ImageInput("", tuple(image_specs))
    (images,) = await decode_images(
        hosted_by_name("resnet18"),
        [entry],
        payloads,
        Limits(**limits),
        decoder,
        lambda byte_count, rows: reserved.append(byte_count),
    )
    return images, reserved


async def test_encoded_and_raw_images_may_be_mixed(decoder: ImageDecoder) -> None:
    image = photo()
    pixels = np.asarray(image)
    image_specs = [ImageSpec(100), ImageSpec(pixels.nbytes, *pixels.shape[:2])]
    batch, _ = await decoded(decoder, image_specs, [png(image), pixels.reshape(-1).copy()])
    assert isinstance(batch, np.ndarray)
    expected = ResNet18_Weights.DEFAULT.transforms()(image)
    assert [torch.equal(torch.from_numpy(row), expected) for row in batch] == [True, True]


@pytest.mark.parametrize("orientation", range(1, 9))
async def test_encoded_images_are_prepared_before_torch_sees_them(
    decoder: ImageDecoder, orientation: int
) -> None:
    """With the bits and the strides of torchvision's transforms, also of a photo that its EXIF data turns."""
    model, exif = hosted_by_name("resnet18"), Image.Exif()
    exif[0x0112] = orientation
    jpeg = io.BytesIO()
    photo(300, 410).save(jpeg, "JPEG", exif=exif)
    payloads = [np.frombuffer(jpeg.getvalue(), np.uint8), png(photo(333, 257))]
    specs = [ImageSpec(payload.size) for payload in payloads]
    batch, _ = await decoded(decoder, specs, payloads)
    assert isinstance(batch, np.ndarray)
    (argument,) = build_arguments(model, [ImageInput("", tuple(specs))], payloads, [batch])
    assert isinstance(argument, torch.Tensor)
    transform = ResNet18_Weights.DEFAULT.transforms()
    upright = [decode_image(payload.tobytes(), 1 << 20) for payload in payloads]
    expected = torch.stack([transform(image) for image in upright])
    assert torch.equal(argument, expected)
    assert argument.stride() == expected.stride()


async def test_images_smaller_than_the_crop_are_left_to_torch(decoder: ImageDecoder) -> None:
    """A preset that only crops pads them with black, by rules of its own."""
    preprocessing = PreprocessingSpec(crop=(224,))
    model = replace(hosted_by_name("resnet18"), preprocessing=Preprocessor(SpecTransform(preprocessing)))
    small = png(photo(100, 300))
    entry = ImageInput("", (ImageSpec(1),))
    (images,) = await decode_images(model, [entry], [small], Limits(), decoder, lambda count, rows: None)
    assert isinstance(images, list)


async def test_what_images_become_is_reserved_before_they_are_decoded(decoder: ImageDecoder) -> None:
    image = photo()
    _, reserved = await decoded(decoder, [ImageSpec(1)] * 2, [png(image)] * 2)
    pixels = 2 * image.width * image.height
    batch = 2 * 3 * 224 * 224 * 4
    assert sum(reserved) >= 4 * pixels + 2 * batch


async def test_an_image_that_does_not_decode_is_named_by_its_position(decoder: ImageDecoder) -> None:
    broken = png(photo())
    with pytest.raises(ServiceError, match="image 1:") as caught:
        await decoded(decoder, [ImageSpec(1)] * 3, [png(photo()), broken[: len(broken) // 2], broken])
    assert caught.value.reason is ErrorReason.INVALID_IMAGE


async def test_an_image_with_too_many_pixels_is_named_by_its_position(decoder: ImageDecoder) -> None:
    with pytest.raises(ServiceError, match="image 0:") as caught:
        await decoded(decoder, [ImageSpec(1)], [png(photo())], max_image_pixels=40 * 60 - 1)
    assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE


async def test_a_batch_that_is_large_only_when_prepared_is_refused_before_any_is_decoded(
    decoder: ImageDecoder,
) -> None:
    """1 x 1 pixels are 3 bytes, and 602,112 as the model gets them."""
    tiny = png(Image.new("RGB", (1, 1)))
    with pytest.raises(ServiceError, match=r"the first 112 images") as caught:
        await decoded(decoder, [ImageSpec(1)] * 200, [tiny] * 200, max_request_bytes=1 << 20)
    assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE
    assert decoder.pids == []


def padded_strips() -> tuple[HostedModel, ImageInput, list[Payload]]:
    """Return a model that pads images to one size, and four strips, of which EXIF data turns two upright."""
    settings = PreprocessingSpec(resize=(800,), longest=1333, rules="transformers", pads=True)
    model = replace(hosted_by_name("resnet18"), preprocessing=Preprocessor(SpecTransform(settings)))
    payloads: list[Payload] = []
    for orientation in (1, 6, 1, 6):
        exif, jpeg = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.new("RGB", (1000, 60)).save(jpeg, "JPEG", exif=exif)
        payloads.append(np.frombuffer(jpeg.getvalue(), np.uint8))
    return model, ImageInput("", tuple(ImageSpec(payload.size) for payload in payloads)), payloads


async def test_padded_images_that_their_exif_data_turns_are_counted_as_turned(decoder: ImageDecoder) -> None:
    model, entry, payloads = padded_strips()
    reserved: list[int] = []
    (images,) = await decode_images(
        model,
        [entry],
        payloads,
        Limits(max_request_bytes=1 << 28),
        decoder,
        lambda *own: reserved.append(own[0]),
    )
    assert isinstance(images, list)
    assert model.preprocessing is not None
    prepared = model.preprocessing.with_made(images)
    made_bytes = sum(value.nbytes for value in (prepared.values, *prepared.made.values()))
    assert made_bytes > 8 * model.preprocessing.prepared_size([(60, 1000)] * 4).batch_bytes
    assert sum(reserved) >= made_bytes


async def test_padded_images_that_are_too_many_once_turned_are_refused(decoder: ImageDecoder) -> None:
    model, entry, payloads = padded_strips()
    with pytest.raises(ServiceError, match="the 4 images are padded to 1333 x 1333") as caught:
        await decode_images(
            model, [entry], payloads, Limits(max_request_bytes=1 << 20), decoder, lambda count, rows: None
        )
    assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE


def test_raw_pixels_that_are_too_many_are_refused_before_they_have_come() -> None:
    entry = ImageInput("", (ImageSpec(3 * 40_000_000, 40_000_000, 1),) * 20)
    with pytest.raises(ServiceError) as caught:
        check_images(hosted_by_name("resnet18"), [entry], Limits())
    assert caught.value.reason is ErrorReason.IMAGE_TOO_LARGE


def test_images_for_a_model_without_preprocessing_are_refused_with_the_shape_it_takes() -> None:
    with pytest.raises(ServiceError, match=r"\(batch, 3\)") as caught:
        check_images(hosted(Identity), [ImageInput("", (ImageSpec(1),))], Limits())
    assert caught.value.reason is ErrorReason.NO_PREPROCESSING
