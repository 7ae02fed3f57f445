"""Models built from folders: what they hold."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T

from tests.support.models.transformers_folders import FAMILIES, save_family
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel, load_model, parse_model_argument
from trocar_server.models.huggingface.building import build
from trocar_server.models.huggingface.folder import open_folder
from trocar_server.models.weights.weights_file import write_weights

_SMALL: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
WITHOUT_POOLER: dict[str, Any] = {
    "roberta": lambda: T.RobertaForMaskedLM(FAMILIES["roberta"][1]()),
    "vit": lambda: T.ViTForImageClassification(FAMILIES["vit"][1]()),
    "albert": lambda: T.AlbertForMaskedLM(T.AlbertConfig(**_SMALL, embedding_size=8, vocab_size=30)),
}
"""Models whose folders have no weights of the pooling layer that `AutoModel` has."""


def hosted_as(model: str, folder: Path) -> HostedModel:
    return load_model(parse_model_argument(f"m={model}"), torch.device("cpu"), folder / "cache")


def test_a_file_that_is_overwritten_changes_no_loaded_weight(tmp_path: Path) -> None:
    saved = save_family("deberta", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {}, None, weights=True)
    file = tmp_path / "model" / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    for name, tensor in saved.state_dict().items():
        assert torch.equal(module.state_dict()[name], tensor)


def test_weights_are_aligned_as_torch_allocates(tmp_path: Path) -> None:
    save_family("deberta", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {}, None, weights=True)
    assert all(parameter.data_ptr() % 64 == 0 for parameter in module.parameters())


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    save_family("gpt2", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {}, None, weights=True)
    tied = module.get_parameter("lm_head.weight"), module.get_parameter("transformer.wte.weight")
    assert tied[0].data_ptr() == tied[1].data_ptr()


def test_options_replace_entries_of_the_configuration_and_of_its_parts(tmp_path: Path) -> None:
    save_family("deberta", tmp_path / "model")
    module = build(open_folder(tmp_path / "model"), "", {"num_labels": 5}, None, weights=False)
    assert module.get_parameter("classifier.bias").shape == (5,)
    save_family("clip", tmp_path / "clip")
    options = {"vision_config": {"image_size": 16}}
    module = build(open_folder(tmp_path / "clip"), "", options, None, weights=False)
    positions = module.get_parameter("vision_model.embeddings.position_embedding.weight")
    assert positions.shape == ((16 // 4) ** 2 + 1, 8)


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("deberta", {"num_label": 5}, "no option 'num_label'; nearest: num_labels"),
        ("deberta", {"zzzz": 5}, "no option 'zzzz'; config.json lists them"),
        (
            "clip",
            {"image_size": 16},
            r"no option 'image_size'; write \{'vision_config': \{'image_size': 16\}\}",
        ),
        (
            "clip",
            {"vision_config": {"image_sizes": 16}},
            "no option 'vision_config.image_sizes'; nearest: .*image_size",
        ),
    ],
)
def test_an_option_that_the_configuration_does_not_know_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], words: str
) -> None:
    save_family(family, tmp_path)
    with pytest.raises(ServiceError, match=words) as error:
        build(open_folder(tmp_path), "", options, None, weights=False)
    assert error.value.reason is ErrorReason.MODEL_INVALID


@pytest.mark.parametrize("family", WITHOUT_POOLER)
def test_weights_of_a_model_without_its_pooling_layer_are_loaded_again(tmp_path: Path, family: str) -> None:
    WITHOUT_POOLER[family]().save_pretrained(tmp_path / "model")
    source = f"hf:{tmp_path / 'model'}#feature-extraction"
    first, file = hosted_as(source, tmp_path), tmp_path / "exported.safetensors"
    write_weights(first.module.state_dict(), file)
    again = hosted_as(f"{source}={file}", tmp_path)
    theirs: Any = T.AutoModel.from_pretrained(tmp_path / "model", add_pooling_layer=False)
    assert [name for name, _ in again.module.named_modules()] == [name for name, _ in theirs.named_modules()]
    assert again.signature == first.signature
    state = again.module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize("family", WITHOUT_POOLER)
def test_weights_of_a_pooling_layer_are_loaded_into_one(tmp_path: Path, family: str) -> None:
    WITHOUT_POOLER[family]().save_pretrained(tmp_path / "model")
    source = f"hf:{tmp_path / 'model'}#feature-extraction"
    first, file = hosted_as(f"{source}=random:3", tmp_path), tmp_path / "exported.safetensors"
    write_weights(first.module.state_dict(), file)
    state = hosted_as(f"{source}={file}", tmp_path).module.state_dict()
    assert any(name.startswith("pooler.") for name in state)
    assert all(torch.equal(state[name], value) for name, value in first.module.state_dict().items())


@pytest.mark.parametrize(
    "options",
    [
        {"trust_remote_code": True},
        {"local_files_only": False},
        {"return_unused_kwargs": False},
        {"revision": "main"},
        {"token": "hf_x"},
        {"cache_dir": "/tmp"},
        {"subfolder": "../other"},
        {"_from_pipeline": "x"},
    ],
)
def test_an_option_that_is_an_argument_of_the_loader_is_refused(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    save_family("bert", tmp_path / "model")
    save_family("roberta", tmp_path / "other")
    with pytest.raises(ServiceError, match=f"'{next(iter(options))}' is no entry of config.json") as error:
        build(open_folder(tmp_path / "model"), "", options, None, weights=False)
    assert error.value.reason is ErrorReason.MODEL_INVALID


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("bert", {"attn_implementation": "org/kernel"}, "has attn_implementation 'org/kernel': kernels"),
        ("clip", {"vision_config": {"auto_map": {"AutoModel": "a.B"}}}, "has an auto_map"),
    ],
)
def test_an_option_that_would_import_code_is_refused(
    tmp_path: Path, family: str, options: dict[str, Any], words: str
) -> None:
    save_family(family, tmp_path)
    with pytest.raises(ServiceError, match=f"'options' {words}"):
        build(open_folder(tmp_path), "", options, None, weights=False)
