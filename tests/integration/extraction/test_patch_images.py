"""Images in patches: SigLIP 2's models of any proportions (NaFlex), equal to transformers alone."""

# transformers is half typed.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

import trocar
from tests.support.models.text_models import save_tokenizer
from tests.support.models.transformers_folders import (
    images_of,
    loaded_by_transformers,
    processed_images,
)
from tests.support.servers.running_server import RunningServer, running_server

BLOCKS = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
VISION = {**BLOCKS, "patch_size": 4, "num_patches": 16}
LOGITS = '/out["logits_per_image"]'
TEXTS = ["a cat", "the dog sat"]
SIZES = [(30, 47), (9, 40), (1, 300), (64, 3)]


def _kinds() -> dict[str, tuple[Any, Any]]:
    whole = T.Siglip2Config(text_config={**BLOCKS, "vocab_size": 30}, vision_config=VISION)
    classifier = T.Siglip2Config(text_config={**BLOCKS, "vocab_size": 30}, vision_config=VISION)
    classifier.num_labels = 3
    return {
        "whole": (T.Siglip2Model, whole),
        "classes": (T.Siglip2ForImageClassification, classifier),
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("naflex")
    for name, (kind, config) in _kinds().items():
        torch.manual_seed(0)
        kind(config).save_pretrained(root / name)
        T.Siglip2ImageProcessorPil(patch_size=4, max_num_patches=20).save_pretrained(root / name)
        save_tokenizer(root / name, model_input_names=["input_ids"])
    return {name: root / name for name in _kinds()}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tables: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    tables["tower"] = {"source": f"hf:{folders['whole']}#Siglip2VisionModel"}
    as_is = tmp_path_factory.mktemp("as_is")
    kind, config = _kinds()["whole"]
    kind(config).save_pretrained(as_is)
    T.Siglip2ImageProcessorPil(do_resize=False).save_pretrained(as_is)
    tables["as_is"] = {"source": f"hf:{as_is}"}
    with running_server(models=tables, device="cpu") as running:
        yield running


def _tokens(folder: Path) -> dict[str, Any]:
    load: Any = T.AutoTokenizer.from_pretrained
    return dict(load(folder)(TEXTS, padding="max_length", max_length=64, return_tensors="pt"))


def test_texts_and_images_of_any_proportions_give_what_transformers_gives(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    folder = folders["whole"]
    model, inputs = (
        loaded_by_transformers(T.Siglip2Model, folder),
        processed_images(folder, images_of(SIZES)),
    )
    assert len({tuple(shape) for shape in inputs["spatial_shapes"].tolist()}) == len(SIZES)
    with torch.inference_mode():
        wanted = model(**_tokens(folder), **inputs)
        features = model.get_image_features(**inputs).pooler_output.numpy()
    taps = [LOGITS, "image_features", "vision.layer[1]"]
    maps = client.extract("whole", {"text": TEXTS, "images": images_of(SIZES)}, taps)
    np.testing.assert_array_equal(maps[LOGITS], wanted.logits_per_image.numpy())
    np.testing.assert_array_equal(maps["vision_model.head"], features)
    arrays = {name: value.numpy() for name, value in inputs.items()}
    again = client.extract("whole", {"text": TEXTS, **arrays}, taps)
    for name, value in again.items():
        np.testing.assert_array_equal(value, maps[name])
    (alone,) = client.extract("tower", images_of(SIZES), "image_features").values()
    np.testing.assert_array_equal(alone, features)


def test_streams_and_dry_runs_take_images_in_patches(client: trocar.Client, folders: dict[str, Path]) -> None:
    model = loaded_by_transformers(T.Siglip2VisionModel, folders["whole"])
    batches = [images_of(SIZES), images_of(SIZES[2:]), images_of(SIZES[:1])]
    with client.extract_stream("tower", batches, ["head", "layer[0]"]) as stream:
        found = [result.unwrap() for result in stream]
    for pictures, maps in zip(batches, found, strict=True):
        with torch.inference_mode():
            wanted = model(**processed_images(folders["whole"], pictures)).pooler_output.numpy()
        np.testing.assert_array_equal(maps["head"], wanted)
    plan = client.plan("tower", batches[0], ["head", "layer[0]"]).feature_maps
    assert {name: info.shape for name, info in plan.items()} == {
        name: value.shape for name, value in found[0].items()
    }
    described = client.model("tower").preprocessing
    assert described is not None
    assert "at most 20 patches of 4 x 4 pixels" in described.description


def test_trainers_and_their_data_sets_take_images_in_patches(
    client: trocar.Client, folders: dict[str, Path], tmp_path: Path
) -> None:
    pictures, labels = images_of(SIZES), [0, 1, 2, 1]
    for number, (pixels, label) in enumerate(zip(pictures, labels, strict=True)):
        folder = tmp_path / "pictures" / "abc"[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    order = [0, 1, 3, 2]  # of a folder: by class, then by name
    model = loaded_by_transformers(T.Siglip2ForImageClassification, folders["classes"])
    inputs = processed_images(folders["classes"], [pictures[index] for index in order])
    targets = torch.tensor(labels)[order]
    with torch.inference_mode():
        wanted = torch.nn.functional.cross_entropy(model(**inputs).logits, targets).item()
    with client.train("classes", losses="cross_entropy", trainable=["classifier"]) as trainer:
        assert trainer.evaluate([pictures[index] for index in order], targets.numpy()).loss == wanted
        history = trainer.fit(tmp_path / "pictures", batch_size=4, shuffle=False)
    assert history.losses[0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([[100, 100], [1, 1]], "exceed max_length"),
        ([[1 << 40, 1 << 20], [1, 1]], "exceed max_length"),
        ([[0, 3], [1, 1]], "must be positive"),
        ([[1, 1]], "2 and 1 images"),
    ],
)
def test_shapes_that_do_not_fit_their_patches_are_refused(
    client: trocar.Client, folders: dict[str, Path], shapes: Any, message: str
) -> None:
    inputs = {
        name: value.numpy()
        for name, value in processed_images(folders["whole"], images_of(SIZES[:2])).items()
    }
    with pytest.raises(trocar.errors.InputRejectedError, match=message):
        client.extract("whole", {"text": TEXTS, **inputs, "spatial_shapes": np.array(shapes)}, LOGITS)


def test_a_processor_that_does_something_else_is_refused_with_the_arrays_to_send(
    client: trocar.Client,
) -> None:
    with pytest.raises(
        trocar.errors.NoPreprocessingError, match=r"do_resize.*pixel_values.*spatial_shapes: int64"
    ):
        client.extract("as_is", images_of(SIZES), LOGITS)
    with pytest.raises(trocar.errors.InputRejectedError, match="'spatial_shapes' is given twice"):
        client.extract(
            "whole",
            {
                "text": TEXTS,
                "images": images_of(SIZES)[:1],
                "spatial_shapes": np.ones((1, 2), np.int64),
            },
            LOGITS,
        )
