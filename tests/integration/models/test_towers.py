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
from tests.support.models.transformers_folders import save_family, save_image_processor
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
    with running_server(models=tables, device="cpu") as running:
        yield running


def theirs(name: str, folder: Path) -> Any:
    kind: Any = getattr(transformers, name)
    model = kind.from_pretrained(folder).eval()
    for parameter in model.parameters():  # aligned as torch allocates, which decides the last bits
        parameter.data = parameter.data.clone()
    return model


@pytest.mark.parametrize("name", VISION)
def test_the_tower_of_images_takes_images_alone(
    client: trocar.Client, folders: dict[str, Path], name: str
) -> None:
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (9, 12, 3), np.uint8) for _ in range(3)]
    processor = transformers.AutoImageProcessor.from_pretrained(folders[name], backend="pil")
    pixels = processor([Image.fromarray(each) for each in pictures], return_tensors="pt")["pixel_values"]
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
    tokens = transformers.AutoTokenizer.from_pretrained(folders[name])(
        TEXTS, padding=True, return_tensors="pt"
    )
    with torch.inference_mode():
        wanted = theirs(name, folders[name])(**tokens)
    tap = f'/out["{TEXT[name]}"]'
    maps = client.extract(name.lower(), TEXTS, [tap])
    np.testing.assert_array_equal(maps[tap], wanted[TEXT[name]].numpy())
    spans = client.extract(name.lower(), ["a cat"], [trocar.tap("hidden[1]", tokens=trocar.span("cat"))])
    assert spans["hidden[1]"].shape == (1, 1, 8)


def test_a_tower_of_another_family_is_refused_by_name(folders: dict[str, Path]) -> None:
    tables: Any = {"wrong": {"source": f"hf:{folders['SiglipTextModel']}#CLIPVisionModel"}}
    with (
        pytest.raises(ServiceError, match=r"CLIPVisionModel takes a CLIPVisionConfig; .* SiglipConfig"),
        running_server(models=tables, device="cpu"),
    ):
        pass
