"""Image processors as preprocessing: bit-equal to transformers' own, or refused by name."""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportCallIssue=false

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image
from transformers import AutoImageProcessor

from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.image_processors import NotMappedError, image_preprocessing
from trocar_server.models.image_rules import TransformersRules
from trocar_server.models.preprocessing import Preprocessor, SpecTransform

SMALL = {"shortest_edge": 20}
SQUARE = {"height": 18, "width": 24}
PROCESSORS: dict[str, Any] = {
    "clip": T.CLIPImageProcessorPil(size=SMALL, crop_size={"height": 16, "width": 16}),
    "clip, a crop of odd margins": T.CLIPImageProcessorPil(
        size={"shortest_edge": 21}, crop_size={"height": 16, "width": 14}
    ),
    "clip, a crop larger than the image": T.CLIPImageProcessorPil(
        size=SMALL, crop_size={"height": 33, "width": 38}
    ),
    "clip, a crop alone": T.CLIPImageProcessorPil(do_resize=False, crop_size={"height": 16, "width": 41}),
    "siglip": T.SiglipImageProcessorPil(size=SQUARE),
    "vit": T.ViTImageProcessorPil(size=SQUARE),
    "vit, lanczos": T.ViTImageProcessorPil(size=SQUARE, resample=1),
    "vit, no normalisation": T.ViTImageProcessorPil(size=SQUARE, do_normalize=False),
    "vit, no rescaling": T.ViTImageProcessorPil(size=SQUARE, do_rescale=False),
    "vit, another scale": T.ViTImageProcessorPil(size=SQUARE, rescale_factor=1 / 127.5),
    "deit": T.DeiTImageProcessorPil(size={"height": 20, "width": 20}, crop_size={"height": 16, "width": 16}),
    "blip": T.BlipImageProcessorPil(size=SQUARE),
    "dinov2": T.BitImageProcessorPil(size=SMALL, crop_size={"height": 14, "width": 14}),
    "segformer": T.SegformerImageProcessorPil(size=SQUARE),
    "beit": T.BeitImageProcessorPil(size=SQUARE, do_center_crop=True, crop_size={"height": 13, "width": 16}),
    "mobilenet_v2": T.MobileNetV2ImageProcessorPil(size=SMALL, crop_size={"height": 16, "width": 16}),
    "detr": T.DetrImageProcessorPil(size={"shortest_edge": 20, "longest_edge": 31}),
    "deformable_detr": T.DeformableDetrImageProcessorPil(size={"shortest_edge": 20, "longest_edge": 31}),
    "rt_detr": T.RTDetrImageProcessorPil(size=SQUARE),
    "convnext, cropped": T.ConvNextImageProcessorPil(size=SMALL),
    "convnext, warped": T.ConvNextImageProcessorPil(size={"shortest_edge": 384}),
    "levit": T.LevitImageProcessorPil(size=SMALL, crop_size={"height": 20, "width": 20}),
}
SIZES = [(30, 47), (47, 30), (20, 20), (20, 33), (61, 19), (15, 90), (7, 9)]


def _pictures() -> list[Image.Image]:
    random = np.random.default_rng(0)
    return [Image.fromarray(random.integers(0, 256, (*size, 3), np.uint8)) for size in SIZES]


@pytest.mark.parametrize("name", PROCESSORS)
def test_images_are_prepared_as_transformers_prepares_them(name: str, tmp_path: Path) -> None:
    PROCESSORS[name].save_pretrained(tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    ours = Preprocessor(SpecTransform(image_preprocessing(tmp_path)))
    for picture in _pictures():
        batch = ours([picture])
        assert isinstance(batch, torch.Tensor)
        wanted = np.stack(theirs(picture)["pixel_values"]).astype(np.float32)
        np.testing.assert_array_equal(batch.numpy(), wanted, err_msg=str(picture.size))
        size = ours.prepared_size([(picture.height, picture.width)])
        assert size.batch_bytes == batch.nbytes


def test_a_large_image_is_resized_in_part_as_transformers_resizes_all_of_it(tmp_path: Path) -> None:
    processor = T.CLIPImageProcessorPil(size={"shortest_edge": 225}, crop_size={"height": 224, "width": 224})
    processor.save_pretrained(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (4, 400, 3), np.uint8)  # becomes 225 x 22,500
    ours = Preprocessor(SpecTransform(image_preprocessing(tmp_path)))([Image.fromarray(pixels)])
    assert isinstance(ours, torch.Tensor)
    wanted = np.stack(processor(Image.fromarray(pixels))["pixel_values"])
    step = 1 / 255 / min(processor.image_std)
    assert np.abs(ours.numpy() - wanted).max() <= step * 1.01


@pytest.mark.parametrize(
    "settings",
    [
        {"feature_extractor_type": "CLIPFeatureExtractor", "size": 20, "crop_size": 16, "resample": 3},
        {"feature_extractor_type": "ViTFeatureExtractor", "size": 20, "image_mean": [0.5, 0.4, 0.3]},
        {"image_processor_type": "ViTImageProcessorFast", "size": {"height": 20, "width": 16}},
    ],
)
def test_files_of_older_versions_are_read(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    theirs = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    batch = Preprocessor(SpecTransform(image_preprocessing(tmp_path)))(_pictures()[:1])
    assert isinstance(batch, torch.Tensor)
    np.testing.assert_array_equal(batch.numpy(), np.stack(theirs(_pictures()[0])["pixel_values"]))


def test_a_processor_that_was_saved_with_its_tokenizer_is_found(tmp_path: Path) -> None:
    settings = {"image_processor": PROCESSORS["siglip"].to_dict(), "processor_class": "SiglipProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(settings))
    assert image_preprocessing(tmp_path).resize == (18, 24)


@pytest.mark.parametrize(
    ("processor", "named"),
    [
        (T.CLIPImageProcessorPil(do_pad=True), "do_pad"),
        (T.DetrImageProcessorPil(pad_size={"height": 900, "width": 900}), "pad_size"),
        (T.Siglip2ImageProcessorPil(), "Siglip2ImageProcessor"),
        (T.EfficientNetImageProcessorPil(), "EfficientNetImageProcessor"),
        (T.CLIPImageProcessorPil(size={"longest_edge": 20}), "longest_edge"),
        (T.DetrImageProcessorPil(size={"max_height": 20, "max_width": 20}), "max_height, max_width"),
        (T.CLIPImageProcessorPil(crop_size={"shortest_edge": 20}), "crop_size"),
        (T.ViTImageProcessorPil(image_mean=[0.5], image_std=[0.5]), "image_mean"),
    ],
)
def test_what_has_no_counterpart_is_named(processor: Any, named: str, tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    with pytest.raises(NotMappedError, match=named):
        image_preprocessing(tmp_path)


def test_a_processor_that_names_code_is_refused_before_transformers_reads_it(tmp_path: Path) -> None:
    settings = {"image_processor_type": "X", "auto_map": {"AutoImageProcessor": "code.X"}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(settings))
    (tmp_path / "code.py").write_text("raise SystemExit")
    with pytest.raises(ServiceError, match="auto_map"):
        image_preprocessing(tmp_path)


@pytest.mark.parametrize(("do_pad", "takes_mask"), [(True, True), (True, False), (False, True)])
def test_images_are_padded_where_the_processor_and_the_model_do(
    do_pad: bool, takes_mask: bool, tmp_path: Path
) -> None:
    T.DetrImageProcessorPil(do_pad=do_pad).save_pretrained(tmp_path)
    beside = ["pixel_mask"] if takes_mask else []
    assert image_preprocessing(tmp_path, beside=beside).pads == (do_pad and takes_mask)


def test_images_in_patches_get_the_size_that_transformers_gives() -> None:
    from transformers.models.siglip2.image_processing_pil_siglip2 import get_image_size_for_max_num_patches

    random = np.random.default_rng(0)
    sizes = [(1, 1), (1, 8_000), (8_000, 1), *random.integers(1, 3_000, (60, 2)).tolist()]
    for patch, patches in ((16, 256), (4, 20), (14, 1)):
        rules = TransformersRules(patch=patch, patches=patches)
        for height, width in sizes:
            found = rules.resized((height, width), ())
            assert found == get_image_size_for_max_num_patches(height, width, patch, patches)
            assert found[0] * found[1] <= patches * patch**2


def test_images_are_cut_into_patches_where_the_model_takes_their_shapes(tmp_path: Path) -> None:
    T.Siglip2ImageProcessorPil(patch_size=4, max_num_patches=20).save_pretrained(tmp_path)
    spec = image_preprocessing(tmp_path, beside=["spatial_shapes"])
    assert (spec.patch, spec.patches, spec.pads) == (4, 20, False)
