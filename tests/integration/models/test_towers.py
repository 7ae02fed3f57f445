"""One tower of CLIP and SigLIP: images or texts alone, as transformers' own classes compute them."""

# transformers is half typed.
# pyright: reportPrivateImportUsage=false

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

import trocar
from tests.support.models.text_models import save_tokenizer
from tests.support.models.transformers_folders import (
    loaded_by_transformers,
    save_family,
    save_image_processor,
)
from tests.support.servers.running_server import RunningServer, running_server
from trocar_server.errors import ServiceError

VISION = {
    "CLIPVisionModel": "last_hidden_state",
    "CLIPVisionModelWithProjection": "image_embeds",
    "SiglipVisionModel": "pooler_output",
}
TEXT = {
    "CLIPTextModel": "last_hidden_state",
    "CLIPTextModelWithProjection": "text_embeds",
    "SiglipTextModel": "pooler_output",
}
TEXTS = ["a cat", "the dog sat"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("towers")
    for name in ("clip", "siglip"):
        save_family(name, root / name)
        save_image_processor(name, root / name)
        save_tokenizer(root / name, model_input_names=["input_ids", "attention_mask"])
    return {name: root / ("clip" if name.startswith("CLIP") else "siglip") for name in (*VISION, *TEXT)}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    tables: dict[str, Any] = {
        name.lower(): {"source": f"hf:{folder}#{name}"} for name, folder in folders.items()
    }
    tables |= {folder.name: {"source": f"hf:{folder}"} for folder in folders.values()}
    with running_server(models=tables, device="cpu") as running:
        yield running


def theirs(name: str, folder: Path) -> Any:
    return loaded_by_transformers(getattr(transformers, name), folder)


def _tokens(folder: Path, texts: list[str] = TEXTS) -> Any:
    # SigLIP was trained on texts of one length: transformers' own pipeline pads to 64, too.
    padding: Any = (
        {"padding": "max_length", "max_length": 64} if folder.name == "siglip" else {"padding": True}
    )
    return transformers.AutoTokenizer.from_pretrained(folder)(texts, **padding, return_tensors="pt")


def _pictures(count: int = 3) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (9, 12, 3), np.uint8) for _ in range(count)]


def _pixels(folder: Path, pictures: list[Any]) -> Any:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return processor([Image.fromarray(each) for each in pictures], return_tensors="pt")["pixel_values"]


@pytest.mark.parametrize("name", VISION)
def test_the_tower_of_images_takes_images_alone(
    client: trocar.Client, folders: dict[str, Path], name: str
) -> None:
    pictures = _pictures()
    pixels = _pixels(folders[name], pictures)
    with torch.inference_mode():
        wanted = theirs(name, folders[name])(pixels, output_hidden_states=True)
    tap = f'/out["{VISION[name]}"]'
    maps = client.extract(name.lower(), pictures, [tap, "hidden[1]"])
    np.testing.assert_array_equal(maps[tap], wanted[VISION[name]].numpy())
    np.testing.assert_array_equal(maps["hidden[1]"], wanted.hidden_states[1].numpy())
    assert next(entry.name for entry in client.model(name.lower()).inputs) == "pixel_values"


@pytest.mark.parametrize("name", TEXT)
def test_the_tower_of_texts_takes_texts_alone(
    client: trocar.Client, folders: dict[str, Path], name: str
) -> None:
    tokens = _tokens(folders[name])
    with torch.inference_mode():
        wanted = theirs(name, folders[name])(**tokens)
    tap = f'/out["{TEXT[name]}"]'
    maps = client.extract(name.lower(), TEXTS, [tap])
    np.testing.assert_array_equal(maps[tap], wanted[TEXT[name]].numpy())
    spans = client.extract(name.lower(), ["a cat"], [trocar.tap("hidden[1]", tokens=trocar.span("cat"))])
    assert spans["hidden[1]"].shape == (1, 1, 8)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_features_are_those_of_transformers(
    client: trocar.Client, folders: dict[str, Path], family: str
) -> None:
    kind, pictures = ("CLIPModel" if family == "clip" else "SiglipModel"), _pictures()
    folder = next(path for path in folders.values() if path.name == family)
    model, tokens, pixels = theirs(kind, folder), _tokens(folder), _pixels(folder, pictures)
    with torch.inference_mode():
        wanted = {
            "image_features": model.get_image_features(pixels).pooler_output.numpy(),
            "text_features": model.get_text_features(**tokens).pooler_output.numpy(),
        }
    stages = client.model(family).stages
    maps = client.extract(family, {"text": TEXTS, "images": pictures}, list(wanted))
    towers = {
        "image_features": ("clipvisionmodelwithprojection", "siglipvisionmodel", pictures),
        "text_features": ("cliptextmodelwithprojection", "sigliptextmodel", TEXTS),
    }
    for name, value in wanted.items():
        np.testing.assert_array_equal(maps[stages[name]], value)
        clip, siglip, given = towers[name]
        alone = client.extract(clip if family == "clip" else siglip, given, name)
        np.testing.assert_array_equal(next(iter(alone.values())), value)


def test_similarities_of_towers_are_those_of_the_whole_model(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    pictures, folder = _pictures(), folders["CLIPTextModel"]
    (images,) = client.extract("clipvisionmodelwithprojection", pictures, "image_features").values()
    (texts,) = client.extract("cliptextmodelwithprojection", TEXTS, "text_features").values()
    unit = [each / np.linalg.norm(each, axis=1, keepdims=True) for each in (images, texts)]
    model = theirs("CLIPModel", folder)
    with torch.inference_mode():
        logits = model(**_tokens(folder), pixel_values=_pixels(folder, pictures)).logits_per_image
    scale = model.logit_scale.exp().item()
    np.testing.assert_allclose(unit[0] @ unit[1].T * scale, logits.numpy(), rtol=1e-4)


def test_a_text_of_siglip_does_not_depend_on_its_neighbours(client: trocar.Client) -> None:
    (together,) = client.extract("sigliptextmodel", TEXTS, "text_features").values()
    for text, value in zip(TEXTS, together, strict=True):
        (alone,) = client.extract("sigliptextmodel", [text], "text_features").values()
        np.testing.assert_allclose(alone[0], value, rtol=1e-4, atol=1e-6)
    found = client.extract("sigliptextmodel", TEXTS, "layer[0]")
    assert [len(one) for one in found.samples("layer[0]")] == list(found.tokens.lengths)
    assert max(found.tokens.lengths) < 64 == found["layer[0]"].shape[1]


def test_a_tower_of_another_family_is_refused_by_name(folders: dict[str, Path]) -> None:
    tables: Any = {"wrong": {"source": f"hf:{folders['SiglipTextModel']}#CLIPVisionModel"}}
    with (
        pytest.raises(ServiceError, match=r"CLIPVisionModel takes a CLIPVisionConfig; .* SiglipConfig"),
        running_server(models=tables, device="cpu"),
    ):
        pass
