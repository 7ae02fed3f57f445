"""Texts as inputs: tokens and values equal those of transformers in this process."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoTokenizer

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server
from trocar import Client
from trocar._cli import main
from trocar.errors import InputRejectedError, NoPreprocessingError, RequestTooLargeError

MODELS = text_models.__name__
TEXTS = ["the cat sat", "a dog sat on the mat", "hello"]
LAYER = "model.encoder.layer.1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_models.save_tokenizer(
        tmp_path_factory.mktemp("tokenizer"), chat_template=text_models.CHAT_TEMPLATE
    )


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that pads on the left, and has no template."""
    return text_models.save_tokenizer(tmp_path_factory.mktemp("bare"), padding_side="left")


@pytest.fixture(scope="module")
def server(folder: Path, bare: Path) -> Iterator[RunningServer]:
    def custom(name: str, shape: tuple[int, ...], processor: Path | None = None) -> dict[str, Any]:
        return {"factory": f"{MODELS}:{name}", "input_shape": shape, "processor": processor}

    models = {
        "bert": custom("bert", (4,), folder),
        "gpt": custom("gpt", (4,), bare),
        "unplaced": custom("unplaced_gpt", (4,), bare),
        "minilm": custom("minilm", (4,), text_models.minilm_folder()),
        "untold": custom("bert", (4,)),
    }
    with running_server(models=models, limits={"max_text_characters": 20_000, "max_tokens": 512}) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    with trocar.connect(server.address) as found:
        yield found


def hooked(model: Any, path: str, encoding: Any) -> Any:
    """Return what a module computes on tokens, by a plain hook."""
    found: list[Any] = []
    module = model.get_submodule(path)
    handle = module.register_forward_hook(lambda _, __, value: found.append(value))
    with torch.inference_mode():
        model(**encoding)
    handle.remove()
    value = found[0][0] if isinstance(found[0], tuple) else found[0]
    return value.numpy()


def test_values_and_tokens_equal_those_of_transformers(client: Client, folder: Path) -> None:
    maps = client.extract("bert", TEXTS, [LAYER])
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    encoding = tokenizer(TEXTS, padding=True, return_tensors="pt")
    assert np.array_equal(maps[LAYER], hooked(text_models.bert(), LAYER, encoding))
    plain = tokenizer(TEXTS, return_offsets_mapping=True, return_special_tokens_mask=True)
    for i, sample in enumerate(maps.tokens.samples):
        assert list(sample.ids) == plain["input_ids"][i]
        assert list(sample.spans) == plain["offset_mapping"][i]
        assert list(sample.is_special) == [bool(each) for each in plain["special_tokens_mask"][i]]
        assert list(sample.tokens) == tokenizer.convert_ids_to_tokens(plain["input_ids"][i])
    assert np.array_equal(maps.tokens.mask, encoding["attention_mask"].numpy())


def test_minilm_computes_the_real_sentence_vectors(client: Client) -> None:
    from sentence_transformers import SentenceTransformer

    sentences = ["The cat sits on the mat.", "Quarterly revenue rose."]
    maps = client.extract("minilm", sentences, ["model.encoder.layer.5"])
    pooled = np.stack([values.mean(axis=0) for values in maps.samples("model.encoder.layer.5")])
    ours = pooled / np.linalg.norm(pooled, axis=1, keepdims=True)
    theirs = SentenceTransformer(str(text_models.minilm_folder()), device="cpu").encode(sentences)
    assert np.allclose(ours, theirs, atol=1e-6)


def test_values_without_padding_are_those_of_each_length(client: Client) -> None:
    maps = client.extract("bert", TEXTS, [LAYER])
    assert [len(values) for values in maps.samples(LAYER)] == [5, 8, 3] == list(maps.tokens.lengths)
    assert np.array_equal(maps.samples(LAYER)[2], maps[LAYER][2, :3])


def test_texts_padded_on_the_left_have_the_positions_of_their_own_tokens(client: Client, bare: Path) -> None:
    layer = "model.h.1"
    maps = client.extract("gpt", TEXTS, [layer])
    tokenizer = AutoTokenizer.from_pretrained(str(bare))
    encoding = text_models.placed(tokenizer, tokenizer(TEXTS, padding=True, return_tensors="pt"))
    encoding.pop("token_type_ids")
    assert maps.tokens.pads_left
    assert maps.tokens.arguments == ("input_ids", "attention_mask", "position_ids")
    assert np.array_equal(maps[layer], hooked(text_models.gpt(), layer, encoding))
    assert np.array_equal(maps.samples(layer)[2], maps[layer][2, -3:])


@pytest.mark.parametrize("model", ["gpt", "unplaced"])
def test_a_tokenizer_that_pads_on_the_left_moves_no_token(client: Client, model: str) -> None:
    layer = "model.h.1"
    maps = client.extract(model, TEXTS, [layer])
    assert maps.tokens.pads_left == (model == "gpt")
    for text, found in zip(TEXTS, maps.samples(layer), strict=True):
        alone = client.extract(model, text, [layer])
        assert alone.tokens.arguments == ("input_ids", "attention_mask")
        np.testing.assert_allclose(found, alone[layer][0], rtol=1e-4, atol=1e-6)


def test_pairs_have_two_segments(client: Client, folder: Path) -> None:
    maps = client.extract("bert", [("the cat", "a dog")], [LAYER])
    encoding = AutoTokenizer.from_pretrained(str(folder))("the cat", "a dog", return_tensors="pt")
    assert encoding["token_type_ids"].sum()
    assert np.array_equal(maps[LAYER], hooked(text_models.bert(), LAYER, encoding))


def test_a_chat_is_rendered_by_the_models_own_template(client: Client, folder: Path) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "a cat"}]
    maps = client.extract("bert", trocar.chat(messages, add_generation_prompt=True), [LAYER])
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert maps.tokens.samples[0].rendered == rendered
    assert list(maps.tokens.samples[0].ids) == tokenizer(rendered, add_special_tokens=False)["input_ids"]


def test_ids_of_different_lengths_are_padded(client: Client) -> None:
    maps = client.extract("bert", [[2, 4, 3], [2, 5, 6, 7, 3]], [LAYER])
    assert [sample.ids for sample in maps.tokens.samples] == [(2, 4, 3), (2, 5, 6, 7, 3)]
    inputs = {"input_ids": [[2, 4, 3, 0, 0], [2, 5, 6, 7, 3]], "attention_mask": [[1, 1, 1, 0, 0], [1] * 5]}
    encoding = {name: torch.tensor(value) for name, value in inputs.items()}
    assert np.array_equal(maps[LAYER], hooked(text_models.bert(), LAYER, encoding))


def test_a_long_text_is_cut_only_when_asked(client: Client) -> None:
    text = "cat " * 40
    with pytest.raises(InputRejectedError, match="text 1 has 42 tokens, the model takes 16") as error:
        client.extract("bert", ["cat", text], [LAYER])
    assert error.value.details["token_count"] == "42"
    assert client.extract("bert", trocar.texts([text], truncate=True), [LAYER]).tokens.lengths == (16,)
    cut = trocar.texts([text], truncate=True, max_tokens=5)
    assert client.extract("bert", cut, [LAYER]).tokens.lengths == (5,)


@pytest.mark.parametrize(
    ("inputs", "problem"),
    [
        (["cat", ""], "the text is empty"),
        ([[2, 99, 3]], "has the token id 99, the vocabulary ends with 14"),
        (trocar.texts(["cat"], max_tokens=99), "max_tokens is 99, and the model takes 16"),
        ({"": trocar.texts(["cat"]), "input_ids": np.ones((1, 4), np.int64)}, "'input_ids' is given"),
    ],
)
def test_bad_texts_are_refused(client: Client, inputs: Any, problem: str) -> None:
    with pytest.raises(InputRejectedError, match=problem):
        client.extract("bert", inputs, [LAYER])


def test_a_tokenizer_without_a_template_takes_no_chat(client: Client) -> None:
    with pytest.raises(InputRejectedError, match="no chat template"):
        client.extract("gpt", trocar.chat([("user", "hello")]), ["model.h.1"])


def test_texts_to_a_model_without_a_tokenizer_are_refused(client: Client) -> None:
    with pytest.raises(NoPreprocessingError, match="takes no texts"):
        client.extract("untold", "the cat", [LAYER])


def test_images_to_a_model_of_texts_are_refused(client: Client) -> None:
    with pytest.raises(NoPreprocessingError, match="no preprocessing for images"):
        client.extract("bert", np.zeros((8, 8, 3), np.uint8), [LAYER])


def test_sound_to_a_model_of_texts_is_refused(client: Client) -> None:
    with pytest.raises(NoPreprocessingError, match="no feature extractor, so it takes no sound"):
        client.extract("bert", trocar.audio(np.zeros(160, np.float32), 16_000), [LAYER])


def test_texts_over_the_limits_are_refused(client: Client) -> None:
    with pytest.raises(RequestTooLargeError, match="20,004 characters"):
        client.extract("bert", trocar.texts(["cat " * 5001]), [LAYER])
    with pytest.raises(RequestTooLargeError, match="tokens with its padding, the limit is 512"):
        client.extract("bert", ["cat " * 10] * 60, [LAYER])


def test_a_dry_run_tokenizes(client: Client) -> None:
    plan = client.plan("bert", TEXTS, [LAYER])
    assert plan.feature_maps[LAYER].shape == (3, 8, 16)


def test_streams_take_texts_and_a_bad_batch_fails_alone(client: Client) -> None:
    with client.extract_stream("bert", [["the cat"], [""], TEXTS], [LAYER]) as stream:
        results = list(stream)
    assert [result.error is None for result in results] == [True, False, True]
    assert results[2].maps is not None
    assert results[2].maps.tokens.lengths == (5, 8, 3)
    assert np.array_equal(results[2].maps[LAYER], client.extract("bert", TEXTS, [LAYER])[LAYER])


def test_swaps_take_values_from_other_texts(client: Client) -> None:
    edits = [trocar.edit("model.encoder.layer.0", "swap", source="other")]
    maps = client.extract("bert", "the cat", [LAYER], edits=edits, sources={"other": "a dog"})
    assert np.array_equal(maps[LAYER], client.extract("bert", "a dog", [LAYER])[LAYER])


def test_an_unchanged_processor_has_one_digest(client: Client) -> None:
    first, second = (client.extract("bert", text, [LAYER]).tokens for text in ("cat", "dog"))
    assert first.processor_digest == second.processor_digest
    assert first.processor_digest != client.extract("gpt", "cat", ["model.h.1"]).tokens.processor_digest


def test_the_command_line_takes_texts(server: RunningServer, client: Client, tmp_path: Path) -> None:
    out, lines = tmp_path / "maps.safetensors", tmp_path / "lines.txt"
    lines.write_text("\n".join(TEXTS[1:]) + "\n\n")
    options = ["--text", TEXTS[0], "--text-file", str(lines), "--tap", LAYER, "--out", str(out)]
    with pytest.raises(SystemExit) as ended:
        main(["extract", "bert", *options, "--server", server.address])
    assert not ended.value.code
    assert np.array_equal(load_file(out)[LAYER], client.extract("bert", TEXTS, [LAYER])[LAYER])


def test_a_model_that_is_loaded_again_gets_the_tokenizer_that_is_there_then(tmp_path: Path) -> None:
    text_models.save_tokenizer(tmp_path)
    model = {"factory": f"{MODELS}:bert", "input_shape": (4,), "processor": tmp_path}
    with running_server(models={"bert": model}) as running, trocar.connect(running.address) as client:
        before = client.extract("bert", ["cat dog"], [LAYER])
        file = tmp_path / "tokenizer.json"
        content = json.loads(file.read_text())
        words = content["model"]["vocab"]
        words["cat"], words["dog"] = words["dog"], words["cat"]
        file.write_text(json.dumps(content))
        assert client.extract("bert", ["cat dog"], [LAYER]).tokens.samples == before.tokens.samples
        client.unload("bert")
        client.load("bert")
        after = client.extract("bert", ["cat dog"], [LAYER])
    first, second = (maps.tokens.samples[0].ids for maps in (before, after))
    assert second == (first[0], first[2], first[1], first[3])
    assert not np.array_equal(before[LAYER], after[LAYER])
    assert before.tokens.processor_digest != after.tokens.processor_digest


def distilbert() -> Any:
    """Return a DistilBERT, which takes no token types."""
    config = transformers.DistilBertConfig(dim=8, n_layers=1, n_heads=2, hidden_dim=16, vocab_size=30)
    return transformers.DistilBertModel(config)


def bart() -> Any:
    """Return a BART, which takes no token types either."""
    config = transformers.BartConfig(
        vocab_size=30,
        d_model=8,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
    )
    return transformers.BartModel(config)


def roberta() -> Any:
    """Return a RoBERTa for 16 tokens: of the 18 rows of its table, two are the padding's and unused."""
    config = transformers.RobertaConfig(
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=30,
        max_position_embeddings=18,
        pad_token_id=1,
    )
    return transformers.RobertaModel(config)


_OF_BERT = ["input_ids", "token_type_ids", "attention_mask"]
TAKERS = {"distilbert": (distilbert, _OF_BERT), "bart": (bart, _OF_BERT), "roberta": (roberta, _OF_BERT[::2])}
"""Model, and what its tokenizer makes."""


@pytest.fixture(scope="module")
def takers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of `TAKERS`, with tokenizers that know no maximum."""
    folders = {name: tmp_path_factory.mktemp(name) for name in TAKERS}
    for name, (make, names) in TAKERS.items():
        torch.manual_seed(0)
        make().save_pretrained(folders[name])
        text_models.save_tokenizer(folders[name], model_max_length=int(1e30), model_input_names=names)
    return folders


def own_model(folder: Path) -> Any:
    """Return a model of `TAKERS` as transformers loads it."""
    return transformers.AutoModel.from_pretrained(str(folder)).eval()


@pytest.fixture(scope="module")
def taking(takers: dict[str, Path]) -> Iterator[Client]:
    models: dict[str, Any] = {name: {"source": f"hf:{folder}"} for name, folder in takers.items()}
    with running_server(models=models, device="cpu") as running, trocar.connect(running.address) as found:
        yield found


@pytest.mark.parametrize(
    ("name", "layer"), [("distilbert", "transformer.layer.0"), ("bart", "encoder.layers.0")]
)
def test_a_model_gets_what_it_takes_of_its_tokenizer(
    taking: Client, takers: dict[str, Path], name: str, layer: str
) -> None:
    encoding = AutoTokenizer.from_pretrained(str(takers[name]))(TEXTS, padding=True, return_tensors="pt")
    assert encoding.pop("token_type_ids") is not None
    maps = taking.extract(name, TEXTS, [layer])
    assert maps.tokens.arguments == ("input_ids", "attention_mask")
    assert np.array_equal(maps[layer], hooked(own_model(takers[name]), layer, encoding))


def test_texts_of_a_decoder_are_what_the_decoder_takes(taking: Client, takers: dict[str, Path]) -> None:
    tokenizer, layer = AutoTokenizer.from_pretrained(str(takers["bart"])), "decoder.layers.0"
    options = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
    answers = tokenizer(TEXTS[::-1], **options)
    encoding = {**tokenizer(TEXTS, **options), **{f"decoder_{name}": answers[name] for name in answers}}
    maps = taking.extract("bart", {"text": TEXTS, "decoder_text": TEXTS[::-1]}, [layer])
    assert np.array_equal(maps[layer], hooked(own_model(takers["bart"]), layer, encoding))


def test_a_text_is_cut_to_the_positions_of_the_model(taking: Client, takers: dict[str, Path]) -> None:
    text, layer = "the cat sat on the mat " * 5, "encoder.layer.0"
    tokenizer = AutoTokenizer.from_pretrained(str(takers["roberta"]))
    encoding = tokenizer([text], truncation=True, max_length=16, return_tensors="pt")
    maps = taking.extract("roberta", trocar.texts([text], truncate=True), [layer])
    assert maps.tokens.lengths == (16,)
    assert np.array_equal(maps[layer], hooked(own_model(takers["roberta"]), layer, encoding))
    with pytest.raises(InputRejectedError, match="32 tokens, the model takes 16"):
        taking.extract("roberta", [text], [layer])


def test_texts_of_which_a_model_takes_nothing_are_refused_as_such(tmp_path: Path) -> None:
    """A Whisper's folder has its decoder's tokenizer, and the encoder alone takes no ids."""
    text_models.save_tokenizer(text_models.save_whisper(tmp_path))
    source = {"source": f"hf:{tmp_path}#audio-classification"}
    with (
        running_server(models={"own": source}, device="cpu") as running,
        trocar.connect(running.address) as own,
        pytest.raises(InputRejectedError, match="the model takes nothing of what its tokenizer"),
    ):
        own.extract("own", TEXTS, ["layer[0]"])
