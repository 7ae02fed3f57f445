"""Edits of tokens by text, character and role, against hooks on transformers' own models."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoTokenizer

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server

MODELS = text_models.__name__
EDITED, BEHIND = "model.encoder.layer.0", "model.encoder.layer.1"
TEXTS = ["the cat sat on the mat", "a cat sat", "cat cat"]
DIRECTION = np.linspace(-1, 1, 16, dtype=np.float32)
CHAT = [("user", "the cat"), ("assistant", "a dog sat"), ("user", "hello")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {
        "bert": text_models.save_tokenizer(
            root / "bert", chat_template=text_models.CHAT_TEMPLATE, model_max_length=32
        ),
        "t5": text_models.save_tokenizer(
            root / "t5", padding_side="left", model_input_names=["input_ids", "attention_mask"]
        ),
        "whisper": text_models.save_tokenizer(root / "whisper", model_input_names=["input_ids"]),
    }
    torch.manual_seed(3)
    settings: dict[str, Any] = {"decoder_start_token_id": 0}
    t5 = transformers.T5Config(
        vocab_size=15, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, **settings
    )
    transformers.T5Model(t5).save_pretrained(found["t5"])
    sizes: dict[str, Any] = {
        f"{side}_{name}": count for side in ("encoder", "decoder") for name, count in _SIZES.items()
    }
    whisper = transformers.WhisperConfig(
        vocab_size=15,
        num_mel_bins=8,
        d_model=16,
        **sizes,
        max_source_positions=50,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
    )
    transformers.WhisperModel(whisper).save_pretrained(found["whisper"])
    text_models.save_feature_extractor(found["whisper"])
    return found


_SIZES = {"layers": 2, "attention_heads": 2, "ffn_dim": 24}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[RunningServer]:
    models: dict[str, Any] = {
        "bert": {"factory": f"{MODELS}:long_bert", "input_shape": (4,), "processor": folders["bert"]},
        "t5": {"source": f"hf:{folders['t5']}#T5Model"},
        "whisper": {"source": f"hf:{folders['whisper']}#WhisperModel"},
    }
    with running_server(models=models, device="cpu") as running:
        yield running


def hooked(
    model: torch.nn.Module,
    path: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    rows: list[list[int]],
    wanted: str,
    arguments: dict[str, Any],
) -> np.ndarray[Any, Any]:
    """Return a module's output where a hook changed some tokens of each sample of an earlier one's."""
    found: list[torch.Tensor] = []

    def edit(_module: object, _args: object, output: Any) -> Any:
        value = output[0] if isinstance(output, tuple) else output
        result = value.clone()
        for sample, places in enumerate(rows):
            result[sample, places] = change(value)[sample, places]
        return (result, *output[1:]) if isinstance(output, tuple) else result

    def keep(_module: object, _args: object, output: Any) -> None:
        found.append(output[0] if isinstance(output, tuple) else output)

    handles = [
        model.get_submodule(path).register_forward_hook(edit),
        model.get_submodule(wanted).register_forward_hook(keep),
    ]
    with torch.no_grad():
        model(**arguments)
    for handle in handles:
        handle.remove()
    return found[0].numpy()


def bert_arguments(folders: dict[str, Path], texts: list[str]) -> dict[str, torch.Tensor]:
    tokenizer = AutoTokenizer.from_pretrained(str(folders["bert"]))
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


CAT = [[2], [2], [1, 2]]
"""The tokens of "cat" in `TEXTS`, behind [CLS]."""
CHANGES: dict[str, tuple[trocar.Edit, Callable[[torch.Tensor], torch.Tensor]]] = {
    "zero": (trocar.edit(EDITED, "zero", tokens=trocar.span("cat")), torch.zeros_like),
    "steer": (
        trocar.edit(EDITED, "steer", DIRECTION, alpha=2, tokens=trocar.span("cat")),
        lambda value: value + 2 * torch.from_numpy(DIRECTION),
    ),
    "scale": (
        trocar.edit(EDITED, "scale", -3.0, tokens=trocar.span("cat"), channels=[1, 5], samples=[2, 0]),
        lambda value: torch.cat([_scaled(value[:1]), value[1:2], _scaled(value[2:])]),
    ),
}


def _scaled(value: torch.Tensor) -> torch.Tensor:
    factor = torch.ones(16)
    factor[[1, 5]] = -3.0
    return value * factor


@pytest.mark.parametrize("name", CHANGES)
def test_tokens_of_a_text_are_edited_as_by_a_hook(
    client: trocar.Client, folders: dict[str, Path], name: str
) -> None:
    edit, change = CHANGES[name]
    arguments = bert_arguments(folders, TEXTS)
    expected = hooked(text_models.long_bert(), EDITED, change, CAT, BEHIND, arguments)
    np.testing.assert_array_equal(client.extract("bert", TEXTS, [BEHIND], edits=[edit])[BEHIND], expected)
    plain = client.extract("bert", TEXTS, [BEHIND])[BEHIND]
    assert (plain != expected).any()


def test_each_text_may_have_its_own_span_and_a_chat_its_roles(
    client: trocar.Client, folders: dict[str, Path]
) -> None:
    own = [trocar.span("on"), trocar.span("cat"), trocar.span(4, 7)]
    expected = hooked(
        text_models.long_bert(),
        EDITED,
        torch.zeros_like,
        [[4], [2], [2]],
        BEHIND,
        bert_arguments(folders, TEXTS),
    )
    edit = trocar.edit(EDITED, "zero", tokens=own)
    np.testing.assert_array_equal(client.extract("bert", TEXTS, [BEHIND], edits=[edit])[BEHIND], expected)
    taps: list[str | trocar.Tap] = [EDITED, trocar.tap(EDITED, alias="said", tokens="assistant")]
    edit = trocar.edit(EDITED, "zero", tokens="assistant")
    maps = client.extract("bert", trocar.chat(CHAT), taps, edits=[edit])
    (places,) = maps.info["said"].token_positions
    assert [maps.tokens.samples[0].tokens[place] for place in places] == ["a", "dog", "sat"]
    is_zero = ~maps[EDITED][0].any(axis=1)
    assert np.flatnonzero(is_zero).tolist() == list(places)


def test_gradients_of_a_text_are_edited(client: trocar.Client) -> None:
    of = trocar.value(BEHIND, function="square")
    options: dict[str, Any] = {"of": of, "at": [EDITED], "taps": [EDITED]}
    name = f"{EDITED}/grad_out"
    plain = client.gradients("bert", TEXTS, **options)[name]
    edit = trocar.edit(name, "zero", tokens=trocar.span("cat"))
    changed = client.gradients("bert", TEXTS, **options, edits=[edit])[name]
    expected = plain.copy()
    for sample, places in enumerate(CAT):
        expected[sample, places] = 0
    np.testing.assert_array_equal(changed, expected)


def test_stored_edits_plans_and_streams_know_spans(client: trocar.Client) -> None:
    edit = trocar.edit(EDITED, "zero", tokens=trocar.span("cat"))
    expected = client.extract("bert", TEXTS, [BEHIND], edits=[edit])[BEHIND]
    client.store_edits("bert", "no-cat", [edit])
    np.testing.assert_array_equal(client.extract("bert", TEXTS, [BEHIND], edits=["no-cat"])[BEHIND], expected)
    assert client.plan("bert", TEXTS, [BEHIND], edits=[edit]).feature_maps[BEHIND].shape == expected.shape
    with client.extract_stream("bert", [TEXTS, ["a dog"]], [BEHIND], edits=[edit]) as stream:
        first, second = (result.maps for result in stream)
    assert first is not None
    np.testing.assert_array_equal(first[BEHIND], expected)
    assert second is None  # it has no cat


@pytest.mark.parametrize("operation", ["zero", "scale"])
def test_a_decoders_own_texts_are_tapped_and_edited(
    client: trocar.Client, folders: dict[str, Path], operation: Literal["zero", "scale"]
) -> None:
    encoder, decoder = ["the cat sat on the mat", "a dog"], ["cat", "the cat cat"]
    block, last = "decoder.block.0", "decoder.final_layer_norm"
    inputs = {"text": encoder, "decoder_text": decoder}
    tokenizer = AutoTokenizer.from_pretrained(str(folders["t5"]))
    given = tokenizer(encoder, padding=True, return_tensors="pt")
    own = tokenizer(decoder, padding=True, return_tensors="pt")
    arguments = {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "decoder_input_ids": own["input_ids"],
        "decoder_attention_mask": own["attention_mask"],
    }
    cat = tokenizer.convert_tokens_to_ids("cat")
    rows = [np.flatnonzero(row == cat).tolist() for row in own["input_ids"].numpy()]
    assert rows == [[3], [2, 3]]  # padded on the left
    change = torch.zeros_like if operation == "zero" else lambda value: value * 5.0
    span = trocar.span("cat", decoder=True)
    values = () if operation == "zero" else (5.0,)
    model = transformers.T5Model.from_pretrained(str(folders["t5"])).eval()
    expected = hooked(model, block, change, rows, last, arguments)
    edit = trocar.edit(f"{block}[0]", operation, *values, tokens=span)
    taps: list[str | trocar.Tap] = [last, trocar.tap(last, alias="cats", tokens=span)]
    maps = client.extract("t5", inputs, taps, edits=[edit])
    np.testing.assert_array_equal(maps[last], expected)
    assert maps.info["cats"].token_positions == ((1,), (2, 3))
    for sample, places in enumerate(rows):
        np.testing.assert_array_equal(maps["cats"][sample, : len(places)], expected[sample, places])


def test_a_prompt_beside_sound_is_the_only_text(client: trocar.Client, folders: dict[str, Path]) -> None:
    sound = np.random.default_rng(0).normal(size=16_000).astype(np.float32)
    block, last = "decoder.layers.0", "decoder.layers.1"
    tokenizer = AutoTokenizer.from_pretrained(str(folders["whisper"]))
    ids = tokenizer("the cat sat", return_tensors="pt")["input_ids"]
    extractor = transformers.AutoFeatureExtractor.from_pretrained(str(folders["whisper"]))
    features = extractor(sound, sampling_rate=16_000, return_tensors="pt")["input_features"]
    model = transformers.WhisperModel.from_pretrained(str(folders["whisper"])).eval()
    arguments = {"input_features": features, "decoder_input_ids": ids}
    expected = hooked(model, block, torch.zeros_like, [[2]], last, arguments)
    inputs: dict[str, Any] = {"audio": trocar.audio(sound, 16_000), "decoder_text": "the cat sat"}
    edit = trocar.edit(block, "zero", tokens=trocar.span("cat"))
    tap = trocar.tap(last, alias="cat", tokens=trocar.span(4, 7))
    maps = client.extract("whisper", inputs, [last, tap], edits=[edit])
    np.testing.assert_array_equal(maps[last], expected)
    np.testing.assert_array_equal(maps["cat"], expected[:, 2:3])


@pytest.mark.parametrize(
    ("model", "inputs", "edit", "message"),
    [
        ("bert", TEXTS, trocar.edit(EDITED, "zero", tokens=trocar.span("dog")), "the text is not in it"),
        ("bert", TEXTS, trocar.edit(EDITED, "zero", tokens=[trocar.span("cat")] * 2), "2 spans for 3 texts"),
        (
            "bert",
            TEXTS,
            trocar.edit(EDITED, "zero", tokens=trocar.span("cat", decoder=True)),
            "no texts of the decoder were sent",
        ),
    ],
)
def test_spans_without_tokens_are_refused(
    client: trocar.Client, model: str, inputs: Any, edit: trocar.Edit, message: str
) -> None:
    for call in (client.extract, client.plan):
        with pytest.raises(trocar.errors.EditNotPossibleError, match=message) as caught:
            call(model, inputs, [BEHIND], edits=[edit])
        assert "edits[0]" in str(caught.value)


def test_other_values_and_arrays_have_no_such_tokens(client: trocar.Client) -> None:
    edit = trocar.edit(EDITED, "zero", tokens=trocar.span("cat"))
    with pytest.raises(trocar.errors.ReductionRejectedError, match="only texts that the server tokenizes"):
        client.extract("bert", np.zeros((1, 4), np.float32), [BEHIND], edits=[edit])
    inputs = {"text": ["the cat sat"], "decoder_text": ["cat"]}
    edit = trocar.edit("decoder.block.0[0]", "zero", tokens=trocar.span("cat"))
    with pytest.raises(trocar.errors.EditShapeMismatchError, match="decoder=True"):
        client.extract("t5", inputs, ["decoder.final_layer_norm"], edits=[edit])
