"""Images with texts for models whose own processor takes both: equal to transformers in this process."""

# transformers is half typed.
# pyright: reportPrivateImportUsage=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false

import hashlib
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
from tests.support.models.image_text_models import PLACEHOLDERS, save_image_text_model
from tests.support.models.transformers_folders import images_of, loaded_by_transformers
from tests.support.servers.running_server import RunningServer, running_server
from trocar.errors import ImageTooLargeError, InputRejectedError, NoPreprocessingError, RequestTooLargeError

LOGITS = '/out["logits"]'
LONG = "hello what is a " * 6
"""Of 24 tokens."""
PICTURES = [Image.fromarray(pixels) for pixels in images_of([(30, 47), (20, 20), (11, 40)])]
WITH_PLACES = [name for name, placeholder in PLACEHOLDERS.items() if placeholder]
TAPS = {
    "qwen2": ["model.visual.blocks.1", "model.visual.merger", "model.language_model.layers.1"],
    "qwen25": ["model.visual.blocks.0.attn", "model.language_model.layers.0.mlp"],
    "idefics3": ["model.vision_model.encoder.layers.1", "model.connector", "model.text_model.layers.1"],
    "pix2struct": ["encoder.encoder.layer.1", "decoder.layer.1"],
}


@dataclass(frozen=True)
class Own:
    """A model in this process, and its processor."""

    model: Any
    processor: Any

    def inputs(self, texts: list[str], images: list[Any] | None, **options: Any) -> dict[str, Any]:
        """What transformers' own processor makes."""
        made = self.processor(text=list(texts), images=images, padding=True, return_tensors="pt", **options)
        return dict(made)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    for name in PLACEHOLDERS:
        save_image_text_model(name, root / name)
    return {name: root / name for name in PLACEHOLDERS}


@pytest.fixture(scope="module")
def own(folders: dict[str, Path]) -> dict[str, Own]:
    found = {}
    for name, folder in folders.items():
        config: Any = T.AutoConfig.from_pretrained(folder)
        processor: Any = T.AutoProcessor.from_pretrained(folder)
        processor.image_processor = T.AutoImageProcessor.from_pretrained(folder, backend="pil")
        found[name] = Own(loaded_by_transformers(getattr(T, config.architectures[0]), folder), processor)
    return found


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    models: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, folder in folders.items()}
    with running_server(
        models=models, device="cpu", limits={"max_tokens": 200, "max_request_bytes": 64 << 20}
    ) as running:
        yield running


def texts_of(name: str) -> list[str]:
    place = PLACEHOLDERS[name]
    return [f"hello {place} what is", f"a {place}"] if place else ["hello what is", "a"]


def hooked(model: Any, paths: list[str], inputs: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """What plain hooks see in this process, and the logits."""
    seen: dict[str, Any] = {}

    def keep(path: str) -> Any:
        def hook(_: Any, __: Any, value: Any) -> None:
            seen[path] = value[0] if isinstance(value, tuple) else value

        return hook

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.inference_mode():
        logits = model(**inputs).logits.numpy()
    for handle in handles:
        handle.remove()
    return seen, logits


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_images_with_texts_give_what_transformers_gives(
    client: trocar.Client, own: dict[str, Own], folders: dict[str, Path], name: str
) -> None:
    texts, taps = texts_of(name), TAPS[name]
    inputs = own[name].inputs(texts, PICTURES[:2])
    values, logits = hooked(own[name].model, taps, inputs)
    forms: list[Any] = [[png(PICTURES[0]), np.asarray(PICTURES[1])], PICTURES[:2]]
    maps = client.extract(name, {"text": texts, "images": PICTURES[:2]}, [LOGITS])
    for images in forms:
        maps = client.extract(name, {"text": texts, "images": images}, [*taps, LOGITS])
        np.testing.assert_array_equal(maps[LOGITS], logits)
        for tap in taps:
            info = next(key for key in maps if key.startswith(tap))
            np.testing.assert_array_equal(maps[info], values[tap].numpy())
        plan = client.plan(name, {"text": texts, "images": images}, [*taps, LOGITS]).feature_maps
        assert {key: (each.shape, each.byte_count) for key, each in plan.items()} == {
            key: (value.shape, value.nbytes) for key, value in maps.items()
        }
    key = "decoder_input_ids" if name == "pix2struct" else "input_ids"
    rows = [row[row != 0].tolist() for row in inputs[key]]
    assert [list(sample.ids) for sample in maps.tokens.samples] == rows
    assert maps.tokens.lengths == tuple(map(len, rows))
    assert set(maps.tokens.arguments) == set(inputs)
    assert maps.tokens.processor_digest != hashlib.sha256().hexdigest()
    assert maps.tokens.pads_left == name.startswith("qwen")


@pytest.mark.parametrize("name", WITH_PLACES)
def test_several_images_or_none_in_a_text(client: trocar.Client, own: dict[str, Own], name: str) -> None:
    place = PLACEHOLDERS[name]
    for texts, images in (
        ([f"a {place} is {place} .", "hello", f"{place}"], PICTURES),
        (["hello cat", "what is a cat ."], None),
    ):
        _, logits = hooked(own[name].model, [], own[name].inputs(texts, images))
        given: Any = {"text": texts, "images": images} if images else texts
        np.testing.assert_array_equal(client.extract(name, given, [LOGITS])[LOGITS], logits)


@pytest.mark.parametrize("name", WITH_PLACES)
def test_a_chat_holds_its_images(client: trocar.Client, own: dict[str, Own], name: str) -> None:
    content: list[Any] = [
        {"type": "image", "image": PICTURES[0]},
        {"type": "text", "text": "what is"},
        {"type": "image", "image": png(PICTURES[1])},
    ]
    messages: list[Any] = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "a cat"}]},
    ]
    rendered = own[name].processor.apply_chat_template(messages, tokenize=False)
    inputs = own[name].inputs([rendered], PICTURES[:2], add_special_tokens=False)
    _, logits = hooked(own[name].model, [], inputs)
    tap = trocar.tap(LOGITS, alias="said", tokens="assistant")
    maps = client.extract(name, trocar.chat(messages), [LOGITS, tap])
    np.testing.assert_array_equal(maps[LOGITS], logits)
    (sample,) = maps.tokens.samples
    places = maps.info["said"].token_positions[0]
    assert [sample.tokens[place] for place in places] == ["a", "cat"]
    text = sample.rendered
    assert [text[start:end] for start, end in sample.spans] == list(sample.tokens)

    beside: list[Any] = [
        {"role": "user", "content": [{"type": "image"}, "what is", {"type": "image"}]},
        messages[1],
    ]
    same = client.extract(name, {"text": trocar.chat(beside), "images": PICTURES[:2]}, [LOGITS])
    np.testing.assert_array_equal(same[LOGITS], logits)


def test_edits_and_gradients_equal_hooks(client: trocar.Client, own: dict[str, Own]) -> None:
    texts, place, model = texts_of("qwen2"), "model.language_model.layers.0", own["qwen2"].model
    inputs = own["qwen2"].inputs(texts, PICTURES[:2])
    given: Any = {"text": texts, "images": PICTURES[:2]}

    def double(_: Any, __: Any, value: Any) -> Any:
        return (value[0] * 2, *value[1:]) if isinstance(value, tuple) else value * 2

    handle = model.get_submodule("model.visual.merger").register_forward_hook(double)
    _, wanted = hooked(model, [], inputs)
    handle.remove()
    edit = trocar.edit("model.visual.merger", "scale", factor=2.0)
    np.testing.assert_array_equal(client.extract("qwen2", given, [LOGITS], edits=[edit])[LOGITS], wanted)

    seen: list[torch.Tensor] = []

    def watch(_: Any, __: Any, value: Any) -> Any:
        first = (value[0] if isinstance(value, tuple) else value).detach().requires_grad_()
        seen.append(first)
        return (first, *value[1:]) if isinstance(value, tuple) else first

    handle = model.get_submodule(place).register_forward_hook(watch)
    model(**inputs).logits.square().sum().backward()
    handle.remove()
    grads = client.gradients("qwen2", given, of=trocar.value(LOGITS, function="square"), at=[place])
    np.testing.assert_array_equal(next(iter(grads.values())), seen[0].grad.numpy())  # type: ignore[union-attr]


def test_streams_trainers_and_swaps_take_them(client: trocar.Client, own: dict[str, Own]) -> None:
    texts = texts_of("qwen2")
    batches: list[Any] = [{"text": texts[:count], "images": PICTURES[:count]} for count in (1, 2)]
    with client.extract_stream("qwen2", [*batches, {"text": texts}], [LOGITS]) as stream:
        results = list(stream)
    assert results[2].error is not None
    for batch, result in zip(batches, results, strict=False):
        _, logits = hooked(own["qwen2"].model, [], own["qwen2"].inputs(batch["text"], batch["images"]))
        assert result.maps is not None
        np.testing.assert_array_equal(result.maps[LOGITS], logits)

    inputs = own["qwen2"].inputs(texts, PICTURES[:2])
    labels = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, -100)
    with torch.inference_mode():
        loss = own["qwen2"].model(**inputs, labels=labels).loss.item()
    with client.train("qwen2", losses="causal_lm") as trainer:
        assert trainer.evaluate(batches[1]).loss == pytest.approx(loss, rel=1e-6)

    layer = "model.language_model.layers.0"
    swap = trocar.edit(layer, "swap", source="other")
    other: Any = {"text": texts, "images": [PICTURES[0], PICTURES[1].rotate(90)]}
    maps = client.extract("qwen2", batches[1], [LOGITS], edits=[swap], sources={"other": other})
    direct = client.extract("qwen2", other, [LOGITS])
    np.testing.assert_array_equal(maps[LOGITS], direct[LOGITS])


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("qwen2", {"text": ["a <|image_pad|>"]}, r"1 placeholders .* and 0 images were sent"),
        (
            "idefics3",
            {"text": ["a <image>", "a"], "images": PICTURES},
            r"text 0: 1, text 1: 0.* and 3 images",
        ),
        ("idefics3", {"images": PICTURES[:1]}, "need a text that holds the placeholder '<image>'"),
        ("qwen2", {"text": "hello", "images": PICTURES[:1]}, "0 placeholders"),
        ("pix2struct", {"text": "hello", "images": PICTURES[:2]}, "1 texts and 2 images"),
        ("pix2struct", {"text": "hello"}, "the model takes images"),
        ("qwen2", {"text": [[1, 2]], "images": PICTURES[:1]}, "not beside pairs, token ids"),
        (
            "qwen2",
            {"text": trocar.texts("a <|image_pad|>", truncate=True), "images": PICTURES[:1]},
            "cannot be cut",
        ),
        (
            "qwen2",
            {"text": "<|image_pad|>", "images": PICTURES[:1], "pixel_values": np.ones((4, 96), np.float32)},
            "'pixel_values' is given, and the server also computes it",
        ),
        ("qwen2", {"text": "<|image_pad|>", "images": np.zeros((1, 900, 3), np.uint8)}, "aspect ratio"),
        ("idefics3", {"text": "<image>" * 20, "images": PICTURES[:1] * 20}, "text 0 has .* tokens"),
    ],
)
def test_texts_and_images_that_do_not_fit_are_refused(
    client: trocar.Client, name: str, inputs: Any, message: str
) -> None:
    for call in (client.extract, client.plan):
        with pytest.raises(InputRejectedError, match=message):
            call(name, inputs, [LOGITS])


def test_limits_are_checked_before_any_image_is_decoded(client: trocar.Client) -> None:
    damaged = png(PICTURES[0])[:-30]  # with a header
    with pytest.raises(RequestTooLargeError, match="the limit is 200"):
        client.extract("idefics3", {"text": ["<image>"] * 20, "images": [damaged] * 20}, [LOGITS])
    with pytest.raises(ImageTooLargeError, match=r"the images become .* bytes"):
        client.extract("pix2struct", {"text": ["a"] * 200, "images": [damaged] * 200}, [LOGITS])


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_tokens_of_texts_count_with_and_without_images(client: trocar.Client, name: str) -> None:
    def inputs(count: int) -> list[Any]:
        texts: list[str] = [LONG] * count
        if not PLACEHOLDERS[name]:
            return [{"text": texts, "images": PICTURES[:1] * count}]
        return [texts, {"text": [*texts[1:], PLACEHOLDERS[name]], "images": PICTURES[:1]}]

    for given in inputs(8):
        assert len(client.extract(name, given, [LOGITS])[LOGITS]) == 8
    for given in inputs(9):
        with pytest.raises(RequestTooLargeError, match="tokens with its padding, the limit is 200"):
            client.extract(name, given, [LOGITS])


@pytest.mark.parametrize("name", WITH_PLACES)
def test_texts_that_are_cut_count_as_they_are_cut(
    client: trocar.Client, own: dict[str, Own], name: str
) -> None:
    texts = [LONG] * 10
    inputs = own[name].inputs(texts, None, truncation=True, max_length=20)
    _, logits = hooked(own[name].model, [], inputs)
    maps = client.extract(name, trocar.texts(texts, truncate=True, max_tokens=20), [LOGITS])
    np.testing.assert_array_equal(maps[LOGITS], logits)


def test_a_processor_that_draws_texts_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    save_image_text_model("pix2struct", tmp_path)
    processor: Any = T.Pix2StructImageProcessorPil
    processor(is_vqa=True).save_pretrained(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    with (
        running_server(models={"vqa": {"source": f"hf:{tmp_path}"}}, device="cpu") as running,
        trocar.connect(running.address) as client,
        pytest.raises(NoPreprocessingError, match="is_vqa"),
    ):
        client.extract("vqa", {"text": "a", "images": PICTURES[:1]}, [LOGITS])
