"""Images through a model's image processor, alone and with texts: equal to transformers."""

# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false

import asyncio
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

import trocar
from tests.support.models.text_models import save_tokenizer
from tests.support.models.transformers_folders import save_family, save_image_processor
from tests.support.servers.running_server import RunningServer, running_server

TAPS = {
    "clip": "vision_model.encoder.layers.1",
    "siglip": "vision_model.encoder.layers.0",
    "vit": "vit.layers.1",
    "dinov2": "layernorm",
    "segformer": "decode_head.classifier",
    "detr": "bbox_predictor",
}
TEXTS = ["a cat", "the dog sat on the mat"]


@dataclass(frozen=True)
class Own:
    """A model in this process, its image processor and its folder."""

    model: Any
    processor: Any
    folder: Path


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Own]:
    root = tmp_path_factory.mktemp("folders")
    found = {}
    for name in TAPS:
        model = save_family(name, root / name).requires_grad_(False)  # as on a server: else other kernels
        found[name] = Own(model, save_image_processor(name, root / name), root / name)
    for name in ("clip", "siglip"):
        save_tokenizer(root / name, model_input_names=["input_ids", "attention_mask"])
    return found


@pytest.fixture(scope="module")
def server(own: dict[str, Own], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    tables: dict[str, Any] = {name: {"source": f"hf:{each.folder}"} for name, each in own.items()}
    padding = tmp_path_factory.mktemp("padding")
    save_family("vit", padding)
    T.CLIPImageProcessorPil(do_pad=True).save_pretrained(padding)
    tables["padding"] = {"source": f"hf:{padding}"}
    with running_server(models=tables, device="cpu") as running:
        yield running


def _pictures(count: int = 2, size: tuple[int, int] = (30, 47)) -> list[Any]:
    random = np.random.default_rng(0)
    return [random.integers(0, 256, (*size, 3), np.uint8) for _ in range(count)]


def _png(pixels: Any) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def _hooked(model: Any, path: str, inputs: dict[str, Any]) -> tuple[Any, Any]:
    """The value that a plain hook sees in this process, and the model's output."""
    seen: list[Any] = []
    handle = model.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        output = model(**inputs)
    handle.remove()
    return (seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]).numpy(), output


def _prepared(each: Own, pictures: list[Any]) -> dict[str, Any]:
    images = [Image.fromarray(pixels) for pixels in pictures]
    return dict(each.processor(images, return_tensors="pt"))


def _tokens(each: Own, texts: list[str]) -> dict[str, Any]:
    # As transformers' own pipeline: SigLIP takes texts of one length.
    padding: Any = (
        {"padding": "max_length", "max_length": 64} if each.folder.name == "siglip" else {"padding": True}
    )
    return dict(T.AutoTokenizer.from_pretrained(each.folder)(texts, **padding, return_tensors="pt"))


@pytest.mark.parametrize("name", ["vit", "dinov2", "segformer", "detr"])
def test_images_give_what_transformers_gives(client: trocar.Client, own: dict[str, Own], name: str) -> None:
    pictures = _pictures()
    value, _ = _hooked(own[name].model, TAPS[name], _prepared(own[name], pictures))
    for images in (pictures, [_png(pixels) for pixels in pictures], np.stack(pictures)):
        np.testing.assert_array_equal(client.extract(name, images, [TAPS[name]])[TAPS[name]], value)


def test_the_preprocessing_is_described(client: trocar.Client, own: dict[str, Own]) -> None:
    found = client.model("clip").preprocessing
    assert found is not None
    assert (found.resize, found.crop, found.interpolation) == ((9,), (8, 8), "bicubic")
    assert found.mean == pytest.approx(own["clip"].processor.image_mean)
    detector = client.model("detr").preprocessing
    assert detector is not None
    assert "at most 70 on the longer side" in detector.description
    assert (detector.resize, detector.longest, detector.scale) == ((48,), 70, 1 / 255)


def test_a_dry_run_of_images_tells_the_bytes_that_arrive(client: trocar.Client) -> None:
    plan = client.plan("vit", _pictures(3), ["vit.layers.1"]).feature_maps["vit.layers.1"]
    value = client.extract("vit", _pictures(3), ["vit.layers.1"])["vit.layers.1"]
    assert (plan.shape, plan.byte_count) == (value.shape, value.nbytes)


def test_what_cannot_be_prepared_is_refused_by_name(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.NoPreprocessingError, match=r"do_pad.*pixel_values: float32"):
        client.extract("padding", _pictures(), ["vit.layers.1"])


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_texts_and_images_in_one_call_give_what_transformers_gives(
    client: trocar.Client, own: dict[str, Own], name: str
) -> None:
    pictures, each = _pictures(), own[name]
    inputs = {**_tokens(each, TEXTS), **_prepared(each, pictures)}
    value, output = _hooked(each.model, TAPS[name], inputs)
    text = "text_model.encoder.layers.0"
    of_texts, _ = _hooked(each.model, text, inputs)
    logits = '/out["logits_per_image"]'
    maps = client.extract(name, {"text": TEXTS, "images": pictures}, [TAPS[name], text, logits])
    np.testing.assert_array_equal(maps[TAPS[name]], value)
    np.testing.assert_array_equal(maps[text], of_texts)
    np.testing.assert_array_equal(maps[logits], output.logits_per_image.numpy())
    assert maps.tokens.lengths == (4, 8)
    assert [part.shape for part in maps.samples(text)] == [(4, 8), (8, 8)]


def _shapes(maps: Any) -> dict[str, tuple[int, ...]]:
    return {name: info.shape for name, info in maps.items()}


@pytest.mark.parametrize(("images", "texts"), [(1, 2), (2, 1), (3, 2), (1, 1), (4, 2)])
def test_images_need_not_be_as_many_as_texts(
    client: trocar.Client, own: dict[str, Own], images: int, texts: int
) -> None:
    pictures, taps = _pictures(images), ["text_model", "vision_model", '/out["logits_per_image"]']
    inputs = {"text": TEXTS[:texts], "images": pictures}
    with torch.inference_mode():
        output = own["clip"].model(**_tokens(own["clip"], TEXTS[:texts]), **_prepared(own["clip"], pictures))
    maps = client.extract("clip", inputs, taps[2])
    np.testing.assert_array_equal(maps[taps[2]], output.logits_per_image.numpy())
    plan = client.plan("clip", inputs, ["**@*", "/out"]).feature_maps
    assert _shapes(plan) == _shapes(client.extract("clip", inputs, ["**@*", "/out"]).info)


def test_a_stream_and_asyncio_take_texts_and_images(
    server: RunningServer, client: trocar.Client, own: dict[str, Own]
) -> None:
    tap = '/out["logits_per_image"]'
    batches = [{"text": TEXTS[:count], "images": _pictures(count)} for count in (1, 2)]
    with client.extract_stream("clip", batches, [tap]) as stream:
        found = [result.maps[tap] for result in stream if result.maps is not None]

    async def awaited() -> list[Any]:
        async with trocar.aio.connect(server.address) as other:
            return [(await other.extract("clip", batch, [tap]))[tap] for batch in batches]

    for batch, ours, theirs in zip(batches, found, asyncio.run(awaited()), strict=True):
        tokens, images = _tokens(own["clip"], batch["text"]), _prepared(own["clip"], batch["images"])
        with torch.inference_mode():
            wanted = own["clip"].model(**tokens, **images).logits_per_image.numpy()
        np.testing.assert_array_equal(ours, wanted)
        np.testing.assert_array_equal(theirs, wanted)


def test_statistics_of_texts_beside_images_leave_padding_out(client: trocar.Client) -> None:
    text = "text_model.encoder.layers.0"
    inputs = {"text": TEXTS, "images": _pictures(1)}
    maps = client.extract("clip", inputs, [trocar.tap(text, stats=["mean"], over="sample")])
    own_means = [part.mean() for part in maps.samples(text)]
    np.testing.assert_allclose(maps.stats[text].mean, own_means, rtol=1e-5)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"images": _pictures()}, r"'input_ids' is missing: in Python .*\"text\": texts"),
        ({"text": TEXTS}, r"'pixel_values' is missing: in Python"),
        ({"text": TEXTS, "images": _pictures(), "pixel_values": _pictures()}, "given twice"),
        ({"text": TEXTS, "pictures": _pictures()}, "no input 'pictures'; nearest: pixel_values"),
        ({"text": TEXTS, "input_ids": np.ones((2, 3), np.int64), "images": _pictures()}, "one or the other"),
    ],
)
def test_a_missing_or_double_modality_is_refused(
    client: trocar.Client, inputs: dict[str, Any], message: str
) -> None:
    with pytest.raises(trocar.errors.InputRejectedError, match=message):
        client.extract("clip", inputs, ["vision_model"])


def test_a_trainer_takes_images_as_its_model_does(client: trocar.Client, own: dict[str, Own]) -> None:
    pictures, labels = _pictures(4), np.array([0, 1, 0, 1])
    with torch.inference_mode():
        logits = own["vit"].model(**_prepared(own["vit"], pictures)).logits
    with client.train("vit", losses="cross_entropy", trainable=["classifier"]) as trainer:
        loss = trainer.evaluate(pictures, labels).loss
        flagged = trainer.evaluate({"images": pictures, "interpolate_pos_encoding": True}, labels).loss
    assert flagged == loss  # images of the model's own size need no interpolation
    assert loss == torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).item()
